"""The threads of the CPU backend: ours, not OpenMP's, and under ThreadSanitizer."""

from __future__ import annotations

import subprocess

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
