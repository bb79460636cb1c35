"""Context lengths of a model."""

from __future__ import annotations

from .gguf_file import GGUFFile

N_CONTEXT = 512  # tokens per chunk, as in llama.cpp's programs
POSITIONS = "position_embd.weight"


def trained_context(file: GGUFFile) -> int | None:
    """Return the model's training context; None if the file does not say."""
    length = file.value(f"{file.value('general.architecture', '')}.context_length")
    return length if type(length) is int and length > 0 else None


def context_length(file: GGUFFile) -> int:
    """Return the tokens per chunk: N_CONTEXT, or the training context if that is shorter."""
    return min(N_CONTEXT, trained_context(file) or N_CONTEXT)


def position_limit(file: GGUFFile) -> int | None:
    """Return the number of learned positions, beyond which llama.cpp aborts; None for models without them."""
    return trained_context(file) if any(t.name == POSITIONS for t in file.tensors) else None
