"""Names of the files that a run caches next to OUT for the next one."""

from __future__ import annotations

from collections.abc import Sequence


def imatrix_cache_name(stem: str, layers: Sequence[int] | None = None) -> str:
    """Return the name of a model's cached imatrix. layers: those that it covers, None for all."""
    return f"{stem}.imatrix{'' if layers is None else f'.layers-{layers[0]}-{layers[-1]}'}.gguf"


def logits_cache_name(stem: str) -> str:
    """Return the name of a model's cached logits."""
    return f"{stem}.logits.bin"


def choice_cache_name(stem: str) -> str:
    """Return the name of a model's cached sensitivities."""
    return f"{stem}.choice.json"
