"""System packages (Debian's names) that optional builds and tests need, and their installation."""
from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess
import threading

# package -> a program or a pattern of a file in it
CROSS = {"g++-aarch64-linux-gnu": "aarch64-linux-gnu-g++", "qemu-user": "qemu-aarch64"}  # includes the C library
WINDOWS = {"g++-mingw-w64-x86-64-posix": "x86_64-w64-mingw32-g++-posix"}
WINE = {"wine64": "/usr/lib/wine/wine64"}
BROWSER = {"chromium": "chromium", "chromium-driver": "chromedriver"}
VULKAN = {"glslc": "glslc", "libvulkan-dev": "/usr/include/vulkan/vulkan.hpp", "spirv-headers": "/usr/include/spirv/unified1/spirv.hpp"}
VULKAN_TESTS = {"spirv-tools": "spirv-val", "mesa-vulkan-drivers": "/usr/share/vulkan/icd.d/lvp_icd*.json"}
PARALLEL = {"parallel": "parallel"}
SLURM = {"slurmctld": "slurmctld", "slurmd": "slurmd", "slurm-client": "sbatch", "munge": "munged"}  # nightly


_apt_lock = threading.Lock()


def _apt_get(*arguments: str) -> None:
    subprocess.run(["apt-get", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


@functools.cache
def _update_lists() -> None:
    _apt_get("update")


def find_programs(packages: dict[str, str], without: str) -> bool:
    """Install missing packages if possible and return whether all are present. without: the consequence if not, for the log."""
    def missing() -> list[str]:
        return [package for package, program in packages.items() if not (glob.glob(program) if program.startswith("/") else shutil.which(program))]

    if missing() and shutil.which("apt-get") and hasattr(os, "getuid") and os.getuid() == 0:
        with _apt_lock:
            _update_lists()
            _apt_get("install", "-y", "--no-install-recommends", *missing())
    if missing():
        print(f"{without}: install {', '.join(missing())} (as Debian names them)", flush=True)
    return not missing()
