"""Names of tensors and types in messages: by class or size if there are many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

# limits per line
MAX_NAMES = 2
MAX_CLASSES, MAX_GROUPS, MAX_RANGES = 8, 4, 6
MAX_TENSORS, MAX_EXPERTS = 4, 8


def tensor_class(name: str) -> str:
    """Replace layer and expert numbers by asterisks: blk.*.attn_q.weight."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def short_class(name: str) -> str:
    """Return the class without the prefix and suffix that most share: attn_q."""
    return tensor_class(name).removeprefix("blk.*.").removesuffix(".weight")


def layer_number(name: str) -> int | None:
    """Return 3 for blk.3.attn_q.weight; None for tensors outside layers."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else None


def has_own_inputs(name: str) -> bool:
    """Whether each expert of a token has its own input of this matrix, which its other matrices computed."""
    return ".ffn_down" in name


def describe_tensors(names: list[str], remark: str = "") -> str:
    """Return "tensor blk.0.attn_q.weight REMARK" or "180 tensors in 6 classes REMARK: LIST"."""
    if len(names) == 1:
        return f"tensor {names[0]}{remark}"
    n_classes = len(set(map(tensor_class, names)))
    return f"{len(names)} tensors in {n_classes} class{'es' if n_classes > 1 else ''}{remark}: {list_tensors(names)}"


def list_tensors(names: list[str]) -> str:
    """List the names of a few tensors, or the short classes and layers of many: "output; attn_q, attn_k in layers 0-3, 7"."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    layers: dict[str, set[int]] = {}  # by class
    for name in names:
        layer = layer_number(name)
        layers.setdefault(short_class(name), set()).update(() if layer is None else (layer,))
    groups: dict[tuple[int, ...], list[str]] = {}  # classes by their layers
    for class_name, numbers in layers.items():
        groups.setdefault(tuple(sorted(numbers)), []).append(class_name)
    phrases = [_list_first(classes, MAX_CLASSES) + (_list_layers(numbers) if numbers else "") for numbers, classes in groups.items()]
    n_more = sum(map(len, list(groups.values())[MAX_GROUPS:]))
    return "; ".join(phrases[:MAX_GROUPS]) + (f" and {n_more} class{'es' if n_more > 1 else ''} more" if n_more else "")


def _list_layers(layers: Sequence[int]) -> str:
    """Return " in layer 3" or " in layers 0-3, 7" for ascending numbers."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f" in layer{'s' if len(layers) > 1 else ''} {_list_first(ranges, MAX_RANGES)}"


def _list_first(items: Sequence[str], n: int) -> str:
    """List the first n items and the number of the others."""
    return ", ".join(items[:n]) + (f" and {len(items) - n} more" if len(items) > n else "")


def list_experts(experts: dict[str, list[int]]) -> str:
    """List experts by tensor, a few of each: "blk.0.ffn_up_exps.weight (1, 5) and 3 tensors more"."""
    phrases = [f"{name} ({_list_first([*map(str, numbers)], MAX_EXPERTS)})" for name, numbers in list(experts.items())[:MAX_TENSORS]]
    more = len(experts) - len(phrases)
    return ", ".join(phrases) + (f" and {more} tensor{'s' if more > 1 else ''} more" if more else "")


def list_types_by_bits(names: Iterable[str]) -> list[str]:
    """Return a line for each number of bits that the names of types state: "  3 bits: q3_k_s, q3_k_m"."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(int(re.findall(r"\d+", name)[0]), []).append(name)
    return [f"  {bits} bit{'s' if bits > 1 else ''}: {', '.join(groups[bits])}" for bits in sorted(groups)]


def unknown_type_message(flag: str, name: str, known: Iterable[str], remark: str = "") -> str:
    """Return the message for an unknown type, with a guess of the intended one or a remark in its place."""
    close = get_close_matches(name.lower(), known, 1)
    hint = remark or (f": did you mean {close[0]!r}?" if close else "")
    return f"{flag}: unknown type {name!r}{hint}{'' if hint.endswith('?') else ';'} known types: {', '.join(known)}"
