"""Fixtures of all tests, their tiers and markers, and the rule about skipping. What tests share besides lies in helpers/.

GGML_EXT_NO_SKIP=1 turns every skip into a failure: for machines on which everything has to run.
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
QUICK_FOLDERS = ("unit", "encode", "kernels", "cli")
QUICK_BLOCKS = (1, 3, 16)  # of rows, where a test goes through many lengths
NO_SKIP = os.environ.get("GGML_EXT_NO_SKIP") == "1"

# Programs that tests start buffer their output as in a user's shell.
os.environ.pop("PYTHONUNBUFFERED", None)

# Threads that wait let others run: each worker starts programs of several threads, and spinning took a test from 14 s to 113 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts what runs in its background with interrupts ignored, which children inherit: tests that send one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_quick(item: pytest.Item, folder: str) -> bool:
    """Whether make check runs it: no other build, no more than a few seconds, of kernels those of this processor at three lengths."""
    if folder not in QUICK_FOLDERS or any(item.get_closest_marker(name) for name in ("slow", "extra_build", "nightly")):
        return False
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return values.get("isa", "native") == "native" and (folder != "kernels" or values.get("n_blocks", 1) in QUICK_BLOCKS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(folder)
        if _is_quick(item, folder):
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
    """The built libggml-base."""
    found = library.load()
    if found is None:
        pytest.skip("libggml-base is not built into the installed package")
    return found


@pytest.fixture(scope="session")
def model() -> Path:
    """The reference model in F16."""
    if not MODEL.is_file():
        pytest.skip(f"{MODEL} is missing")
    return MODEL
