"""What --propagate runs, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.text import duration
from .._base.units import MIB
from .._formats.gguf_file import GGUFFile
from .._formats.moments import ENOUGH_TOKENS
from .._importance.calibration import N_CONTEXT, Calibration, Wanted, make_run
from .._importance.cost import Model
from .._importance.stand_in import SOURCE
from .._native.programs import find_tool
from .propagation import Run

# Runs of the model, at most: each layer once and up to the input of each of its groups of matrices, in both streams (streams.cpp).
PASSES = 4
PROGRAM = "ggml-ext-streams"


def make_propagation(wanted: Wanted, file: GGUFFile, folder: Path | None, n_threads: int) -> Run:
    """folder: of OUT, None for a dry run. UserError where the text does not serve, or the program is missing."""
    program = find_tool(PROGRAM)
    if program is None:
        raise UserError(f"--propagate: {PROGRAM} is not in the package: reinstall ggml-ext, or leave the option out")
    # the layers themselves are run here, one after the other: nothing stands in
    run = make_run(replace(wanted, stand_in=SOURCE), file, folder or Path(), n_threads, program, Console())
    kind = wanted.kind or ("full" if run.n_chunks * N_CONTEXT >= ENOUGH_TOKENS * run.model.widest else "block")
    command = [program, "-m", file.path.absolute(), "-f", run.text, "-c", N_CONTEXT, "-b", N_CONTEXT]
    command += ["--chunks", run.n_chunks, "-t", n_threads]
    return Run(tuple(map(str, command)), kind, run.text, run.text_name, run.n_chunks, run.folder, describe(run, file, n_threads))


def describe(run: Calibration, file: GGUFFile, n_threads: int) -> str:
    """Time and memory, before it starts."""
    n_tokens = run.n_chunks * N_CONTEXT
    embd = file.value(f"{file.value('general.architecture', '')}.embedding_length", 0)
    return (
        f"propagation: {len(run.model.layers)} layers, {run.n_chunks} chunks of {N_CONTEXT} tokens of "
        f"{run.text_title}, an estimated {duration(seconds(run.model, n_tokens, n_threads))} "
        f"on {n_threads} threads beside encoding, {(run.model.n_bytes + layer_bytes(run.model) + 8 * embd * n_tokens) / MIB:,.0f} MiB of memory"
    )


def seconds(model: Model, n_tokens: int, n_threads: int) -> float:
    """Rough time of the passes and of the sums: of H, D and R for each input."""
    flops = PASSES * 2.0 * model.n_weights_used + sum(2 * 3 * i.n_used * i.n_columns**2 for i in model.inputs)
    return flops * n_tokens / model.rate(n_threads)


def layer_bytes(model: Model) -> int:
    """Of the sums of one input, and of what they are solved with in double precision."""
    return max((4 * 4 * i.n_matrices + 3 * 8) * i.n_columns**2 for i in model.inputs)
