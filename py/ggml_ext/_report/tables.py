"""What quantize and export print: a line for each tensor, tables by class, and what came out of what was asked for.

Lines fit the terminal, or 80 columns where there is none or a narrower one, for types and sizes as models have them; long
names are shortened in the middle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf import GGMLQuantizationType

from .._base.text import format_table, shorten
from .._base.types import WEIGHT_TYPES
from .._base.units import MIB
from .._encode.accuracy import Accuracy
from .._formats.names import describe_tensors, short_class, tensor_class
from .._plan.plan import Choices, Fallback, Plan, stock_fallback

if TYPE_CHECKING:
    from .._allocation.choice import Chosen

WARN_ABOVE = 3  # times the usual error of a type


def _mib(n_bytes: int) -> str:
    """Three significant digits, or three decimals."""
    size = n_bytes / MIB
    return f"{size:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def tensor_lines(plan: Plan, width: int) -> list[str]:
    """"[ 12/291] blk.0.attn_q.weight      2048x2048  f16 -> itq3_t    8.00 -> 1.53 MiB" for each tensor."""
    rows = []
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        types, sizes = tensor.type.name.lower(), f"{_mib(tensor.n_bytes)} MiB"
        if target != tensor.type:
            types += f" -> {target.name.lower()}"
            sizes = f"{_mib(tensor.n_bytes)} -> {_mib(tensor.bytes_as(target))} MiB"
        rows.append((tensor.name, "x".join(map(str, tensor.ne)), types, sizes))
    types_width, sizes_width = (max((len(row[i]) for row in rows), default=0) for i in (2, 3))
    digits = len(str(len(rows)))
    lines = []
    for i, (name, shape, types, sizes) in enumerate(rows, 1):
        start, end = f"[{i:{digits}}/{len(rows)}] ", f" {shape}  {types:<{types_width}}  {sizes:>{sizes_width}}"
        room = max(width - len(start) - len(end), 12)
        lines.append(f"{start}{shorten(name, room):<{room}}{end}")
    return lines


def _size_table(plan: Plan, width: int) -> list[str]:
    """Counts and sizes by class and type."""
    classes: dict[tuple[str, str], list[int]] = {}
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        counts = classes.setdefault((tensor_class(tensor.name), target.name.lower()), [0, 0, 0])
        counts[:] = counts[0] + 1, counts[1] + tensor.n_elements, counts[2] + tensor.bytes_as(target)
    rows = [
        (name, f"{type_name:<8} {count:5d} {weights:15,d} {size / MIB:10.3f} {size * 8 / weights:7.4g}")
        for (name, type_name), (count, weights, size) in classes.items()
    ]
    return format_table("tensors", f"{'type':<8} {'count':>5} {'weights':>15} {'MiB':>10} {'bpw':>7}", rows, width)


def _accuracy_table(plan: Plan, accuracies: list[Accuracy], width: int) -> list[str]:
    """Errors of the tensors that changed their type, by class and type."""
    classes: dict[tuple[str, str], Accuracy] = {}
    for tensor, target, accuracy in zip(plan.tensors, plan.types, accuracies, strict=True):
        if target != tensor.type:
            key = tensor_class(tensor.name), target.name.lower()
            classes[key] = classes.get(key, Accuracy()) + accuracy
    if not classes:
        return []
    is_weighted, has_targets = any(a.weighted is not None for a in classes.values()), any(a.to_target is not None for a in classes.values())
    # shorter with a column more, so that usual names fit
    title = "rel. sq. err." if is_weighted else "relative squared error"

    def columns_of(type_name: str, a: Accuracy) -> str:
        more = [value for is_shown, value in ((is_weighted, a.weighted), (has_targets, a.to_target)) if is_shown]
        shown = "".join(f" {'' if value is None else format(value, '.6f'):>9}" for value in more)
        return f"{type_name:<8} {a.relative:{len(title)}.6f}{shown} {a.epsilon:14.6g}"

    rows = [(name, columns_of(type_name, a)) for (name, type_name), a in classes.items()]
    heading = f"{'type':<8} {title}{'  weighted' if is_weighted else ''}{' to target' if has_targets else ''} {'largest error':>14}"
    return format_table("tensors", heading, rows, width)


def _dead_line(dead: dict[str, tuple[int, int]]) -> list[str]:
    """"dead inputs = 1,024 of 3,072 columns of ffn_gate, ffn_up; ..." if there are any, by classes of tensors."""
    classes: dict[str, tuple[int, int]] = {}
    for name, (n, total) in dead.items():
        key = short_class(name)
        before = classes.get(key, (0, 0))
        classes[key] = before[0] + n, before[1] + total
    groups: dict[tuple[int, int], list[str]] = {}  # of classes that share their inputs
    for name, counts in classes.items():
        if counts[0]:
            groups.setdefault(counts, []).append(name)
    said = [f"{n:,} of {total:,} columns of {', '.join(names)}" for (n, total), names in groups.items()]
    return [f"dead inputs = {'; '.join(said)}"] if said else []


def _outcome(plan: Plan, choices: Choices) -> list[str]:
    """What was asked for and what came out; one line if they are the same."""
    in_all = f"{plan.size_after() * 8 / max(plan.n_elements(), 1):.2f} bpw in all"
    asked, got = plan.layers_bpw(plan.wanted), plan.layers_bpw(plan.types)
    blocks = "" if got is None else f"{got:.5g} bpw in the layers, "
    if not plan.fallbacks and not plan.inaccurate:
        return ["", f"{choices.asked} as asked: {blocks}{in_all}"]
    lines = ["", f"asked for {choices.asked}{'' if asked is None else f', {asked:.5g} bpw'}; got {blocks}{in_all}"]
    lines += _fallback_outcomes(plan)
    for (wanted, got), names in plan.inaccurate.items():
        lines.append(describe_tensors(names, f": {got.name.lower()} instead of {wanted.name.lower()} for the errors"))
    return lines


def _fallback_outcomes(plan: Plan) -> list[str]:
    """A line for each pair of our own types and one for all that fell back to stock types."""
    groups: dict[str, list[Fallback]] = {}
    for f in plan.fallbacks:
        what = "fell back" if f.is_loss else f"took {f.got.name.lower()} in place of {f.wanted.name.lower()}"
        groups.setdefault(what, []).append(f)
    lines = []
    for what, of_group in groups.items():
        n = sum(len(plan.fallbacks[f]) for f in of_group)
        lengths = ", ".join(map(str, sorted({f.n_per_row for f in of_group})))
        refused = "" if all(f.is_same_code for f in of_group) else "; --no-fallback refuses that"
        lines.append(f"{n} of {plan.n_matrices} matrices {what} for their rows of {lengths}{refused}")
    return lines


def summary(
    plan: Plan, choices: Choices, width: int, importance: str, accuracies: list[Accuracy] | None = None, seconds: float = 0,
    chosen: Chosen | None = None, dead: dict[str, tuple[int, int]] | None = None,
) -> str:
    """Tables by class and type of tensor, totals, and the outcome. importance: what was used; accuracies: None for a dry run;
    chosen: what a target led to; dead: as Importance.dead_columns()."""
    n, before, after = plan.n_elements(), plan.size_before(), plan.size_after()
    lines = [
        *_size_table(plan, width),
        "",
        f"model size  = {before / MIB:8.2f} MiB ({before * 8 / max(n, 1):.2f} BPW)",
        f"quant size  = {after / MIB:8.2f} MiB ({after * 8 / max(n, 1):.2f} BPW)",
        f"importance  = {importance}",
        *_dead_line(dead or {}),
    ]
    if accuracies is not None:
        lines += _accuracy_table(plan, accuracies, width)
        lines.append(
            f"quantized {n / 1e6:,.1f} M weights in {seconds:.1f} s ({n / 1e6 / max(seconds, 1e-9):,.1f} M weights/s)"
        )
    if chosen is not None:
        lines += chosen.table(width)
    return "\n".join(lines + _outcome(plan, choices) + (chosen.describe() if chosen is not None else []))


def error_warnings(plan: Plan, accuracies: list[Accuracy]) -> list[str]:
    """One line for each of our types that has tensors with errors far above the usual one."""
    found: dict[GGMLQuantizationType, dict[str, float]] = {}
    for tensor, target, accuracy in zip(plan.tensors, plan.types, accuracies, strict=True):
        if target != tensor.type and accuracy.exceeds_usual(target, WARN_ABOVE):
            found.setdefault(target, {})[tensor.name] = accuracy.judged
    lines = []
    for target, errors in found.items():
        info = WEIGHT_TYPES[target.name.lower()]
        said = f": relative squared error up to {max(errors.values()):.3g} as {info.name}, usual {info.usual_rel_mse:g}"
        lines.append(f"{describe_tensors(list(errors), said)}; --fallback-above {WARN_ABOVE} stores such as "
                     f"{stock_fallback(target).name.lower()}")
    return lines


def fallback_lines(plan: Plan) -> list[str]:
    """One line for each length of rows and pair of types: a note where it is no loss, else a warning."""
    return [f"{'warning' if f.is_loss else 'note'}: {f.describe(names)}" for f, names in plan.fallbacks.items()]
