"""ggml-ext-streams: the inputs of a model's matrices, of the model as it is and of the one that is being made."""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .._base.errors import UserError
from .._base.files import mapping_error
from .process import POLL_SECONDS, describe_failure, start_program

FLAG, WAY_OUT = "--propagate: ", "leave out --propagate"


@dataclass(frozen=True)
class WeightProduct:
    """A weight matrix at its place in the graph. scale: of the product before the residual stream is added; 0 where it is not."""

    weight: str
    rows: int
    scale: float


@dataclass(frozen=True)
class ProductGroup:
    """Products with one input. inputs: vectors of a chunk; of experts, used: of them a token; experts: 0 for a plain matrix."""

    columns: int
    inputs: int
    used: int
    experts: int
    products: tuple[WeightProduct, ...]

    def shapes(self, n_tokens: int) -> Iterator[tuple[type, tuple[int, int]]]:
        """Of the arrays of a chunk, each of which comes twice."""
        yield np.float32, (self.inputs, self.columns)
        if self.experts:
            yield np.int32, (n_tokens, self.used)
        yield from ((np.float32, (n_tokens, p.rows)) for p in self.products if p.scale)

    def n_bytes(self, n_tokens: int) -> int:
        return sum(8 * rows * columns for _, (rows, columns) in self.shapes(n_tokens))


@dataclass(frozen=True)
class ChunkArrays:
    """Of a chunk, views of memory that the next one is put into. x, ids: of the model as it is, and of the one that is made: float32
    (inputs, columns), int32 (tokens, used); residuals: the same by weight matrix, float32 (tokens, rows)."""

    x: tuple[np.ndarray, np.ndarray]
    ids: tuple[np.ndarray, np.ndarray] | None
    residuals: dict[str, tuple[np.ndarray, np.ndarray]]


def dense_products(groups: Sequence[ProductGroup]) -> list[WeightProduct]:
    """Whose matrices are not of experts."""
    return [p for g in groups if not g.experts for p in g.products]


class LayerStreams:
    """The program while it runs. As a context it ends the program. UserError with what the program says is wrong."""

    def __init__(self, command: Sequence[str], folder: Path):
        """command: with model, text, tokens a chunk and where the streams lie; folder: for files that are passed on."""
        self._command, self._folder = list(command), folder
        self._stack, self._rest = ExitStack(), b""
        self.layers: tuple[tuple[ProductGroup, ...], ...] = ()
        self.n_chunks = self.n_tokens = 0  # n_tokens: of a chunk
        self.no_gradients = ""  # why the model cannot be differentiated

    def __enter__(self) -> LayerStreams:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = stack.enter_context(start_program(self._command, self._folder, None, subprocess.PIPE, self._log))
            self._read(self._answer())
            self._map(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def _read(self, found: dict) -> None:
        """What the program says of the model."""
        self.layers = tuple(
            tuple(ProductGroup(**{**g, "products": tuple(WeightProduct(**p) for p in g["products"])}) for g in groups) for groups in found["layers"]
        )
        self.n_chunks, self.n_tokens, self.no_gradients = found["chunks"], found["context"], found["no_gradients"]

    def _map(self, stack: ExitStack) -> None:
        """The memory that both sides see."""
        path = self._folder / "exchange"
        n_bytes = max(max((g.n_bytes(self.n_tokens) for g in groups), default=1) for groups in self.layers)
        n_bytes = max(n_bytes, *(4 * self.n_tokens * sum(p.rows for p in dense_products(groups)) for groups in self.layers[:-1]))
        self._ask(f"exchange {n_bytes} {path}")
        with open(path, "r+b") as file:
            try:
                self._memory = mmap.mmap(file.fileno(), n_bytes)
            except OSError as e:
                raise UserError(f"{FLAG}{mapping_error(path, e)}, or {WAY_OUT}") from e
        path.unlink()
        stack.callback(self._release)

    def _release(self) -> None:
        try:
            self._memory.close()
        except BufferError:
            pass  # a view that an exception holds

    def _answer(self) -> dict:
        output = self._process.stdout
        while b"\n" not in self._rest:
            # as in process.py: a signal must be noticed while the program says nothing
            if not select.select([output], [], [], POLL_SECONDS)[0]:
                continue
            if not (piece := os.read(output.fileno(), 65536)):
                self._process.wait()
                self._log.seek(0)
                log = self._log.read().decode(errors="replace")
                less = f"pass fewer --calibration-chunks, or {WAY_OUT}"
                raise UserError(FLAG + describe_failure("ggml-ext-streams", self._process.returncode, log, "", WAY_OUT, less))
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if first := answer.get("not_finite"):
            raise UserError(
                f"{FLAG}the model computes values that are not finite, the first in {first}: convert it again from a good source, or "
                "pass --no-propagate --no-calibration, which run no model"
            )
        if "error" in answer:
            raise UserError(f"--propagate: {answer['error']}; {WAY_OUT}")
        return answer

    def _ask(self, line: str) -> dict:
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            pass  # why, the answer says
        return self._answer()

    def enter_layer(self, layer: int) -> None:
        self._ask(f"layer {layer}")

    def replace(self, name: str, type_name: str, data: np.ndarray | bytes) -> None:
        """The stream of the model that is made goes on behind a matrix with these bytes."""
        path = self._folder / "matrix"
        try:
            with open(path, "wb") as file:
                file.write(data)
        except OSError as e:
            raise UserError(f"--propagate: cannot write {path}: {e.strerror}; {WAY_OUT}") from e
        self._ask(f"set {name} {type_name.lower()} {path}")
        path.unlink()

    def inputs(self, layer: int, group: int, chunk: int, is_last: bool) -> ChunkArrays:
        """is_last: the stream of the model as it is goes on behind the layer."""
        self._ask(f"inputs {group} {chunk} {int(is_last)}")
        found, at, of = [], 0, self.layers[layer][group]
        for dtype, shape in of.shapes(self.n_tokens):
            n = shape[0] * shape[1]
            both = np.frombuffer(self._memory, dtype, 2 * n, at).reshape(2, *shape)
            found.append((both[0], both[1]))
            at += 8 * n
        ids = found[1] if of.experts else None
        residuals = found[2 if of.experts else 1 :]
        return ChunkArrays(found[0], ids, dict(zip((p.weight for p in of.products if p.scale), residuals, strict=True)))

    def learn(self, n_chunks: int) -> Iterator[int]:
        """Finds the gradients of the first chunks at the streams behind all layers, in the model as it is: yields each chunk, once done."""
        self._ask(f"learn {n_chunks}")
        for chunk in range(n_chunks):
            self._ask(f"backward {chunk}")
            yield chunk

    def gradients(self, layer: int, chunk: int) -> dict[str, np.ndarray]:
        """Of the outputs of a layer's plain matrices, float32 (tokens, rows), before the layer is left; the loss is that of streams.cpp.
        Views of memory as of inputs()."""
        self._ask(f"gradients {chunk}")
        found, at = {}, 0
        for product in dense_products(self.layers[layer]):
            n = self.n_tokens * product.rows
            found[product.weight] = np.frombuffer(self._memory, np.float32, n, at).reshape(self.n_tokens, product.rows)
            at += 4 * n
        return found

    def advance(self) -> float:
        """All chunks go on behind the layer. The energy there of the difference of both streams, as a part of that of the model as it
        is; first tokens, whose energy is of another order, are left out."""
        found = [self._ask(f"advance {chunk}") for chunk in range(self.n_chunks)]
        return sum(f["difference"] for f in found) / max(sum(f["energy"] for f in found), 1e-300)
