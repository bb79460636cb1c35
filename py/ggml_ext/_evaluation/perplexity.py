"""Run llama-perplexity on several models with the same settings."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from .._base.console import Console
from .._base.errors import UserError
from .._native.process import describe_failure, last_error, run_logged
from .figures import TASKS, Figure, count_finished, parse_answers, parse_perplexity, parse_statistics
from .logits import BaseLogits

Parsed = TypeVar("Parsed")

# llama-perplexity may continue or exit with 0 after errors in these functions, so their lines in the log count as failures
FAILING_FUNCTIONS = "perplexity|kl_divergence|hellaswag_score|winogrande_score|load_winogrande_from_csv|multiple_choice_\\w+"
MAX_ANSWERS = 16  # to a multiple-choice question; each answer is a sequence of its own
MIN_TASK_CONTEXT = 512  # tokens of a sequence in tasks
SECONDS_TO_ESTIMATE = 5.0  # from the first finished chunks to the first estimate of the time


@dataclass(frozen=True)
class PerplexityRunner:
    """llama-perplexity with fixed settings. All methods raise UserError if the program fails.

    Attributes:
        program: llama-perplexity.
        n_ctx: tokens per chunk.
        n_batch: tokens per batch, raised to n_ctx if smaller.
        options: further options of llama-perplexity, such as -ngl 99.
        console: for the progress bar.
        on_estimate: called with the estimated seconds of a run, more than once while it runs.
    """

    program: Path
    n_ctx: int
    n_batch: int
    n_threads: int
    options: tuple[str, ...]
    console: Console
    on_estimate: Callable[[float], None]

    def save_logits(self, model: Path, text: Path, n_chunks: int, out: Path) -> tuple[Figure, str]:
        """Write the base model's logits on a text; returns perplexity and log."""
        flags = ["-f", text, "--chunks", n_chunks, "--kl-divergence-base", out]
        log = self._run(f"logits of {model.name}", model, n_chunks, "chunk", flags)
        BaseLogits.read(out)
        return self._parse(model, "final estimate", parse_perplexity, log), log

    def perplexity(self, model: Path, text: Path, n_chunks: int) -> tuple[Figure, str]:
        """Measure the perplexity on a text; returns it and the log."""
        log = self._run(model.name, model, n_chunks, "chunk", ["-f", text, "--chunks", n_chunks])
        return self._parse(model, "final estimate", parse_perplexity, log), log

    def compare(self, model: Path, base: BaseLogits) -> tuple[dict[str, Figure], str]:
        """Compare a model with the base; returns the statistics by name and the log."""
        log = self._run(model.name, model, base.n_chunks, "chunk", ["--kl-divergence", "--kl-divergence-base", base.path])
        return require_finite(model, self._parse(model, "statistics", parse_statistics, log)), log

    def score(self, model: Path, kind: str, tasks: Path, n_tasks: int | None) -> np.ndarray:
        """Answer tasks; returns 100 for each right answer and 0 for each wrong one, (n_tasks, 1). kind: key of TASKS. n_tasks: None for
        llama-perplexity's default."""
        number = [] if n_tasks is None else [f"--{kind}-tasks", n_tasks]
        parallel = ["-np", MAX_ANSWERS] if kind == "multiple-choice" else []
        title, n_ctx = f"{kind} of {model.name}", max(self.n_ctx, MIN_TASK_CONTEXT)
        flags = [f"--{kind}", TASKS[kind], tasks, *number, *parallel]
        log = self._run(title, model, n_tasks or 0, "task", flags, n_ctx=n_ctx)
        return self._parse(model, "score", parse_answers, log)

    def _run(self, title: str, model: Path, total: int, unit: str, flags: Sequence[object], n_ctx: int | None = None) -> str:
        """Run the program with a progress bar; returns its log."""
        n_ctx = n_ctx or self.n_ctx
        command = [self.program, "-m", model, "-c", n_ctx, "-b", max(self.n_batch, n_ctx), "-t", self.n_threads, *self.options, *flags]
        first: tuple[float, int] | None = None  # time and count of the first update
        with self.console.bar(title, total or None, unit) as bar:

            def update(log: str) -> None:
                nonlocal first
                if match := re.search(r"(?:over|selecting) (\d+) (?:chunks|\w+ tasks)", log):
                    bar.total = int(match[1])
                n, now = count_finished(log), time.monotonic()
                if first is None and n:
                    first = now, n
                elif first is not None and n > first[1] and now - first[0] > SECONDS_TO_ESTIMATE and bar.total:
                    self.on_estimate((now - first[0]) / (n - first[1]) * bar.total)
                bar.update(n - bar.n)

            code, log = run_logged([*map(str, command)], Path(), update)
        if code:
            raise UserError(describe_failure("llama-perplexity", code, log, f"for {model}", less_memory="pass a smaller --batch-size or --ctx-size"))
        # after errors such as another vocabulary the exit code may be 0
        if errors := re.findall(rf"^\S+ E ((?:{FAILING_FUNCTIONS})\s*: .*)", log, re.M):
            raise UserError(f"llama-perplexity on {model}: " + " / ".join(errors))
        return log

    @staticmethod
    def _parse(model: Path, what: str, parse: Callable[[str], Parsed | None], log: str) -> Parsed:
        if (parsed := parse(log)) is None:
            raise UserError(f"llama-perplexity gave no {what} for {model}; its output ends with: {last_error(log)}")
        return parsed


def require_finite(model: Path, figures: dict[str, Figure]) -> dict[str, Figure]:
    """Return the figures, with 0 for NaN as an error. Raise UserError if a value is not finite, as when the model's logits are NaN."""
    for name, figure in figures.items():
        if not math.isfinite(figure.value):
            raise UserError(
                f"llama-perplexity on {model}: {name} is {figure.value}: the file is damaged, or the model's activations are too large for a "
                "type in it; quantize or download it again, or try another type"
            )
    # for equal models rounding may make a variance negative and its root NaN
    return {
        name: Figure(figure.value, 0.0 if figure.error is not None and math.isnan(figure.error) else figure.error)
        for name, figure in figures.items()
    }
