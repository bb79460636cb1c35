"""Names of the files that a run keeps beside OUT for the next one."""

from __future__ import annotations

from collections.abc import Sequence


def imatrix_cache_name(stem: str, layers: Sequence[int] | None = None) -> str:
    """Name of the importance matrix that a calibration keeps. stem: of the model; layers: those that it is of, None for all."""
    return f"{stem}.imatrix{'' if layers is None else f'.layers-{layers[0]}-{layers[-1]}'}.gguf"


def choice_cache_name(stem: str) -> str:
    """Name of the file with what was measured for a target."""
    return f"{stem}.choice.json"
