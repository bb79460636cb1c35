"""Cache the errors and costs measured for a target in MODEL.choice.json next to OUT, for the next target."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from .._base.errors import UserError
from .._base.files import open_file, write_atomically
from .._base.json import is_number, parse_json
from .sensitivity import MeasuredCosts, ProbedPart

FORMAT = 1
WRITING_SHARE = 0.05  # of the measuring time that writing may take


def _are_errors(value: object) -> bool:
    """Whether these are errors by name. The NMSE is infinite if zeros are stored as another value."""
    return isinstance(value, dict) and all(v == math.inf or (is_number(v) and v >= 0) for v in value.values())


def _is_cost(value: object, probe_errors: dict[str, float]) -> bool:
    """Whether this is a part's name, its tensors with known errors, and its KL divergence."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    name, tensors, cost = value
    is_part = isinstance(name, str) and isinstance(tensors, list) and all(isinstance(t, str) and t in probe_errors for t in tensors)
    return is_part and is_number(cost)


@dataclass
class ChoiceRecord:
    """The content of MODEL.choice.json."""

    made_from: dict
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # by tensor and type
    text: dict = field(default_factory=dict)  # identifies the text of the sensitivities
    probe_errors: dict[str, float] = field(default_factory=dict)  # by tensor
    costs: list[list] = field(default_factory=list)  # [name, tensors, KL divergence] of each part
    format: int = FORMAT

    @classmethod
    def read(cls, path: Path | None, dependencies: dict) -> ChoiceRecord:
        """Read a record with these dependencies; return an empty record if there is none."""
        try:
            record = cls(**parse_json(path.read_text())) if path is not None else cls(dependencies)
        except (OSError, ValueError, TypeError):
            return cls(dependencies)
        is_same = (record.made_from, record.format) == (json.loads(json.dumps(dependencies)), FORMAT)
        return record if is_same and record.is_sound() else cls(dependencies)

    def is_sound(self) -> bool:
        """Whether all values have valid types: users may edit the file."""
        return (
            isinstance(self.text, dict)
            and isinstance(self.errors, dict)
            and all(map(_are_errors, [*self.errors.values(), self.probe_errors]))
            and isinstance(self.costs, list)
            and all(_is_cost(cost, self.probe_errors) for cost in self.costs)
        )

    def write(self, path: Path | None) -> None:
        """Write the record, unless path is None. UserError if that fails."""
        if path is None:
            return
        try:
            with write_atomically(path) as part, open_file(part) as f:
                f.write(json.dumps(self.__dict__, indent=1).encode() + b"\n")
        except OSError as e:
            raise UserError(f"cannot write {path}: {e.strerror}; write OUT to another directory") from e

    def costs_with(self, text: dict) -> MeasuredCosts:
        """Return the costs that were measured with a text."""
        if self.text != text:
            return MeasuredCosts()
        return MeasuredCosts(self.probe_errors, [(ProbedPart(name, tuple(tensors)), cost) for name, tensors, cost in self.costs])

    def set_costs(self, text: dict, costs: MeasuredCosts) -> None:
        self.text, self.probe_errors = text, costs.errors
        self.costs = [[part.name, list(part.tensors), cost] for part, cost in costs.costs]


class RecordWriter:
    """Writes a growing record repeatedly, because the run may be killed at any time."""

    def __init__(self, record: ChoiceRecord, path: Path | None):
        """path: None to write nothing."""
        self.record, self._path, self._next = record, path, 0.0

    def write(self) -> None:
        """Write the record. UserError if that fails."""
        started = time.monotonic()
        self.record.write(self._path)
        now = time.monotonic()
        self._next = now + (now - started) / WRITING_SHARE

    def write_if_due(self) -> None:
        """Write if writing takes no more than WRITING_SHARE of the time."""
        if time.monotonic() >= self._next:
            self.write()
