"""Format the output of quantize and export: a line per tensor, sizes and errors by class, and the outcome.

Long names are shortened in the middle, so that usual lines fit the terminal, or 80 columns without a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gguf import GGMLQuantizationType

from .._allocation.allocation import Allocation
from .._base.text import format_table, shorten
from .._base.types import WEIGHT_TYPES
from .._base.units import MIB
from .._calibration.importance import DeadColumns
from .._encode.accuracy import Accuracy, MeasuredTensor
from .._formats.hessians import HessianUse
from .._formats.names import describe_tensors, short_class, tensor_class
from .._formats.tensor_types import accurate_upstream_type
from .._plan.plan import Fallback, QuantizationPlan, TypeChoices

WARN_ABOVE = 3  # multiple of the usual NMSE of a type


def _mib(n_bytes: int) -> str:
    """Format with three significant digits, at most three decimals."""
    size = n_bytes / MIB
    n_decimals = 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    return f"{size:.{n_decimals}f}"


def tensor_lines(plan: QuantizationPlan, width: int) -> list[str]:
    """Format "[ 12/291] blk.0.attn_q.weight      2048x2048  f16 -> itq3_t    8.00 -> 1.53 MiB" for each tensor."""
    rows = []
    for t in plan.tensors:
        types, sizes = t.tensor.type.name.lower(), f"{_mib(t.tensor.n_bytes)} MiB"
        if t.is_changed:
            types += f" -> {t.type.name.lower()}"
            sizes = f"{_mib(t.tensor.n_bytes)} -> {_mib(t.n_bytes)} MiB"
        rows.append((t.name, "x".join(map(str, t.tensor.ne)), types, sizes))
    types_width, sizes_width = (max((len(row[i]) for row in rows), default=0) for i in (2, 3))
    digits = len(str(len(rows)))
    lines = []
    for i, (name, shape, types, sizes) in enumerate(rows, 1):
        start, end = f"[{i:{digits}}/{len(rows)}] ", f" {shape}  {types:<{types_width}}  {sizes:>{sizes_width}}"
        room = max(width - len(start) - len(end), 12)
        lines.append(f"{start}{shorten(name, room):<{room}}{end}")
    return lines


def _size_table(plan: QuantizationPlan, width: int) -> list[str]:
    """Tabulate number and size of tensors by class and type."""
    classes: dict[tuple[str, str], list[int]] = {}
    for t in plan.tensors:
        counts = classes.setdefault((tensor_class(t.name), t.type.name.lower()), [0, 0, 0])
        counts[:] = counts[0] + 1, counts[1] + t.tensor.n_elements, counts[2] + t.n_bytes
    rows = [
        (name, f"{type_name:<8} {count:5d} {weights:15,d} {size / MIB:10.3f} {size * 8 / weights:7.4g}")
        for (name, type_name), (count, weights, size) in classes.items()
    ]
    return format_table("tensors", f"{'type':<8} {'count':>5} {'weights':>15} {'MiB':>10} {'bpw':>7}", rows, width)


def _accuracy_table(tensors: Sequence[MeasuredTensor], width: int) -> list[str]:
    """Tabulate the errors of the tensors whose type changed, by class and type."""
    classes: dict[tuple[str, str], Accuracy] = {}
    for t in tensors:
        if t.planned.is_changed:
            key = tensor_class(t.planned.name), t.planned.type.name.lower()
            classes[key] = classes.get(key, Accuracy()) + t.accuracy
    if not classes:
        return []
    is_weighted, has_corrected = any(a.weighted_nmse is not None for a in classes.values()), any(a.corrected_nmse is not None for a in classes.values())

    def format_columns(type_name: str, a: Accuracy) -> str:
        optional = [value for is_shown, value in ((is_weighted, a.weighted_nmse), (has_corrected, a.corrected_nmse)) if is_shown]
        shown = "".join(f" {'' if value is None else format(value, '.6f'):>9}" for value in optional)
        return f"{type_name:<8} {a.nmse:8.6f}{shown} {a.epsilon:14.6g}"

    rows = [(name, format_columns(type_name, a)) for (name, type_name), a in classes.items()]
    heading = f"{'type':<8} {'NMSE':>8}{'  weighted' if is_weighted else ''}{' to target' if has_corrected else ''} {'largest error':>14}"
    return format_table("tensors", heading, rows, width)


def _dead_line(dead: Mapping[str, DeadColumns]) -> list[str]:
    """Format "dead inputs = 1,024 of 3,072 columns of ffn_gate, ffn_up; ...", or nothing."""
    classes: dict[str, DeadColumns] = {}
    for name, columns in dead.items():
        total = classes.get(short_class(name), DeadColumns(0, 0))
        classes[short_class(name)] = DeadColumns(total.n_dead + columns.n_dead, total.n_columns + columns.n_columns)
    groups: dict[DeadColumns, list[str]] = {}  # classes with the same inputs share a line
    for name, columns in classes.items():
        if columns.n_dead:
            groups.setdefault(columns, []).append(name)
    parts = [f"{c.n_dead:,} of {c.n_columns:,} columns of {', '.join(names)}" for c, names in groups.items()]
    return [f"dead inputs = {'; '.join(parts)}"] if parts else []


def hessian_record(uses: Mapping[str, HessianUse]) -> dict:
    """Describe the Hessian of each class of tensors for JSON: kind, columns, tokens per column, experts."""
    experts = _experts_by_class(uses)
    return {
        name: {"columns": use.width, "is_full": use.is_full, "tokens_per_column": round(use.tokens_per_column, 2), **experts.get(name, {})}
        for name, use in _hessians_by_class(uses).items()
    }


def _hessians_by_class(uses: Mapping[str, HessianUse]) -> dict[str, HessianUse]:
    """For each class of tensors, return the Hessian of the layer with the fewest tokens per column."""
    classes: dict[str, HessianUse] = {}
    for name, use in uses.items():
        classes[short_class(name)] = min(use, classes.get(short_class(name), use), key=lambda u: u.tokens_per_column)
    return classes


def _hessian_line(uses: Mapping[str, HessianUse]) -> list[str]:
    """Format "Hessians    = full (4,096 columns, 12.5 tokens per column) of attn_q, attn_k", with a line for each other kind."""
    groups: dict[str, list[str]] = {}
    for name, use in _hessians_by_class(uses).items():
        columns, tokens = f"{use.width:,} columns", f"{use.tokens_per_column:.3g} tokens per column"
        groups.setdefault(f"full ({columns}, {tokens})" if use.is_full else f"blocks of {columns} ({tokens})", []).append(name)
    lines = [f"{kind} of {', '.join(names)}" for kind, names in groups.items()]
    return [f"{'' if i else 'Hessians    =':<13} {line}" for i, line in enumerate(lines)]


def _experts_by_class(uses: Mapping[str, HessianUse]) -> dict[str, dict[str, int]]:
    """Count the experts of each class over all layers: all, those without tokens, and the tokens of the smallest and of the median one."""
    classes: dict[str, list[HessianUse]] = {}
    for name, use in uses.items():
        if use.n_experts > 1:
            classes.setdefault(short_class(name), []).append(use)
    return {
        name: {
            "experts": sum(u.n_experts for u in layers),
            "fewest_tokens": round(min(u.fewest for u in layers)),
            "median_tokens": round(min(u.tokens for u in layers)),  # of the layer with the fewest, as in the line of Hessians
            "experts_without_tokens": sum(u.n_unseen for u in layers),
        }
        for name, layers in classes.items()
    }


def _expert_line(uses: Mapping[str, HessianUse]) -> list[str]:
    """Format "experts     = fewest 3 tokens, median 1,067, 12 of 22,272 without, in ffn_gate_exps, ffn_up_exps", with a line for other tokens."""
    groups: dict[str, list[str]] = {}
    for name, experts in _experts_by_class(uses).items():
        n, fewest, median, unseen = experts.values()
        groups.setdefault(f"fewest {fewest:,} tokens, median {median:,}, {unseen:,} of {n:,} experts without tokens", []).append(name)
    return [f"{'' if i else 'experts     =':<13} {tokens}, in {', '.join(names)}" for i, (tokens, names) in enumerate(groups.items())]


def _outcome(plan: QuantizationPlan, choices: TypeChoices) -> list[str]:
    """Compare the result with the request; one line if they agree."""
    total = f"{plan.size_after() * 8 / max(plan.n_elements(), 1):.2f} bpw in total"
    bpw, requested_bpw, replaced = plan.layers_bpw(), plan.requested_layers_bpw(), plan.replaced()
    layers = "" if bpw is None else f"{bpw:.5g} bpw in the layers, "
    if not plan.fallbacks() and not replaced:
        return ["", f"{choices.request} as requested: {layers}{total}"]
    requested = "" if requested_bpw is None else f", {requested_bpw:.5g} bpw"
    lines = ["", f"requested {choices.request}{requested}; result: {layers}{total}"]
    lines += _fallback_outcomes(plan)
    for (before, after), names in replaced.items():
        lines.append(describe_tensors(names, f": {after.name.lower()} instead of {before.name.lower()} (--fallback-above)"))
    return lines


def _fallback_outcomes(plan: QuantizationPlan) -> list[str]:
    """Format a line per pair of ggml-ext types, and one for all fallbacks to upstream types."""
    fallbacks = plan.fallbacks()
    groups: dict[str, list[Fallback]] = {}
    for f in fallbacks:
        outcome = "use fallback types" if f.is_loss else f"use {f.type.name.lower()} instead of {f.requested.name.lower()}"
        groups.setdefault(outcome, []).append(f)
    lines = []
    for outcome, group in groups.items():
        n = sum(len(fallbacks[f]) for f in group)
        lengths = ", ".join(map(str, sorted({f.n_per_row for f in group})))
        hint = "" if all(f.is_same_code for f in group) else "; --no-fallback makes this an error"
        lines.append(f"{n} of {plan.n_matrices} matrices {outcome} (rows of {lengths}){hint}")
    return lines


def calibration_lines(importance: str, dead: Mapping[str, DeadColumns], hessians: Mapping[str, HessianUse]) -> list[str]:
    """Format the part of the summary about calibration.

    Args:
        importance: describes the statistics.
        dead: dead columns by tensor.
        hessians: by tensor.
    """
    return [f"importance  = {importance}", *_hessian_line(hessians), *_expert_line(hessians), *_dead_line(dead)]


def summary(
    plan: QuantizationPlan, choices: TypeChoices, width: int, *, calibration: Sequence[str], tensors: Sequence[MeasuredTensor] | None = None,
    seconds: float = 0, allocation: Allocation | None = None,
) -> str:
    """Summarize a run: tables by class and type, totals, and the outcome.

    Args:
        plan: the tensors and their types.
        choices: the options that choose types.
        width: of the terminal.
        calibration: calibration_lines().
        tensors: with their errors; None in a dry run.
        seconds: time of writing.
        allocation: of a target, if there is one.
    """
    n, before, after = plan.n_elements(), plan.size_before(), plan.size_after()
    lines = [
        *_size_table(plan, width),
        "",
        f"model size  = {before / MIB:8.2f} MiB ({before * 8 / max(n, 1):.2f} BPW)",
        f"quant size  = {after / MIB:8.2f} MiB ({after * 8 / max(n, 1):.2f} BPW)",
        *calibration,
    ]
    if tensors is not None:
        lines += _accuracy_table(tensors, width)
        lines.append(
            f"quantized {n / 1e6:,.1f} M weights in {seconds:.1f} s ({n / 1e6 / max(seconds, 1e-9):,.1f} M weights/s)"
        )
    if allocation is not None:
        lines += allocation.table(width)
    return "\n".join(lines + _outcome(plan, choices) + (allocation.describe() if allocation is not None else []))


def error_warnings(tensors: Sequence[MeasuredTensor]) -> list[str]:
    """Format a warning per ggml-ext type with tensors far above its usual NMSE."""
    groups: dict[GGMLQuantizationType, dict[str, float]] = {}
    for t in tensors:
        if t.planned.is_changed and t.accuracy.exceeds_usual(t.planned.type, WARN_ABOVE):
            groups.setdefault(t.planned.type, {})[t.planned.name] = t.accuracy.judged_nmse
    lines = []
    for qtype, errors in groups.items():
        info = WEIGHT_TYPES[qtype.name.lower()]
        described = f": NMSE up to {max(errors.values()):.3g} in {info.name}, usual {info.usual_rel_mse:g}"
        accurate = accurate_upstream_type(qtype).name.lower()
        lines.append(f"{describe_tensors(list(errors), described)}; --fallback-above {WARN_ABOVE} stores such tensors as {accurate}")
    return lines
