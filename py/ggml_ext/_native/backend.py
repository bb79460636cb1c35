"""Operations on ggml's devices, in a process of their own, because ggml aborts on errors.

A job is a JSON object for backend_program.py: `device`, the name or kind of a device, `n_threads`, and `cases`, each with

    name            what results call it
    op, type        MUL_MAT, MUL_MAT_ID or GET_ROWS; the ggml type of the weights
    weights         dimensions, fastest first: columns, rows, experts
    inputs          dimensions of the float32 activations
    ids             a list of experts or rows per token
    *_file          with the bytes of weights and inputs, repeated as needed (zeros if it is missing); output_file is written
    copies          number of weight matrices that one run multiplies, so that caches do not hold them
    min_runs, seconds    the operation is repeated until both are reached

Without `device` the program lists the devices.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._base.encoding import to_json
from . import library as _lib
from .process import describe_failure, run_limited

PROGRAM = Path(__file__).with_name("backend_program.py")
Case = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """A device of ggml. kind: cpu, gpu, igpu, accel or meta. free, total: bytes of memory, 0 if unknown."""

    name: str
    description: str
    backend: str
    kind: str
    free: int
    total: int


@dataclass(frozen=True)
class BackendRun:
    """The result of the program.

    Attributes:
        values: what it printed.
        outcome: ended, crashed or hung.
        failure: why it ended early, in one line; empty if it did not.
        log: its output, without values.
    """

    values: list[Any]
    outcome: str
    failure: str
    log: str

    def seconds(self) -> dict[str, list[float] | None]:
        """Return the seconds of each run by case; None for cases that the device does not support."""
        return {value["ends"]: value["seconds"] for value in self.values if "ends" in value}

    def stage(self) -> str:
        """Return the case that was running at the end; start before the first one, end after the last."""
        last = self.values[-1] if self.values else {"starts": "start"}
        return last.get("starts", "end")


def can_run() -> bool:
    """Return whether the package has libggml, and Python can start programs."""
    return _lib.libggml_path() is not None and bool(sys.executable)


def list_devices(seconds: float) -> tuple[list[Device], BackendRun]:
    """List the devices of this machine, within a time limit. The run has the messages of the backends."""
    run = _run({}, seconds)
    return [Device(**device) for device in (run.values[0] if run.values else [])], run


def run_cases(device: str, cases: Sequence[Case], n_threads: int, seconds: float) -> BackendRun:
    """Run cases on a device, within a time limit."""
    return _run({"device": device, "n_threads": n_threads, "cases": cases}, seconds)


def _run(job: dict[str, Any], seconds: float) -> BackendRun:
    """Run a job. Values that precede a crash are kept."""
    path = _lib.libggml_path()
    assert path is not None, "can_run() is False"
    # -I: modules next to the program have names of standard ones
    command = [sys.executable, "-I", str(PROGRAM), to_json({"library": str(path), "directory": str(path.parent), **job})]
    code, log = run_limited(command, Path(), seconds)
    values = [json.loads(text) for text in re.findall(r"^result (.*)$", log, re.M)]
    log = re.sub(r"\n?^result .*\n", "", log, flags=re.M).strip().replace(os.path.expanduser("~"), "~")  # users publish it
    if code is None:
        return BackendRun(values, "hung", f"hung or too slow, stopped after {seconds:.0f} s", log)
    if code:
        return BackendRun(values, "crashed", describe_failure("the program", code, log), log)
    return BackendRun(values, "ended", "", log)
