#!/usr/bin/env python3
"""The whole check of the Metal kernels on a Mac: build, correctness, speed. Ten minutes; writes one JSON file.

    metal_check.py [--out metal-check.json] [--build build/metal-check] [--minutes 20] [--only build,ops,graph,speed]
                   [--types itq3_t,itq2_t] [--chunks 60] [--device MTL0]

Needs the command line tools of Xcode, cmake, ninja, git and the Python packages numpy, gguf and PyYAML. Prints a line for each
check. Every check passes or fails in the JSON, with its seconds and figures; exit code 1 if anything failed. Speeds are reported,
not judged: nobody has measured them before.
"""
from __future__ import annotations

import platform
import subprocess
import sys

import backend_check
from check_run import Failed, Run


def sysctl(name: str) -> str:
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True).stdout.strip()


def check(run: Run) -> dict:
    """Whether Apple's compiler took our library: the log says why not."""
    devices, log = backend_check.list_devices(run)
    for words in ("no kernels for the types", "failed to build"):
        if words in devices + log:
            raise Failed((devices + log)[(devices + log).find(words) :][:4000])
    return {"devices": devices}


def environment() -> dict:
    return {"chip": sysctl("machdep.cpu.brand_string"), "macos": platform.mac_ver()[0], "memory_bytes": sysctl("hw.memsize")}


def main() -> int:
    if platform.system() != "Darwin" and not {"-h", "--help"} & set(sys.argv):
        print(f"error: this system is {platform.system()}; the check needs a Mac. tests/gpu/test_metal_host.py is what runs elsewhere", file=sys.stderr)
        return 1
    return backend_check.main(__doc__, backend_check.Backend("Metal", "GGML_METAL", "MTL0", check, environment))


if __name__ == "__main__":
    sys.exit(main())
