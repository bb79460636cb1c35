"""What quantize and export do alike: they tell of a plan, and write it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .._base.console import Console
from .._encode.accuracy import Accuracy
from .._output.conversion import Conversion
from .._output.output import Output
from .._output.run import run_once
from .._output.verify import verify
from .._output.writer import write_tensors
from .._plan.plan import Plan
from .._plan.sizes import possible_sizes
from .._report.records import tensor_record
from .._report.tables import fallback_lines


def tell_plan(plan: Plan, console: Console) -> None:
    """Types other than those asked for, and the plan's warnings."""
    for line in [] if console.quiet else fallback_lines(plan):
        kind, text = line.split(": ", 1)
        (console.warn if kind == "warning" else console.note)(text)
    for warning in plan.warnings:
        console.warn(warning)


@dataclass(frozen=True)
class Written:
    """accuracies: by tensor; seconds: with those of an earlier run; n_before: tensors of that run; was_run: by --verify."""

    accuracies: list[Accuracy]
    seconds: float
    n_before: int
    was_run: bool = False


@dataclass(frozen=True)
class Job:
    """A conversion that is written. headers: of the parts of OUT, as long with the accuracies as before they are known (None);
    bound_to: what the bytes depend on, from the first headers; lines: what to report of each tensor, or nothing."""

    output: Output
    conversion: Conversion
    title: str
    headers: Callable[[list[Accuracy] | None], list[bytes]]
    bound_to: Callable[[list[bytes]], dict]
    lines: list[str]
    is_verified: bool = False

    def record(self, i: int) -> dict:
        """Of a finished tensor."""
        done = self.output.finished[i]
        return {**tensor_record(self.conversion.plan, i, done.accuracy), "seconds": round(done.seconds, 3), "sha256": done.sha256}

    def records(self) -> list[dict]:
        return [self.record(i) for i in range(len(self.conversion.plan.tensors))]

    def write(self, console: Console) -> Written:
        """Writes OUT, or what an earlier run left to be written."""
        started, output, of = time.monotonic(), self.output, self.conversion
        first = self.headers(None)
        output.begin(self.bound_to(first), first, possible_sizes(of.plan, of.fallback_above), console.note)
        n_before, seconds_before = len(output.finished), sum(done.seconds for done in output.finished)
        n = len(of.plan.tensors)
        accuracies = write_tensors(
            output, of, console, self.title, lambda i: console.report(self.lines[i]) if self.lines else None,
            lambda i: console.event("tensor", {"index": i + 1, "of": n, **self.record(i)}),
        )
        final = self.headers(accuracies)
        output.complete(final)
        if self.is_verified:
            verify(output, final, of, console)
        of.check_unchanged()
        was_run = self.is_verified and run_once(output, of.file, console)
        output.publish()
        return Written(accuracies, time.monotonic() - started + seconds_before, n_before, was_run)
