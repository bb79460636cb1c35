"""llama-bench on several models in turn, so that drift of the machine's speed affects all of them equally."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._base.errors import UserError
from .._native.process import describe_failure, run_captured
from .load import OtherLoad

Samples = dict[str, dict[str, list[float]]]
WHAT = ("decode", "prefill")


@dataclass(frozen=True)
class BenchRunner:
    """llama-bench with fixed settings. options: further options of the program."""

    program: Path
    n_prompt: int
    n_gen: int
    n_threads: int
    options: tuple[str, ...] = ()

    def run(self, model: Path) -> dict[str, float]:
        """Measure tokens per second: {"decode": ..., "prefill": ...}. UserError if the program fails."""
        command = [self.program, "-m", model, "-p", self.n_prompt, "-n", self.n_gen, "-t", self.n_threads, "-r", 1, *self.options, "-o", "json"]
        code, out, log = run_captured([*map(str, command)], Path())
        if code:
            raise UserError(describe_failure("llama-bench", code, log, f"for {model}"))
        return {"decode" if r["n_gen"] else "prefill": r["avg_ts"] for r in json.loads(out)}


def measure_speed(
    models: Mapping[str, Path], bench: BenchRunner, n_rounds: int, done: Callable[[int], object], *,
    warn: Callable[[str], object], failed: Callable[[str, Exception], None] | None = None,
) -> Samples:
    """Measure tokens per second in every round: {name: {"decode": [...], "prefill": [...]}}.

    Args:
        models: files by name, measured in turn.
        bench: llama-bench.
        n_rounds: number of rounds.
        done: called with the number of each finished round.
        warn: called with a warning if other programs were busy.
        failed: called with name and error of a model on which llama-bench fails, which is then left out; None: raise UserError.
    """
    samples: Samples = {name: {what: [] for what in WHAT} for name in models}
    load = OtherLoad()
    for i in range(n_rounds):
        for name in list(samples):
            try:
                speeds = bench.run(models[name])
            except UserError as e:
                if failed is None:
                    raise
                failed(name, e)
                del samples[name]
                continue
            for what, speed in speeds.items():
                samples[name][what].append(speed)
        done(i + 1)
    if warning := load.warning():
        warn(warning)
    return samples


def summarize_speed(samples: Samples, baselines: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per model: median, minimum and maximum, and the median ratio to each baseline over rounds as "decode/NAME"."""
    rows = []
    for name, speeds in samples.items():
        row: dict[str, Any] = {"type": name}
        for what, values in speeds.items():
            row[what] = statistics.median(values)
            row[f"{what}_min"], row[f"{what}_max"] = min(values), max(values)
            for base in baselines:
                row[f"{what}/{base}"] = statistics.median(a / b for a, b in zip(values, samples[base][what], strict=True))
        rows.append(row)
    return rows
