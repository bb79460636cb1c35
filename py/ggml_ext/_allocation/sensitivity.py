"""What an error in a matrix costs the model: KL divergence for a unit of its relative squared error.

The model is linear: KL divergence = sum over matrices of sensitivity * error, the error being (w - w')^T H (w - w') over w^T H w
with what is known of the inputs. That small independent errors add up so is the linearity theorem of HIGGS (Malinovskii et al.,
arXiv 2411.17525) for the perplexity and the plain relative error; there each layer's factor is found with noise. Here parts of the
model are stored in two bits, and llama-perplexity measures what each costs: one part for each class of tensors, one for each range of
layers. From the two the sensitivity of each matrix follows as a product of a factor of its class and one of its layer.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import free_space, temporary_directory
from .._base.threads import map_in_order
from .._base.units import MIB
from .._calibration.importance import Importance
from .._encode.accuracy import Accuracy
from .._encode.codec import Codec, Guide
from .._formats.chunks import row_chunks
from .._formats.context import N_CONTEXT, context_length
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.names import layer_number, tensor_class
from .._native.process import describe_failure, last_error, run_logged
from .._native.text_file import read_end
from .._plan.plan import fit_to_row

T = GGMLQuantizationType
PROBE = T.ITQ2_T  # what the parts are stored in: its errors are large enough to be measured well, and not yet the ruin of the model
N_CHUNKS = 8  # of N_CONTEXT tokens, the second half of each counts: 2,048 tokens give the mean KL divergence to some 3 %
TEXT_BYTES = N_CHUNKS * N_CONTEXT * 8  # from the end of the text, which calibration reads from its beginning; a token has some 4
INSIDE_CHARACTERS = bytes(range(0x80, 0xC0))  # of UTF-8, all bytes but the first
FEW_LAYERS = 8  # up to which each is a part of its own
ROUNDS = 100  # of fitting factors of classes and of layers in turn; it converges within a few
LEAST_COST = 1e-7  # of a part: what is lost in the 16 bits of the logits may be measured as nothing, or as less
ERRORS_DIFFER = 1e-6  # of two runs that encode the same
TEMPORARY = ".sensitivity-"

# Without a measurement: KL divergence for a relative squared error of 1 in all matrices of a class, by the end of its name. Of the
# reference model with whole second moments: the cost of each class over its mean error.
USUAL = {
    "attn_q": 0.33, "attn_k": 0.55, "attn_v": 0.86, "attn_output": 1.03, "ffn_gate": 0.48, "ffn_up": 0.31, "ffn_down": 0.64,
    "token_embd": 2.1, "output": 2.1,
}
OTHERS = 0.6
FIRST_LAYER = 8  # times as much as in each of the others; there they are alike, the last has 1.2 times the mean


@dataclass(frozen=True)
class Probed:
    """Tensors that get their errors together, a class or a range of layers."""

    name: str
    tensors: tuple[str, ...]

    @property
    def is_of_layers(self) -> bool:
        """True for blk.2-8, False for blk.*.attn_q.weight."""
        return re.match(r"blk\.\d", self.name) is not None


def class_name(name: str) -> str:
    """"attn_q" of blk.3.attn_q.weight, "ffn_down" of its experts too."""
    return re.sub(r"_(ch|sh)?exps?$", "", tensor_class(name).removeprefix("blk.*.").removesuffix(".weight"))


def usual(names: Sequence[str]) -> dict[str, float]:
    """Sensitivities where none were measured."""
    totals: dict[str, int] = {}

    def share(name: str) -> int:
        return FIRST_LAYER if layer_number(name) == 0 else 1

    for name in names:
        totals[tensor_class(name)] = totals.get(tensor_class(name), 0) + share(name)
    return {name: USUAL.get(class_name(name), OTHERS) * share(name) / totals[tensor_class(name)] for name in names}


def class_parts(names: Sequence[str]) -> list[Probed]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(tensor_class(name), []).append(name)
    return [Probed(name, tuple(of_class)) for name, of_class in groups.items()]


def layer_parts(names: Sequence[str]) -> list[Probed]:
    """Ranges of layers: each alone where they are few, else the first two, four equal ranges and the last."""
    layers = sorted({n for n in map(layer_number, names) if n is not None})
    n = len(layers)
    if n <= FEW_LAYERS:
        starts = list(range(n))
    else:
        starts = [0, 1, *(2 + (n - 3) * i // 4 for i in range(4)), n - 1]
    parts = []
    for start, end in zip(starts, [*starts[1:], n]):
        inside = layers[start:end]
        title = f"blk.{inside[0]}" if len(inside) == 1 else f"blk.{inside[0]}-{inside[-1]}"
        parts.append(Probed(title, tuple(name for name in names if layer_number(name) in inside)))
    return parts


def make_parts(names: Sequence[str]) -> list[Probed]:
    """All that are measured: each class, then ranges of layers."""
    return [*class_parts(names), *layer_parts(names)]


@dataclass
class Measured:
    """What was measured of a model: the first of its parts, while a run is not through them."""

    errors: dict[str, float] = field(default_factory=dict)  # relative squared, by tensor, in the type of the probe
    costs: list[tuple[Probed, float]] = field(default_factory=list)  # KL divergence of each part

    def is_whole(self) -> bool:
        return [part for part, _ in self.costs] == make_parts(list(self.errors))

    def continued(self, errors: dict[str, float], parts: Sequence[Probed]) -> Measured:
        """What a run that found these errors can go on with: nothing of one that measured other parts or had other errors."""
        are_same = list(self.errors) == list(errors) and all(
            math.isclose(self.errors[name], error, rel_tol=ERRORS_DIFFER) for name, error in errors.items()
        )
        are_first = [part for part, _ in self.costs] == list(parts[: len(self.costs)])
        return Measured(self.errors, list(self.costs)) if are_same and are_first else Measured(errors)


def end_of(text: bytes) -> bytes:
    """The last TEXT_BYTES, from the beginning of a line where half of them is left then, else of a character."""
    if len(text) <= TEXT_BYTES:
        return text
    end = text[-TEXT_BYTES:]
    whole_lines = end.partition(b"\n")[2]
    return whole_lines if 2 * len(whole_lines) > len(end) else end.lstrip(INSIDE_CHARACTERS)


def fit(
    start: Mapping[str, float], errors: Mapping[str, float], costs: Sequence[tuple[Probed, float]]
) -> dict[str, float]:
    """Sensitivities, by tensor, that explain what parts cost, nearest to the ratios of `start`.

    errors: relative squared errors that the tensors had when their parts cost what `costs` says: first all classes, then ranges of
    layers. The classes' sum is kept, to which those of the layers are scaled.
    """
    out = dict(start)
    layers = [(p, max(c, LEAST_COST)) for p, c in costs if p.is_of_layers]
    classes = [(p, max(c, LEAST_COST)) for p, c in costs if not p.is_of_layers]
    inside = {name for p, _ in layers for name in p.tensors}
    whole = sum(c for p, c in classes if inside.issuperset(p.tensors))
    scale = whole / sum(c for _, c in layers) if layers else 1.0
    for _ in range(ROUNDS):
        for part, cost in [*((p, c * scale) for p, c in layers), *classes]:
            now = sum(out[name] * errors[name] for name in part.tensors)
            if now > 0:
                for name in part.tensors:
                    out[name] *= cost / now
    return out


@dataclass(frozen=True)
class Probe:
    """What it takes to measure: a model of floats, what is known of its inputs, an encoder and a text."""

    file: GGUFFile
    tensors: Sequence[Tensor]  # all that may get errors
    importance: Importance
    codec: Codec
    program: Path  # llama-perplexity
    text: Path
    folder: Path
    n_threads: int
    importance_of: frozenset[str]  # names of the tensors whose importances are used

    @property
    def n_context(self) -> int:
        """Tokens of a chunk."""
        return context_length(self.file)

    @property
    def n_chunks(self) -> int:
        """N_CHUNKS, or more that are shorter."""
        return N_CHUNKS * N_CONTEXT // self.n_context

    def parts(self) -> list[Probed]:
        return make_parts([t.name for t in self.tensors])

    def bytes_needed(self) -> int:
        """Of the disk: a copy of the model, the matrices in two bits, and logits, two bytes for each token of the vocabulary."""
        n_vocab = next((t.n_rows for t in self.file.tensors if t.name == "token_embd.weight"), 1 << 18)
        packed = sum(self._packed_bytes(t) for t in self.tensors)
        return sum(p.n_bytes for p in self.file.parts) + packed + self.n_chunks * self.n_context // 2 * 2 * (n_vocab + 8)

    def _packed_bytes(self, tensor: Tensor) -> int:
        return tensor.bytes_as(fit_to_row(tensor, PROBE))

    def describe(self) -> str:
        return (
            f"sensitivity: llama-perplexity runs {len(self.parts()) + 1} times over {self.n_chunks} chunks of {self.n_context} tokens, with "
            f"{self.bytes_needed() / MIB:,.0f} MiB of the disk in between; --sensitivity usual leaves it out"
        )

    def run(
        self, before: Measured, keep: Callable[[Measured], None], console: Console
    ) -> Measured:
        """Measures what `before`, of a run that was stopped, lacks. keep: called after each part with what there is by then. UserError
        where the disk or llama-perplexity fails."""
        try:
            with temporary_directory(self.folder, TEMPORARY, console.note) as folder:
                if (free := free_space(self.folder)) < self.bytes_needed():
                    raise UserError(
                        f"no space left on device: {self.folder} needs {self.bytes_needed() / MIB:,.0f} MiB to measure what errors cost, "
                        f"{free / MIB:,.0f} MiB are free; free some space, or pass --sensitivity usual"
                    )
                return self._run(folder, before, keep, console)
        except OSError as e:
            raise UserError(
                f"sensitivity: cannot write in {self.folder}: {e.strerror}; write OUT to another folder, or pass --sensitivity usual"
            ) from e

    def _run(
        self, folder: Path, before: Measured, keep: Callable[[Measured], None], console: Console
    ) -> Measured:
        text, logits = folder / "text.txt", folder / "logits.bin"
        text.write_bytes(end_of(read_end(self.text, TEXT_BYTES + 1)))
        copies = [folder / part.path.name for part in self.file.parts]
        for part, copy in zip(self.file.parts, copies, strict=True):
            shutil.copyfile(part.path, copy)
            copy.chmod(0o600)
        where = {t.name: (copy, t.offset) for part, copy in zip(self.file.parts, copies) for t in part.tensors}
        by_name = {t.name: t for t in self.tensors}
        first = copies[[p.path for p in self.file.parts].index(self.file.path)]
        parts = self.parts()
        with console.bar("sensitivity", len(parts) + 2, "run") as bar:
            self._perplexity(first, "-f", text, "--chunks", self.n_chunks, "--kl-divergence-base", logits)
            bar.update()
            errors, packed = self._encode(folder / "packed.bin")
            found = before.continued(errors, parts)
            if found.costs:
                console.note(f"an earlier run was stopped: going on after {len(found.costs)} of {len(parts)} parts")
            bar.update(1 + len(found.costs))
            for part in parts[len(found.costs) :]:
                for name in part.tensors:
                    self._write(by_name[name], *where[name], packed[name])
                found.costs.append((part, self._kld(first, logits)))
                keep(found)
                for name in part.tensors:
                    self._write(by_name[name], *where[name], None)
                bar.update()
        return found

    def _encode(self, path: Path) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Errors of the tensors in the type of the probe, and their rows in it: uint8 (n_rows, row_bytes), mapped from the file."""
        errors, packed = {}, {}
        store = np.memmap(path, np.uint8, "w+", shape=(sum(map(self._packed_bytes, self.tensors)),))
        position = 0
        with ThreadPoolExecutor(self.n_threads) as pool:
            for tensor in self.tensors:
                target = fit_to_row(tensor, PROBE)
                guide = self.importance.guide(tensor) if tensor.name in self.importance_of else Guide()
                guide = self.importance.with_metrics(guide, tensor, target, self.codec)

                def convert(chunk: tuple[int, int], tensor=tensor, target=target, guide=guide):
                    return chunk, self.codec.convert(self.file.rows(tensor, *chunk), tensor, chunk[0], target, guide)

                rows = store[position : position + self._packed_bytes(tensor)].reshape(tensor.n_rows, -1)
                position += rows.size
                total = Accuracy()
                for (start, n_rows), (data, accuracy) in map_in_order(pool, convert, row_chunks(tensor), 2 * self.n_threads):
                    rows[start : start + n_rows] = data
                    total += accuracy
                    guide.written(tensor, start + n_rows)
                errors[tensor.name] = total.relative if total.weighted is None else total.weighted
                packed[tensor.name] = rows
        return errors, packed

    def _write(self, tensor: Tensor, path: Path, offset: int, packed: np.ndarray | None) -> None:
        """A tensor of the copy as it decodes from its packed rows, or as it was."""
        with open(path, "r+b") as f:
            f.seek(offset)
            for start, n_rows in row_chunks(tensor):
                if packed is None:
                    f.write(self.file.rows(tensor, start, n_rows).tobytes())
                else:
                    weights = self.codec.decode(np.array(packed[start : start + n_rows]), fit_to_row(tensor, PROBE), tensor.ne[0])
                    f.write(self.codec.encode(weights, tensor.type).tobytes())

    def _perplexity(self, model: Path, *args) -> str:
        command = [self.program, "-m", model, "-c", self.n_context, "-b", self.n_context, "-t", self.n_threads, *args]
        code, log = run_logged([*map(str, command)], model.parent)
        if code:
            without = "pass --sensitivity usual to go on without"
            raise UserError("sensitivity: " + describe_failure("llama-perplexity", code, log, f"for {self.file.path} and {self.text}", without, without))
        return log

    def _kld(self, model: Path, logits: Path) -> float:
        log = self._perplexity(model, "--kl-divergence", "--kl-divergence-base", logits)
        found = re.search(r"Mean\s+KLD:\s+(-?[\w.]+)", log)
        if found is None or not np.isfinite(float(found[1])):
            raise UserError(
                f"sensitivity: llama-perplexity gave no KL divergence of {self.file.path}: {last_error(log)}; pass another text with "
                "--imatrix-from, or --sensitivity usual"
            )
        return float(found[1])
