"""Shared by quantize and export: report a plan, and write the output."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._base.console import Console
from .._encode.accuracy import MeasuredTensor
from .._output.conversion import Conversion
from .._output.other_parts import check_other_parts
from .._output.output import Output
from .._output.parts import PartNumber
from .._output.verify import run_once, verify
from .._output.writer import write_tensors
from .._plan.plan import QuantizationPlan
from .._report.results import TensorResult


def report_plan(plan: QuantizationPlan, console: Console) -> None:
    """Report fallbacks, as notes if they cost no quality, and the plan's warnings."""
    if not console.quiet:
        for fallback, names in plan.fallbacks().items():
            report = console.warn if fallback.is_loss else console.note
            report(fallback.describe(names))
    for warning in plan.warnings:
        console.warn(warning)


@dataclass(frozen=True)
class WrittenFile:
    """The result of writing."""

    paths: list[Path]
    tensors: list[MeasuredTensor]
    results: list[TensorResult]
    seconds: float  # including a resumed run
    n_before: int  # tensors that the resumed run had finished
    was_run: bool = False  # --verify ran a token


@dataclass(frozen=True)
class WritingJob(ABC):
    """A conversion that is ready to be written."""

    output: Output
    conversion: Conversion
    title: str
    lines: Sequence[str] = field(default_factory=list)  # to print per tensor; may be empty
    is_verified: bool = False
    part: PartNumber | None = None  # of --part; other runs write the other parts
    digests: Mapping[str, str] = field(default_factory=dict)  # of --part: digest_dependencies()

    @abstractmethod
    def pack_headers(self, tensors: Sequence[MeasuredTensor]) -> list[bytes]:
        """Pack the headers of all parts. Their lengths do not depend on the errors."""

    @abstractmethod
    def list_dependencies(self, headers: Sequence[bytes]) -> dict:
        """List what the output's bytes depend on. headers: preliminary ones, before errors are known."""

    def tensor_result(self, i: int) -> TensorResult:
        """Return the result of a finished tensor."""
        finished = self.output.finished[i]
        return TensorResult.make(self.conversion.plan.tensors[i], finished.accuracy, finished.seconds, finished.sha256)

    def write(self, console: Console) -> WrittenFile:
        """Write OUT, or resume an interrupted run."""
        started, output, conversion = time.monotonic(), self.output, self.conversion
        plan = conversion.plan
        check_other_parts(output.path, self.digests)
        headers = self.pack_headers([MeasuredTensor(t) for t in plan.tensors])
        possible = plan.possible_sizes(conversion.fallback_above)
        output.begin(self.list_dependencies(headers), headers, possible, console.note)
        n_before, seconds_before = len(output.finished), sum(finished.seconds for finished in output.finished)
        n = len(plan.tensors)
        write_tensors(
            output, conversion, console, title=self.title,
            before=lambda i: console.report(self.lines[i]) if self.lines else None,
            after=lambda i: console.event("tensor", {"index": i + 1, "of": n, **self.tensor_result(i).record()}),
        )
        tensors = [MeasuredTensor(t, finished.accuracy) for t, finished in zip(plan.tensors, output.finished, strict=True)]
        headers = self.pack_headers(tensors)
        output.complete(headers)
        if self.is_verified:
            verify(output, headers, conversion, console)
        conversion.check_unchanged()
        was_run = self.is_verified and self.part is None and run_once(output, conversion.file, console)
        check_other_parts(output.path, self.digests)  # again: they may have begun after this one
        output.publish()
        return WrittenFile(
            paths=[part.path for part in output.parts],
            tensors=tensors,
            results=[self.tensor_result(i) for i in range(n)],
            seconds=time.monotonic() - started + seconds_before,
            n_before=n_before,
            was_run=was_run,
        )
