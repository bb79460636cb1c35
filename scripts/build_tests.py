#!/usr/bin/env python3
"""Build the native parts of the test suite: upstream's tests and the kernels per instruction set in the package's
build folder, the fuzz drivers under sanitizers, and the stock llama-cli that the stock check runs.

    build_tests.py --package build/package [--jobs N] [--only package,asan,stock]
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# enum: upstream reads type fields of a file into enums before it checks their range
SANITIZE = "-fsanitize=address,undefined -fno-sanitize=enum -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"


def run(*command) -> None:
    done = subprocess.run([str(c) for c in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit("\n".join(done.stdout.splitlines()[-40:]) + f"\nerror: {' '.join(map(str, command))} failed")


def configure(folder: str, *options: str) -> None:
    run("cmake", "-S", ROOT, "-B", ROOT / "build" / folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="build folder of the installed package")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="package,asan,stock")
    args = parser.parse_args()
    steps = {
        "package": (None, args.package, "ext-tests"),
        # the ggml libraries alone, without the native flags that a debugger of sanitizer reports does not need
        "asan": (("-DGGML_EXT_TESTS=ON", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DCMAKE_C_FLAGS={SANITIZE}",
                  f"-DCMAKE_CXX_FLAGS={SANITIZE}", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DGGML_RPC=OFF",
                  "-DGGML_OPENMP=OFF"), ROOT / "build" / "asan", "ext-fuzz"),
        "stock": (("-DGGML_EXT_STOCK=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DGGML_RPC=OFF"), ROOT / "build" / "stock", "llama-cli"),
    }
    for name in args.only.split(","):
        options, folder, target = steps[name]
        start = time.monotonic()
        if options:
            configure(folder.name, *options)
        run("cmake", "--build", folder, "--target", target, "--parallel", args.jobs)
        print(f"built {target} in {folder.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
