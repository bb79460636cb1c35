"""Fixtures, tiers and markers of all tests, and the rule about skipping. Shared code is in helpers/.

GGML_EXT_NO_SKIP=1 turns every skip into a failure, for machines on which every test must run.
GGML_EXT_TEST_MODEL=FILE replaces data/model-f16.gguf.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ggml_ext._native import library
from helpers.models import MODEL

TESTS = Path(__file__).parent
QUICK_DIRECTORIES = ("unit", "encode", "kernels", "cli")
QUICK_BLOCKS = (1, 3, 16)  # row lengths of tests that use many
NO_SKIP = os.environ.get("GGML_EXT_NO_SKIP") == "1"

# Test programs buffer their output as in a user's shell.
os.environ.pop("PYTHONUNBUFFERED", None)

# Waiting threads yield: each worker starts multithreaded programs, and spinning took a test from 14 s to 113 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A background shell ignores interrupts, and children inherit that: tests that send one would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_quick(item: pytest.Item, directory: str) -> bool:
    """Return whether make check runs a test: no other build, a few seconds at most, kernels of this CPU at three lengths."""
    if directory not in QUICK_DIRECTORIES or any(item.get_closest_marker(name) for name in ("slow", "extra_build", "nightly")):
        return False
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return values.get("isa", "native") == "native" and (directory != "kernels" or values.get("n_blocks", 1) in QUICK_BLOCKS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        directory = item.path.relative_to(TESTS).parts[0]
        item.add_marker(directory)
        if _is_quick(item, directory):
            item.add_marker("quick")


def _forbid_skip(report) -> None:
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which GGML_EXT_NO_SKIP=1 forbids: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _forbid_skip(report)
    return report


@pytest.fixture(scope="session")
def lib() -> library.Library:
    """Return the built libggml-base."""
    built = library.load()
    if built is None:
        pytest.skip("libggml-base is not built into the installed package")
    return built


@pytest.fixture(scope="session")
def model() -> Path:
    """Return the reference model in F16."""
    if not MODEL.is_file():
        pytest.skip(f"{MODEL} is missing")
    return MODEL
