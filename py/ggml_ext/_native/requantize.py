"""llama-quantize on a quantized model, for temporary files."""

from __future__ import annotations

from pathlib import Path

from .process import describe_failure, run_logged


def requantize(program: Path, source: Path, out: Path, file_type: str, n_threads: int) -> str | None:
    """Write the model in a file type of llama-quantize; returns what went wrong, or None."""
    command = [program, "--allow-requantize", source, out, file_type, n_threads]
    code, log = run_logged([*map(str, command)], Path())
    return describe_failure("llama-quantize", code, log, f"for {source} as {file_type.lower()}") if code else None
