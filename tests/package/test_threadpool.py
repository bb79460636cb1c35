"""The threads of the CPU backend: ours, not OpenMP's, and under ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ggml_ext._native.library import Library
from helpers.native import TSAN, require_built


def test_late_threads_change_no_result():
    """10,000 graphs, 1 to 16 threads, random delays, aborts and pauses. A lost wake-up would hang; one run takes 15 seconds."""
    done = subprocess.run([require_built(TSAN, "threadpool-stress"), "10000"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "10000 graphs" in done.stdout and "equal" in done.stdout, done.stdout + done.stderr[-3000:]


def test_package_has_no_openmp(lib: Library):
    """Its barriers spin for a thread that another program keeps waiting."""
    libraries = list(lib.path.parent.glob("libggml-cpu*"))
    assert libraries and not [path for path in libraries if b"libgomp" in path.read_bytes()]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the CPUs of a process are known on Linux alone")
def test_no_more_threads_than_cpus(lib: Library):
    """More would wait for each other at every barrier. The CPUs are those of the start: --cpu-strict pins the main thread later."""
    usable = sorted(os.sched_getaffinity(0))
    script = """
import ctypes, os, sys
limit = ctypes.CDLL(sys.argv[1]).ggml_ext_limit_threads
os.sched_setaffinity(0, {int(sys.argv[2])})
print(limit(1), limit(2), limit(10000))
"""
    path = next(lib.path.parent.glob("libggml-cpu.so*"))
    for cpus in (usable[:1], usable):
        done = subprocess.run([sys.executable, "-c", script, path, str(cpus[0])], capture_output=True, text=True, check=True,
                              preexec_fn=lambda cpus=cpus: os.sched_setaffinity(0, cpus))
        n = len(cpus)
        assert done.stdout.split() == ["1", str(min(2, n)), str(n)]
        assert done.stderr.count(f"using {n} threads instead of ") == 1
