"""llama-perplexity on one model after the other, with the same settings."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .._base.console import Console
from .._base.errors import UserError
from .._native.process import describe_failure, last_error, run_logged
from .figures import TASKS, Figure, count_finished, parse_perplexity, parse_score, parse_statistics
from .logits import BaseLogits

Found = TypeVar("Found")

# functions of llama-perplexity after whose errors it ends with exit code 0, or goes on
FAILING = "perplexity|kl_divergence|hellaswag_score|winogrande_score|load_winogrande_from_csv|multiple_choice_\\w+"
N_ANSWERS = 16  # of a question with several, at most; each takes a sequence, and each sequence memory for TASK_CONTEXT tokens
TASK_CONTEXT = 512
SURE = 5.0  # seconds after the first chunk from which on the rate says how long it takes


@dataclass(frozen=True)
class PerplexityRunner:
    """options: handed to llama-perplexity as they are, such as -ngl 99; estimated: called with the seconds that a run takes, from
    when that is known on."""

    program: Path
    n_ctx: int
    n_batch: int
    n_threads: int
    options: tuple[str, ...]
    console: Console
    estimated: Callable[[float], None]

    def save_logits(self, model: Path, text: Path, n_chunks: int, out: Path) -> tuple[Figure, str]:
        """Runs the base model on the text and writes its logits. The perplexity and the log. UserError if the file is not whole."""
        log = self._run(f"logits of {model.name}", model, n_chunks, "chunk", "-f", text, "--chunks", n_chunks, "--kl-divergence-base", out)
        BaseLogits.read(out)
        return self._result(model, "final estimate", parse_perplexity, log), log

    def perplexity(self, model: Path, text: Path, n_chunks: int) -> tuple[Figure, str]:
        log = self._run(model.name, model, n_chunks, "chunk", "-f", text, "--chunks", n_chunks)
        return self._result(model, "final estimate", parse_perplexity, log), log

    def compare(self, model: Path, base: BaseLogits) -> tuple[dict[str, Figure], str]:
        """parse_statistics() of a model against the base, and the log."""
        log = self._run(model.name, model, base.n_chunks, "chunk", "--kl-divergence", "--kl-divergence-base", base.path)
        return require_finite(model, self._result(model, "statistics", parse_statistics, log)), log

    def score(self, model: Path, kind: str, tasks: Path, n_tasks: int | None) -> Figure:
        """Percent of right answers. kind: key of TASKS; n_tasks: None for llama-perplexity's own number."""
        number = [] if n_tasks is None else [f"--{kind}-tasks", n_tasks]
        parallel = ["-np", N_ANSWERS] if kind == "multiple-choice" else []
        title, n_ctx = f"{kind} of {model.name}", max(self.n_ctx, TASK_CONTEXT)
        log = self._run(title, model, n_tasks or 0, "task", f"--{kind}", TASKS[kind], tasks, *number, *parallel, n_ctx=n_ctx)
        return self._result(model, "score", parse_score, log)

    def _run(self, title: str, model: Path, total: int, unit: str, *args, n_ctx: int | None = None) -> str:
        n_ctx = n_ctx or self.n_ctx
        command = [self.program, "-m", model, "-c", n_ctx, "-b", max(self.n_batch, n_ctx), "-t", self.n_threads, *self.options, *args]
        first: tuple[float, int] | None = None  # when some were done, and how many
        with self.console.bar(title, total or None, unit) as bar:

            def heard(log: str) -> None:
                nonlocal first
                if of := re.search(r"(?:over|selecting) (\d+) (?:chunks|\w+ tasks)", log):
                    bar.total = int(of[1])
                n, now = count_finished(log), time.monotonic()
                if first is None and n:
                    first = now, n
                elif first is not None and n > first[1] and now - first[0] > SURE and bar.total:
                    self.estimated((now - first[0]) / (n - first[1]) * bar.total)
                bar.update(n - bar.n)

            code, log = run_logged([*map(str, command)], Path(), heard)
        if code:
            raise UserError(describe_failure("llama-perplexity", code, log, f"for {model}", less_memory="pass a smaller --batch-size or --ctx-size"))
        # errors such as another vocabulary end it, or not even that, and the exit code is 0
        if errors := re.findall(rf"^\S+ E ((?:{FAILING})\s*: .*)", log, re.M):
            raise UserError(f"llama-perplexity on {model}: " + " / ".join(errors))
        return log

    @staticmethod
    def _result(model: Path, what: str, parse: Callable[[str], Found | None], log: str) -> Found:
        if (found := parse(log)) is None:
            raise UserError(f"llama-perplexity gave no {what} for {model}; it ends with: {last_error(log)}")
        return found


def require_finite(model: Path, found: dict[str, Figure]) -> dict[str, Figure]:
    """The figures; UserError if one is no number, as it is for a model whose logits are NaN."""
    for name, figure in found.items():
        if not math.isfinite(figure.value):
            raise UserError(f"llama-perplexity on {model}: {name} is {figure.value}: the file is damaged; quantize or download it again")
    # A model against itself: the variance of the difference is 0, or by rounding less, and its root then NaN.
    return {
        name: Figure(figure.value, 0.0 if figure.error is not None and math.isnan(figure.error) else figure.error)
        for name, figure in found.items()
    }
