"""Matrices in the order of the graph: each is encoded for the inputs that the matrices before it leave, and makes up for their errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from .._base.console import Bar, Console
from .._base.errors import UserError
from .._base.files import fingerprint, temporary_directory
from .._base.threads import map_in_order
from .._calibration.importance import Importance
from .._encode.accuracy import Accuracy
from .._encode.codec import Codec, Guide, PerExpert, measured
from .._encode.feedback import Rows, encode_fed, make_rows
from .._encode.targets import correction, ridge_of
from .._formats.chunks import row_chunks
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.hessians import TensorHessian, token_warnings
from .._formats.imatrix import dead_columns
from .._native.streams import WAY_OUT, LayerStreams, ProductGroup
from .._plan.plan import IMATRIX_TYPES, Plan, metric_of, uses_metric
from .._plan.rules import TOKEN_EMBD
from .sums import RowSums, Sums

TEMPORARY = ".propagation-"
# Rows that know of each other's errors: time and memory of what they know grow with it.
ROWS_TOGETHER = 1024


@dataclass(frozen=True)
class Encoded:
    """A finished matrix."""

    data: np.ndarray  # uint8 (n_rows, row_bytes)
    accuracy: Accuracy


@dataclass(frozen=True)
class Run:
    """What is to be run. command: of ggml-ext-streams; kind: of second moments, "block" or "full"; text: what it calibrates with, whose
    name for people text_name is; n_gradient_chunks: the first, of which gradients are found; folder: for temporary files; described: what it costs."""

    command: tuple[str, ...]
    kind: str
    text: Path
    text_name: str
    n_chunks: int
    n_gradient_chunks: int
    folder: Path
    described: str

    def made_from(self) -> list:
        """What the bytes depend on."""
        return [self.kind, fingerprint(self.text), self.n_chunks, self.n_gradient_chunks]

    def importance(self) -> Importance:
        """For the tensors whose inputs the streams do not reach: nothing but its record."""
        return Importance(self.kind, calibration=self.text_name)

    def importance_described(self) -> str:
        return f"{self.kind}, behind quantized layers ({self.text_name} text)"


def check_cut(run: Run, say: Callable[[str], None]) -> None:
    """UserError if the model's graph cannot be cut at its layers."""
    with temporary_directory(run.folder, TEMPORARY, say) as folder:
        with LayerStreams([*run.command, "--chunks", "1"], folder.resolve()):
            pass


@dataclass
class Propagation:
    """The layers of a model, quantized one after the other. As a context it ends what it started."""

    run: Run
    file: GGUFFile
    plan: Plan
    codec: Codec
    n_threads: int
    warn: Callable[[str], None]
    console: Console
    dead_columns: dict[str, tuple[int, int]] = field(default_factory=dict)  # as Importance.dead_columns()
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _layer: int = 0  # the next
    _n_learned: int = 0  # chunks of which gradients were found
    _done: dict[int, Encoded] = field(default_factory=dict)  # that nobody has taken
    _rows: dict[str, list[Rows]] = field(default_factory=dict)  # of the layer's matrices
    _tokens: dict[str, TensorHessian] = field(default_factory=dict)  # without their values

    def __post_init__(self) -> None:
        self._index = {t.name: i for i, t in enumerate(self.plan.tensors)}

    def __enter__(self) -> Propagation:
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def index(self, name: str) -> int | None:
        """Of a tensor that is to be quantized, or None."""
        i = self._index.get(name)
        return i if i is not None and self.plan.types[i] != self.plan.tensors[i].type else None

    def open(self) -> None:
        """Starts the program, and finds gradients where the model's graph is known well enough. UserError where it has no layers."""
        folder = self._stack.enter_context(temporary_directory(self.run.folder, TEMPORARY, self.console.note)).resolve()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(self.n_threads))
        self._streams = streams = self._stack.enter_context(LayerStreams([*self.run.command, "-o", str(folder / "streams")], folder))
        if streams.no_gradients:
            self.console.note(f"rows do not make up for each other: {streams.no_gradients}")
            return
        self._n_learned = min(self.run.n_gradient_chunks, streams.n_chunks)
        with self.console.bar("gradients", self._n_learned, "chunk") as bar:
            for _ in streams.learn(self._n_learned):
                bar.update()

    def start(self, finished: Callable[[int], np.ndarray | None], bar: Bar) -> None:
        """finished: bytes of tensors that an earlier run made, or None. UserError where a matrix that must have importances is not in a
        layer."""
        self._finished, self._bar = finished, bar
        self._reached = {p.weight for groups in self._streams.layers for g in groups for p in g.products} | {TOKEN_EMBD}
        for tensor, target in zip(self.plan.tensors, self.plan.types, strict=True):
            if target in IMATRIX_TYPES and tensor.type != target and tensor.name not in self._reached:
                raise UserError(
                    f"--propagate: tensor {tensor.name}: {target.name.lower()} needs an importance matrix, and its input is not known; "
                    f"{WAY_OUT}"
                )
        if (i := self.index(TOKEN_EMBD)) is not None:
            self._begin_with(i)

    def _begin_with(self, i: int) -> None:
        """Token embeddings, whose inputs are none."""
        data, tensor, target = self._finished(i), self.plan.tensors[i], self.plan.types[i]
        if data is None:
            self._done[i] = self._encode(tensor, target, self._weights(tensor, target), Guide())
            data = self._done[i].data
        self._streams.replace(tensor.name, target.name, data)

    def covers(self, i: int) -> bool:
        """Whether a tensor's bytes are made here."""
        return self.index(self.plan.tensors[i].name) is not None and self.plan.tensors[i].name in self._reached

    def take(self, i: int) -> Encoded:
        """The bytes of a tensor: those of its layer and of all before are made for it."""
        while i not in self._done:
            self._next_layer()
        return self._done.pop(i)

    def _wanted(self, group: ProductGroup) -> list[int]:
        found = [self.index(p.weight) for p in group.products if p.weight != TOKEN_EMBD]
        return [i for i in found if i is not None]

    def _next_layer(self) -> None:
        streams, k = self._streams, self._layer
        groups = streams.layers[k]
        streams.enter_layer(k)
        wanted = [self._wanted(g) for g in groups]
        before = {i: self._finished(i) for of_group in wanted for i in of_group}
        if before and all(data is not None for data in before.values()):
            for i, data in before.items():
                streams.replace(self.plan.tensors[i].name, self.plan.types[i].name, data)
        else:
            last = max((g for g, of_group in enumerate(wanted) if of_group), default=-1)
            self._rows = self._learned_rows(k)
            for g, of_group in enumerate(wanted):
                if of_group:
                    self._encode_group(k, g, of_group, g == last)
        if k + 1 < len(streams.layers):  # behind the last there is no stream
            error = streams.advance()
            for i in self._done.keys() & before.keys():
                self._done[i] = replace(self._done[i], accuracy=replace(self._done[i].accuracy, stream_error=error))
        self._layer += 1
        if self._layer == len(streams.layers) - 1 and self._tokens:
            for line in token_warnings(self._tokens):
                self.warn(line)

    def _learned_rows(self, k: int) -> dict[str, list[Rows]]:
        """By matrix of layer k. The output matrix has none: its rows are tokens."""
        if not self._n_learned or k + 1 == len(self._streams.layers):
            return {}
        sums = RowSums(self._streams.layers[k], ROWS_TOGETHER)
        for chunk in range(self._n_learned):
            sums.add(self._streams.gradients(k, chunk), self._pool)
        return {name: make_rows(g, sums.n_tokens[name]) for name, g in sums.g.items() if self.index(name) is not None}

    def _encode_group(self, k: int, g: int, wanted: list[int], is_last: bool) -> None:
        streams, group = self._streams, self._streams.layers[k][g]
        sums = Sums(group)
        for chunk in range(streams.n_chunks):
            sums.add(streams.inputs(k, g, chunk, is_last), self._pool)
        scales = {p.weight: p.scale for p in group.products}
        moments = sums.moments(f"--propagate: layer {k}", self.run.kind)
        self._tokens |= {self.plan.tensors[i].name: replace(moments, stored=np.empty(0)) for i in wanted}
        importance = importances(sums)
        dead = dead_columns(importance)
        self.dead_columns |= {self.plan.tensors[i].name: (int(np.count_nonzero(dead)), dead.size) for i in wanted}
        metrics: dict[tuple, PerExpert] = {}
        for i in wanted:
            tensor, target = self.plan.tensors[i], self.plan.types[i]
            guide = Guide(importance, None, moments, PerExpert(moments.triangles))
            if uses_metric(target):
                key = metric_of(target)
                if key not in metrics:
                    metrics[key] = PerExpert(self._metric_maker(tensor, target, guide))
                guide = replace(guide, metrics=metrics[key])
            weights = self._targets(tensor, target, sums, scales[tensor.name])
            self._done[i] = self._encode(tensor, target, weights, guide)
            streams.replace(tensor.name, target.name, self._done[i].data)

    def _metric_maker(self, tensor: Tensor, target: GGMLQuantizationType, guide: Guide) -> Callable:
        return lambda expert: self.codec.metric(tensor, target, guide, expert, self.warn)

    def _weights(self, tensor: Tensor, target: GGMLQuantizationType) -> np.ndarray:
        """As the model has them, float32 (n_rows, n_per_row)."""
        chunks = row_chunks(tensor)
        return np.concatenate([self.codec.weights(self.file.rows(tensor, *c), tensor, c[0], target) for c in chunks])

    def _targets(self, tensor: Tensor, target: GGMLQuantizationType, sums: Sums, scale: float) -> np.ndarray:
        """float32 (n_rows, n_per_row). UserError where they are not finite."""
        weights = self._weights(tensor, target)
        n_rows = tensor.n_rows // len(sums.h)

        def add(expert: int) -> None:
            part = weights[expert * n_rows : (expert + 1) * n_rows]
            r = sums.r[tensor.name] / np.float32(scale) if tensor.name in sums.r else None
            part += correction(part, *sums.of_expert(expert), r, ridge_of(sums.group.columns, sums.counts[expert]))

        try:
            list(self._pool.map(add, range(len(sums.h))))
        except np.linalg.LinAlgError as e:
            raise UserError(f"--propagate: tensor {tensor.name}: the second moments of its inputs cannot be inverted: {e}; {WAY_OUT}") from e
        if not np.isfinite(weights).all():
            raise UserError(f"--propagate: tensor {tensor.name}: no finite weights make up for the errors before it; {WAY_OUT}")
        return weights

    def _encode(self, tensor: Tensor, target: GGMLQuantizationType, weights: np.ndarray, guide: Guide) -> Encoded:
        if self.codec.needs_codebook(tensor, target):
            guide = replace(guide, codebook=self.codec.codebook([(0, weights)], tensor, guide))
        if rows := self._rows.get(tensor.name):
            data = self._encode_fed(tensor, target, weights, guide, rows)
        else:
            data = self._encode_alone(tensor, target, weights, guide)
        return Encoded(data, self._measure(tensor, target, weights, data, guide))

    def _measure(self, tensor: Tensor, target: GGMLQuantizationType, wanted: np.ndarray, data: np.ndarray, guide: Guide) -> Accuracy:
        """How far data is from the model's weights, and from what was to be encoded, float32 (n_rows, n_per_row)."""

        def measure(chunk: tuple[int, int]) -> Accuracy:
            first, part = chunk[0], slice(chunk[0], sum(chunk))
            stored = self.codec.decode(data[part], target, tensor.ne[0])
            weights = self.codec.decode(self.file.rows(tensor, *chunk), tensor.type, tensor.ne[0])
            to_target = guide.measure(tensor, first, wanted[part], stored)
            found = measured(tensor, first, weights, stored, target, guide)
            return replace(found, target_error=to_target.weighted_error, target_energy=to_target.weighted_energy)

        return sum(self._pool.map(measure, row_chunks(tensor)), Accuracy())

    def _encode_alone(self, tensor: Tensor, target: GGMLQuantizationType, weights: np.ndarray, guide: Guide) -> np.ndarray:
        """Rows that do not know of each other."""

        def encode(chunk: tuple[int, int]) -> tuple[int, np.ndarray]:
            first, n_rows = chunk
            return n_rows, self.codec.encode_guided(weights[first : first + n_rows], tensor, first, target, guide)

        parts = []
        for n_rows, data in map_in_order(self._pool, encode, row_chunks(tensor), 2 * self.n_threads):
            parts.append(data)
            self._bar.update(n_rows * tensor.ne[0])
        return np.concatenate(parts)

    def _encode_fed(
        self, tensor: Tensor, target: GGMLQuantizationType, weights: np.ndarray, guide: Guide, rows: list[Rows]
    ) -> np.ndarray:
        """Rows that make up for each other."""

        def encode(part: np.ndarray) -> np.ndarray:
            self._bar.update(part.size)
            return self.codec.encode(part, target, guide.importances(0), guide.codebook, guide.metric(0))

        def decode(data: np.ndarray) -> np.ndarray:
            return self.codec.decode(data, target, tensor.ne[0])

        return encode_fed(weights, rows, encode, decode, self.n_threads, self._pool.map)[0]


def importances(sums: Sums) -> np.ndarray:
    """Mean squares of the inputs, float32 (matrices, columns), of experts without tokens those of all."""
    squares = np.einsum("eii->ei", sums.h) / np.maximum(sums.counts, 1)[:, None]
    squares[sums.counts == 0] = squares.mean(axis=0) if len(squares) > 1 else 1
    return squares.astype(np.float32)
