"""Configure sequential quantization, and estimate its time and memory."""

from __future__ import annotations

from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.text import format_duration
from .._base.units import GIB, MIB
from .._calibration.by_layer import PROGRAM, list_command
from .._calibration.calibration import CalibrationSetup, configure_calibration
from .._calibration.cost import CalibrationCost
from .._calibration.options import CalibrationOptions
from .._formats.gguf_file import GGUFFile
from .._formats.names import layer_number
from .._native.programs import find_tool
from .._native.streams import FLAG, HINT
from .layers import ROWS_TOGETHER, PropagationConfig

PASSES = 2  # runs of the model: each stream computes each product once (stream-pair.cpp)
# Chunks with gradients, and their runs of the model: forward, then by layers forward, back and forward again.
GRADIENT_CHUNKS, GRADIENT_PASSES = 16, 5
# Tokens per column from which on Hessians are full. Fewer were measured only without --propagate.
ENOUGH_TOKENS = 7


def configure_propagation(
    options: CalibrationOptions, file: GGUFFile, directory: Path | None, n_threads: int, console: Console
) -> PropagationConfig:
    """Configure sequential quantization.

    Args:
        options: the options of calibration.
        file: the model.
        directory: that of OUT; None for a dry run.
        n_threads: of ggml-ext-streams.
        console: gets a note if memory is short.

    Raises:
        UserError: the text cannot be used, the program is missing, or memory does not suffice.
    """
    program = find_tool(PROGRAM)
    if program is None:
        raise UserError(f"{FLAG}: {PROGRAM} is not in the package: reinstall ggml-ext, or leave the option out")
    setup = configure_calibration(options, file, directory or Path(), n_threads=n_threads, program=program)
    check_memory(setup, file, console)
    n_columns = next((n for n in setup.cost.widths if setup.n_tokens >= ENOUGH_TOKENS * n), 0)
    return PropagationConfig(
        command=tuple(list_command(file.path, setup.text, n_context=setup.n_context, n_chunks=setup.n_chunks, n_threads=n_threads)),
        kind=options.kind or ("full" if n_columns else "block"),
        full_columns=None if options.kind else setup.cost.full_limit(n_columns),
        text=setup.text,
        text_name=setup.text_name,
        n_chunks=setup.n_chunks,
        n_tokens=setup.n_tokens,
        n_gradient_chunks=gradient_chunks(setup.n_chunks),
        directory=setup.directory,
        description=describe(setup, file, n_threads),
    )


def describe(setup: CalibrationSetup, file: GGUFFile, n_threads: int) -> str:
    """Describe sequential quantization, with its estimated time and memory."""
    n_tokens, n_learned = setup.n_tokens, gradient_chunks(setup.n_chunks) * setup.n_context
    embd = file.value(f"{file.value('general.architecture', '')}.embedding_length", 0)
    # of both models the streams and, within a layer, what the next group of matrices needs (stream-pair.h); gradients
    kept = max((i.n_used * i.n_columns for i in setup.cost.inputs), default=0) + 3 * embd
    streams = (8 * embd + 4 * kept) * n_tokens + 2 * embd * len(setup.cost.layers) * n_learned
    return (
        f"propagation: {len(setup.cost.layers)} layers, {setup.n_chunks} chunks of {setup.n_context} tokens of "
        f"{setup.text_title}, gradients of {gradient_chunks(setup.n_chunks)}, estimate "
        f"{format_duration(seconds(setup.cost, n_tokens, n_learned, n_threads))} on {n_threads} threads besides encoding, "
        f"{(setup.cost.n_bytes + sums_bytes(setup.cost, file) + streams) / MIB:,.0f} MiB of memory"
    )


def check_memory(setup: CalibrationSetup, file: GGUFFile, console: Console) -> None:
    """Raise UserError if the sums of a layer exceed the memory limit. Add a note if they and the model do."""
    sums, allowed = sums_bytes(setup.cost, file), setup.memory_limit / GIB
    if sums > setup.memory_limit:
        raise UserError(
            f"{FLAG}: the sums of a layer need {sums / GIB:.2f} GiB, the limit is {allowed:.2f} GiB: pass a larger --memory, or {HINT}"
        )
    if (needed := setup.cost.n_bytes + sums) > setup.memory_limit:
        console.note(f"the model and the sums of a layer need {needed / GIB:.1f} GiB, the limit is {allowed:.1f} GiB: this may be slow")


def gradient_chunks(n_chunks: int) -> int:
    return min(GRADIENT_CHUNKS, n_chunks)


def seconds(cost: CalibrationCost, n_tokens: int, n_learned: int, n_threads: int) -> float:
    """Estimate the time of the passes and of the sums H, D and R of each input. n_learned: tokens with gradients."""
    weights = 2.0 * cost.n_weights_used
    sums = sum(2 * 2.5 * i.n_used * i.n_columns**2 for i in cost.inputs)  # of H, one half
    return ((PASSES * weights + sums) * n_tokens + GRADIENT_PASSES * weights * n_learned) / cost.rate(n_threads)


def sums_bytes(cost: CalibrationCost, file: GGUFFile) -> int:
    """Return the memory of the sums of a layer, in bytes."""
    return layer_bytes(cost) + rows_bytes(file)


def rows_bytes(file: GGUFFile) -> int:
    """Return the bytes of the row statistics of a layer: sums, factor, and a copy during factorization."""
    by_layer: dict[int, int] = {}
    for tensor in file.tensors:
        if (layer := layer_number(tensor.name)) is not None and len(tensor.ne) == 2:
            by_layer[layer] = by_layer.get(layer, 0) + 3 * 4 * tensor.ne[1] * min(tensor.ne[1], ROWS_TOGETHER)
    return max(by_layer.values(), default=0)


def layer_bytes(cost: CalibrationCost) -> int:
    """Return the bytes of the sums of one input, and of solving with them in double precision."""
    return max((4 * 4 * i.n_matrices + 3 * 8) * i.n_columns**2 for i in cost.inputs)
