"""Types for each tensor under a limit: --target-size, --target-bpw, --target-kld (target.py).

Each matrix has some types to choose from; the relative squared error of each is measured on a sample of its rows, weighted with what
is known of its inputs. Times the sensitivity of the matrix (sensitivity.py) it is its share of the KL divergence.
Which types make the least of it under a limit of bytes, or the fewest bytes under a limit of it, is solved in _knapsack.py.

Errors and sensitivities are kept beside OUT, as MODEL.choice.json, for the next target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from gguf import GGMLQuantizationType, LlamaFileType
from tqdm import tqdm

from .._base.errors import UserError
from .._base.files import open_file, written_beside
from .._base.json import is_number, parse_json
from .._base.package import __version__
from .._base.signals import Stopped
from .._base.text import table
from .._base.threads import map_in_order
from .._base.types import WEIGHT_TYPES
from .._base.units import MIB
from .._encode.accuracy import Accuracy
from .._encode.codec import UNWEIGHTED_IN_NUMPY, Codec, Guide
from .._formats.gguf_file import GGUFFile, Tensor, pad, row_bytes
from .._formats.kept import kept_choice
from .._formats.names import tensor_class
from .._importance import calibration
from .._importance.importance import Importance
from .._native.programs import find_tool
from .._plan.plan import IMATRIX_TYPES, OUTPUT, PER_LAYER_TOKEN_EMBD, SOURCE_TYPES, TOKEN_EMBD, Choices, Plan, fit_to_row
from . import sensitivity as _sensitivity
from .knapsack import Solution, solve
from .sensitivity import Measured, Part, Probe
from .target import SENSITIVITIES, Target

T = GGMLQuantizationType
GROUPS, GROUP_ROWS = 4, 16  # of rows that stand for a tensor, spread over it
FORMAT = 1  # of the kept results
WRITING_SHARE = 0.05  # of the time in which errors are measured, for keeping them
HEADER_ROOM = 4096  # bytes for keys that OUT has and the input lacks: names of files, options
STAYS = "{} is enough for the types of the input: everything stays as it is"
PART_HEADER = 1024  # bytes of the header of a part but the first, beside the names of its tensors


@dataclass
class Item:
    """A weight matrix and the types that it may get."""

    index: int  # in the plan
    tensor: Tensor
    types: list[GGMLQuantizationType]
    is_named: bool = False  # by an option


def named_type(tensor: Tensor, choices: Choices, tied: bool) -> GGMLQuantizationType | None:
    """The type that an option names for it. tied: the embeddings serve as the output matrix."""
    is_embd = tensor.name in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD)
    by_pattern = next((o.type for o in choices.overrides if o.pattern.search(tensor.name)), None)
    if is_embd and choices.token_embd is not None and not (tensor.name == PER_LAYER_TOKEN_EMBD and by_pattern is not None):
        return choices.token_embd
    if tensor.name == OUTPUT and choices.output is not None:
        return choices.output
    return choices.output if by_pattern is None and tied and is_embd else by_pattern


def make_items(target: Target, plan: Plan, choices: Choices, codec: Codec) -> list[Item]:
    """The matrices of a plan in which each that no option names has the type that stands for all."""
    tied = all(t.name != OUTPUT for t in plan.tensors)
    items = []
    for i, (tensor, wanted, got) in enumerate(zip(plan.tensors, plan.wanted, plan.types, strict=True)):
        named = named_type(tensor, choices, tied)
        if named is not None and (wanted != tensor.type or got != tensor.type):
            if named != wanted:  # the plan's embeddings do not follow the output
                got = plan.wanted[i] = plan.types[i] = fit_to_row(tensor, named)
            items += [Item(i, tensor, [got], True)] if got != tensor.type else []
        elif wanted == choices.type:
            keeps = [] if target.types_are_listed or tensor.type not in SOURCE_TYPES else [tensor.type]
            items.append(Item(i, tensor, [*dict.fromkeys([*_fitting(tensor, target.types, codec), *keeps])]))
            if not items[-1].types:
                raise _none_usable(tensor, target.types, f"with rows of {tensor.ne[0]}" if codec.lib else "with the numpy encoder")
    return items


def _none_usable(tensor: Tensor, types: Sequence[GGMLQuantizationType], why: str) -> UserError:
    names = ", ".join(t.name.lower() for t in types)
    return UserError(f"--target-types: tensor {tensor.name} can have none of {names} {why}: add a type, such as q8_0")


def _fitting(tensor: Tensor, listed: Sequence[GGMLQuantizationType], codec: Codec) -> list[GGMLQuantizationType]:
    found = []
    for target in listed:
        with contextlib.suppress(UserError):  # it fits no such row, and has no fallback that does
            found.append(fit_to_row(tensor, target))
    return [t for t in dict.fromkeys(found) if codec.can_encode(t)]


def drop_unusable(items: list[Item], plan: Plan, codec: Codec) -> None:
    """Leaves out what cannot be made with the importances that there are. UserError if that is all."""
    for item in items:
        weighted = item.tensor.name in plan.importance
        usable = [
            t
            for t in item.types
            if t == item.tensor.type
            or not ((t in IMATRIX_TYPES and not weighted) or (weighted and codec.lib is None and t in UNWEIGHTED_IN_NUMPY))
        ]
        if not usable:
            raise _none_usable(item.tensor, item.types, "with the numpy encoder" if weighted else "without an importance matrix")
        item.types = usable


def n_bytes(tensor: Tensor, qtype: GGMLQuantizationType) -> int:
    return row_bytes(qtype, tensor.ne[0]) * tensor.n_rows


@dataclass(frozen=True)
class Limit:
    """What a target leaves for the matrices. alignment: to which the data of tensors are padded, where that counts."""

    target: Target
    n_elements: int
    fixed: int  # bytes of everything else
    alignment: int

    @classmethod
    def make(cls, target: Target, plan: Plan, items: list[Item], header: int, alignment: int) -> Limit:
        """header: bytes of the file before the data."""
        limit = cls(target, plan.n_elements(), 0, alignment if target.kind == "size" else 1)
        free = {item.index for item in items}
        others = [(t, q) for i, (t, q) in enumerate(zip(plan.tensors, plan.types, strict=True)) if i not in free]
        return replace(limit, fixed=sum(limit.weight(t, q) for t, q in others) + (header if target.kind == "size" else 0))

    def weight(self, tensor: Tensor, qtype: GGMLQuantizationType) -> int:
        """Bytes that count."""
        return pad(n_bytes(tensor, qtype), self.alignment)

    @property
    def n_bytes(self) -> float:
        """For the matrices; infinite where the target is no size."""
        value = {"size": self.target.value, "bpw": self.target.value * self.n_elements / 8}.get(self.target.kind, math.inf)
        return value - self.fixed

    def say(self, weight: float) -> str:
        """A size of the matrices as that of all, in the target's unit."""
        total = weight + self.fixed
        if self.target.kind == "bpw":
            return f"{math.ceil(total * 8 / self.n_elements * 1e4) / 1e4:g} bpw"
        return f"{total / MIB:,.2f} MiB ({int(total):,} bytes)"

    def smallest(self, items: list[Item]) -> int:
        return sum(min(self.weight(item.tensor, t) for t in item.types) for item in items)

    def check(self, items: list[Item], room: int = 0) -> None:
        """UserError if the target is below the smallest file. room: bytes that more keys may take."""
        if (least := self.smallest(items)) > self.n_bytes:
            named = ", or leave the types of single tensors out" if any(item.is_named for item in items) else ""
            raise UserError(
                f"--target-{self.target.kind} {self.target.text} is below the smallest possible, {self.say(least + room)}: take that at "
                f"the least, or add smaller types with --target-types{named}"
            )


def sample_error(
    file: GGUFFile, tensor: Tensor, target: GGMLQuantizationType, importance: Importance, codec: Codec, weighted: bool
) -> float:
    """Relative squared error of a sample of a tensor's rows in a type, weighted where something is known of the inputs."""
    if target == tensor.type:
        return 0.0
    guide = importance.guide(tensor) if weighted else Guide()
    guide = importance.with_metrics(guide, tensor, target, codec)
    groups = min(GROUPS, -(-tensor.n_rows // GROUP_ROWS))
    total = Accuracy()
    for i in range(groups):  # of equal parts of the rows, the middle
        first = max(0, (2 * i + 1) * tensor.n_rows // (2 * groups) - GROUP_ROWS // 2)
        n_rows = min(GROUP_ROWS, tensor.n_rows - first)
        total += codec.convert(file.rows(tensor, first, n_rows), tensor, first, target, guide)[1]
    return float(total.relative if total.weighted is None else total.weighted)


def _are_errors(found) -> bool:
    """True for errors by name: finite, or infinite for zeros that are stored as anything else."""
    return isinstance(found, dict) and all(v == math.inf or (is_number(v) and v >= 0) for v in found.values())


def _is_cost(found, probe_errors: dict[str, float]) -> bool:
    """True for a part's name, its tensors, whose errors are known, and its KL divergence."""
    if not isinstance(found, list) or len(found) != 3:
        return False
    name, tensors, cost = found
    is_part = isinstance(name, str) and isinstance(tensors, list) and all(isinstance(t, str) and t in probe_errors for t in tensors)
    return is_part and is_number(cost)


@dataclass
class Kept:
    """Content of MODEL.choice.json."""

    made_from: dict
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # by tensor and type
    text: dict = field(default_factory=dict)  # what the sensitivities were measured with
    probe_errors: dict[str, float] = field(default_factory=dict)  # by tensor
    costs: list[list] = field(default_factory=list)  # name of a part, its tensors, its KL divergence
    format: int = FORMAT

    @classmethod
    def read(cls, path: Path | None, made_from: dict) -> Kept:
        """What is there of the same model, importances, options and version; empty if it is of others or cannot be read."""
        try:
            found = cls(**parse_json(path.read_text())) if path is not None else cls(made_from)
        except (OSError, ValueError, TypeError):
            return cls(made_from)
        is_ours = (found.made_from, found.format) == (json.loads(json.dumps(made_from)), FORMAT)
        return found if is_ours and found.is_sound() else cls(made_from)

    def is_sound(self) -> bool:
        """False if a value is of another kind than the program writes: the file may have been changed by anyone."""
        return (
            isinstance(self.text, dict)
            and isinstance(self.errors, dict)
            and all(map(_are_errors, [*self.errors.values(), self.probe_errors]))
            and isinstance(self.costs, list)
            and all(_is_cost(cost, self.probe_errors) for cost in self.costs)
        )

    def write(self, path: Path | None) -> None:
        if path is None:
            return
        try:
            with written_beside(path) as part, open_file(part) as f:
                f.write(json.dumps(self.__dict__, indent=1).encode() + b"\n")
        except OSError as e:
            raise UserError(f"cannot write {path}: {e.strerror}; write OUT to another folder") from e

    def measured(self, used: dict) -> Measured:
        """What errors cost, as far as it was measured with that text."""
        if self.text != used:
            return Measured()
        return Measured(self.probe_errors, [(Part(name, tuple(tensors)), cost) for name, tensors, cost in self.costs])

    def set_measured(self, used: dict, found: Measured) -> None:
        self.text, self.probe_errors = used, found.errors
        self.costs = [[part.name, list(part.tensors), cost] for part, cost in found.costs]


class Keeper:
    """Kept results with their file, for a run that may be killed at any time."""

    def __init__(self, kept: Kept, path: Path | None):
        """path: None where nothing is written."""
        self.kept, self._path, self._next = kept, path, 0.0

    def write(self) -> None:
        """UserError if it cannot be written."""
        began = time.monotonic()
        self.kept.write(self._path)
        now = time.monotonic()
        self._next = now + (now - began) / WRITING_SHARE

    def write_now_and_then(self) -> None:
        """The first time, and then so often that writing takes no more than its share of the time."""
        if time.monotonic() >= self._next:
            self.write()


@dataclass(frozen=True)
class Chosen:
    """What was decided, and why."""

    items: list[Item]
    types: list[GGMLQuantizationType]  # by item
    shares: list[float]  # of the KL divergence, by item
    is_measured: bool  # the sensitivities are the model's
    gap: float  # part of what was minimised that a better choice could save at most
    notes: list[str]

    def apply(self, plan: Plan) -> None:
        """The plan gets these types; tensors that options name keep theirs."""
        for item, qtype in zip(self.items, self.types, strict=True):
            if len(item.types) > 1 or plan.types[item.index] != qtype:
                plan.wanted[item.index] = plan.types[item.index] = qtype
        of_options = {item.tensor.name for item in self.items if item.is_named}
        plan.fallbacks = {
            f: left for f, names in plan.fallbacks.items() if (left := [n for n in names if n in of_options]) and f.got != f.wanted
        }

    @property
    def predicted(self) -> float:
        """KL divergence."""
        return math.fsum(self.shares)

    def table(self, width: int) -> list[str]:
        """Lines: what each class and type is predicted to cost."""
        classes: dict[tuple[str, str], list[float]] = {}
        for item, qtype, share in zip(self.items, self.types, self.shares, strict=True):
            classes.setdefault((tensor_class(item.tensor.name), qtype.name.lower()), []).append(share)
        rows = [
            (name, f"{of_type:<8} {len(of_class):5d} {math.fsum(of_class):13.6f}") for (name, of_type), of_class in classes.items()
        ]
        return table("tensors", f"{'type':<8} {'count':>5} {'predicted KLD':>13}", rows, width)

    def record(self) -> dict:
        return {
            "predicted_kl_divergence": self.predicted,
            "sensitivities": SENSITIVITIES[0 if self.is_measured else 1],
            "optimality_gap": self.gap,
        }

    def describe(self) -> list[str]:
        """For the summary."""
        of = "" if self.is_measured else ", with the sensitivities of another model: it may be ten times too small or too large"
        best = f"a better choice could save {self.gap:.2%} at most" if self.gap else "no choice of these types is better by the model"
        return [f"predicted KL divergence {self.predicted:.4g}{of}; {best}", *self.notes]

    def file_type(self) -> tuple[str | None, int]:
        """Name of the type of ours that most weights of the blocks have, if one has some; general.file_type."""
        counts: dict[GGMLQuantizationType, int] = {}
        for item, qtype in zip(self.items, self.types, strict=True):
            in_blocks = item.tensor.name.startswith("blk.")
            counts[qtype] = counts.get(qtype, 0) + (item.tensor.n_elements if in_blocks else 0)
        ours = {q: n for q, n in counts.items() if q.name.lower() in WEIGHT_TYPES and n}
        if ours:
            name = max(ours, key=ours.get).name.lower()
            return name, int(WEIGHT_TYPES[name].id)
        most = max(counts, key=counts.get).name if counts else "F16"
        named = (getattr(LlamaFileType, name, None) for name in (f"MOSTLY_{most}", f"MOSTLY_{most}_M", f"MOSTLY_{most}_S", f"ALL_{most}"))
        return None, int(next((f for f in named if f is not None), LlamaFileType.GUESSED))


def choose_at_once(target: Target, file: GGUFFile, plan: Plan, items: list[Item]) -> Chosen | None:
    """What needs no measurement: everything stays as it is. UserError if the target is surely below the smallest file."""
    limit = Limit.make(target, plan, items, calibration.header_bytes(file), file.alignment)
    room = HEADER_ROOM if target.kind == "size" else 0
    limit.check(items, room)
    if not items:
        return Chosen([], [], [], True, 0.0, ["options name the types of all matrices: nothing is left to choose"])
    types = [item.tensor.type for item in items]
    fits = target.kind != "kld" and sum(limit.weight(item.tensor, item.tensor.type) for item in items) + room <= limit.n_bytes
    if fits and all(t in item.types for item, t in zip(items, types, strict=True)):
        return Chosen(items, types, [0.0] * len(items), True, 0.0, [STAYS.format(target.option.replace("=", " "))])
    return None


def choose(
    args: argparse.Namespace, target: Target, file: GGUFFile, plan: Plan, items: list[Item], header: int, importance: Importance,
    codec: Codec, folder: Path | None, n_threads: int, say: Callable[[str], None], warn: Callable[[str], None], show_bar: bool,
) -> Chosen:
    """The types of the items. plan: with the importances that are used; header: bytes of OUT before its data; folder: of OUT, None
    for a dry run, which runs no model and keeps nothing. UserError where the target cannot be reached."""
    drop_unusable(items, plan, codec)
    limit = Limit.make(target, plan, items, header, file.alignment)
    limit.check(items)
    kept_path, kept = _find_kept(args, file, importance)
    if importance.matrix is None:
        warn("types are chosen by plain errors: nothing is known of the inputs of the matrices, which costs quality")
    keeper = Keeper(kept, None if folder is None else kept_path)
    try:
        _measure_errors(file, plan, items, keeper, importance, codec, n_threads, say, show_bar)
    except Stopped:
        keeper.write()  # what there is by now
        raise
    keeper.write()
    sensitivities, is_measured = _sensitivities(
        args, file, plan, items, keeper, importance, codec, folder, n_threads, say, warn, show_bar
    )

    options = []
    for item in items:
        of_item, sensitivity = kept.errors[item.tensor.name], sensitivities[item.tensor.name]
        options.append([(limit.weight(item.tensor, t), sensitivity * of_item[t.name.lower()]) for t in item.types])
    if target.kind == "kld":
        found = solve([[(cost, weight) for weight, cost in of_item] for of_item in options], target.value)
    else:
        found = solve(options, limit.n_bytes)
    if found is None:  # of sizes, limit.check() told
        least = sum(min(cost for _, cost in of_item) for of_item in options)
        raise UserError(
            f"--target-kld {target.text} is below the smallest possible, {_above(least)}: the types that may be chosen reach no less;"
            " add better ones with --target-types, or leave it and types of single tensors out"
        )
    shares = [sensitivities[item.tensor.name] * kept.errors[item.tensor.name][item.types[i].name.lower()]
              for item, i in zip(items, found.picks, strict=True)]
    types = [item.types[i] for item, i in zip(items, found.picks, strict=True)]
    return Chosen(items, types, shares, is_measured, found.gap, _notes(target, items, types, found, options))


def _above(value: float) -> str:
    """Four digits, rounded up."""
    step = 10.0 ** (math.floor(math.log10(value)) - 3) if value > 0 else 1.0
    return f"{math.ceil(value / step) * step:.4g}"


def _notes(
    target: Target, items: list[Item], types: list[GGMLQuantizationType], found: Solution, options: list[list[tuple[float, float]]]
) -> list[str]:
    if all(t == item.tensor.type for item, t in zip(items, types, strict=True)):
        return [STAYS.format(target.option.replace("=", " "))]
    best = sum(min(cost for _, cost in of_item) for of_item in options)
    reached = sum(of_item[i][1] for of_item, i in zip(options, found.picks, strict=True))
    if target.kind != "kld" and reached <= best:
        return [f"{target.option.replace('=', ' ')} is enough for the best of the types in all tensors: OUT is smaller"]
    return []


def _find_kept(args: argparse.Namespace, file: GGUFFile, importance: Importance) -> tuple[Path | None, Kept]:
    made_from = {
        "version": __version__,
        "model": [calibration.fingerprint(part.path, calibration.header_bytes(part)) for part in file.parts],
        "importance": [importance.kind, [calibration.fingerprint(p) for p in importance.paths()]],
        "encoder": [args.effort, args.itq3_levels],
    }
    path = None if args.output is None else Path(os.path.realpath(args.output)).with_name(kept_choice(file.stem))
    return path, Kept.read(path, made_from)


def _measure_errors(
    file: GGUFFile, plan: Plan, items: list[Item], keeper: Keeper, importance: Importance, codec: Codec, n_threads: int,
    say: Callable[[str], None], show_bar: bool,
) -> None:
    """Fills in the kept errors for all types of all items."""
    kept = keeper.kept
    missing = [
        (item.tensor, lacking)
        for item in items
        if (lacking := [t for t in item.types if t.name.lower() not in kept.errors.get(item.tensor.name, {})])
    ]
    if not missing:
        say("errors of all types were measured before: used again")
        return
    n_types = len({t for _, types in missing for t in types})
    say(f"errors of {n_types} type{'s' * (n_types > 1)} are measured on up to {GROUPS * GROUP_ROWS} rows of {len(missing)} tensors")

    def measure(job: tuple[Tensor, list[GGMLQuantizationType]]) -> dict[str, float]:
        tensor, types = job
        own = replace(importance, _last=(None, None))  # metrics of the last tensor are not shared between threads
        found = {t.name.lower(): sample_error(file, tensor, t, own, codec, tensor.name in plan.importance) for t in types}
        file.release(tensor, tensor.n_rows)
        importance.release(tensor)
        return found

    with ThreadPoolExecutor(n_threads) as pool, tqdm(total=len(missing), desc="errors", unit="tensor", disable=not show_bar) as bar:
        try:
            for (tensor, _), found in zip(missing, map_in_order(pool, measure, missing, 2 * n_threads), strict=True):
                kept.errors.setdefault(tensor.name, {}).update(found)
                keeper.write_now_and_then()
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _sensitivities(
    args: argparse.Namespace, file: GGUFFile, plan: Plan, items: list[Item], keeper: Keeper, importance: Importance, codec: Codec,
    folder: Path | None, n_threads: int, say: Callable[[str], None], warn: Callable[[str], None], show_bar: bool,
) -> tuple[dict[str, float], bool]:
    """By tensor, and whether they are this model's."""
    tensors = [item.tensor for item in items]
    usual = _sensitivity.usual([t.name for t in tensors])
    if args.sensitivity == "usual":
        return usual, False
    text = args.imatrix_from or calibration.TEXT
    program = find_tool("llama-perplexity")
    text_is_there = text.is_file()
    used = {"text": calibration.fingerprint(text) if text_is_there else {}, "chunks": _sensitivity.N_CHUNKS}
    before = keeper.kept.measured(used)
    if before.is_whole() and set(before.errors) >= {t.name for t in tensors}:
        say("what errors cost was measured before: used again")
        return _sensitivity.fit(_sensitivity.usual(list(before.errors)), before.errors, before.costs), True
    why = (
        "--dry-run runs no model" if folder is None
        else "--no-calibration runs no model" if args.no_calibration
        else "llama-perplexity is not in the package" if program is None
        else "the built library is not in use" if codec.lib is None
        else "tensors of the model are quantized already" if any(t.type not in SOURCE_TYPES for t in tensors)
        else f"{text} is not there" if not text_is_there
        else None
    )
    if why:
        (warn if program is None and folder is not None else say)(f"what errors cost is taken from another model: {why}")
        return usual, False
    probe = Probe(file, tensors, importance, codec, program, text, folder, n_threads, frozenset(plan.importance))
    say(probe.describe())

    def keep(found: Measured) -> None:
        keeper.kept.set_measured(used, found)
        keeper.write()

    found = probe.run(before, keep, say, show_bar)
    return _sensitivity.fit(usual, found.errors, found.costs), True
