"""llama-bench on several models in turn, so that drift of the machine's speed falls on all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._base.errors import UserError
from .._native.process import describe_failure, run_captured

Samples = dict[str, dict[str, list[float]]]
WHAT = ("decode", "prefill")


@dataclass(frozen=True)
class BenchRunner:
    """llama-bench with the same settings for all models. options: handed to it as they are."""

    program: Path
    n_prompt: int
    n_gen: int
    n_threads: int
    options: tuple[str, ...] = ()

    def run(self, model: Path) -> dict[str, float]:
        """Tokens a second: {"decode": ..., "prefill": ...}. UserError if the program fails."""
        command = [self.program, "-m", model, "-p", self.n_prompt, "-n", self.n_gen, "-t", self.n_threads, "-r", 1, *self.options, "-o", "json"]
        code, out, log = run_captured([*map(str, command)], Path())
        if code:
            raise UserError(describe_failure("llama-bench", code, log, f"for {model}"))
        return {"decode" if r["n_gen"] else "prefill": r["avg_ts"] for r in json.loads(out)}


def measure_speed(
    models: Mapping[str, Path], bench: BenchRunner, n_rounds: int, done: Callable[[int], None],
    failed: Callable[[str, Exception], None] | None = None,
) -> Samples:
    """Tokens a second of every round: {name: {"decode": [...], "prefill": [...]}}; the models in turn. done: called with its number after
    each round.

    UserError if llama-bench fails; with failed(name, error), which is called instead, the model is left out.
    """
    samples: Samples = {name: {what: [] for what in WHAT} for name in models}
    for i in range(n_rounds):
        for name in list(samples):
            try:
                found = bench.run(models[name])
            except UserError as e:
                if failed is None:
                    raise
                failed(name, e)
                del samples[name]
                continue
            for what, speed in found.items():
                samples[name][what].append(speed)
        done(i + 1)
    return samples


def summarize_speed(samples: Samples, baselines: Sequence[str]) -> list[dict]:
    """A row for each model: medians, least and largest, and the median of the rounds' ratios to each baseline as "decode/NAME"."""
    rows = []
    for name, speeds in samples.items():
        row = {"type": name}
        for what, values in speeds.items():
            row[what] = statistics.median(values)
            row[f"{what}_min"], row[f"{what}_max"] = min(values), max(values)
            for base in baselines:
                row[f"{what}/{base}"] = statistics.median(a / b for a, b in zip(values, samples[base][what], strict=True))
        rows.append(row)
    return rows
