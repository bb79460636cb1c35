"""Run ggml-ext-streams, which computes the inputs of a model's matrices layer by layer, in the original and the partly quantized model.

The comment at the top of ggml_ext/streams/main.cpp documents the requests and answers.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._base.errors import UserError
from .._base.files import mapping_error
from .._formats.names import has_own_inputs
from .process import describe_failure, read_lines, require_pipe, start_program

FLAG, HINT = "--propagate", "pass --no-propagate"


@dataclass(frozen=True)
class WeightProduct:
    """A product with a weight matrix in the graph.

    Attributes:
        weight: name of the matrix.
        rows: size of an output vector.
        scale: factor with which the output is added to the residual stream; 0 if it is not added, as with experts.
    """

    weight: str
    rows: int
    scale: float


@dataclass(frozen=True)
class ProductGroup:
    """The products of a layer that have the same input.

    Attributes:
        columns: size of an input vector.
        inputs: input vectors per chunk: one per token, or one per token and expert if experts have inputs of their own.
        used: experts per token.
        experts: number of experts; 0 for plain matrices.
        products: the products, in the order of the graph.
    """

    columns: int
    inputs: int
    used: int
    experts: int
    products: tuple[WeightProduct, ...]

    def shares_inputs(self, n_tokens: int) -> bool:
        """Whether the experts of a token have the same input. If a token has one expert, the number of inputs does not tell."""
        return self.inputs == n_tokens and not (self.used == 1 and has_own_inputs(self.products[0].weight))

    def shapes(self, n_tokens: int) -> Iterator[tuple[type[np.generic], tuple[int, int]]]:
        """Yield type and shape of a chunk's arrays, each of which exists for both models."""
        yield np.float32, (self.inputs, self.columns)
        if self.experts:
            yield np.int32, (n_tokens, self.used)
        yield from ((np.float32, (n_tokens, p.rows)) for p in self.products if p.scale)

    def n_bytes(self, n_tokens: int) -> int:
        """Return the bytes of a chunk's arrays: 4 per element, for both models."""
        return sum(8 * rows * columns for _, (rows, columns) in self.shapes(n_tokens))

    def input_shapes(self, n_tokens: int) -> list[tuple[type[np.generic], tuple[int, int]]]:
        """Return type and shape of a chunk's inputs and, with experts, of their ids."""
        return list(self.shapes(n_tokens))[: 2 if self.experts else 1]


@dataclass(frozen=True)
class ChunkArrays:
    """Arrays of a chunk, for the original and the quantized model; views of memory that the next chunk overwrites.

    Attributes:
        x: inputs, float32 (inputs, columns).
        ids: experts of each token, int32 (tokens, used); None for plain matrices.
        residuals: residual streams by weight matrix, float32 (tokens, rows).
    """

    x: tuple[np.ndarray, np.ndarray]
    ids: tuple[np.ndarray, np.ndarray] | None
    residuals: dict[str, tuple[np.ndarray, np.ndarray]]


def dense_products(groups: Sequence[ProductGroup]) -> list[WeightProduct]:
    """Return the products without experts."""
    return [p for g in groups if not g.experts for p in g.products]


class LayerStreams:
    """A running ggml-ext-streams, which computes the original and the quantized model layer by layer.

    The context manager starts and ends the program. All methods raise UserError with the program's message. Order of calls:
    begin_gradients() and, for the layers in reverse, enter_layer() and gradients(), if needed; then for each layer enter_layer(), the methods for
    its arrays and matrices, and, except for the output matrix, advance(). With the original model alone: enter_layer() and collect_inputs() of all chunks.

    Attributes:
        layers: groups of products by layer; the last entry is the output matrix, after the last layer.
        mtp_layers: the same of the layers that predict further tokens, which come after it. Their common input is the hidden state of the main
            model: what advance() through the output matrix computes.
        n_chunks: number of chunks of the text.
        n_tokens: tokens per chunk.
        no_gradients: why the model cannot be differentiated; empty if it can.
    """

    def __init__(self, command: Sequence[str], directory: Path, *, flag: str = FLAG, hint: str = HINT, only_original: bool = False):
        """Prepare the program.

        Args:
            command: the program with its arguments: model, text, chunk length and, optionally, the file for the streams (-o).
            directory: for files that are exchanged with the program.
            flag: the start of error messages.
            hint: their end, a way out.
            only_original: run the original model alone, for collect_inputs().
        """
        self._command, self._dir, self._flag, self._hint, self._only_original = list(command), directory, flag, hint, only_original
        self._stack = ExitStack()
        self.layers: tuple[tuple[ProductGroup, ...], ...] = ()
        self.mtp_layers: tuple[tuple[ProductGroup, ...], ...] = ()
        self.n_chunks = self.n_tokens = 0
        self.no_gradients = ""

    def __enter__(self) -> LayerStreams:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = stack.enter_context(start_program(self._command, self._dir, None, subprocess.PIPE, self._log))
            self._lines = read_lines(require_pipe(self._process.stdout))
            self._set_model(self._read_answer())
            self._map_memory(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _set_model(self, answer: dict[str, Any]) -> None:
        """Store the program's description of the model."""
        self.layers, self.mtp_layers = (
            tuple(
                tuple(ProductGroup(**{**g, "products": tuple(WeightProduct(**p) for p in g["products"])}) for g in groups)
                for groups in answer[key]
            )
            for key in ("layers", "mtp_layers")
        )
        self.n_chunks, self.n_tokens, self.no_gradients = answer["chunks"], answer["context"], answer["no_gradients"]

    @property
    def all_layers(self) -> tuple[tuple[ProductGroup, ...], ...]:
        """Groups of products by layer, with those of MTP layers after the output matrix."""
        return self.layers + self.mtp_layers

    @property
    def collected_layers(self) -> tuple[tuple[ProductGroup, ...], ...]:
        """The groups whose inputs collect_inputs() returns, by layer: those of the output matrix are left out."""
        return (*self.layers[:-1], (), *self.mtp_layers) if self.mtp_layers else self.layers[:-1]

    def has_output(self, layer: int) -> bool:
        """Whether the streams can be advanced through a layer."""
        return layer < len(self.layers) - (0 if self.mtp_layers else 1)

    def _map_memory(self, stack: ExitStack) -> None:
        """Map the memory that is shared with the program."""
        path = self._dir / "exchange"
        n_bytes = self._exchange_bytes()
        self._ask(f"exchange {n_bytes} {int(self._only_original)} {path}")
        with open(path, "r+b") as file:
            try:
                self._memory = mmap.mmap(file.fileno(), n_bytes)
            except OSError as e:
                raise UserError(f"{self._flag}: {mapping_error(path, e)}, or {self._hint}") from e
        path.unlink()
        stack.callback(self._release)

    def _exchange_bytes(self) -> int:
        """Return the bytes of the largest arrays that are exchanged at once."""
        if self._only_original:
            shapes = ([shape for g in groups for _, shape in g.input_shapes(self.n_tokens)] for groups in self.collected_layers)
            return max(4 * sum(rows * columns for rows, columns in layer) for layer in shapes)
        inputs = (g.n_bytes(self.n_tokens) for groups in self.all_layers for g in groups)
        gradients = (4 * self.n_tokens * sum(p.rows for p in dense_products(groups)) for groups in self.layers[:-1])
        return max([1, *inputs, *gradients])

    def _release(self) -> None:
        with contextlib.suppress(BufferError):  # an exception may hold a view
            self._memory.close()

    def _read_answer(self) -> dict[str, Any]:
        if (line := next(self._lines, None)) is None:
            code = self._process.wait()
            self._log.seek(0)
            log = self._log.read().decode(errors="replace")
            less = f"pass fewer --calibration-chunks, or {self._hint}"
            raise UserError(f"{self._flag}: " + describe_failure("ggml-ext-streams", code, log, hint=self._hint, less_memory=less))
        answer = json.loads(line)
        if first := answer.get("not_finite"):
            raise UserError(
                f"{self._flag}: the model computes values that are not finite, the first in {first}: convert it again from a good source, or "
                "pass --no-propagate --no-calibration, which run no model"
            )
        if "error" in answer:
            raise UserError(f"{self._flag}: {answer['error']}; {self._hint}")
        return answer

    def _ask(self, line: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            require_pipe(self._process.stdin).write(line.encode() + b"\n")
        return self._read_answer()

    def prefer_bf16(self) -> None:
        """Let the original model's products use BF16 in place of F16 if the CPU is faster with that."""
        self._ask("bf16")

    def enter_layer(self, layer: int) -> None:
        self._ask(f"layer {layer}")

    def replace(self, name: str, type_name: str, data: np.ndarray | bytes) -> None:
        """Replace a matrix of the quantized model by encoded data."""
        path = self._dir / "matrix"
        try:
            with open(path, "wb") as file:
                file.write(data if isinstance(data, bytes) else data.data)
        except OSError as e:
            raise UserError(f"{self._flag}: cannot write {path}: {e.strerror}; {self._hint}") from e
        self._ask(f"set {name} {type_name.lower()} {path}")
        path.unlink()

    def compute_inputs(self, layer: int, group: int, chunk: int, advance_original: bool) -> ChunkArrays:
        """Compute a chunk's inputs of a group. advance_original: also advance the original model's stream through the layer."""
        self._ask(f"inputs {group} {chunk} {int(advance_original)}")
        products = self.all_layers[layer][group]
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        offset = 0
        for dtype, shape in products.shapes(self.n_tokens):
            n = shape[0] * shape[1]
            both: np.ndarray = np.frombuffer(self._memory, dtype, 2 * n, offset).reshape(2, *shape)
            pairs.append((both[0], both[1]))
            offset += 8 * n
        ids = pairs[1] if products.experts else None
        residuals = pairs[2 if products.experts else 1 :]
        return ChunkArrays(pairs[0], ids, dict(zip((p.weight for p in products.products if p.scale), residuals, strict=True)))

    def collect_inputs(self, layer: int, chunk: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Compute a chunk's inputs of all groups of the layer in the original model, and advance its stream to the layer's output.

        Return for each group the inputs, float32 (inputs, columns), and the experts of each token, int32 (tokens, used), or None. The
        arrays are views of memory that the next request overwrites.
        """
        self._ask(f"collect {chunk}")
        out, offset = [], 0
        for group in self.collected_layers[layer]:
            arrays: list[np.ndarray] = []
            for dtype, (rows, columns) in group.input_shapes(self.n_tokens):
                arrays.append(np.frombuffer(self._memory, dtype, rows * columns, offset).reshape(rows, columns))
                offset += 4 * rows * columns
            out.append((arrays[0], arrays[1] if group.experts else None))
        return out

    def begin_gradients(self, n_chunks: int) -> Iterator[int]:
        """Run the first chunks through the original model, and back to the output of the last layer; yield each chunk when it is done."""
        self._ask(f"learn {n_chunks}")
        for chunk in range(n_chunks):
            self._ask(f"begin {chunk}")
            yield chunk

    def end_gradients(self) -> None:
        """Free the memory of begin_gradients()."""
        self._ask("learn 0")

    def gradients(self, layer: int, chunk: int) -> dict[str, np.ndarray]:
        """Return the gradients of the outputs of the current layer's plain matrices, float32 (tokens, rows).

        The layers are taken from the last to the first, each with all chunks of begin_gradients(). The loss is defined in
        ggml_ext/streams/labels.h. The arrays are views of memory that the next request overwrites.
        """
        self._ask(f"gradients {chunk}")
        by_weight: dict[str, np.ndarray] = {}
        offset = 0
        for product in dense_products(self.layers[layer]):
            n = self.n_tokens * product.rows
            by_weight[product.weight] = np.frombuffer(self._memory, np.float32, n, offset).reshape(self.n_tokens, product.rows)
            offset += 4 * n
        return by_weight

    def advance(self) -> float:
        """Advance all chunks of the quantized model through the layer, and of the original model unless compute_inputs() did so.

        Return the energy of the streams' difference, relative to the original stream. First tokens are left out, because their energy is of
        another order of magnitude.
        """
        answers = [self._ask(f"advance {chunk}") for chunk in range(self.n_chunks)]
        return sum(a["difference"] for a in answers) / max(sum(a["energy"] for a in answers), 1e-300)
