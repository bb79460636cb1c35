"""Faults that a GPU or its driver can cause, injected into one check of a rehearsal: gpu_check.py --rehearse --inject FAULT.

The check sees real faults: a wrong result is computed from damaged weights, a hanging kernel is a stopped process, and memory runs out
because of a limit.
"""
from __future__ import annotations

import tempfile
from pathlib import Path

FAULTS = {"no-device": "the driver offers no such device", "missing-library": "a library of the backend cannot be loaded",
          "hang": "a kernel never ends", "out-of-memory": "memory cannot be allocated", "wrong-value": "a kernel computes a wrong value"}
VICTIM = "perplexity itq3_s"  # the check with the last three faults
HANG_SECONDS = 3
ADDRESS_SPACE_KB = 60_000  # less than the program's libraries and its model need


def inject(fault: str, check: str, command: list[str], limit: float) -> tuple[list[str], float]:
    """Return the command and its time limit, changed if this check is the victim."""
    if check != VICTIM or not any(Path(word).name == "llama-perplexity" for word in command):
        return command, limit
    if fault == "hang":
        return ["sh", "-c", 'kill -STOP $$; exec "$@"', "sh", *command], HANG_SECONDS
    if fault == "out-of-memory":
        return ["sh", "-c", f'ulimit -v {ADDRESS_SPACE_KB}; exec "$@"', "sh", *command], limit
    if fault == "wrong-value" and command[command.index("-ngl") + 1] != "0":  # not the reference
        i = command.index("-m") + 1
        return [*command[:i], str(damaged_copy(Path(command[i]))), *command[i + 1 :]], limit
    return command, limit


def damaged_copy(model: Path) -> Path:
    """Copy the model with the rows of one matrix in reverse order: wrong, but valid weights."""
    from ggml_ext._formats.gguf_file import GGUFFile

    content = bytearray(model.read_bytes())
    matrix = next(t for t in GGUFFile(model).tensors if "ffn_down" in t.name)
    row_bytes, start = matrix.n_bytes // matrix.n_rows, matrix.offset
    rows = [content[start + i * row_bytes : start + (i + 1) * row_bytes] for i in range(matrix.n_rows)]
    content[start : start + matrix.n_bytes] = b"".join(reversed(rows))
    with tempfile.NamedTemporaryFile(dir=model.parent, prefix="damaged-", suffix=".gguf", delete=False) as file:
        file.write(content)
    return Path(file.name)
