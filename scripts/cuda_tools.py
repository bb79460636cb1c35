#!/usr/bin/env python3
"""Where CUDA's compiler and cuBLAS are.

    cuda_tools.py nvcc       print the path of nvcc
    cuda_tools.py cublas     print the folder of cublas_v2.h and the path of libcublas, if a Python package has them

cuBLAS may come with the toolkit or with the Python package nvidia-cublas (nvidia-cublas-cu12 for CUDA 12). Exit code 1 and
one line if nothing is found. The standard library is all this needs.
"""
from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path


def nvcc() -> Path | None:
    """CUDACXX, nvcc on the PATH, or that of the usual folder."""
    for name in (os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc"):
        if name and (found := shutil.which(name)):
            return Path(found)
    return None


def toolkit_has_cublas() -> bool:
    compiler = nvcc()
    roots = [compiler.resolve().parent.parent] if compiler else []
    roots += [Path(os.environ[v]) for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)] + [Path("/usr/local/cuda")]
    return any((root / "include" / "cublas_v2.h").exists() for root in roots)


def cublas() -> tuple[Path, Path] | None:
    """Folder of the headers and the library of cuBLAS in an installed Python package."""
    spec = importlib.util.find_spec("nvidia")
    roots = [*(spec.submodule_search_locations if spec else []),
             # what pip hides from the build of a package is on disk all the same
             *(Path(sysconfig.get_path(where)) / "nvidia" for where in ("purelib", "platlib"))]
    for root in map(Path, roots):
        for header in sorted(root.glob("*/include/cublas_v2.h"), reverse=True):
            libraries = sorted((header.parent.parent / "lib").glob("libcublas.so*"))
            if libraries:
                return header.parent, libraries[0]
    return None


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in ("nvcc", "cublas"):
        print(__doc__, file=sys.stderr)
        return 1
    if sys.argv[1] == "nvcc":
        found = nvcc()
        print(found or "nvcc was not found: install the CUDA toolkit, or name it in CUDACXX", file=sys.stdout if found else sys.stderr)
    else:
        found = cublas()
        if found:
            print(f"{found[0]};{found[1]}")
        else:
            print("cuBLAS was not found: install it with the CUDA toolkit, or pip install nvidia-cublas", file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
