"""How messages name tensors: by class where there are many, and in a given width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

# in one line
MAX_NAMES = 2
MAX_CLASSES, MAX_GROUPS, MAX_RANGES = 8, 4, 6
MAX_TENSORS, MAX_EXPERTS = 4, 8


def tensor_class(name: str) -> str:
    """The name without its layer and expert numbers: blk.*.attn_q.weight."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def short_class(name: str) -> str:
    """The same without the parts that most share: attn_q."""
    return tensor_class(name).removeprefix("blk.*.").removesuffix(".weight")


def layer_number(name: str) -> int | None:
    """3 of blk.3.attn_q.weight; None outside of layers."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else None


def describe_tensors(names: list[str], what: str = "") -> str:
    """"tensor blk.0.attn_q.weight" or "180 tensors in 6 classes", then what there is to say and, of several, which."""
    if len(names) == 1:
        return f"tensor {names[0]}{what}"
    n_classes = len(set(map(tensor_class, names)))
    return f"{len(names)} tensors in {n_classes} class{'es' if n_classes > 1 else ''}{what}: {list_tensors(names)}"


def list_tensors(names: list[str]) -> str:
    """The names of a few tensors; of many the classes, without the parts that most share, and their layers: "output; attn_q, attn_k in
    layers 0-3, 7"."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    layers: dict[str, set[int]] = {}  # by class
    for name in names:
        layer = layer_number(name)
        layers.setdefault(short_class(name), set()).update(() if layer is None else (layer,))
    groups: dict[tuple[int, ...], list[str]] = {}  # classes by their layers
    for of_class, found in layers.items():
        groups.setdefault(tuple(sorted(found)), []).append(of_class)
    said = [_first(classes, MAX_CLASSES) + (_in_layers(found) if found else "") for found, classes in groups.items()]
    n_more = sum(map(len, list(groups.values())[MAX_GROUPS:]))
    return "; ".join(said[:MAX_GROUPS]) + (f" and {n_more} class{'es' if n_more > 1 else ''} more" if n_more else "")


def _in_layers(layers: Sequence[int]) -> str:
    """" in layer 3" or " in layers 0-3, 7"; layers: ascending."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f" in layer{'s' if len(layers) > 1 else ''} {_first(ranges, MAX_RANGES)}"


def _first(items: Sequence[str], n: int) -> str:
    """The first n of them, and how many more there are."""
    return ", ".join(items[:n]) + (f" and {len(items) - n} more" if len(items) > n else "")


def list_experts(experts: dict[str, list[int]]) -> str:
    """Some numbers of experts of some tensors, by the tensor's name: "blk.0.ffn_up_exps.weight (1, 5) and 3 tensors more"."""

    said = [f"{name} ({_first([*map(str, found)], MAX_EXPERTS)})" for name, found in list(experts.items())[:MAX_TENSORS]]
    more = len(experts) - len(said)
    return ", ".join(said) + (f" and {more} tensor{'s' if more > 1 else ''} more" if more else "")


def unknown_type_message(flag: str, name: str, known: Iterable[str], remark: str = "") -> str:
    """The error for a type that is not known; remark: instead of a guess what was meant."""
    close = get_close_matches(name.lower(), known, 1)
    hint = remark or (f": did you mean {close[0]!r}?" if close else "")
    return f"{flag}: unknown type {name!r}{hint}{'' if hint.endswith('?') else ';'} known types: {', '.join(known)}"
