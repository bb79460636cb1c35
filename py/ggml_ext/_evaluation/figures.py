"""Results in the logs of llama-perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Figure(NamedTuple):
    """A value with its standard error, if llama-perplexity prints one."""

    value: float
    error: float | None = None


# names in the statistics
PPL, BASE_PPL, LN_RATIO, KLD, SAME_TOP = "Mean PPL(Q)", "Mean PPL(base)", "Mean ln(PPL(Q)/PPL(base))", "Mean KLD", "Same top p"
KLD_99 = "99.0% KLD"
# kind of task -> llama-perplexity's option for its file
TASKS = {"hellaswag": "-f", "winogrande": "-f", "multiple-choice": "-bf"}
CHUNK_OF_PPL = re.compile(r"\[(\d+)\]([-\w.]+),")
CHUNK_OF_KLD = re.compile(r"^ *(\d+) +\S+ ± +\S+ +(\S+) ± +\S+ +(\S+) ±", re.M)
TASK = re.compile(r"^(\d+)\t *([\d.]+)", re.M)  # tasks so far, percent of right answers


def parse_statistics(log: str) -> dict[str, Figure] | None:
    """Return the statistics by name, such as "Mean KLD", shares in percent; None if the last one is missing."""
    body = log.partition("====== Perplexity statistics ======")[2]
    lines = re.findall(r"^ *(\S.*?) *: +(-?[\w.]+)(?: ± +(-?[\w.]+))? ?%?$", body, re.M)
    statistics = {" ".join(name.split()): Figure(float(value), float(error) if error else None) for name, value, error in lines}
    return statistics if SAME_TOP in statistics else None


def parse_perplexity(log: str) -> Figure | None:
    """Return the final estimate."""
    match = re.search(r"Final estimate: PPL = ([-\w.]+) \+/- ([-\w.]+)", log)
    return Figure(float(match[1]), float(match[2])) if match else None


def parse_score(log: str) -> Figure | None:
    """Return the percent of right answers after the last task, with the standard error of a share, which the program does not always
    print."""
    if not (lines := TASK.findall(log)):
        return None
    n, percent = int(lines[-1][0]), float(lines[-1][1])
    return Figure(percent, math.sqrt(percent * (100 - percent) / max(n - 1, 1)))


def count_finished(log: str) -> int:
    """Return the number of chunks or tasks that a run has finished."""
    return max((int(fields[0]) for pattern in (CHUNK_OF_PPL, CHUNK_OF_KLD, TASK) for fields in pattern.findall(log)), default=0)


def chunk_sums(log: str) -> list[float]:
    """Return the cumulative sums of ln(PPL) over chunks, or of ln(PPL / PPL of the base) in a comparison.

    The log has means over the chunks so far, with four decimals of the perplexity and five of the logarithm.
    """
    if lines := CHUNK_OF_KLD.findall(log):
        return [int(n) * float(mean) for n, mean, _ in lines]
    return [int(n) * math.log(float(mean)) for n, mean in CHUNK_OF_PPL.findall(log)]


def kld_sums(log: str) -> list[float]:
    """Return the cumulative sums of the KL divergence over chunks; none without a base. The log has means with five decimals."""
    return [int(n) * float(mean) for n, _, mean in CHUNK_OF_KLD.findall(log)]


def compare_paired(first: Sequence[float], second: Sequence[float]) -> Figure | None:
    """Return the mean difference, ln(PPL first / PPL second) or that of the KL divergence, from the sums of two runs on the same chunks.

    The standard error is that of the differences per chunk, in which the difficulty of a chunk cancels. Rounding in the logs adds up to
    1e-5 times the chunk's number to a difference, which only increases the error. None for fewer than two or different numbers of chunks.
    """
    if len(first) != len(second) or len(first) < 2:
        return None
    differences = np.diff(np.subtract(first, second), prepend=0.0)
    return Figure(float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(differences))))
