"""System packages (Debian's names) that optional builds and tests need, and their installation."""
from __future__ import annotations

import glob
import os
import shutil
import subprocess

# package -> a program or a pattern of a file in it
CROSS = {"g++-aarch64-linux-gnu": "aarch64-linux-gnu-g++", "qemu-user": "qemu-aarch64"}  # includes the C library
WINDOWS = {"g++-mingw-w64-x86-64-posix": "x86_64-w64-mingw32-g++-posix"}
WINE = {"wine64": "/usr/lib/wine/wine64"}
BROWSER = {"chromium": "chromium", "chromium-driver": "chromedriver"}
VULKAN = {"glslc": "glslc", "libvulkan-dev": "/usr/include/vulkan/vulkan.hpp", "spirv-headers": "/usr/include/spirv/unified1/spirv.hpp"}
VULKAN_TESTS = {"spirv-tools": "spirv-val", "mesa-vulkan-drivers": "/usr/share/vulkan/icd.d/lvp_icd*.json"}
PARALLEL = {"parallel": "parallel"}
SLURM = {"slurmctld": "slurmctld", "slurmd": "slurmd", "slurm-client": "sbatch", "munge": "munged"}  # nightly


def find_programs(packages: dict[str, str], without: str) -> bool:
    """Install missing packages if possible and return whether all are present. without: the consequence if not, for the log."""
    def missing() -> list[str]:
        return [package for package, program in packages.items() if not (glob.glob(program) if program.startswith("/") else shutil.which(program))]

    if missing() and shutil.which("apt-get") and hasattr(os, "getuid") and os.getuid() == 0:
        for command in (["update"], ["install", "-y", "--no-install-recommends", *missing()]):
            subprocess.run(["apt-get", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    if missing():
        print(f"{without}: install {', '.join(missing())} (as Debian names them)", flush=True)
    return not missing()
