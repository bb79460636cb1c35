"""What there is to say of a file and its tensors: a table that grows, what stands below it, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._base.units import MIB
from .._encode.accuracy import Accuracy
from .._encode.histogram import Histogram
from .._formats.gguf_file import Tensor
from .._formats.tensor_types import DITTO3
from .results import error_record

N_LAYERS = 10  # whose errors of the stream are in the table; --json has all


@dataclass
class Finding:
    """What there is to say of a tensor."""

    tensor: Tensor
    epsilon: float | None
    accuracy: Accuracy | None = None  # where there is an original
    is_changed: bool = False  # of another type than the original

    @property
    def bpw(self) -> float:
        return self.tensor.n_bytes * 8 / self.tensor.n_elements

    @property
    def fits(self) -> bool:
        """False if an error is larger than epsilon."""
        return self.epsilon is None or self.accuracy is None or self.accuracy.max_abs <= self.epsilon

    def record(self) -> dict:
        """For --json."""
        return {
            "name": self.tensor.name,
            "shape": list(self.tensor.ne),
            "type": self.tensor.type.name.lower(),
            "bytes": self.tensor.n_bytes,
            "bits_per_weight": self.bpw,
            **({} if self.epsilon is None else {"epsilon": self.epsilon}),
            **({} if self.accuracy is None else {**error_record(self.accuracy), "within_epsilon": self.fits}),
        }


@dataclass(frozen=True)
class Inspection:
    """All findings: data alone, so that it can be pickled.

    path: the file as it was named; n_tensors: of the file, of which --tensor chooses some; against: the original, None without one;
    importance: what the errors are weighed with, "none" without --imatrix; made_with: the importance matrix that the file records; total: the
    errors of all tensors together, None without an original; histograms: by type, None where they were not asked for; stream_errors: by
    layer, empty where none are recorded (--propagate).
    """

    path: Path
    n_tensors: int
    against: Path | None
    importance: str
    made_with: str | None
    findings: Sequence[Finding]
    total: Accuracy | None
    histograms: dict[str, Histogram] | None
    stream_errors: Sequence[float] = ()

    def record(self) -> dict:
        """For --json."""
        tensors = [f.tensor for f in self.findings]
        n, n_bytes = sum(t.n_elements for t in tensors), sum(t.n_bytes for t in tensors)
        totals = {"tensors": len(tensors), "weights": n, "bytes": n_bytes, "bits_per_weight": n_bytes * 8 / max(n, 1)}
        out: dict[str, Any] = {"file": str(self.path), "tensors": [f.record() for f in self.findings], "total": totals}
        if self.total is not None:
            out |= {"against": str(self.against), "importance": self.importance}
            totals |= error_record(self.total)
        if self.stream_errors:
            out["stream_errors"] = list(self.stream_errors)
        if self.histograms is not None:
            out["histograms"] = {name: histogram.record() for name, histogram in self.histograms.items()}
        return out

    def lines(self) -> list[str]:
        """Below the table."""
        return [
            *summary_lines(self), *stream_lines(self.stream_errors), *([] if self.histograms is None else histogram_lines(self.histograms))
        ]


def row_writer(tensors: Sequence[Tensor], weighted: bool) -> Callable[..., str]:
    """A function that returns a line with the columns of the table, name, shape, type and numbers, in the widths that the tensors need."""
    width = max((len(t.name) for t in tensors), default=0)
    shape_width = max((len(shape_of(t)) for t in tensors), default=0)

    def line_of(*columns: str) -> str:
        name, shape, type_name, *numbers = columns
        line = f"{name:<{width}}  {shape:>{shape_width}}  {type_name:<8}"
        line += "".join(f" {n:>{w}}" for n, w in zip(numbers, (7, 12, 13, *([9] if weighted else []), 13, 8)))
        return line.rstrip()

    return line_of


def shape_of(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.ne))


def columns_of(finding: Finding, weighted: bool) -> list[str]:
    """The numbers of a row."""
    columns = [f"{finding.bpw:.4g}", "" if finding.epsilon is None else f"{finding.epsilon:.6g}"]
    if (accuracy := finding.accuracy) is not None:
        of_inputs = [] if not weighted else ["" if accuracy.weighted is None else f"{accuracy.weighted:.6f}"]
        columns += [f"{accuracy.relative:.6f}", *of_inputs, f"{accuracy.max_abs:.6g}", "ok" if finding.fits else "EXCEEDED"]
    return columns


def summary_lines(found: Inspection) -> list[str]:
    """Below the table."""
    tensors = [f.tensor for f in found.findings]
    n, n_bytes = sum(t.n_elements for t in tensors), sum(t.n_bytes for t in tensors)
    of_ditto3 = [f for f in found.findings if f.tensor.type == DITTO3]
    of_file = "" if len(tensors) == found.n_tensors else f" of {found.n_tensors}"
    lines = ["", f"{len(tensors)}{of_file} tensors, {n:,} weights, {n_bytes / MIB:,.2f} MiB, {n_bytes * 8 / max(n, 1):.4g} bpw"]
    if of_ditto3:
        n_recorded = sum(f.epsilon is not None for f in found.findings)
        lines.append(f"epsilon is recorded for {n_recorded} of {len(of_ditto3)} ditto3 tensors")
    if (total := found.total) is not None:
        lines.append(f"relative squared error of all weights: {total.relative:.6f}")
        if total.weighted is not None:
            lines.append(f"weighted with {found.importance}: {total.weighted:.6f}")
        elif found.made_with and found.importance == "none":
            lines.append(f"made with the importance matrix {found.made_with}: --imatrix FILE shows the errors weighed with it")
    return lines


def stream_lines(errors: Sequence[float]) -> list[str]:
    """How far the residual stream is from the original model's, behind the layers; nothing where it is not recorded."""
    if not any(errors):
        return []
    known = [(layer, error) for layer, error in enumerate(errors) if error]
    some = known if len(known) <= N_LAYERS else [known[i * (len(known) - 1) // (N_LAYERS - 1)] for i in range(N_LAYERS)]
    shown = ", ".join(f"{layer}: {error:.3g}" for layer, error in some)
    return [f"relative squared error of the residual stream behind {'layers' if len(some) == len(known) else 'some layers'} {shown}"]


def histogram_lines(histograms: dict[str, Histogram]) -> list[str]:
    lines = [line for name, histogram in histograms.items() for line in histogram.lines(name)]
    return lines or ["", "no histogram: no tensor has a type of ggml-ext"]
