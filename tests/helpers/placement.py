"""Measures of models whose weights are on several devices, and where they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import perplexity_run


class Measured(NamedTuple):
    """The printed perplexity, the mean KL divergence from base logits (0 without), and MiB of weights by buffer, as the log names them."""

    perplexity: str
    divergence: float
    buffers: dict[str, float]


def measure(file: Path, n_ctx: int, threads: int, *options) -> Measured:
    """Run llama-perplexity. One thread keeps the order of sums."""

    def parse(log: str) -> Measured | None:
        value = re.search(r"(?:Final estimate: PPL =|Mean PPL\(Q\) +:) +([\d.]+)", log)
        divergence = re.search(r"Mean +KLD: +(-?[\d.]+)", log)
        buffers = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", log)
        return value and Measured(value[1], float(divergence[1]) if divergence else 0.0, {name: float(size) for name, size in buffers})

    return perplexity_run.run_perplexity("perplexity", parse, file, n_ctx, threads, "-lv", 4, *options)
