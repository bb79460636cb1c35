#!/usr/bin/env python3
"""Pack the GPU check into one archive for a machine without a compiler: `make gpu-bundle ARCH=90`.

    gpu_bundle.py [--arch 90[,120]] [--out build/gpu-bundle] [--build-only] [--programs DIR]

Builds the programs, the CUDA backend for the given architectures (75, 80, 86, 89, 90, 120) and, if glslc is installed, the Vulkan backend
in build/cuda. Copies them into a directory with the scripts, the reference model and the Python packages, and writes the archive next to
it. The other machine needs the GPU's driver, cuBLAS, glibc 2.35, Python 3.10 or newer and numpy; this machine needs nvcc and no GPU.

--build-only (`make cuda`) only compiles and links. --programs uses the programs of another build.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import cuda_tools
import gpu_build
from gpu_build import CUDA_PROGRAMS, HOST_PROGRAMS, PROGRAMS, ROOT, BuildError

sys.path.append(str(ROOT / "scripts" / "gpu"))
ARCHITECTURES = ("75", "80", "86", "89", "90", "120")
BACKENDS = ("libggml-cpu.so", "libggml-cuda.so", "libggml-vulkan.so")  # loaded at run time
# provided by the other machine: the C library, drivers, cuBLAS
PROVIDED = re.compile(r"(ld-linux|libc|libm|libdl|libpthread|librt|libcuda|libcublas|libcublasLt|libvulkan)[-.]")
NEXT_TO_PROGRAMS = re.compile(r"libcudart\.")
MAX_GLIBC = (2, 35)
SCRIPTS = ("scripts/gpu/gpu_check.py", "scripts/gpu/check_backend.py", "scripts/gpu/check_correctness.py", "scripts/gpu/check_faults.py",
           "scripts/gpu/check_page.py", "scripts/gpu/check_run.py", "scripts/gpu/check_speed.py", "scripts/gpu/check_tools.py",
           "scripts/tools/synth_model.py", "scripts/build/cuda_tools.py")
DATA = ("data/model-f16.gguf", "data/heldout.txt", "LICENSE")
PACKAGES = {"gguf": "gguf", "yaml": "[Pp]y[Yy][Aa][Mm][Ll]", "tqdm": "tqdm"}  # pure Python, and their distributions; numpy has to be there
LAUNCHER = """#!/bin/sh
# The GPU check: ./gpu-check --help
here=$(cd "$(dirname "$0")" && pwd)
for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 python}; do
    if "$python" -c 'import sys, numpy; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
        export PYTHONPATH="$here/py" PYTHONDONTWRITEBYTECODE=1
        exec "$python" "$here/scripts/gpu/gpu_check.py" "$@"
    fi
done
echo "error: no Python 3.10 or later with numpy among the usual names: install numpy, or name one: PYTHON=/path/to/python3 ./gpu-check" >&2
exit 1
"""
README = """The GPU check of ggml-ext: correctness and speed of its kernels on this machine's GPU, in ten minutes.

    ./gpu-check                      CUDA
    ./gpu-check --backend vulkan     a GPU of any vendor
    ./gpu-check --help

It needs the GPU's driver, Python 3.10 or newer with numpy and, for CUDA, cuBLAS (of a toolkit, or pip install nvidia-cublas). It
writes gpu-check.json and gpu-check.md: please send both.
"""


def shared_libraries(program: Path) -> dict[str, Path | None]:
    """Return the paths of the libraries that a program needs, by name; None if the loader does not find one."""
    cublas = os.pathsep.join(map(str, cuda_tools.library_directories()))
    output = subprocess.run(["ldd", program], capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": cublas}).stdout
    return {name: Path(path) if path.startswith("/") else None for name, path in re.findall(r"^\s*(\S+) => (\S+)", output, re.M)}


def copy_programs(programs: Path, directory: Path) -> None:
    """Copy and strip programs, backends and all libraries that the other machine does not provide.

    The compiler's libraries go to lib/. gpu-check uses them only if the system's are too old, because the GPU's driver needs the system's.
    """
    bin_directory, fallback = directory / "bin", directory / "lib"
    for path in (bin_directory, fallback):
        path.mkdir(parents=True)
    names = [*PROGRAMS, *HOST_PROGRAMS, *(n for n in (*CUDA_PROGRAMS, *BACKENDS) if (programs / n).exists())]
    if missing := [name for name in names if not (programs / name).exists()]:
        raise BuildError(f"{programs} has no {', '.join(missing)}: build them first")
    libraries: dict[str, Path | None] = {"libllama.so.0": programs / "libllama.so.0"}
    for name in names:
        shutil.copy2(programs / name, bin_directory / name)
        libraries |= shared_libraries(programs / name)
    for name, path in libraries.items():
        if PROVIDED.match(name):
            continue
        if path is None:
            raise BuildError(f"the library {name} was not found: the bundle would be incomplete")
        own = path.parent == programs or NEXT_TO_PROGRAMS.match(name)
        shutil.copy2(path.resolve(), (bin_directory if own else fallback) / name)
    for path in [*bin_directory.iterdir(), *fallback.iterdir()]:
        subprocess.run(["strip", "--strip-unneeded", path], check=True)


def newest_glibc(directory: Path) -> tuple[int, int]:
    """Return the glibc version that the programs and their libraries need, without the compiler's libraries in lib/."""
    versions = [(2, 0)]
    for path in (directory / "bin").iterdir():
        symbols = subprocess.run(["readelf", "--version-info", "--wide", path], capture_output=True, text=True, check=True).stdout
        versions += [(int(a), int(b)) for a, b in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", symbols)]
    return max(versions)


def copy_python(directory: Path) -> None:
    """Copy the scripts, the package without its data, and the pure Python packages that they import."""
    no_cache = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
    shutil.copytree(ROOT / "py" / "ggml_ext", directory / "py" / "ggml_ext", ignore=shutil.ignore_patterns("__pycache__", "data", "bin", "convert"))
    for name, distribution in PACKAGES.items():
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise BuildError(f"the Python package {name} is missing: pip install gguf has all that is needed")
        source = Path(next(iter(spec.submodule_search_locations)))
        shutil.copytree(source, directory / "py" / name, ignore=no_cache)
        for info in source.parent.glob(f"{distribution}-*.dist-info"):
            shutil.copytree(info, directory / "py" / info.name)  # with its license
    for name in (*SCRIPTS, *DATA):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, directory / name)


def describe(architectures: list[str]) -> dict:
    from check_run import source_fingerprint

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        except OSError:
            return ""

    release = re.search(r"release ([\d.]+)", output(str(cuda_tools.nvcc()), "--version"))
    return {"commit": output("git", "rev-parse", "--short=12", "HEAD").strip(), "sources": source_fingerprint(),
            "architectures": ",".join(architectures), "nvcc": release[1] if release else "none"}


def assemble(programs: Path, directory: Path, architectures: list[str]) -> None:
    """Write the bundle's directory. BuildError if it is incomplete or needs a newer glibc."""
    shutil.rmtree(directory, ignore_errors=True)
    copy_programs(programs.resolve(), directory)
    if (version := newest_glibc(directory)) > MAX_GLIBC:
        raise BuildError(f"the programs need glibc {version[0]}.{version[1]}; at most {MAX_GLIBC[0]}.{MAX_GLIBC[1]} is allowed: build on an older system")
    copy_python(directory)
    (directory / "bundle.json").write_text(json.dumps(describe(architectures), indent=1))
    (directory / "README.txt").write_text(README)
    (directory / "gpu-check").write_text(LAUNCHER)
    (directory / "gpu-check").chmod(0o755)


def write_archive(directory: Path) -> Path:
    archive = directory.with_name(directory.name + ".tar.xz")
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        tar.add(directory, directory.name, filter=lambda info: setattr(info, "uname", "") or setattr(info, "gname", "") or info)
    return archive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="90", help=f"CUDA architectures, of {', '.join(ARCHITECTURES)} (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="directory of the bundle (default: dist/ggml-ext-gpu-check-sm90)")
    parser.add_argument("--build-only", action="store_true", help="compile and link, without a bundle")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="use the programs in this directory instead of building them")
    args = parser.parse_args()
    architectures = re.split(r"[,; ]+", args.arch)
    if unknown := set(architectures) - set(ARCHITECTURES):
        print(f"error: --arch: unknown {', '.join(sorted(unknown))}; choose from {', '.join(ARCHITECTURES)}", file=sys.stderr)
        return 1
    start = time.monotonic()
    try:
        if args.programs:
            programs = args.programs
        else:
            backends = ["cuda"] if args.build_only or not gpu_build.has_vulkan_tools() else ["cuda", "vulkan"]
            print("building; the log is build/gpu.log", flush=True)
            programs = gpu_build.build(backends, architectures, HOST_PROGRAMS) / "bin"
            print(f"built for sm_{', sm_'.join(architectures)}: {time.monotonic() - start:.0f} s", flush=True)
        if args.build_only:
            return 0
        directory = args.out or ROOT / "dist" / ("ggml-ext-gpu-check-sm" + "-".join(architectures))
        assemble(programs, directory, architectures)
        archive = write_archive(directory)
    except BuildError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB, unpacked {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
