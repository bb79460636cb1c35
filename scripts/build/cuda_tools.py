#!/usr/bin/env python3
"""Find CUDA's compiler and cuBLAS, and compile with them. Needs only the standard library.

    cuda_tools.py cublas     print the directory of cublas_v2.h and the path of libcublas, if a Python package has them

cuBLAS comes with the toolkit or with the Python package nvidia-cublas (nvidia-cublas-cu12 for CUDA 12). If it is missing, the script
prints one line and exits with 1.
"""
from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def nvcc() -> Path | None:
    """Return the path of nvcc: CUDACXX, on the PATH, or in /usr/local/cuda."""
    for name in (os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc"):
        if name and (path := shutil.which(name)):
            return Path(path)
    return None


def toolkit_roots() -> list[Path]:
    compiler = nvcc()
    roots = [compiler.resolve().parent.parent] if compiler else []
    return [*roots, *(Path(os.environ[v]) for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)), Path("/usr/local/cuda")]


def package_roots() -> list[Path]:
    """Return the directories of NVIDIA's Python packages, including those that pip hides from an isolated build."""
    spec = importlib.util.find_spec("nvidia")
    return [*map(Path, spec.submodule_search_locations if spec else ()), *(Path(sysconfig.get_path(where)) / "nvidia" for where in ("purelib", "platlib"))]


def toolkit_has_cublas() -> bool:
    return any((root / "include" / "cublas_v2.h").exists() for root in toolkit_roots())


def cublas() -> tuple[Path, Path] | None:
    """Return the header directory and the library of cuBLAS in an installed Python package."""
    for root in package_roots():
        for header in sorted(root.glob("*/include/cublas_v2.h"), reverse=True):
            libraries = sorted((header.parent.parent / "lib").glob("libcublas.so*"))
            if libraries:
                return header.parent, libraries[0]
    return None


def library_directories() -> list[Path]:
    """Return the directories of libcudart and libcublas, those of toolkits first."""
    candidates = [root / name for root in toolkit_roots() for name in ("lib64", "targets/x86_64-linux/lib", "lib")]
    candidates += [path for root in package_roots() for path in sorted(root.glob("*/lib"), reverse=True)]
    return list(dict.fromkeys(d for d in candidates if any(any(d.glob(f"{name}.so*")) for name in ("libcublas", "libcudart"))))


def has_cublas() -> bool:
    return toolkit_has_cublas() or cublas() is not None


def compile_command(ggml: Path, arch: str, *args) -> list[str]:
    """Return nvcc's command with upstream's flags and include directories. ggml: the directory in the patched tree."""
    headers_and_library = cublas()
    directories = [*([headers_and_library[0]] if headers_and_library else []), ggml / "include", ggml / "src", ggml / "src" / "ggml-cuda", ROOT / "ggml_ext", ROOT / "ggml_ext" / "hooks", ROOT]
    return [str(nvcc() or "nvcc"), f"-arch={arch}", "-std=c++17", "-O3", "-use_fast_math", "-extended-lambda",
            *(f"-I{directory}" for directory in directories), *map(str, args)]


def trimmed_mmvq(text: str, types: dict[str, bool], columns: tuple[int, ...]) -> str:
    """Remove the cases of other types and column counts from the switches of upstream's mmvq.cu that instantiate kernels.

    types: ggml's names in lower case, and whether they are ggml-ext types.
    """
    upper = {name.upper(): name for name in types}
    text = re.sub(r"        case GGML_TYPE_(\w+):\n            mul_mat_vec_q_switch_ncols_dst<.*?break;\n",
                  lambda m: m[0] if m[1] in upper else "", text, flags=re.S)
    cases = " ".join(f"X({key}, {name})" for key, name in upper.items() if types[name])
    begin = text.index("static void mul_mat_vec_q_switch_type(")
    text = text[:begin] + text[begin:].replace("GGML_EXT_WEIGHT_TYPES(X)", cases, 1)
    return re.sub(r"        case (\d): \{.*?\} break;\n", lambda m: m[0] if int(m[1]) in columns else "", text, flags=re.S)


def main() -> int:
    if sys.argv[1:] != ["cublas"]:
        print(__doc__, file=sys.stderr)
        return 1
    if not (headers_and_library := cublas()):
        print("cuBLAS was not found: install it with the CUDA toolkit, or pip install nvidia-cublas", file=sys.stderr)
        return 1
    print("{};{}".format(*headers_and_library))
    return 0


if __name__ == "__main__":
    sys.exit(main())
