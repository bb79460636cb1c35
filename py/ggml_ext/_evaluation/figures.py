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
# chunks so far, ln(PPL / PPL of the base), KL divergence, percent of equal tokens
CHUNK_OF_KLD = re.compile(r"^ *(\d+) +\S+ ± +\S+ +(\S+) ± +\S+ +(\S+) ± +\S+ +\S+ ± +\S+ % +(\S+) ±", re.M)
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


def parse_answers(log: str) -> np.ndarray | None:
    """Return 100 for each right answer and 0 for each wrong one, float64 (n_tasks, 1); None without answers.

    The log has the percentage of the tasks so far, with four decimals or more.
    """
    n_right = [round(int(n) * float(percent) / 100) for n, percent in TASK.findall(log)]
    return 100.0 * np.diff(n_right, prepend=0)[:, None] if n_right else None


def count_finished(log: str) -> int:
    """Return the number of chunks or tasks that a run has finished."""
    return max((int(fields[0]) for pattern in (CHUNK_OF_PPL, CHUNK_OF_KLD, TASK) for fields in pattern.findall(log)), default=0)


def chunk_sums(log: str) -> list[float]:
    """Return the cumulative sums of ln(PPL) over chunks, or of ln(PPL / PPL of the base) in a comparison.

    The log has means over the chunks so far, with four decimals of the perplexity and five of the logarithm.
    """
    if lines := CHUNK_OF_KLD.findall(log):
        return [int(n) * float(mean) for n, mean, _, _ in lines]
    return [int(n) * math.log(float(mean)) for n, mean in CHUNK_OF_PPL.findall(log)]


def kld_sums(log: str) -> list[float]:
    """Return the cumulative sums of the KL divergence over chunks; none without a base. The log has means with five decimals."""
    return [int(n) * float(mean) for n, _, mean, _ in CHUNK_OF_KLD.findall(log)]


def top_sums(log: str) -> list[float]:
    """Return the cumulative sums of the top-1 agreement in percent over chunks; none without a base. The log has means with three decimals."""
    return [int(n) * float(mean) for n, _, _, mean in CHUNK_OF_KLD.findall(log)]


def compare_paired(first: Sequence[float], second: Sequence[float]) -> Figure | None:
    """Return the mean difference, such as ln(PPL first / PPL second), from the sums of two runs on the same chunks.

    The standard error is that of the differences per chunk, in which the difficulty of a chunk cancels. Rounding in the logs adds up to
    1e-5 times the chunk's number to a difference, which only increases the error. None for fewer than two or different numbers of chunks.
    """
    if len(first) != len(second) or len(first) < 2:
        return None
    return mean_over_samples(np.diff(np.subtract(first, second), prepend=0.0)[:, None])[0]


def mean_over_samples(values: np.ndarray) -> list[Figure]:
    """Return mean and standard error of each column. values: independent samples such as chunks, (n_samples, n_columns); one alone has no error."""
    n = len(values)
    errors = values.std(0, ddof=1) / math.sqrt(n) if n > 1 else np.zeros(values.shape[1])
    return [Figure(float(mean), float(error)) for mean, error in zip(values.mean(0), errors, strict=True)]
