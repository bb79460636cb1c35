"""Sequential quantization: encode the linear layers in graph order.

Each linear layer is calibrated with the inputs that the quantized layers before it produce. Its weights are corrected for the errors of these
layers, as in GPTAQ and QEP (_encode/correction.py), and then encoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from .._base.console import Bar, Console
from .._base.errors import UserError
from .._base.files import fingerprint, temporary_directory
from .._base.threads import map_in_order
from .._calibration.importance import DeadColumns, Importance
from .._encode.accuracy import Accuracy
from .._encode.codec import Codec
from .._encode.encode_tensor import Chunk, CorrectedTensor, SourceTensor, add_codebook, encode_tensor
from .._encode.feedback import RowSpan, encode_with_row_feedback, make_row_spans
from .._encode.tensor_calibration import Metric, PerExpert, TensorCalibration
from .._formats.column_scales import ColumnScales
from .._formats.gguf_file import GGUFFile
from .._formats.hessians import TensorHessian, kind_for, token_warnings
from .._formats.tensor_types import IMATRIX_TYPES, metric_name
from .._native.streams import FLAG, HINT, LayerStreams, ProductGroup
from .._plan.plan import PlannedTensor, QuantizationPlan
from .._plan.rules import TOKEN_EMBD
from .experts import ExpertCorrections, check_corrected, copy_rows, make_corrector
from .sums import RowSums, StoredRowSums, Sums, sole_narrow_product

TEMPORARY = ".propagation-"
# Consecutive rows that compensate each other's errors. More of them take more time and memory.
ROWS_TOGETHER = 1024
# Rows whose error is measured at once: the complete Hessian is read for them.
MEASURED_ROWS = 512

CorrectedRows = Callable[[Chunk], np.ndarray]  # returns rows of corrected weights, float32 (n_rows, n_per_row)


@dataclass(frozen=True)
class EncodedTensor:
    """A finished matrix."""

    data: np.ndarray  # uint8 (n_rows, row_bytes)
    accuracy: Accuracy


@dataclass(frozen=True)
class PropagationConfig:
    """The configuration of sequential quantization."""

    command: tuple[str, ...]
    kind: str  # of the Hessians, "block" or "full"
    text: Path  # to calibrate with
    text_name: str  # for messages
    n_chunks: int
    n_tokens: int  # of all chunks
    n_gradient_chunks: int  # number of first chunks with gradients
    directory: Path  # of temporary files
    description: str  # with estimated time and memory
    full_columns: int | None = None  # with kind "full": inputs of more columns have block-diagonal Hessians; None: no limit
    common_sums: bool = False  # experts with the same inputs (ffn_gate, ffn_up) share their sums, to save memory
    prefers_bf16: bool = True  # the original model runs with a layer's matrices in BF16, where the CPU has it

    def list_dependencies(self) -> list:
        """List what the encoded bytes depend on."""
        savings = [name for name, saves in (("common sums", self.common_sums), ("no BF16", not self.prefers_bf16)) if saves]
        return [self.importance().title, fingerprint(self.text), self.n_chunks, self.n_gradient_chunks, *savings]

    def importance(self) -> Importance:
        """Describe the statistics in the output's metadata."""
        importance = Importance(self.kind, text_name=self.text_name, full_columns=self.full_columns, n_tokens=self.n_tokens)
        importance.description = f"{importance.title}, from quantized layers ({self.text_name} text)"
        return importance


def check_cut(config: PropagationConfig, note: Callable[[str], None]) -> None:
    """Raise UserError if the model's graph cannot be cut at its layers."""
    with temporary_directory(config.directory, TEMPORARY, note) as directory:
        with LayerStreams([*config.command, "--chunks", "1"], directory.resolve()):
            pass


@dataclass
class SequentialQuantizer:
    """Quantizer of a model, layer by layer. As a context manager it ends the program that it starts.

    Order of calls: open(), start(), then covers() and take() for each tensor in graph order.
    """

    config: PropagationConfig
    file: GGUFFile
    plan: QuantizationPlan
    codec: Codec
    n_threads: int
    warn: Callable[[str], None]
    console: Console
    scales: ColumnScales = field(default_factory=ColumnScales)  # of the weights that `file` reads
    dead_columns: dict[str, DeadColumns] = field(default_factory=dict)  # by tensor
    hessians: dict[str, TensorHessian] = field(default_factory=dict)  # by tensor, without their values
    _changed: dict[str, PlannedTensor] = field(init=False)  # the tensors to encode, by name
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)
    _layer: int = field(default=0, init=False)  # the next one
    _encoded: dict[str, EncodedTensor] = field(default_factory=dict, init=False)  # until take()
    _row_spans: dict[str, list[RowSpan]] = field(default_factory=dict, init=False)  # of the layer's matrices, by name
    # set by open()
    _pool: ThreadPoolExecutor = field(init=False)
    _streams: LayerStreams = field(init=False)
    _row_sums: StoredRowSums | None = field(default=None, init=False)  # None without gradients
    # set by start()
    _read_finished: Callable[[str], np.ndarray | None] = field(init=False)
    _bar: Bar = field(init=False)
    _reached: set[str] = field(init=False)  # tensors whose inputs the program computes, and the token embeddings

    def __post_init__(self) -> None:
        self._changed = {t.name: t for t in self.plan.changed}

    def __enter__(self) -> SequentialQuantizer:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(self) -> None:
        """Start the program, and compute gradients if it can differentiate the graph. Raise UserError if the graph has no layers."""
        self.file.complete(Path(self.config.command[0]).name)
        directory = self._stack.enter_context(temporary_directory(self.config.directory, TEMPORARY, self.console.note)).resolve()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(self.n_threads))
        command = [*self.config.command, "-o", str(directory / "streams")]
        self._streams = streams = self._stack.enter_context(LayerStreams(command, directory))
        if self.config.prefers_bf16:
            streams.prefer_bf16()
        if not self.config.n_gradient_chunks:
            return
        if streams.no_gradients:
            self.console.note(f"no error feedback between rows: {streams.no_gradients}")
            return
        self._row_sums = row_sums = StoredRowSums(directory / "rows")
        try:
            self._collect_row_sums(row_sums, min(self.config.n_gradient_chunks, streams.n_chunks))
        except OSError as e:
            raise UserError(f"{FLAG}: cannot write {row_sums.path}: {e.strerror}; {HINT}") from e

    def _collect_row_sums(self, out: StoredRowSums, n_chunks: int) -> None:
        """Compute gradients and sum the row statistics G (_encode/feedback.py) of all layers, the last one first.

        The output matrix has none: its rows are vocabulary entries.
        """
        layers = self._streams.layers[:-1]
        with self.console.bar("gradients", n_chunks * (1 + len(layers)), "chunk") as bar:
            for _ in self._streams.begin_gradients(n_chunks):
                bar.update()
            for k in range(len(layers))[::-1]:
                self._streams.enter_layer(k)
                sums = RowSums(layers[k], ROWS_TOGETHER, self._pool, self.scales)
                for chunk in range(n_chunks):
                    sums.add(self._streams.gradients(k, chunk))
                    bar.update()
                sums.flush()
                out.write(k, sums)
        self._streams.end_gradients()

    def start(self, read_finished: Callable[[str], np.ndarray | None], bar: Bar) -> None:
        """Prepare for the first layer: check that types which need an imatrix have one, and encode the token embeddings.

        Args:
            read_finished: returns the data of a tensor that an earlier run encoded, or None.
            bar: counts encoded weights.

        Raises:
            UserError: a type needs an imatrix, but the program does not compute the tensor's input.
        """
        self._read_finished, self._bar = read_finished, bar
        self._reached = {p.weight for groups in self._streams.all_layers for g in groups for p in g.products} | {TOKEN_EMBD}
        for t in self._changed.values():
            if t.type in IMATRIX_TYPES and t.name not in self._reached:
                raise UserError(
                    f"{FLAG}: tensor {t.name}: {t.type.name.lower()} needs an imatrix, but the inputs of this tensor are unknown; {HINT}"
                )
        self._scale_kept_tensors()
        if (embd := self._changed.get(TOKEN_EMBD)) is not None:
            self._encode_embeddings(embd)

    def _scale_kept_tensors(self) -> None:
        """Replace the tensors with column scales that stay unquantized, such as norms, in the quantized model."""
        for planned in self.plan.tensors:
            if planned.name in self.scales and not planned.is_changed:
                tensor = planned.tensor
                self._streams.replace(tensor.name, tensor.type.name, self.file.rows(tensor, 0, tensor.n_rows))

    def _encode_embeddings(self, planned: PlannedTensor) -> None:
        """Encode the token embeddings, which have no inputs."""
        data = self._read_finished(planned.name)
        if data is None:
            read = partial(self._source(planned).read_rows, qtype=planned.type)
            self._encoded[planned.name] = encoded = self._encode(planned, read, TensorCalibration())
            data = encoded.data
        self._streams.replace(planned.name, planned.type.name, data)

    def covers(self, planned: PlannedTensor) -> bool:
        """Whether this quantizer encodes the tensor."""
        return planned.name in self._changed and planned.name in self._reached

    def take(self, planned: PlannedTensor) -> EncodedTensor:
        """Return the encoded tensor, after encoding all layers up to its own."""
        while planned.name not in self._encoded:
            self._encode_layer()
        return self._encoded.pop(planned.name)

    def _matrices(self, group: ProductGroup) -> list[PlannedTensor]:
        """List the matrices of a group to encode."""
        return [self._changed[p.weight] for p in group.products if p.weight != TOKEN_EMBD and p.weight in self._changed]

    def _encode_layer(self) -> None:
        """Encode the next layer, or reuse its data from an interrupted run, and advance the streams through it."""
        streams, k = self._streams, self._layer
        streams.enter_layer(k)
        groups = [self._matrices(g) for g in streams.all_layers[k]]
        if not self._resume_layer([t for matrices in groups for t in matrices]):
            self._encode_groups(k, groups)
        if streams.has_output(k):
            self._record_stream_error(streams.advance(), {t.name for matrices in groups for t in matrices})
        self._layer += 1
        # all layers are encoded; warn now, because take() reaches the output matrix only if its type changes
        if self._layer == len(streams.collected_layers):
            self._warn_of_few_tokens()

    def _resume_layer(self, matrices: list[PlannedTensor]) -> bool:
        """Replace all matrices of the layer by the data of an interrupted run. Return False if one is missing."""
        finished = [(t, data) for t in matrices if (data := self._read_finished(t.name)) is not None]
        if not matrices or len(finished) < len(matrices):
            return False
        for planned, data in finished:
            self._streams.replace(planned.name, planned.type.name, data)
        return True

    def _encode_groups(self, k: int, groups: list[list[PlannedTensor]]) -> None:
        """Encode the matrices of layer k, group by group. The last group with matrices advances the original model's stream."""
        last = max((g for g, matrices in enumerate(groups) if matrices), default=-1)
        self._row_spans = self._make_row_spans(k)
        for g, matrices in enumerate(groups):
            if matrices:
                self._encode_group(k, g, matrices, advance_original=g == last)

    def _record_stream_error(self, error: float, names: set[str]) -> None:
        """Add the error of the residual stream after the layer to the accuracy of its encoded matrices."""
        for name in self._encoded.keys() & names:
            encoded = self._encoded[name]
            self._encoded[name] = replace(encoded, accuracy=replace(encoded.accuracy, stream_error=error))

    def _warn_of_few_tokens(self) -> None:
        """Warn once, for all layers, of Hessians that have too few tokens."""
        if self.hessians:
            for line in token_warnings(self.hessians):
                self.warn(line)

    def _make_row_spans(self, k: int) -> dict[str, list[RowSpan]]:
        """Factorize the row statistics G of each matrix of layer k that is encoded; none without gradients."""
        stored = self._row_sums.read(k) if self._row_sums else ()
        return {name: make_row_spans(g, n_tokens, self._pool.map) for name, g, n_tokens in stored if name in self._changed}

    def _encode_group(self, k: int, g: int, matrices: list[PlannedTensor], *, advance_original: bool) -> None:
        """Encode the matrices with one input. advance_original: also advance the stream of the original model."""
        streams, group = self._streams, self._streams.all_layers[k][g]
        weights = {} if group.experts else {t.name: copy_rows(self._source(t), (0, t.tensor.n_rows), t.type) for t in matrices}
        narrow = sole_narrow_product(group)
        factors = self.scales.column_factors(matrices[0].name)
        are_common = self.config.common_sums and group.shares_inputs(streams.n_tokens)
        sums = Sums(group, self._pool, factors, weights[narrow.weight] if narrow else None, bool(group.experts) and are_common)
        for chunk in range(streams.n_chunks):
            sums.add(streams.compute_inputs(k, g, chunk, advance_original))
        sums.flush()
        hessian = sums.hessian(f"{FLAG}: layer {k}", kind_for(group.columns, self.config.kind, self.config.full_columns))
        calibration = TensorCalibration.from_hessian(hessian_diagonal(sums), hessian)
        if group.experts:
            corrections = ExpertCorrections(sums, [t.name for t in matrices])
            corrected: dict[str, CorrectedRows] = {
                t.name: partial(corrections.rows, self._source(t), t.type, calibration) for t in matrices
            }
        else:
            self._correct(weights, sums)
            corrected = {name: partial(_slice, values) for name, values in weights.items()}
        del sums, weights  # whose memory is as large as the metric's
        self._encode_corrected(matrices, corrected, calibration)

    def _encode_corrected(
        self, matrices: list[PlannedTensor], corrected: dict[str, CorrectedRows], calibration: TensorCalibration
    ) -> None:
        """Encode matrices with one input. corrected: their weights; calibration: of the input."""
        diagonal, hessian = calibration.diagonal, calibration.hessian
        assert diagonal is not None and hessian is not None
        metrics: dict[str, PerExpert[Metric]] = {}
        for t in matrices:
            self.hessians[t.name] = replace(hessian, stored=np.empty(0))
            self.dead_columns[t.name] = DeadColumns.count(diagonal)
            # each matrix has its own PerExpert, from which encode_tensor() drops finished experts; the shared values stay in metrics
            calibrated = TensorCalibration.from_hessian(diagonal, hessian)
            if (name := metric_name(t.type)) is not None:
                if hessian.n_matrices > 1:  # not shared: those of all experts would take more memory than the sums
                    maker = self._metric_maker(t, calibrated)
                else:
                    maker = metrics.setdefault(name, PerExpert(self._metric_maker(t, calibration))).get
                calibrated = replace(calibrated, metrics=PerExpert(maker))
            self._encoded[t.name] = encoded = self._encode(t, corrected.pop(t.name), calibrated)
            self._streams.replace(t.name, t.type.name, encoded.data)

    def _metric_maker(self, planned: PlannedTensor, calibration: TensorCalibration) -> Callable[[int], Metric]:
        return lambda expert: self.codec.metric(planned.tensor, planned.type, calibration, expert, self.warn)

    def _source(self, planned: PlannedTensor) -> SourceTensor:
        return SourceTensor(self.file, planned.tensor, self.codec)

    def _correct(self, weights: dict[str, np.ndarray], sums: Sums) -> None:
        """Correct the weights of dense matrices with one input in place. weights: float32 (rows, columns) by name.

        Raise UserError if a corrected weight is not finite.
        """
        h, d = sums.expert_sums(0)
        corrector = make_corrector(h, sums.counts[0], list(weights), self._pool.map)
        for product in sums.group.products:
            if product.weight in weights:
                corrector.correct(weights[product.weight], d, sums.residual_sums(product))
        for name, values in weights.items():
            check_corrected(name, values)

    def _encode(self, planned: PlannedTensor, corrected: CorrectedRows, calibration: TensorCalibration) -> EncodedTensor:
        tensor, qtype = planned.tensor, planned.type
        source = CorrectedTensor(self.file, tensor, self.codec, corrected)
        if spans := self._row_spans.get(tensor.name):
            return self._encode_with_row_feedback(source, qtype, add_codebook(source, qtype, calibration), spans)
        parts: list[np.ndarray] = []

        def store(first_row: int, data: np.ndarray) -> None:
            parts.append(data)
            self._bar.update(len(data) * tensor.ne[0])

        map_items = partial(map_in_order, self._pool, n_ahead=2 * self.n_threads)
        accuracy = encode_tensor(source, qtype, calibration, map_items=map_items, store=store)
        return EncodedTensor(np.concatenate(parts), accuracy)

    def _encode_with_row_feedback(
        self, source: CorrectedTensor, qtype: GGMLQuantizationType, calibration: TensorCalibration, spans: list[RowSpan]
    ) -> EncodedTensor:
        """Encode the rows with error feedback between them (_encode/feedback.py)."""
        tensor, codec = source.tensor, self.codec
        corrected = source.corrected((0, tensor.n_rows))

        def encode(part: np.ndarray) -> np.ndarray:
            self._bar.update(part.size)
            return codec.encode(part, qtype, calibration.importances(0), calibration.codebook, calibration.metric(0))

        def decode(data: np.ndarray) -> np.ndarray:
            return codec.decode(data, qtype, tensor.ne[0])

        data = encode_with_row_feedback(corrected, spans, encode, decode, n_threads=self.n_threads, map_items=self._pool.map)

        def measure(chunk: Chunk) -> Accuracy:
            first, n_rows = chunk
            return source.measure(chunk, source.corrected(chunk), data[first : first + n_rows], qtype, calibration)

        accuracies = self._pool.map(measure, [(first, min(MEASURED_ROWS, len(data) - first)) for first in range(0, len(data), MEASURED_ROWS)])
        return EncodedTensor(data, sum(accuracies, Accuracy()))


def _slice(weights: np.ndarray, chunk: Chunk) -> np.ndarray:
    """Return the rows of a chunk."""
    return weights[chunk[0] : sum(chunk)]


def hessian_diagonal(sums: Sums) -> np.ndarray:
    """Return the diagonals of the Hessians, float32 (matrices, columns). Experts without tokens get the mean of all;
    a single matrix without tokens gets ones."""
    squares = np.einsum("eii->ei", sums.h) / np.maximum(sums.counts, 1)[:, None]
    squares[sums.counts == 0] = squares.mean(axis=0) if len(squares) > 1 else 1
    return squares.astype(np.float32)
