"""ggml-ext-graph: how a model's graph uses its tensors, and whether the model runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._base.errors import UserError
from .process import describe_failure, last_error, run_captured
from .programs import find_tool, require_tool

PROGRAM = "ggml-ext-graph"
PRODUCT, ROWS = "product", "rows"  # uses; others are operations under ggml's names


def read_uses(parts: Sequence[Path], *, of_mtp_layers: bool = False) -> dict[str, set[str]] | None:
    """Return the uses of each tensor by name. None if llama.cpp cannot build the model's graph, or the program is missing.

    of_mtp_layers: read the graphs of the layers that predict further tokens (MTP, NextN) instead.
    """
    out = _run("mtp" if of_mtp_layers else "uses", parts)
    if out is None:
        return None
    uses: dict[str, set[str]] = {}
    for name, use in (line.split("\t") for line in out.splitlines()):
        uses.setdefault(name, set()).add(use)
    return uses


@dataclass(frozen=True)
class ScaleGroup:
    """Matrices with the same input, and what makes it (ggml_ext/graph/column-scales.h).

    Attributes:
        consumers: names of the matrices whose columns can be multiplied by s.
        producers: names of the tensors whose rows, or elements of a vector, are divided by s.
        block: columns of a head; without heads, all.
        repeat: heads of the consumers that share the rows of one head of the producers.
        is_exact: a run with scaled weights gave the same results.
    """

    consumers: tuple[str, ...]
    producers: tuple[str, ...]
    block: int
    repeat: int
    is_exact: bool = True


def read_scale_groups(parts: Sequence[Path]) -> list[ScaleGroup]:
    """Find the groups of a model by running it on a few tokens. Empty if llama.cpp cannot run it, or the program is missing.

    Raises:
        UserError: the program was killed. Other groups in a repeated run would discard what an interrupted one has written.
    """
    groups = []
    out = _run("scales", parts, hint="pass --no-column-scales") or ""
    for kind, consumers, producers, block, repeat in (line.split("\t") for line in out.splitlines()):
        groups.append(ScaleGroup(tuple(consumers.split(",")), tuple(producers.split(",")), int(block), int(repeat), kind == "group"))
    return groups


def _run(action: str, parts: Sequence[Path], hint: str | None = None) -> str | None:
    """Return the program's output, None if it is missing or fails. With a hint, UserError if a signal ends it."""
    try:
        program = find_tool(PROGRAM)
    except UserError:  # a build without the program
        program = None
    if program is None:
        return None
    code, out, log = run_captured(_command(program, action, parts), Path())
    if code < 0 and hint:
        raise UserError(describe_failure(PROGRAM, code, log, hint=hint, less_memory=f"free some memory, or {hint}"))
    return None if code else out


def find_run_error(parts: Sequence[Path]) -> str | None:
    """Run one token through a model and return what went wrong, or None. UserError if the program is missing."""
    code, _, log = run_captured(_command(require_tool(PROGRAM), "run", parts), Path())
    return f"{PROGRAM} exited with {code}: {last_error(log)}" if code else None


def _command(program: Path, action: str, parts: Sequence[Path]) -> list[str]:
    return [str(program), action, *map(os.path.abspath, parts)]
