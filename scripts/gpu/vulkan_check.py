#!/usr/bin/env python3
"""The whole check of the Vulkan kernels on a GPU of any vendor: build, correctness, speed. Ten to twenty minutes; writes one JSON file.

    vulkan_check.py [--out vulkan-check.json] [--build build/vulkan-check] [--minutes 20] [--only build,ops,graph,speed]
                    [--types itq3_t,itq2_t] [--chunks 60] [--device Vulkan0]

Needs a driver, the loader's headers, SPIR-V's and glslc (Debian: libvulkan-dev, spirv-headers, glslc), cmake, ninja, git and the Python
packages numpy, gguf and PyYAML. Prints a line for each check, and the speeds beside stock types. Every check passes or fails in the JSON,
with its seconds and figures; exit code 1 if anything failed. Speeds are reported, not judged: nobody has measured them before.

Without a GPU it can be tried on a driver for processors: GGML_VK_VISIBLE_DEVICES=0 vulkan_check.py --only build,ops,graph --chunks 2
"""
from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import backend_check
from check_run import Run


def check(run: Run) -> dict:
    """What the device can do, as llama.cpp says it: halves, subgroups, shared memory, matrix cores."""
    devices, log = backend_check.list_devices(run)
    return {"devices": devices, "abilities": [line for line in log.splitlines() if line.startswith("ggml_vulkan: ")]}


def environment() -> dict:
    found = {"system": platform.platform()}
    if shutil.which("vulkaninfo"):
        found["vulkaninfo"] = subprocess.run(["vulkaninfo", "--summary"], capture_output=True, text=True).stdout
    return found


if __name__ == "__main__":
    sys.exit(backend_check.main(__doc__, backend_check.Backend("Vulkan", "GGML_VULKAN", "Vulkan0", check, environment)))
