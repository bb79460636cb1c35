"""How many tokens a model is run on at once."""

from __future__ import annotations

from .gguf_file import GGUFFile

N_CONTEXT = 512  # tokens of a chunk, as in llama.cpp's programs
POSITIONS = "position_embd.weight"


def trained_context(file: GGUFFile) -> int | None:
    """Tokens that a model was trained with at most, where the file says so."""
    found = file.value(f"{file.value('general.architecture', '')}.context_length")
    return found if type(found) is int and found > 0 else None


def context_length(file: GGUFFile) -> int:
    """Tokens of a chunk: no more than the model was trained with."""
    return min(N_CONTEXT, trained_context(file) or N_CONTEXT)


def position_limit(file: GGUFFile) -> int | None:
    """Tokens after which a model with learned positions has none left, and llama.cpp ends; None for other models."""
    return trained_context(file) if any(t.name == POSITIONS for t in file.tensors) else None
