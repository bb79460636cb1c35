"""Configure sequential quantization, and estimate its time and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.text import format_duration
from .._base.units import GIB, MIB
from .._calibration.by_layer import PROGRAM, list_command
from .._calibration.calibration import CalibrationSetup, configure_calibration
from .._calibration.cost import FLOPS_PER_THREAD, UNTIMED_BYTES, CalibrationCost, Input
from .._calibration.options import CalibrationOptions
from .._formats.gguf_file import GGUFFile
from .._formats.names import layer_number
from .._native import token_sums
from .._native.programs import find_tool
from .._native.streams import FLAG, HINT
from .layers import ROWS_TOGETHER, PropagationConfig

PASSES = 2  # runs of the model: each stream computes each product once (stream-pair.cpp)
# Chunks that gradients are computed for, and the runs of the model on them: one forward, then forward and backward layer by layer.
GRADIENT_CHUNKS, GRADIENT_PASSES = 16, 3
# Inputs with at least this many tokens per column get full Hessians. With fewer tokens, full Hessians do not help all models
# (docs/results/sequential.md#few-tokens-per-column).
TOKENS_FOR_FULL = 7
ENCODED_BYTES = 0.75  # per weight of an encoded matrix, with its copies


def configure_propagation(
    options: CalibrationOptions, file: GGUFFile, directory: Path | None, n_threads: int, console: Console, mtp_layers: bool = False
) -> PropagationConfig:
    """Configure sequential quantization.

    Args:
        options: the options of calibration.
        file: the model.
        directory: that of OUT; None for a dry run.
        n_threads: of ggml-ext-streams.
        console: gets a note if memory is short.
        mtp_layers: quantize the layers that predict further tokens too.

    Raises:
        UserError: the text cannot be used, the program is missing, or memory does not suffice.
    """
    program = find_tool(PROGRAM)
    if program is None:
        raise UserError(f"{FLAG}: {PROGRAM} is not in the package: reinstall ggml-ext; {HINT}")
    setup = configure_calibration(options, file, directory or Path(), n_threads=n_threads, program=program, mtp_layers=mtp_layers)
    use = fit_into_memory(setup, file, console)
    n_columns = next((n for n in setup.cost.widths if setup.n_tokens >= TOKENS_FOR_FULL * n), 0)
    return PropagationConfig(
        command=tuple(list_command(
            file.path, setup.text, n_context=setup.n_context, n_chunks=setup.n_chunks, n_threads=n_threads, mtp_layers=mtp_layers
        )),
        kind=options.kind or ("full" if n_columns else "block"),
        full_columns=None if options.kind else setup.cost.full_limit(n_columns),
        common_sums=use.common_sums,
        prefers_bf16=use.prefers_bf16,
        text=setup.text,
        text_name=setup.text_name,
        n_chunks=setup.n_chunks,
        n_tokens=setup.n_tokens,
        n_gradient_chunks=use.n_gradient_chunks,
        directory=setup.directory,
        description=describe(setup, file, n_threads, use),
    )


@dataclass(frozen=True)
class MemoryUse:
    """The choices that keep sequential quantization within the memory limit."""

    sums_bytes: int
    common_sums: bool  # of experts
    n_gradient_chunks: int
    prefers_bf16: bool


def describe(setup: CalibrationSetup, file: GGUFFile, n_threads: int, use: MemoryUse) -> str:
    """Describe sequential quantization, with its estimated time and memory."""
    n_tokens, n_gradient_tokens = setup.n_tokens, use.n_gradient_chunks * setup.n_context
    architecture = file.value("general.architecture", "")
    n_streams = max(1, file.value(f"{architecture}.hyper_connection.count", 0))
    embd = n_streams * file.value(f"{architecture}.embedding_length", 0)
    # Temporary files: the streams of both models; within a layer, the values that the next group of matrices starts from (stream-pair.h);
    # the outputs of all layers and the row statistics G, in 16 bits.
    kept = max((i.n_used * i.n_columns for i in setup.cost.inputs), default=0) + 3 * embd
    temporary = (8 * embd + 4 * kept) * n_tokens + 2 * embd * len(setup.cost.layers) * n_gradient_tokens + 2 * count_row_sums(file).total()
    return (
        f"sequential quantization: {len(setup.cost.layers)} layers, {setup.n_chunks} chunks of {setup.n_context} tokens of "
        f"{setup.text_title}, gradients of {use.n_gradient_chunks}, estimate "
        f"{format_duration(estimate_seconds(setup.cost, n_tokens, n_gradient_tokens, n_threads, use.common_sums))} on {n_threads} threads, plus encoding, "
        f"{(setup.cost.n_bytes + use.sums_bytes) / MIB:,.0f} MiB of memory, {temporary / MIB:,.0f} MiB of temporary files"
    )


def fit_into_memory(setup: CalibrationSetup, file: GGUFFile, console: Console) -> MemoryUse:
    """Choose what fits into the memory limit, with notes on the rest. Raise UserError if the sums of a layer exceed it in any case."""
    limit, allowed = setup.memory_limit, f"the limit is {setup.memory_limit / GIB:.2f} GiB"
    separate, common = (sums_bytes(setup.cost, file, setup.n_tokens, are_common) for are_common in (False, True))
    is_common = separate > limit and common < separate
    sums = common if is_common else separate
    if is_common:
        console.note(
            f"{FLAG}: the experts of a layer share the sums of their inputs in ffn_gate and ffn_up: separate sums need {separate / GIB:.2f} GiB, {allowed}"
        )
    if sums > limit:
        raise UserError(f"{FLAG}: the sums of a layer need {sums / GIB:.2f} GiB, {allowed}: pass a larger --memory; {HINT}")
    n_gradient_chunks = min(GRADIENT_CHUNKS, setup.n_chunks)
    if (transposed := 4 * max((t.n_elements for t in file.tensors if len(t.ne) > 2), default=0)) > limit:
        console.note(f"no error feedback between rows: the transposed experts of a layer need {transposed / GIB:.2f} GiB, {allowed}")
        n_gradient_chunks = 0
    if (needed := setup.cost.n_bytes + sums) > limit:
        console.note(f"the model and the sums of a layer need {needed / GIB:.1f} GiB, {allowed}: this may be slow")
    return MemoryUse(sums, is_common, n_gradient_chunks, prefers_bf16=sums + 2 * layer_weights(file) <= limit)


def estimate_seconds(cost: CalibrationCost, n_tokens: int, n_gradient_tokens: int, n_threads: int, common_sums: bool = False) -> float:
    """Estimate the seconds of all steps except encoding. n_gradient_tokens: tokens that gradients are computed for."""
    inputs = [replace(i, n_matrices=1, n_used=1) if common_sums and i.is_common else i for i in cost.inputs]
    runs = cost.run_seconds(n_threads) * (PASSES * n_tokens + GRADIENT_PASSES * n_gradient_tokens)
    sums = n_tokens * sum(sum_operations(i) for i in inputs) + n_gradient_tokens * ROWS_TOGETHER * sum(i.n_rows for i in cost.inputs)
    # H is factorized; D and H^-1 are multiplied with the weights, those of experts with D H^-1 (_sequential/experts.py)
    corrections = sum(
        i.n_matrices * i.n_columns**3 / 3 + (i.n_matrices * i.n_columns + i.n_rows if is_expert(i) else 2 * i.n_rows) * i.n_columns**2
        for i in inputs
    )
    usual = FLOPS_PER_THREAD * n_threads
    return runs + sums / (usual if cost.n_bytes < UNTIMED_BYTES else token_sums.speed(n_threads)) + corrections / usual


def is_narrow(i: Input) -> bool:
    """Whether the input probably has one product, with fewer rows than columns, as sole_narrow_product() requires."""
    return i.n_tensors == i.n_matrices == 1 and i.n_rows < i.n_columns


def sum_operations(i: Input) -> float:
    """Return the operations per token of the sums (see Sums): half of the symmetric H, and D; for a narrow product W (x - x^) and R in place of D."""
    others = 2 * i.n_rows * i.n_columns if is_narrow(i) else i.n_used * i.n_columns**2
    return i.n_used * i.n_columns**2 + 2.0 * others


def sums_bytes(cost: CalibrationCost, file: GGUFFile, n_tokens: int, common_sums: bool) -> int:
    """Return the memory of the sums of a layer, in bytes."""
    return max(input_bytes(i, n_tokens, common_sums) for i in cost.inputs) + 8 * max(count_row_sums(file).values(), default=0)


def layer_weights(file: GGUFFile) -> int:
    """Count the weights of the largest layer."""
    counts: Counter[int] = Counter()
    for tensor in file.tensors:
        if (layer := layer_number(tensor.name)) is not None:
            counts[layer] += tensor.n_elements
    return max(counts.values(), default=0)


def count_row_sums(file: GGUFFile) -> Counter[int]:
    """Count the values of the row statistics G by layer."""
    counts: Counter[int] = Counter()
    for tensor in file.tensors:
        if (layer := layer_number(tensor.name)) is not None and len(tensor.ne) == 2:
            counts[layer] += tensor.ne[1] * min(tensor.ne[1], ROWS_TOGETHER)
    return counts


def input_bytes(i: Input, n_tokens: int, common_sums: bool) -> int:
    """Return the bytes of one input's sums and corrections.

    Counted are the packed tokens; H and D; the means of both over experts; for one matrix the blended, packed and factorized H, and D; the weights
    and their R. For experts, the encoded weights take the place of the last two.
    """
    buffer = min(token_sums.BUFFER, 2 * n_tokens * (2 * i.n_used * i.n_columns + i.n_rows // i.n_matrices))
    if is_expert(i):
        squares, n_bytes = 2 * (1 if common_sums and i.is_common else i.n_matrices) + 6, ENCODED_BYTES * i.n_rows * i.n_columns
    else:
        squares, n_bytes = 3 if is_narrow(i) else 4, 2 * 4 * i.n_rows * i.n_columns
    return buffer + 4 * squares * i.n_columns**2 + int(n_bytes)


def is_expert(i: Input) -> bool:
    return i.n_matrices > 1 or i.is_common
