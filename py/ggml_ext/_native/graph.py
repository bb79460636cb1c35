"""ggml-ext-graph: what a model's graph does with its tensors, and whether the model runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .._base.errors import UserError
from .process import last_error, run_captured
from .programs import find_tool

PROGRAM = "ggml-ext-graph"
PRODUCT, ROWS = "product", "rows"  # others are operations by ggml's names


def read_uses(parts: Sequence[Path]) -> dict[str, set[str]] | None:
    """What the graph does with each tensor, by name. None where llama.cpp builds no graph of the model, or the program is not there."""
    try:
        program = find_tool(PROGRAM)
    except UserError:  # of a build without it
        program = None
    if program is None:
        return None
    code, out, _ = run_captured(_command(program, "uses", parts), Path())
    if code:
        return None
    uses: dict[str, set[str]] = {}
    for name, use in (line.split("\t") for line in out.splitlines()):
        uses.setdefault(name, set()).add(use)
    return uses


def find_run_error(parts: Sequence[Path]) -> str | None:
    """What is wrong with a model, of which one token is run; None for nothing. UserError where the program is not there."""
    program = find_tool(PROGRAM)
    if program is None:
        raise UserError(f"--verify: {PROGRAM} is not in the package: reinstall ggml-ext")
    code, _, log = run_captured(_command(program, "run", parts), Path())
    return f"{PROGRAM} exited with {code}: {last_error(log)}" if code else None


def _command(program: Path, what: str, parts: Sequence[Path]) -> list[str]:
    return [str(program), what, *map(os.path.abspath, parts)]
