"""What was measured for a target, kept beside OUT as MODEL.choice.json for the next one."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from .._base.errors import UserError
from .._base.files import open_file, write_atomically
from .._base.json import is_number, parse_json
from .sensitivity import Measured, Probed

FORMAT = 1
WRITING_SHARE = 0.05  # of the time in which errors are measured, for keeping them


def _are_errors(found) -> bool:
    """True for errors by name: finite, or infinite for zeros that are stored as anything else."""
    return isinstance(found, dict) and all(v == math.inf or (is_number(v) and v >= 0) for v in found.values())


def _is_cost(found, probe_errors: dict[str, float]) -> bool:
    """True for a part's name, its tensors, whose errors are known, and its KL divergence."""
    if not isinstance(found, list) or len(found) != 3:
        return False
    name, tensors, cost = found
    is_part = isinstance(name, str) and isinstance(tensors, list) and all(isinstance(t, str) and t in probe_errors for t in tensors)
    return is_part and is_number(cost)


@dataclass
class Kept:
    """Content of MODEL.choice.json."""

    made_from: dict
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # by tensor and type
    text: dict = field(default_factory=dict)  # what the sensitivities were measured with
    probe_errors: dict[str, float] = field(default_factory=dict)  # by tensor
    costs: list[list] = field(default_factory=list)  # name of a part, its tensors, its KL divergence
    format: int = FORMAT

    @classmethod
    def read(cls, path: Path | None, made_from: dict) -> Kept:
        """What is there of the same model, importances, options and version; empty if it is of others or cannot be read."""
        try:
            found = cls(**parse_json(path.read_text())) if path is not None else cls(made_from)
        except (OSError, ValueError, TypeError):
            return cls(made_from)
        is_ours = (found.made_from, found.format) == (json.loads(json.dumps(made_from)), FORMAT)
        return found if is_ours and found.is_sound() else cls(made_from)

    def is_sound(self) -> bool:
        """False if a value is of another kind than the program writes: the file may have been changed by anyone."""
        return (
            isinstance(self.text, dict)
            and isinstance(self.errors, dict)
            and all(map(_are_errors, [*self.errors.values(), self.probe_errors]))
            and isinstance(self.costs, list)
            and all(_is_cost(cost, self.probe_errors) for cost in self.costs)
        )

    def write(self, path: Path | None) -> None:
        if path is None:
            return
        try:
            with write_atomically(path) as part, open_file(part) as f:
                f.write(json.dumps(self.__dict__, indent=1).encode() + b"\n")
        except OSError as e:
            raise UserError(f"cannot write {path}: {e.strerror}; write OUT to another folder") from e

    def measured(self, used: dict) -> Measured:
        """What errors cost, as far as it was measured with that text."""
        if self.text != used:
            return Measured()
        return Measured(self.probe_errors, [(Probed(name, tuple(tensors)), cost) for name, tensors, cost in self.costs])

    def set_measured(self, used: dict, found: Measured) -> None:
        self.text, self.probe_errors = used, found.errors
        self.costs = [[part.name, list(part.tensors), cost] for part, cost in found.costs]


class Keeper:
    """Kept results with their file, for a run that may be killed at any time."""

    def __init__(self, kept: Kept, path: Path | None):
        """path: None where nothing is written."""
        self.kept, self._path, self._next = kept, path, 0.0

    def write(self) -> None:
        """UserError if it cannot be written."""
        began = time.monotonic()
        self.kept.write(self._path)
        now = time.monotonic()
        self._next = now + (now - began) / WRITING_SHARE

    def write_now_and_then(self) -> None:
        """The first time, and then so often that writing takes no more than its share of the time."""
        if time.monotonic() >= self._next:
            self.write()
