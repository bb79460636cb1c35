"""What a run leaves behind, for programs: files, types, errors and warnings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TensorResult:
    """A tensor of the output. shape: fastest dimension first, as ggml writes it; errors: of the decoded weights against the input,
    None where the type did not change or nothing was written; with --propagate target_error: weighted relative squared error against
    the weights that were encoded in place of the input's, and stream_error: behind the tensor's layer; seconds and sha256: of its data, None in a dry run."""

    name: str
    shape: tuple[int, ...]
    type_before: str
    type: str
    bytes_before: int
    bytes: int
    relative_squared_error: float | None = None
    weighted_relative_squared_error: float | None = None
    largest_error: float | None = None
    target_error: float | None = None
    stream_error: float | None = None
    seconds: float | None = None
    sha256: str | None = None

    @classmethod
    def of(cls, record: dict) -> TensorResult:
        return cls(**{**record, "shape": tuple(record["shape"])})


@dataclass(frozen=True)
class Result:
    """What quantize_model() or export_model() did. paths: the files written, none in a dry run; type: that was asked for; options:
    those that decide the bytes; importance: what was known of the inputs; bytes: of all tensors' data; errors: of all tensors that
    changed their type together; predicted_kl_divergence: with a target alone; seconds: of writing, those of an earlier run that this
    one went on with included."""

    paths: tuple[Path, ...]
    type: str
    options: str
    importance: str
    tensors: tuple[TensorResult, ...] = field(repr=False)  # hundreds
    weights: int
    bytes_before: int
    bytes: int
    bits_per_weight: float
    relative_squared_error: float | None
    weighted_relative_squared_error: float | None
    predicted_kl_divergence: float | None
    seconds: float
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, paths: list[Path], said: tuple[str, str, str], tensors: list[dict], totals: dict, seconds: float, warnings: list[str]):
        """said: type, options, importance; tensors, totals: as in _report/records.py."""
        return cls(
            tuple(paths), *said, tuple(map(TensorResult.of, tensors)), totals["weights"], totals["bytes_before"], totals["bytes"],
            totals["bits_per_weight"], totals.get("relative_squared_error"), totals.get("weighted_relative_squared_error"),
            totals.get("predicted_kl_divergence"), round(seconds, 3), tuple(warnings),
        )
