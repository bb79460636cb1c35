"""llama-quantize on any model, for files that live as long as a run."""

from __future__ import annotations

from pathlib import Path

from .process import last_error, run_logged


def requantize(program: Path, source: Path, out: Path, file_type: str, n_threads: int) -> str | None:
    """Writes the model in a file type by llama-quantize's name; what went wrong, None for nothing."""
    command = [program, "--allow-requantize", source, out, file_type, n_threads]
    code, log = run_logged([*map(str, command)], Path())
    return f"llama-quantize exited with {code} for {source} as {file_type.lower()}: {last_error(log)}" if code else None
