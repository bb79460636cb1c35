"""What the logs of llama-perplexity say."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Figure(NamedTuple):
    """A figure of llama-perplexity."""

    value: float
    error: float | None = None  # standard error, if there is one


# names of figures in the statistics
PPL, BASE_PPL, LN_RATIO, KLD, SAME_TOP = "Mean PPL(Q)", "Mean PPL(base)", "Mean ln(PPL(Q)/PPL(base))", "Mean KLD", "Same top p"
# kind of task -> the option of llama-perplexity that names its file
TASKS = {"hellaswag": "-f", "winogrande": "-f", "multiple-choice": "-bf"}
CHUNK_OF_PPL = re.compile(r"\[(\d+)\]([-\w.]+),")
CHUNK_OF_KLD = re.compile(r"^ *(\d+) +\S+ ± +\S+ +(\S+) ± +\S+ +\S+ ±", re.M)
TASK = re.compile(r"^(\d+)\t *([\d.]+)", re.M)  # tasks so far, percent of them right


def parse_statistics(log: str) -> dict[str, Figure] | None:
    """All lines of the statistics by their names, such as "Mean KLD", shares in percent; None if the last one is missing."""
    body = log.partition("====== Perplexity statistics ======")[2]
    lines = re.findall(r"^ *(\S.*?) *: +(-?[\w.]+)(?: ± +(-?[\w.]+))? ?%?$", body, re.M)
    found = {" ".join(name.split()): Figure(float(value), float(error) if error else None) for name, value, error in lines}
    return found if SAME_TOP in found else None


def parse_perplexity(log: str) -> Figure | None:
    """The final estimate."""
    found = re.search(r"Final estimate: PPL = ([-\w.]+) \+/- ([-\w.]+)", log)
    return Figure(float(found[1]), float(found[2])) if found else None


def parse_score(log: str) -> Figure | None:
    """Percent of right answers after the last task, with the standard error of a share: the programs give one of some kinds and above
    100 tasks only."""
    if not (found := TASK.findall(log)):
        return None
    n, percent = int(found[-1][0]), float(found[-1][1])
    return Figure(percent, math.sqrt(percent * (100 - percent) / max(n - 1, 1)))


def count_finished(log: str) -> int:
    """Chunks or tasks that a run has finished."""
    return max((int(found[0]) for of in (CHUNK_OF_PPL, CHUNK_OF_KLD, TASK) for found in of.findall(log)), default=0)


def chunk_sums(log: str) -> list[float]:
    """What is cumulative in the log, as a sum over chunks: of ln(PPL), or in a comparison of ln(PPL / PPL of the base).

    The log has the mean of the chunks so far, with four decimals of the perplexity and five of the logarithm.
    """
    if found := CHUNK_OF_KLD.findall(log):
        return [int(n) * float(mean) for n, mean in found]
    return [int(n) * math.log(float(mean)) for n, mean in CHUNK_OF_PPL.findall(log)]


def compare_paired(first: Sequence[float], second: Sequence[float]) -> Figure | None:
    """ln(PPL first / PPL second) from chunk_sums() of two runs on the same chunks; its standard error is that of the differences of
    chunks, in which what makes a chunk hard for both cancels. None for fewer than two chunks, or where they are not the same number.

    The rounding of the logs adds 1e-5 times the number of the chunk to a difference, which only makes the error larger.
    """
    if len(first) != len(second) or len(first) < 2:
        return None
    differences = np.diff(np.subtract(first, second), prepend=0.0)
    return Figure(float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(differences))))
