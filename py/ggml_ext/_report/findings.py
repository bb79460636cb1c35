"""The result of inspect: a row per tensor, the lines below the table, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._base.units import MIB
from .._encode.accuracy import Accuracy
from .._encode.histogram import Histogram
from .._formats.gguf_file import Tensor
from .._formats.quality import RecordedQuality
from .._formats.tensor_types import DITTO3
from .recorded_quality import quality_lines
from .results import error_record

N_LAYERS = 10  # printed errors of the residual stream; --json has all


@dataclass
class Finding:
    """A tensor of the file and its errors."""

    tensor: Tensor
    epsilon: float | None
    accuracy: Accuracy | None = None  # with --against
    is_changed: bool = False  # its type differs from the original's

    @property
    def bpw(self) -> float:
        return self.tensor.n_bytes * 8 / self.tensor.n_elements

    @property
    def fits(self) -> bool:
        """Whether all errors are within epsilon."""
        return self.epsilon is None or self.accuracy is None or self.accuracy.max_abs <= self.epsilon

    def record(self) -> dict:
        """Return the values for JSON."""
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
    """The result of inspect, as plain data that can be pickled.

    Attributes:
        path: the file, as named by the caller.
        n_tensors: of the file; `findings` has those that --tensor selects.
        against: the original, or None.
        importance: the statistics that weight errors; "none" without --imatrix.
        made_with: the imatrix that the file records.
        total: the errors of all tensors together; None without an original.
        histograms: by type; None without --histograms.
        stream_errors: errors of the residual stream by layer; empty without --propagate.
        quality: the recorded figures, if they hold for the file.
        has_other_quality: the file has figures of other weights.
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
    quality: RecordedQuality | None = None
    has_other_quality: bool = False

    def record(self) -> dict:
        """Return the values for JSON."""
        tensors = [f.tensor for f in self.findings]
        n, n_bytes = sum(t.n_elements for t in tensors), sum(t.n_bytes for t in tensors)
        totals = {"tensors": len(tensors), "weights": n, "bytes": n_bytes, "bits_per_weight": n_bytes * 8 / max(n, 1)}
        out: dict[str, Any] = {"file": str(self.path), "tensors": [f.record() for f in self.findings], "total": totals}
        if self.total is not None:
            out |= {"against": str(self.against), "importance": self.importance}
            totals |= error_record(self.total)
        if self.quality is not None:
            out["quality"] = self.quality.record()
        if self.stream_errors:
            out["stream_errors"] = list(self.stream_errors)
        if self.histograms is not None:
            out["histograms"] = {name: histogram.record() for name, histogram in self.histograms.items()}
        return out

    def lines(self) -> list[str]:
        """Return the lines below the table."""
        return [
            *summary_lines(self), *quality_lines(self.quality, self.has_other_quality), *stream_lines(self.stream_errors), *([] if self.histograms is None else histogram_lines(self.histograms))
        ]


def make_row_formatter(tensors: Sequence[Tensor], weighted: bool) -> Callable[..., str]:
    """Return a function that formats a row (name, shape, type, numbers) in the widths that the tensors need."""
    width = max((len(t.name) for t in tensors), default=0)
    shape_width = max((len(format_shape(t)) for t in tensors), default=0)

    def format_row(*columns: str) -> str:
        name, shape, type_name, *numbers = columns
        line = f"{name:<{width}}  {shape:>{shape_width}}  {type_name:<8}"
        line += "".join(f" {n:>{w}}" for n, w in zip(numbers, (7, 12, 13, *([9] if weighted else []), 13, 8)))
        return line.rstrip()

    return format_row


def format_shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.ne))


def format_columns(finding: Finding, weighted: bool) -> list[str]:
    """Format the numbers of a row."""
    columns = [f"{finding.bpw:.4g}", "" if finding.epsilon is None else f"{finding.epsilon:.6g}"]
    if (accuracy := finding.accuracy) is not None:
        weighted_error = [] if not weighted else ["" if accuracy.weighted_nmse is None else f"{accuracy.weighted_nmse:.6f}"]
        columns += [f"{accuracy.nmse:.6f}", *weighted_error, f"{accuracy.max_abs:.6g}", "ok" if finding.fits else "EXCEEDED"]
    return columns


def summary_lines(inspection: Inspection) -> list[str]:
    """Format the totals."""
    tensors = [f.tensor for f in inspection.findings]
    n, n_bytes = sum(t.n_elements for t in tensors), sum(t.n_bytes for t in tensors)
    ditto3 = [f for f in inspection.findings if f.tensor.type == DITTO3]
    n_all = "" if len(tensors) == inspection.n_tensors else f" of {inspection.n_tensors}"
    lines = ["", f"{len(tensors)}{n_all} tensors, {n:,} weights, {n_bytes / MIB:,.2f} MiB, {n_bytes * 8 / max(n, 1):.4g} bpw"]
    if ditto3:
        n_recorded = sum(f.epsilon is not None for f in inspection.findings)
        lines.append(f"epsilon is recorded for {n_recorded} of {len(ditto3)} ditto3 tensors")
    if (total := inspection.total) is not None:
        lines.append(f"NMSE of all weights: {total.nmse:.6f}")
        if total.weighted_nmse is not None:
            lines.append(f"weighted NMSE ({inspection.importance}): {total.weighted_nmse:.6f}")
        elif inspection.made_with and inspection.importance == "none":
            lines.append(f"quantized with the imatrix {inspection.made_with}: --imatrix FILE shows the weighted NMSE")
    return lines


def stream_lines(errors: Sequence[float]) -> list[str]:
    """Format the NMSE of the residual stream after some or all layers, if it is recorded."""
    if not any(errors):
        return []
    known = [(layer, error) for layer, error in enumerate(errors) if error]
    some = known if len(known) <= N_LAYERS else [known[i * (len(known) - 1) // (N_LAYERS - 1)] for i in range(N_LAYERS)]
    shown = ", ".join(f"{layer}: {error:.3g}" for layer, error in some)
    return [f"NMSE of the residual stream after {'layers' if len(some) == len(known) else 'some layers'} {shown}"]


def histogram_lines(histograms: dict[str, Histogram]) -> list[str]:
    lines = [line for name, histogram in histograms.items() for line in histogram.lines(name)]
    return lines or ["", "no histogram: no tensor has a ggml-ext type"]
