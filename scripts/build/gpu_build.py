"""Build the programs of the GPU check, for scripts/gpu/gpu_check.py, `make cuda` and `make gpu-bundle`."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_tools
import system_packages

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-perplexity", "llama-quantize", "test-backend-ops", "ggml-ext-gpu-bench")
CUDA_PROGRAMS = ("ggml-ext-gpu-kernels",)
HOST_PROGRAMS = ("ggml-ext-cuda-host-kernels",)  # device code as host code, for rehearsals
OPTIONS = ("-DGGML_EXT_TESTS=ON", "-DGGML_EXT_UI=OFF", "-DGGML_RPC=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_SERVER=OFF")
# programs that start without a driver on any CPU with AVX2, and load backends at run time
LOADABLE = ("-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF")
# not compressed by nvcc, because xz compresses the archive better
CUDA_OPTIONS = ("-DGGML_CUDA=ON", "-DGGML_CUDA_COMPRESSION_MODE=none")


class BuildError(Exception):
    """A tool is missing or the build failed; one line with the way out."""


def run(*command) -> None:
    log = ROOT / "build" / "gpu.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        done = subprocess.run([str(c) for c in command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        last = log.read_text(errors="replace").splitlines()[-30:]
        raise BuildError("\n".join(last) + f"\n{' '.join(map(str, command[:3]))} failed; the complete log is {log.relative_to(ROOT)}")


def install_cublas() -> None:
    """Install cuBLAS if the toolkit has none."""
    if not cuda_tools.nvcc():
        raise BuildError("nvcc is missing: install the CUDA toolkit, 12.8 or later, or name nvcc in CUDACXX")
    if not cuda_tools.has_cublas():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "nvidia-cublas"]
        if subprocess.run(pip).returncode:
            raise BuildError("cuBLAS is missing: install it with the CUDA toolkit, or pip install nvidia-cublas")


def has_vulkan_tools() -> bool:
    return system_packages.find_programs(system_packages.VULKAN, "the Vulkan backend is left out")


def build(backends: list[str], architectures: list[str] | None = None, more_targets: tuple[str, ...] = ()) -> Path:
    """Build the programs and the backends, and return the build directory.

    Args:
        backends: cuda, vulkan, or both; or metal alone.
        architectures: CUDA architectures, such as 90.
        more_targets: further CMake targets.

    Raises:
        BuildError: a tool is missing or the build failed.
    """
    directory = ROOT / "build" / ("cuda" if "cuda" in backends else f"gpu-{backends[0]}")
    options, targets = [*OPTIONS], [*PROGRAMS, *more_targets]
    if backends != ["metal"]:
        options += LOADABLE
        targets += ["ggml-cpu", *(f"ggml-{name}" for name in backends)]
    if "cuda" in backends:
        install_cublas()
        options += [*CUDA_OPTIONS, f"-DCMAKE_CUDA_COMPILER={cuda_tools.nvcc()}",
                    "-DCMAKE_CUDA_ARCHITECTURES=" + ";".join(f"{a}-real" for a in architectures or ["90"])]
        targets += CUDA_PROGRAMS
    if "vulkan" in backends or "cuda" in backends:  # one configuration, so that builds with and without it share objects
        options.append(f"-DGGML_VULKAN={'ON' if shutil.which('glslc') or 'vulkan' in backends else 'OFF'}")
    run("cmake", "-S", ROOT, "-B", directory, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *options)
    run("cmake", "--build", directory, "--parallel", os.cpu_count(), "--target", *targets)
    return directory
