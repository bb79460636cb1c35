"""How messages name tensors: by class where there are many, and in a given width."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

# in one line
MAX_NAMES = 2
MAX_CLASSES = 8
MAX_TENSORS, MAX_EXPERTS = 4, 8


def tensor_class(name: str) -> str:
    """The name without its layer and expert numbers: blk.*.attn_q.weight."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def shorten(text: str, width: int) -> str:
    """text in at most width characters, the middle left out."""
    if len(text) <= width:
        return text
    kept = max(width - 2, 2)
    return f"{text[: kept - kept // 2]}..{text[len(text) - kept // 2 :]}"


def describe_tensors(names: list[str], what: str = "") -> str:
    """"tensor blk.0.attn_q.weight" or "180 tensors in 6 classes", then what there is to say and, of several, which."""
    if len(names) == 1:
        return f"tensor {names[0]}{what}"
    n_classes = len(set(map(tensor_class, names)))
    return f"{len(names)} tensors in {n_classes} class{'es' if n_classes > 1 else ''}{what}: {list_tensors(names)}"


def list_tensors(names: list[str]) -> str:
    """The names of a few tensors; of many the classes, without the parts that most share."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    classes = list(dict.fromkeys(tensor_class(n).removeprefix("blk.*.").removesuffix(".weight") for n in names))
    more = f" and {len(classes) - MAX_CLASSES} more" if len(classes) > MAX_CLASSES else ""
    return ", ".join(classes[:MAX_CLASSES]) + more


def list_experts(experts: dict[str, list[int]]) -> str:
    """Some numbers of experts of some tensors, by the tensor's name: "blk.0.ffn_up_exps.weight (1, 5) and 3 tensors more"."""

    def numbers(found: list[int]) -> str:
        more = f" and {len(found) - MAX_EXPERTS} more" if len(found) > MAX_EXPERTS else ""
        return ", ".join(map(str, found[:MAX_EXPERTS])) + more

    said = [f"{name} ({numbers(found)})" for name, found in list(experts.items())[:MAX_TENSORS]]
    more = len(experts) - len(said)
    return ", ".join(said) + (f" and {more} tensor{'s' if more > 1 else ''} more" if more else "")


def unknown_type(flag: str, name: str, known: Iterable[str], remark: str = "") -> str:
    """The error for a type that is not known; remark: instead of a guess what was meant."""
    close = get_close_matches(name.lower(), known, 1)
    hint = remark or (f": did you mean {close[0]!r}?" if close else "")
    return f"{flag}: unknown type {name!r}{hint}{'' if hint.endswith('?') else ';'} known types: {', '.join(known)}"
