"""The Vulkan backend on lavapipe, Mesa's driver for processors."""

from __future__ import annotations

import glob
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

import perplexity_run
from helpers.native import ROOT, built

VULKAN = Path(os.environ.get("GGML_EXT_TEST_VULKAN", ROOT / "build" / "vulkan"))
SHADERS = VULKAN / "llama" / "ggml" / "src" / "ggml-vulkan" / "vulkan-shaders.spv"


class Case(NamedTuple):
    """One operation: tests/native/vulkan_driver.cpp says what these are."""

    operation: str
    k: int
    m: int
    n: int
    batch: int = 1
    r2: int = 1

    def n_activations(self) -> int:
        return self.k * self.n * self.batch * self.r2


class Outcome(NamedTuple):
    """What the driver found: outputs, their largest error over |w| |x|, squared errors over squared outputs, values with other bits."""

    values: int
    max_error: float
    nmse: float
    different: int


def library() -> Path:
    return built(VULKAN, "libggml-vulkan.so")


def environment(**more: str) -> dict[str, str]:
    """Of processes on lavapipe, whatever else the machine has; skips if it is not installed."""
    drivers = glob.glob("/usr/share/vulkan/icd.d/lvp_icd*.json")
    if not drivers:
        pytest.skip("lavapipe is missing: install mesa-vulkan-drivers (as Debian names it)")
    # devices that are processors are left out unless they are named
    return {**os.environ, "VK_ICD_FILENAMES": drivers[0], "VK_DRIVER_FILES": drivers[0], "GGML_VK_VISIBLE_DEVICES": "0", **more}


def run_cases(type_name: str, cases: list[Case], **variables: str) -> dict[Case, Outcome | None]:
    """The cases in one process, None where the device refuses; AssertionError with the driver's words if it fails.

    Those with the most activations are first: lavapipe 22.3 corrupts its heap when their buffer grows, with stock types too.
    """
    cases = sorted(cases, key=Case.n_activations, reverse=True)
    lines = "".join(f"{type_name} {' '.join(map(str, case))}\n" for case in cases)
    done = subprocess.run([built(VULKAN, "ggml-ext-vulkan-driver"), library()], input=lines, capture_output=True, text=True,
                          env=environment(**variables))
    answers = done.stdout.splitlines()
    where = cases[len(answers)] if len(answers) < len(cases) else "the end"
    assert done.returncode == 0 and len(answers) == len(cases), f"{type_name}: exit code {done.returncode} at {where}: {done.stderr[-800:]}"
    outcomes = {}
    for case, answer in zip(cases, answers, strict=True):
        assert answer != "guard", f"{type_name}: {case}: bytes behind the tensors were written"
        words = answer.split()
        outcomes[case] = None if answer == "refused" else Outcome(int(words[0]), float(words[1]), float(words[2]), int(words[3]))
        print(f"{type_name} {case}: {outcomes[case]}")
    return outcomes


def perplexity(file: Path, text: Path, monkeypatch, *options, **variables: str) -> tuple[float, float]:
    """Of two chunks of 128 tokens; and the MiB of weights on the Vulkan device."""
    def parse(log: str) -> tuple[float, float] | None:
        found = re.search(r"Final estimate: PPL = ([\d.]+)", log)
        size = re.search(r"Vulkan0 model buffer size = +([\d.]+) MiB", log)
        return found and (float(found[1]), float(size[1]) if size else 0.0)

    with monkeypatch.context() as patch:
        for name, value in environment(**variables).items():
            patch.setenv(name, value)
        return perplexity_run.run_perplexity("final estimate", parse, file, 128, 2, "-f", text, "--chunks", 2, "-b", 128, "-lv", 4, *options)
