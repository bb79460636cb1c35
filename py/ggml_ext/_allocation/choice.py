"""Types for each tensor under a limit: --target-size, --target-bpw, --target-kld (target.py).

Each matrix has some types to choose from (items.py). The error of each (inquiry.py) times the sensitivity of the matrix
(sensitivity.py) is its share of the KL divergence. Which types make the least of it under a limit of bytes, or the fewest bytes under a
limit of it, is solved in knapsack.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gguf import GGMLQuantizationType, LlamaFileType

from .._base.errors import UserError
from .._base.text import format_table
from .._base.types import WEIGHT_TYPES
from .._base.units import MIB
from .._formats.gguf_file import GGUFFile, Tensor, header_bytes, pad
from .._formats.names import tensor_class
from .._plan.file_types import FILE_TYPES, FileType
from .._plan.plan import Plan
from .inquiry import Inquiry
from .items import Item, drop_unusable
from .knapsack import Solution, solve
from .target import SENSITIVITIES, Target

HEADER_ROOM = 4096  # bytes for keys that OUT has and the input lacks: names of files, options
STAYS = "{} is enough for the types of the input: everything stays as it is"


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
        return pad(tensor.bytes_as(qtype), self.alignment)

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
        return format_table("tensors", f"{'type':<8} {'count':>5} {'predicted KLD':>13}", rows, width)

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

    def file_type(self, placeholder: FileType, is_stock: bool) -> FileType:
        """Of the type of ours that most weights of the layers have, if one has some, else of the stock type of most. placeholder: what has
        been in its place; is_stock: the file is for every llama.cpp."""
        counts: dict[GGMLQuantizationType, int] = {}
        for item, qtype in zip(self.items, self.types, strict=True):
            in_blocks = item.tensor.name.startswith("blk.")
            counts[qtype] = counts.get(qtype, 0) + (item.tensor.n_elements if in_blocks else 0)
        ours = {q: n for q, n in counts.items() if q.name.lower() in WEIGHT_TYPES and n}
        if ours:
            return FILE_TYPES[max(ours, key=ours.get).name.lower()]
        qtype = max(counts, key=counts.get) if counts else GGMLQuantizationType.F16
        most = qtype.name
        named = (getattr(LlamaFileType, name, None) for name in (f"MOSTLY_{most}", f"MOSTLY_{most}_M", f"MOSTLY_{most}_S", f"ALL_{most}"))
        file_type = int(next((f for f in named if f is not None), LlamaFileType.GUESSED))
        return FileType(most.lower(), file_type, qtype) if is_stock else replace(placeholder, id=file_type)


def choose_at_once(target: Target, file: GGUFFile, plan: Plan, items: list[Item]) -> Chosen | None:
    """What needs no measurement: everything stays as it is. UserError if the target is surely below the smallest file."""
    limit = Limit.make(target, plan, items, header_bytes(file), file.alignment)
    room = HEADER_ROOM if target.kind == "size" else 0
    limit.check(items, room)
    if not items:
        return Chosen([], [], [], True, 0.0, ["options name the types of all matrices: nothing is left to choose"])
    types = [item.tensor.type for item in items]
    fits = target.kind != "kld" and sum(limit.weight(item.tensor, item.tensor.type) for item in items) + room <= limit.n_bytes
    if fits and all(t in item.types for item, t in zip(items, types, strict=True)):
        return Chosen(items, types, [0.0] * len(items), True, 0.0, [STAYS.format(target.option.replace("=", " "))])
    return None


def choose(target: Target, items: list[Item], header: int, inquiry: Inquiry) -> Chosen:
    """The types of the items. header: bytes of OUT before its data. UserError where the target cannot be reached."""
    plan = inquiry.plan
    drop_unusable(items, plan, inquiry.codec)
    limit = Limit.make(target, plan, items, header, inquiry.file.alignment)
    limit.check(items)
    errors, sensitivities, is_measured = inquiry.measure(items)

    def share(item: Item, qtype: GGMLQuantizationType) -> float:
        return sensitivities[item.tensor.name] * errors[item.tensor.name][qtype.name.lower()]

    options = [[(limit.weight(item.tensor, t), share(item, t)) for t in item.types] for item in items]
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
    types = [item.types[i] for item, i in zip(items, found.picks, strict=True)]
    shares = [share(item, t) for item, t in zip(items, types, strict=True)]
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
