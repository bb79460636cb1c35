"""llama-quantize on any model, for files that live as long as a run."""

from __future__ import annotations

from pathlib import Path

from .process import describe_failure, run_logged


def requantize(program: Path, source: Path, out: Path, file_type: str, n_threads: int) -> str | None:
    """Writes the model in a file type by llama-quantize's name; what went wrong, None for nothing."""
    command = [program, "--allow-requantize", source, out, file_type, n_threads]
    code, log = run_logged([*map(str, command)], Path())
    return describe_failure("llama-quantize", code, log, f"for {source} as {file_type.lower()}") if code else None
