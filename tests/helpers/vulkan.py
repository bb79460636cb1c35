"""The Vulkan backend on lavapipe, Mesa's CPU driver."""

from __future__ import annotations

import glob
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.native import ROOT, require_built
from helpers.placement import measure

VULKAN = Path(os.environ.get("GGML_EXT_TEST_VULKAN", ROOT / "build" / "vulkan"))
SHADERS = VULKAN / "llama" / "ggml" / "src" / "ggml-vulkan" / "vulkan-shaders.spv"


class Case(NamedTuple):
    """An operation; tests/native/vulkan_driver.cpp documents the fields."""

    operation: str
    k: int
    m: int
    n: int
    batch: int = 1
    r2: int = 1

    def n_activations(self) -> int:
        n_used = 2 if self.operation == "experts" else 1  # each expert of a token has its own activations
        return self.k * self.n * self.batch * self.r2 * n_used


class CaseResult(NamedTuple):
    """The driver's result: number of outputs, largest error over |w| |x|, NMSE, outputs with different bits."""

    values: int
    max_error: float
    nmse: float
    different: int


def library() -> Path:
    return require_built(VULKAN, "libggml-vulkan.so")


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which lavapipe is the only Vulkan device, or skip if it is not installed."""
    drivers = glob.glob("/usr/share/vulkan/icd.d/lvp_icd*.json")
    if not drivers:
        pytest.skip("lavapipe is missing: install mesa-vulkan-drivers (Debian's name)")
    # ggml ignores CPU devices unless they are selected
    return {**os.environ, "VK_ICD_FILENAMES": drivers[0], "VK_DRIVER_FILES": drivers[0], "GGML_VK_VISIBLE_DEVICES": "0", **more}


def run_cases(type_name: str, cases: list[Case], *, integers: bool = False, **variables: str) -> dict[Case, CaseResult | None]:
    """Run cases in one process; a result is None where the device refuses.

    With `integers` the device uses integer dot products in all products, although lavapipe says that they are slow, and the reference rounds the
    activations too.

    Cases with the most activations run first: lavapipe 22.3 corrupts its heap when ggml's buffer for them grows, with
    upstream types too.
    """
    cases = sorted(cases, key=Case.n_activations, reverse=True)
    if integers:
        variables |= {"GGML_EXT_VK_INTEGER_DOT": "1", "GGML_VK_FORCE_MMVQ": "1"}
    lines = "".join(f"{type_name} {' '.join(map(str, case))}\n" for case in cases)
    done = subprocess.run([require_built(VULKAN, "ggml-ext-vulkan-driver"), library(), *["integers"] * integers], input=lines, capture_output=True, text=True,
                          env=environment(**variables))
    answers = done.stdout.splitlines()
    where = cases[len(answers)] if len(answers) < len(cases) else "the end"
    assert done.returncode == 0 and len(answers) == len(cases), f"{type_name}: exit code {done.returncode} at {where}: {done.stderr[-800:]}"
    results = {}
    for case, answer in zip(cases, answers, strict=True):
        assert answer != "guard", f"{type_name}: {case}: the kernel wrote past its tensors"
        words = answer.split()
        results[case] = None if answer == "refused" else CaseResult(int(words[0]), float(words[1]), float(words[2]), int(words[3]))
        print(f"{type_name} {case}: {results[case]}")
    return results


def perplexity(file: Path, text: Path, monkeypatch, *options, **variables: str) -> tuple[float, float]:
    """Return the perplexity of two chunks of 128 tokens, and the MiB of weights on the Vulkan device."""
    with monkeypatch.context() as patch:
        for name, value in environment(**variables).items():
            patch.setenv(name, value)
        measured = measure(file, 128, 2, "-f", text, "--chunks", 2, "-b", 128, *options)
    return float(measured.perplexity), measured.buffers.get("Vulkan0", 0.0)
