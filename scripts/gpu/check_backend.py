"""The backends that gpu_check.py checks: how each is built, found on a machine, and described in the report."""
from __future__ import annotations

import ctypes.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cuda_tools
from check_run import N_CORES, ROOT, Failed, Run, Unavailable

LOAD = (sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])")  # load a library in a separate process


@dataclass(frozen=True)
class Backend:
    """A GPU backend of llama.cpp.

    Attributes:
        device: llama.cpp's name of its first device.
        library: file name of the loadable backend; the Metal backend is linked in.
        describe: returns the report's entries on the GPU and its driver; raises Failed if there is none.
        hint: what to do if the library cannot be loaded.
        log_errors: phrases in llama.cpp's log that mean that the backend lacks our kernels.
    """

    name: str
    device: str
    library: str | None
    describe: Callable[[Run], dict]
    hint: str = ""
    log_errors: tuple[str, ...] = ()


def describe_nvidia(run: Run) -> dict:
    query = run.command("nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader").splitlines()
    if not query:
        raise Failed("nvidia-smi names no GPU")
    return dict(zip(("gpu", "driver", "compute_capability", "memory"), (part.strip() for part in query[0].split(","))))


def describe_vulkan(run: Run) -> dict:
    loader = ctypes.util.find_library("vulkan")
    if not loader:
        missing = Unavailable if run.rehearsal else Failed
        raise missing("there is no Vulkan loader (libvulkan.so.1): install the GPU's driver, or libvulkan1 (Debian's name)")
    return {"loader": loader}


def describe_mac(run: Run) -> dict:
    def sysctl(name: str) -> str:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True).stdout.strip()

    if platform.system() != "Darwin":
        raise Failed(f"this system is {platform.system()}: Metal needs a Mac. tests/gpu/test_metal_host.py is what runs elsewhere")
    return {"chip": sysctl("machdep.cpu.brand_string"), "macos": platform.mac_ver()[0], "memory_bytes": sysctl("hw.memsize")}


BACKENDS = {b.name: b for b in (
    Backend("cuda", "CUDA0", "libggml-cuda.so", describe_nvidia,
            "install cuBLAS (the CUDA toolkit has it, or pip install nvidia-cublas), or add its directory to LD_LIBRARY_PATH"),
    Backend("vulkan", "Vulkan0", "libggml-vulkan.so", describe_vulkan, "install the GPU's driver, or libvulkan1 (Debian's name)"),
    Backend("metal", "MTL0", None, describe_mac, log_errors=("no kernels for the types", "failed to build")),
)}


def describe_machine(run: Run, backend: Backend) -> dict:
    """Describe system, CPU, GPU and driver; the first check, without which no other runs."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    machine = {"system": platform.platform(), "cpu": cpu[1] if cpu else platform.processor(), "cores": N_CORES,
               "python": platform.python_version()}
    machine |= {"gpu": "none: a rehearsal on the CPU"} if run.device == "CPU" else backend.describe(run)
    run.report["environment"] = machine
    return machine


def find_device(run: Run, backend: Backend) -> dict:
    """Load the backend's library and look for the device among those that llama.cpp lists."""
    library = run.programs / ("libggml-missing.so" if run.fault == "missing-library" else backend.library or "")
    device = backend.device.rstrip("0") + "99" if run.fault == "no-device" else run.device
    if device == "CPU" and not run.fault == "missing-library":
        return {}
    if backend.library and (library.exists() or run.fault == "missing-library"):
        try:
            run.command(*LOAD, library, timeout=60)
        except Failed as e:
            raise Failed(f"{library.name} cannot be loaded: {str(e).rpartition('OSError: ')[2]}: {backend.hint}") from None
    output: list[str] = []
    listed = run.command(run.program("llama-bench"), "--list-devices", timeout=120, keep=output)
    devices = [line.strip() for line in listed.splitlines()[1:]]
    if not any(line.startswith(f"{device}:") for line in devices):
        reason = "" if not backend.library or library.exists() else f" ({run.programs} has no {library.name})"
        missing = Unavailable if run.rehearsal and reason and not run.fault else Failed
        raise missing(f"llama.cpp finds no device {device}{reason}; it lists: {' / '.join(devices)}")
    for words in backend.log_errors:
        if words in output[0]:
            raise Failed(output[0][output[0].find(words) :][:4000])
    return {"devices": devices, "log": re.findall(r"^ggml_(?:vulkan|cuda_init|metal_device_init): .*", output[0], re.M)}


def set_environment(run: Run) -> None:
    """Let child processes find the package, cuBLAS and, if the system's is too old, the bundled C++ library."""
    directories = cuda_tools.library_directories() if run.backend == "cuda" else []
    fallback = ROOT / "lib"
    if fallback.is_dir() and subprocess.run([*LOAD, run.programs / "libllama.so.0"], capture_output=True).returncode:
        directories.append(fallback)
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, directories), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    os.environ["GGML_EXT_LIB_DIR"] = str(run.programs)
    os.environ["GGML_NO_BACKTRACE"] = "1"  # a backtrace by gdb would hide the error message
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "py"), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(ROOT / "py"))
    sys.path.insert(0, str(ROOT / "scripts" / "tools"))
