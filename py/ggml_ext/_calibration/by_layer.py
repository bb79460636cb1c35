"""Calibrate layer by layer: one run of the model, with the Hessians of one layer at a time in memory.

llama-imatrix holds those of all layers, or runs the model once per pass. The result is an imatrix file as llama-imatrix writes it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from .._base.console import Console
from .._base.errors import UserError
from .._formats.gguf_file import GGUFFile
from .._formats.hessians import BLOCK, BLOCK_SIZE, COUNTS, KIND, OWNERS, VALUES, WEIGHTS, block_starts, pack_triangle, packed_size
from .._formats.imatrix import CHUNK_SIZE_KEY, DATASETS_KEY, N_CHUNKS_KEY, SUMS
from .._formats.imatrix import COUNTS as TOKENS
from .._native.programs import find_tool
from .._native.streams import LayerStreams, ProductGroup
from .._native.token_sums import TokenSums, pack

PROGRAM = "ggml-ext-streams"
N_CHECKED = 32  # tokens of the run that checks whether the graph can be cut
PREFIX, HINT = "calibration", "pass --no-calibration to skip it, or an imatrix with --imatrix"


def list_weights(group: ProductGroup) -> list[str]:
    """List the matrices with an input. The first one owns its Hessian in the file."""
    return list(dict.fromkeys(p.weight for p in group.products))


def list_arrays(group: ProductGroup, kind: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield names and shapes of an input's arrays in the file."""
    n, names = max(1, group.experts), list_weights(group)
    yield names[0] + VALUES, (n, packed_size(group.columns, kind == "full"))
    yield names[0] + COUNTS, (n, 1)
    for name in names:
        yield name + SUMS, (n, group.columns)
        yield name + TOKENS, (n, 1)


@dataclass(frozen=True)
class InputSums:
    """The sums of x x^T of one input over the tokens of each expert.

    Attributes:
        n_weights: matrices with that input.
        blocks: per expert, a list of float32 (columns, columns): the diagonal blocks of the sum, or the full sum as one block.
        counts: tokens of each expert; without experts, of all: float32 (experts or 1,).
    """

    n_weights: int
    blocks: list[list[np.ndarray]]
    counts: np.ndarray

    @classmethod
    def empty(cls, group: ProductGroup, kind: str) -> InputSums:
        """Begin with zeros. kind: "block" or "full"."""
        n, n_experts = group.columns, max(1, group.experts)
        widths = [n] if kind == "full" else [min(BLOCK, n - start) for start in block_starts(n)]
        # one large array: its memory returns to the operating system when it is freed
        values = np.zeros((n_experts, sum(width**2 for width in widths)), np.float32)
        ends = np.cumsum([width**2 for width in widths])[:-1]
        blocks = [[part.reshape(width, width) for part, width in zip(np.split(row, ends), widths, strict=True)] for row in values]
        return cls(len(list_weights(group)), blocks, np.zeros(n_experts, np.float32))

    def add(self, x: np.ndarray, ids: np.ndarray | None, sums: TokenSums) -> None:
        """Add the inputs of a chunk: LayerStreams.collect_inputs()."""
        for expert, blocks in enumerate(self.blocks):
            own = x if ids is None else _select_tokens(x, ids, expert)
            start = 0
            self.counts[expert] += len(own)
            for block in blocks:
                part = pack(own[:, start : start + len(block)])
                start += len(block)
                sums.add(block, part, part)

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield the arrays of list_arrays()."""
        counts = self.counts[:, None]
        yield np.stack([np.concatenate([pack_triangle(b) for b in blocks]) for blocks in self.blocks])
        yield counts
        diagonals = np.stack([np.concatenate([np.diagonal(b) for b in blocks]) for blocks in self.blocks])
        for _ in range(self.n_weights):
            yield diagonals
            yield counts


def _select_tokens(x: np.ndarray, ids: np.ndarray, expert: int) -> np.ndarray:
    """Return the inputs of an expert: float32 (tokens of the expert, columns).

    x has a row per token, or per token and slot if experts have inputs of their own. ids: (tokens, slots), the expert of each slot.
    """
    token, slot = np.nonzero(ids == expert)
    x = x.reshape(len(ids), -1, x.shape[1])
    return x[token, slot if x.shape[1] > 1 else 0]


def list_command(model: Path, text: Path, *, n_context: int, n_chunks: int, n_threads: int, mtp_layers: bool = False) -> list[str]:
    """Return the program with its arguments. UserError if the package lacks it. mtp_layers: run the layers that predict further tokens too."""
    program = find_tool(PROGRAM)
    if program is None:
        raise UserError(f"{PROGRAM} is not in the package: reinstall ggml-ext")
    command = [program, "-m", model.absolute(), "-f", text, "-c", n_context, "-b", n_context, "--chunks", n_chunks, "-t", n_threads]
    return [*map(str, command), *(["--mtp-layers"] if mtp_layers else [])]


def find_obstacle(file: GGUFFile, text: Path, is_dry: bool, mtp_layers: bool = False) -> str:
    """Return why a model cannot run layer by layer; "" if it can. This loads the model, except in a dry run."""
    try:
        command = list_command(file.path, text, n_context=N_CHECKED, n_chunks=1, n_threads=1, mtp_layers=mtp_layers)
        if not is_dry:
            file.complete(PROGRAM)
            with tempfile.TemporaryDirectory() as directory, _open_streams(command, Path(directory).resolve()):
                pass
    except UserError as e:
        return str(e).removeprefix(f"{PREFIX}: ").removesuffix(f"; {HINT}")
    return ""


def _open_streams(command: Sequence[str], directory: Path) -> LayerStreams:
    return LayerStreams(command, directory, flag=PREFIX, hint=HINT, only_original=True)


def collect_by_layer(
    command: Sequence[str], out: Path, kind_of: Callable[[int], str], *, n_threads: int, title: str, console: Console
) -> None:
    """Run ggml-ext-streams and write an imatrix file.

    Args:
        command: list_command().
        out: the file; temporary files are next to it.
        kind_of: returns "block" or "full" for an input with a number of columns.
        n_threads: of the sums.
        title: of the progress bar.
        console: gets the progress bar.

    Raises:
        UserError: the program fails.
        OSError: the file cannot be written.
    """
    with _open_streams([*command, "-o", str(out.with_name("streams"))], out.parent) as streams, ThreadPoolExecutor(n_threads) as pool:
        layers = streams.collected_layers
        writer = _open_writer(out, command, kind_of, streams)
        with contextlib.closing(writer), console.bar(title, len(layers) * streams.n_chunks, "chunk") as bar:
            for k, groups in enumerate(layers):
                streams.enter_layer(k)
                totals, sums = [InputSums.empty(group, kind_of(group.columns)) for group in groups], TokenSums(pool)
                for chunk in range(streams.n_chunks):
                    for total, (x, ids) in zip(totals, streams.collect_inputs(k, chunk), strict=True):
                        total.add(x, ids, sums)
                    bar.update()
                sums.flush()
                for total in totals:
                    for array in total.arrays():
                        writer.write_tensor_data(array)


def _open_writer(out: Path, command: Sequence[str], kind_of: Callable[[int], str], streams: LayerStreams) -> gguf.GGUFWriter:
    """Write the header of the file."""
    inputs = [group for groups in streams.collected_layers for group in groups]
    owners = {name: names[0] for names in map(list_weights, inputs) for name in names}
    writer = gguf.GGUFWriter(out, "")
    writer.add_type("imatrix")
    writer.add_array(DATASETS_KEY, [Path(command[command.index("-f") + 1]).name])
    writer.add_uint32(N_CHUNKS_KEY, streams.n_chunks)
    writer.add_uint32(CHUNK_SIZE_KEY, streams.n_tokens)
    writer.add_string(KIND, "full" if any(kind_of(group.columns) == "full" for group in inputs) else "block")
    writer.add_uint32(BLOCK_SIZE, BLOCK)
    writer.add_array(WEIGHTS, list(owners))
    writer.add_array(OWNERS, list(owners.values()))
    for group in inputs:
        for name, shape in list_arrays(group, kind_of(group.columns)):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0] * shape[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer
