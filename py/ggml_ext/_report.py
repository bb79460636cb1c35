"""What the quantizer prints: a line for each tensor, tables by class, and what came out of what was asked for.

Lines fit the terminal, or 80 columns where there is none or a narrower one, for types and sizes as models have them; long
names are shortened in the middle.
"""

from __future__ import annotations

import shutil
import sys

from gguf import GGMLQuantizationType

from ._accuracy import Accuracy
from ._gguf_file import Tensor, row_bytes
from ._names import shorten, tensor_class
from ._plan import Choices, Plan
from ._writer import MIB

MIN_COLUMNS = 80


def columns() -> int:
    """Width of what standard output is shown on."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return max(MIN_COLUMNS, shutil.get_terminal_size().columns) if is_terminal else MIN_COLUMNS


def _mib(n_bytes: int) -> str:
    """Three significant digits, or three decimals."""
    size = n_bytes / MIB
    return f"{size:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def _new_bytes(tensor: Tensor, qtype: GGMLQuantizationType) -> int:
    return row_bytes(qtype, tensor.ne[0]) * tensor.n_rows


def tensor_lines(plan: Plan, width: int) -> list[str]:
    """"[ 12/291] blk.0.attn_q.weight      2048x2048  f16 -> itq3_t    8.00 -> 1.53 MiB" for each tensor."""
    rows = []
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        types, sizes = tensor.type.name.lower(), f"{_mib(tensor.n_bytes)} MiB"
        if target != tensor.type:
            types += f" -> {target.name.lower()}"
            sizes = f"{_mib(tensor.n_bytes)} -> {_mib(_new_bytes(tensor, target))} MiB"
        rows.append((tensor.name, "x".join(map(str, tensor.ne)), types, sizes))
    types_width, sizes_width = (max((len(row[i]) for row in rows), default=0) for i in (2, 3))
    digits = len(str(len(rows)))
    lines = []
    for i, (name, shape, types, sizes) in enumerate(rows, 1):
        start, end = f"[{i:{digits}}/{len(rows)}] ", f" {shape}  {types:<{types_width}}  {sizes:>{sizes_width}}"
        room = max(width - len(start) - len(end), 12)
        lines.append(f"{start}{shorten(name, room):<{room}}{end}")
    return lines


def _table(title: str, heading: str, rows: list[tuple[str, str]], width: int) -> list[str]:
    """Lines of a name, shortened to what the other columns leave, and those."""
    room = width - len(heading) - 2
    rows = [(shorten(name, room), others) for name, others in [(title, heading), *rows]]
    name_width = max(len(name) for name, _ in rows)
    return ["", *(f"{name:<{name_width}}  {others}" for name, others in rows)]


def _size_table(plan: Plan, width: int) -> list[str]:
    """Counts and sizes by class and type."""
    classes: dict[tuple[str, str], list[int]] = {}
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        counts = classes.setdefault((tensor_class(tensor.name), target.name.lower()), [0, 0, 0])
        counts[:] = counts[0] + 1, counts[1] + tensor.n_elements, counts[2] + _new_bytes(tensor, target)
    rows = [
        (name, f"{type_name:<8} {count:5d} {weights:15,d} {size / MIB:10.3f} {size * 8 / weights:7.4g}")
        for (name, type_name), (count, weights, size) in classes.items()
    ]
    return _table("tensors", f"{'type':<8} {'count':>5} {'weights':>15} {'MiB':>10} {'bpw':>7}", rows, width)


def _accuracy_table(plan: Plan, accuracies: list[Accuracy], width: int) -> list[str]:
    """Errors of the tensors that changed their type, by class and type."""
    classes: dict[tuple[str, str], Accuracy] = {}
    for tensor, target, accuracy in zip(plan.tensors, plan.types, accuracies, strict=True):
        if target != tensor.type:
            key = tensor_class(tensor.name), target.name.lower()
            classes[key] = classes.get(key, Accuracy()) + accuracy
    if not classes:
        return []
    rows = [(name, f"{type_name:<8} {a.relative:22.6f} {a.epsilon:14.6g}") for (name, type_name), a in classes.items()]
    return _table("tensors", f"{'type':<8} {'relative squared error':>22} {'largest error':>14}", rows, width)


def _outcome(plan: Plan, choices: Choices) -> list[str]:
    """What was asked for and what came out; one line if they are the same."""
    in_all = f"{plan.size_after() * 8 / max(plan.n_elements(), 1):.2f} bpw in all"
    asked, got = plan.blocks_bpw(plan.wanted), plan.blocks_bpw(plan.types)
    blocks = "" if got is None else f"{got:.5g} bpw in the blocks, "
    if not plan.fallbacks:
        return ["", f"{choices.name} as asked: {blocks}{in_all}"]
    lengths = sorted({f.n_per_row for f in plan.fallbacks})
    return [
        "",
        f"asked for {choices.name}{'' if asked is None else f', {asked:.5g} bpw'}; got {blocks}{in_all}",
        f"{len(plan.fallback_names)} of {plan.n_matrices} matrices fell back for their rows of "
        f"{', '.join(map(str, lengths))}; --no-fallback refuses that",
    ]


def summary(
    plan: Plan, choices: Choices, width: int, accuracies: list[Accuracy] | None = None, seconds: float = 0
) -> str:
    """Tables by class and type of tensor, totals, and the outcome. accuracies: None for a dry run."""
    n, before, after = plan.n_elements(), plan.size_before(), plan.size_after()
    lines = [
        *_size_table(plan, width),
        "",
        f"model size  = {before / MIB:8.2f} MiB ({before * 8 / max(n, 1):.2f} BPW)",
        f"quant size  = {after / MIB:8.2f} MiB ({after * 8 / max(n, 1):.2f} BPW)",
    ]
    if accuracies is not None:
        lines += _accuracy_table(plan, accuracies, width)
        lines.append(
            f"quantized {n / 1e6:,.1f} M weights in {seconds:.1f} s ({n / 1e6 / max(seconds, 1e-9):,.1f} M weights/s)"
        )
    return "\n".join(lines + _outcome(plan, choices))


def fallback_warnings(plan: Plan) -> list[str]:
    """One line for each length of rows and pair of types."""
    return [fallback.describe(names) for fallback, names in plan.fallbacks.items()]
