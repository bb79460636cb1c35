"""Measure the sensitivity of each matrix: KL divergence per unit of NMSE.

The predictor is linear: KL divergence = sum over matrices of sensitivity * NMSE, as in the linearity theorem of HIGGS (Malinovskii et al., arXiv
2411.17525). HIGGS adds noise to each layer; here one part of the model at a time is stored in two bits, and llama-perplexity measures the KL
divergence. A part is a class of tensors or a range of layers. A matrix's sensitivity is a factor of its class times a factor of its layer.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import check_free_space, temporary_directory
from .._base.threads import map_in_order
from .._base.units import MIB
from .._calibration.importance import Importance
from .._encode.codec import Codec
from .._encode.encode_tensor import SourceTensor, encode_tensor
from .._encode.tensor_calibration import MetricCache
from .._formats.chunks import row_chunks
from .._formats.context import N_CONTEXT, context_length
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.names import layer_number, short_class, tensor_class
from .._native.process import describe_failure, last_error, run_logged
from .._native.text_file import read_end
from .._plan.plan import PlannedTensor, fit_to_row

PROBE = GGMLQuantizationType["ITQ2_T"]  # type of the probed part: errors large enough to measure, small enough to keep the model working
N_CHUNKS = 8  # of N_CONTEXT tokens; the scored 2,048 tokens give the mean KL divergence to about 3 %
# From the end of the text, because calibration reads its beginning: twice the usual 4 bytes per token, because cut_text() may drop half.
TEXT_BYTES = N_CHUNKS * N_CONTEXT * 8
INSIDE_CHARACTERS = bytes(range(0x80, 0xC0))  # UTF-8 continuation bytes
FEW_LAYERS = 8  # up to this many, each layer is a part
FIT_ROUNDS = 100  # of fitting classes and ranges of layers in turn; a few suffice
LEAST_COST = 1e-7  # of a part: logits have 16 bits, so small divergences may be measured as zero or negative
SAME_ERROR_TOLERANCE = 1e-6  # relative tolerance between two runs that encode the same
TEMPORARY = ".sensitivity-"

# KL divergence for an NMSE of 1 in all matrices of a class, measured on the reference model with full Hessians.
CLASS_SENSITIVITIES = {
    "attn_q": 0.33, "attn_k": 0.55, "attn_v": 0.86, "attn_output": 1.03, "ffn_gate": 0.48, "ffn_up": 0.31, "ffn_down": 0.64,
    "token_embd": 2.1, "output": 2.1,
}
OTHER_SENSITIVITY = 0.6  # of the other classes
FIRST_LAYER_FACTOR = 8  # sensitivity of a matrix in the first layer over that of its class in any other layer


@dataclass(frozen=True)
class ProbedPart:
    """Tensors that are probed together: a class, or a range of layers."""

    name: str
    tensors: tuple[str, ...]

    @property
    def is_layer_range(self) -> bool:
        """Whether it is a range such as blk.2-8 and not a class such as blk.*.attn_q.weight."""
        return re.match(r"blk\.\d", self.name) is not None


def sensitivity_key(name: str) -> str:
    """Return the key of CLASS_SENSITIVITIES: "attn_q" for blk.3.attn_q.weight; experts count as a matrix without experts."""
    return re.sub(r"_(ch|sh)?exps?$", "", short_class(name))


def usual_sensitivities(names: Sequence[str]) -> dict[str, float]:
    """Return default sensitivities, for a model that is not measured: CLASS_SENSITIVITIES, divided among the matrices of a class."""
    totals: dict[str, int] = {}

    def layer_weight(name: str) -> int:
        return FIRST_LAYER_FACTOR if layer_number(name) == 0 else 1

    for name in names:
        totals[tensor_class(name)] = totals.get(tensor_class(name), 0) + layer_weight(name)
    return {
        name: CLASS_SENSITIVITIES.get(sensitivity_key(name), OTHER_SENSITIVITY) * layer_weight(name) / totals[tensor_class(name)]
        for name in names
    }


def class_parts(names: Sequence[str]) -> list[ProbedPart]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(tensor_class(name), []).append(name)
    return [ProbedPart(name, tuple(members)) for name, members in groups.items()]


def layer_parts(names: Sequence[str]) -> list[ProbedPart]:
    """Return ranges of layers: each layer if they are few, else the first two, four equal ranges and the last."""
    layers = sorted({n for n in map(layer_number, names) if n is not None})
    n = len(layers)
    if n <= FEW_LAYERS:
        starts = list(range(n))
    else:
        starts = [0, 1, *(2 + (n - 3) * i // 4 for i in range(4)), n - 1]
    parts = []
    for start, end in zip(starts, [*starts[1:], n]):
        numbers = layers[start:end]
        title = f"blk.{numbers[0]}" if len(numbers) == 1 else f"blk.{numbers[0]}-{numbers[-1]}"
        parts.append(ProbedPart(title, tuple(name for name in names if layer_number(name) in numbers)))
    return parts


def make_parts(names: Sequence[str]) -> list[ProbedPart]:
    """Return all parts: the classes, then the ranges of layers."""
    return [*class_parts(names), *layer_parts(names)]


@dataclass
class MeasuredCosts:
    """The measured costs of a model's parts, the first ones if a run was interrupted."""

    errors: dict[str, float] = field(default_factory=dict)  # NMSE by tensor in PROBE
    costs: list[tuple[ProbedPart, float]] = field(default_factory=list)  # KL divergence of each part

    def is_complete(self) -> bool:
        return [part for part, _ in self.costs] == make_parts(list(self.errors))

    def resume_with(self, errors: dict[str, float], parts: Sequence[ProbedPart]) -> MeasuredCosts:
        """Return the costs to continue with in a run that has these errors and parts.

        These are the known costs if the errors are the same and the costs are those of the first parts, else none.
        """
        are_same = list(self.errors) == list(errors) and all(
            math.isclose(self.errors[name], error, rel_tol=SAME_ERROR_TOLERANCE) for name, error in errors.items()
        )
        are_first = [part for part, _ in self.costs] == list(parts[: len(self.costs)])
        return MeasuredCosts(self.errors, list(self.costs)) if are_same and are_first else MeasuredCosts(errors)


def cut_text(text: bytes, n_bytes: int = TEXT_BYTES) -> bytes:
    """Return the last n_bytes, cut at a line if that keeps half of them, else at a character."""
    if len(text) <= n_bytes:
        return text
    end = text[-n_bytes:]
    lines = end.partition(b"\n")[2]
    return lines if 2 * len(lines) > len(end) else end.lstrip(INSIDE_CHARACTERS)


def fit_sensitivities(
    start: Mapping[str, float], errors: Mapping[str, float], costs: Sequence[tuple[ProbedPart, float]]
) -> dict[str, float]:
    """Fit sensitivities to the measured costs of the parts by iterative proportional fitting.

    Args:
        start: initial sensitivities by tensor. The ratios between tensors of the same class and range of layers stay.
        errors: NMSE of each tensor in PROBE.
        costs: KL divergence of each part. Those of ranges of layers are scaled to the same sum as those of the classes in layers.
    """
    sensitivities = dict(start)
    ranges = [(p, max(c, LEAST_COST)) for p, c in costs if p.is_layer_range]
    classes = [(p, max(c, LEAST_COST)) for p, c in costs if not p.is_layer_range]
    block_weights = {name for p, _ in ranges for name in p.tensors}
    total = sum(c for p, c in classes if block_weights.issuperset(p.tensors))
    scale = total / sum(c for _, c in ranges) if ranges else 1.0
    for _ in range(FIT_ROUNDS):
        for part, cost in [*((p, c * scale) for p, c in ranges), *classes]:
            predicted = sum(sensitivities[name] * errors[name] for name in part.tensors)
            if predicted > 0:
                for name in part.tensors:
                    sensitivities[name] *= cost / predicted
    return sensitivities


@dataclass(frozen=True)
class ModelCopy:
    """A copy of the model, in which one part at a time is overwritten."""

    first: Path  # the file to load
    places: Mapping[str, tuple[Path, int]]  # file and offset of each tensor

    @classmethod
    def make(cls, file: GGUFFile, directory: Path) -> ModelCopy:
        paths = {part.path: directory / part.path.name for part in file.parts}
        for source, path in paths.items():
            shutil.copyfile(source, path)
            path.chmod(0o600)
        places = {t.name: (paths[part.path], t.offset) for part in file.parts for t in part.tensors}
        return cls(paths[file.path], places)


@dataclass(frozen=True)
class Probe:
    """Measures the cost of each part of a float model with llama-perplexity."""

    file: GGUFFile
    tensors: Sequence[PlannedTensor]  # those to probe
    importance: Importance
    codec: Codec
    program: Path  # llama-perplexity
    text: Path
    directory: Path
    n_threads: int

    @property
    def n_context(self) -> int:
        """Tokens per chunk."""
        return context_length(self.file)

    @property
    def n_chunks(self) -> int:
        """N_CHUNKS, or more if chunks are shorter."""
        return N_CHUNKS * N_CONTEXT // self.n_context

    def parts(self) -> list[ProbedPart]:
        return make_parts([t.name for t in self.tensors])

    def bytes_needed(self) -> int:
        """Return the disk space for a copy of the model, the matrices in PROBE, and logits in 16 bits."""
        n_vocab = next((t.n_rows for t in self.file.tensors if t.name == "token_embd.weight"), 1 << 18)
        packed = sum(_packed_bytes(t.tensor) for t in self.tensors)
        n_scored = self.n_chunks * self.n_context // 2  # llama-perplexity scores half of the tokens, with 2 bytes per logit
        return sum(p.n_bytes for p in self.file.parts) + packed + n_scored * 2 * (n_vocab + 8)

    def describe(self) -> str:
        return (
            f"sensitivity: {len(self.parts()) + 1} runs of llama-perplexity, {self.n_chunks} chunks of {self.n_context} tokens, "
            f"{self.bytes_needed() / MIB:,.0f} MiB of temporary files; --sensitivity usual skips this"
        )

    def measure(self, known: MeasuredCosts, keep: Callable[[MeasuredCosts], None], console: Console) -> MeasuredCosts:
        """Measure the parts that an interrupted run did not.

        Args:
            known: the costs that it measured.
            keep: called after each part with all costs so far.
            console: for notes and the progress bar.

        Raises:
            UserError: the disk or llama-perplexity fails.
        """
        self.file.complete("llama-perplexity")
        try:
            with temporary_directory(self.directory, TEMPORARY, console.note) as directory:
                hint = "pass --sensitivity usual"
                check_free_space(self.directory, self.bytes_needed(), str(self.directory), " to measure the sensitivity", hint)
                return self._measure(directory, known, keep, console)
        except OSError as e:
            raise UserError(
                f"sensitivity: cannot write in {self.directory}: {e.strerror}; write OUT to another directory, or pass --sensitivity usual"
            ) from e

    def _measure(self, directory: Path, known: MeasuredCosts, keep: Callable[[MeasuredCosts], None], console: Console) -> MeasuredCosts:
        text, logits = directory / "text.txt", directory / "logits.bin"
        text.write_bytes(cut_text(read_end(self.text, TEXT_BYTES + 1)))
        copy, tensors, parts = ModelCopy.make(self.file, directory), {t.name: t.tensor for t in self.tensors}, self.parts()
        # the reference run, the encoding and one run per part
        with console.bar("sensitivity", len(parts) + 2, "step") as bar:
            self._run_llama_perplexity(copy.first, ["-f", text, "--chunks", self.n_chunks, "--kl-divergence-base", logits])
            bar.update()
            errors, packed = self._encode(directory / "packed.bin")
            costs = known.resume_with(errors, parts)
            if costs.costs:
                console.note(f"resuming after {len(costs.costs)} of {len(parts)} parts")
            bar.update(1 + len(costs.costs))
            for part in parts[len(costs.costs) :]:
                for name in part.tensors:
                    self._write(tensors[name], *copy.places[name], packed[name])
                costs.costs.append((part, self._measure_kld(copy.first, logits)))
                keep(costs)
                for name in part.tensors:
                    self._write(tensors[name], *copy.places[name], None)
                bar.update()
        return costs

    def _encode(self, path: Path) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Encode all tensors in PROBE. Return their errors and their rows, uint8 (n_rows, row_bytes), mapped from a file."""
        errors, packed = {}, {}
        file = np.memmap(path, np.uint8, "w+", shape=(sum(_packed_bytes(t.tensor) for t in self.tensors),))
        position, cache = 0, MetricCache()
        with ThreadPoolExecutor(self.n_threads) as pool:
            map_items = partial(map_in_order, pool, n_ahead=2 * self.n_threads)
            for t in self.tensors:
                tensor, qtype = t.tensor, fit_to_row(t.tensor, PROBE)
                rows = file[position : position + _packed_bytes(tensor)].reshape(tensor.n_rows, -1)
                position += rows.size

                def store(first_row: int, data: np.ndarray, rows: np.ndarray = rows) -> None:
                    rows[first_row : first_row + len(data)] = data

                calibration = self.importance.calibrate(t, qtype, self.codec, cache)
                accuracy = encode_tensor(SourceTensor(self.file, tensor, self.codec), qtype, calibration, map_items=map_items, store=store)
                errors[t.name], packed[t.name] = accuracy.best_known_nmse, rows
        return errors, packed

    def _write(self, tensor: Tensor, path: Path, offset: int, packed: np.ndarray | None) -> None:
        """Write a tensor of the copy: decoded from its packed rows, or the original weights without them."""
        with open(path, "r+b") as f:
            f.seek(offset)
            for start, n_rows in row_chunks(tensor):
                if packed is None:
                    f.write(self.file.rows(tensor, start, n_rows).tobytes())
                else:
                    weights = self.codec.decode(np.array(packed[start : start + n_rows]), fit_to_row(tensor, PROBE), tensor.ne[0])
                    f.write(self.codec.encode(weights, tensor.type).tobytes())

    def _run_llama_perplexity(self, model: Path, args: Sequence[object]) -> str:
        """Run llama-perplexity on a model and return its log. UserError if it fails."""
        command = [self.program, "-m", model, "-c", self.n_context, "-b", self.n_context, "-t", self.n_threads, *args]
        code, log = run_logged([*map(str, command)], model.parent)
        if code:
            without = "pass --sensitivity usual to skip this"
            files = f"for {self.file.path} and {self.text}"
            raise UserError("sensitivity: " + describe_failure("llama-perplexity", code, log, files, hint=without, less_memory=without))
        return log

    def _measure_kld(self, model: Path, logits: Path) -> float:
        log = self._run_llama_perplexity(model, ["--kl-divergence", "--kl-divergence-base", logits])
        match = re.search(r"Mean\s+KLD:\s+(-?[\w.]+)", log)
        if match is None or not np.isfinite(float(match[1])):
            raise UserError(
                f"sensitivity: llama-perplexity printed no KL divergence for {self.file.path}: {last_error(log)}; pass another text with "
                "--imatrix-from, or --sensitivity usual"
            )
        return float(match[1])


def _packed_bytes(tensor: Tensor) -> int:
    return tensor.bytes_as(fit_to_row(tensor, PROBE))
