#!/usr/bin/env python3
"""Build the native parts of the test suite, and install the Python packages that it needs.

    requirements   tests/requirements.txt
    package        upstream's tests and the kernels per instruction set
    asan, tsan     the fuzz drivers and the thread pool under sanitizers
    stock          unpatched llama.cpp
    aarch64        ggml and the NEON kernels, which run under qemu; --nightly: llama-perplexity too
    vulkan         the backend, which runs on lavapipe
    windows        --nightly: the programs for Windows, which run under Wine
    ptx            the CUDA kernels for the interpreter

    build_tests.py --package build/package [--jobs N] [--only package,ptx,...] [--nightly]

gpu_bundle.py (make cuda) builds the complete CUDA backend, which no test needs.
"""
from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import cuda_tools
import system_packages
from system_packages import find_programs

ROOT = Path(__file__).resolve().parents[2]
# no enum check: upstream reads a file's type fields into enums before it checks their range
# no checks of pointers that AddressSanitizer makes too: they take half of the compiler's time
SANITIZE = "-fsanitize=address,undefined -fno-sanitize=enum,null,object-size,pointer-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"

# for programs that run for seconds and compile for minutes
QUICKLY_COMPILED = [f"-DCMAKE_{language}_FLAGS_RELEASE=-O1 -DNDEBUG" for language in ("C", "CXX")]

# ggml's libraries without llama.cpp; sanitizers check our code only
WITHOUT_LLAMA = ("-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DGGML_RPC=OFF")
SANITIZED = ("-DGGML_EXT_TESTS=ON", "-DGGML_LLAMAFILE=OFF", "-DGGML_CPU_REPACK=OFF", *QUICKLY_COMPILED, *WITHOUT_LLAMA)

# name -> CMake's options, targets
BUILDS = {
    "package": ((), "ext-tests"),
    "asan": ((f"-DCMAKE_C_FLAGS={SANITIZE}", f"-DCMAKE_CXX_FLAGS={SANITIZE}", *SANITIZED), "ext-fuzz"),
    "tsan": (("-DGGML_SANITIZE_THREAD=ON", *SANITIZED), "threadpool-stress"),
    # for any CPU with AVX2: with GCC 12 an unpatched native build crashes on CPUs with AMX (upstream-bugs.md)
    "stock": (("-DGGML_EXT_STOCK=ON", "-DGGML_NATIVE=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=ON", "-DGGML_RPC=OFF",
               *QUICKLY_COMPILED), "llama-simple"),
    # the architecture level of most ARM CPUs since 2018
    "aarch64": ((f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'tests' / 'aarch64.cmake'}", "-DGGML_EXT_TESTS=ON",
                 "-DGGML_NATIVE=OFF", "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod", "-DGGML_RPC=OFF",
                 "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_SUBPROCESS=OFF"), "ext-tests"),
    # one library, which programs of the package load; its shaders take most of the time
    "vulkan": (("-DGGML_VULKAN=ON", "-DGGML_EXT_TESTS=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF",
                *WITHOUT_LLAMA, *QUICKLY_COMPILED), "ext-vulkan"),
}


pip_lock = threading.Lock()  # one pip at a time changes the environment


def run(*command) -> None:
    done = subprocess.run([str(c) for c in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit("\n".join(done.stdout.splitlines()[-40:]) + f"\nerror: {' '.join(map(str, command))} failed")


def configure(directory: str, *options: str) -> None:
    run("cmake", "-S", ROOT, "-B", ROOT / "build" / directory, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", "-DGGML_EXT_UI=OFF",
        *options)


def pip_install(*arguments) -> None:
    with pip_lock:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def install_requirements(args: argparse.Namespace) -> None:
    pip_install("-r", ROOT / "tests" / "requirements.txt")


def find_cuda_tools() -> None:
    """Install the headers of cuBLAS if nvcc has none."""
    if cuda_tools.nvcc() and not cuda_tools.has_cublas():
        try:
            pip_install("--no-deps", "nvidia-cublas")
        except SystemExit:
            print("the CUDA sources will not be compiled: pip install nvidia-cublas failed", flush=True)


def glslc_stubs() -> Path:
    """Copy the glslc wrapper that skips shaders that no test needs; its name has a hash, so that a change recompiles the shaders."""
    text = (ROOT / "tests" / "native" / "glslc_stubs.sh").read_bytes()
    copy = ROOT / "build" / "vulkan" / f"glslc-{hashlib.sha256(text).hexdigest()[:8]}.sh"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(text)
    copy.chmod(0o755)
    return copy


def build_ptx(args: argparse.Namespace) -> None:
    """Build the PTX of the CUDA kernels and the host code that launches them."""
    run(sys.executable, ROOT / "tests" / "ptx" / "build.py", "--package", args.package, *(["--nightly"] if args.nightly else []))


def build_windows(args: argparse.Namespace) -> None:
    run(sys.executable, ROOT / "scripts" / "build" / "windows.py", "--jobs", args.jobs)


def build_with_cmake(name: str, args: argparse.Namespace) -> None:
    """Configure a build, except the package's, and build its targets."""
    options, *targets = BUILDS[name]
    directory = ROOT / "build" / name if name != "package" else args.package
    if name == "vulkan":
        options += (f"-DVulkan_GLSLC_EXECUTABLE={glslc_stubs()}",)
    if name == "aarch64" and args.nightly:
        targets.append("ext-nightly")
    if options:
        configure(name, *options)
    run("cmake", "--build", directory, "--target", *targets, "--parallel", args.jobs)


STEPS = {"requirements": install_requirements, **{name: partial(build_with_cmake, name) for name in BUILDS}, "windows": build_windows,
         "ptx": build_ptx}


def has_programs(name: str, nightly: bool) -> bool:
    """Install the programs that a build and its tests need; return whether it can be built here, and say so if not."""
    is_x86 = platform.machine() == "x86_64"
    if name == "package":
        find_programs(system_packages.BROWSER, "the test of the chat page will be skipped")
        find_programs(system_packages.PARALLEL, "the test of GNU parallel will be skipped")
        if nightly:
            find_programs(system_packages.SLURM, "the test of Slurm will be skipped")
        if nightly and is_x86:
            find_programs(system_packages.WINE, "the tests of Windows' programs and Python will be skipped")
    elif name == "aarch64":  # an ARM machine runs its own build
        return platform.machine() not in ("aarch64", "arm64") and find_programs(
            system_packages.CROSS, "aarch64 is not built and the NEON tests will be skipped")
    elif name == "vulkan":
        return platform.system() == "Linux" and find_programs(
            system_packages.VULKAN | system_packages.VULKAN_TESTS, "the Vulkan backend is not built and its tests will be skipped")
    elif name == "windows":
        return nightly and is_x86 and find_programs(
            system_packages.WINDOWS, "the programs for Windows are not built and their tests will be skipped")
    elif name == "ptx":
        find_cuda_tools()
        if not (can_build := bool(cuda_tools.nvcc()) and cuda_tools.has_cublas()):
            print("skipping the interpreted CUDA kernels: install the CUDA toolkit, 12.8 or later", flush=True)
        return can_build
    return True


def build(name: str, args: argparse.Namespace) -> None:
    if not has_programs(name, args.nightly):
        return
    start = time.monotonic()
    STEPS[name](args)
    print(f"ready: {name}, {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="build directory of the installed package")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--nightly", action="store_true", help="ptx: all column counts, tiles and architectures of all types (20 minutes longer on two cores); aarch64: llama-perplexity too; windows: the programs")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(STEPS):
        parser.error(f"argument --only: no build is called {', '.join(sorted(unknown))}; known: {', '.join(STEPS)}")
    # two at a time: pip uses one core, CMake configures on one, and the longest source keeps one core at the end of a build
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: build(name, args), names))  # a failed build cancels those that wait


if __name__ == "__main__":
    main()
