"""--verify: llama.cpp loads what was written and runs one token, before it takes the name OUT."""

from __future__ import annotations

from .._base.console import Console
from .._base.errors import UserError
from .._formats.gguf_file import GGUFFile
from .._native.graph import find_run_error
from .output import Output


def run_once(output: Output, source: GGUFFile, console: Console) -> bool:
    """Whether it was run: not where the source does not run either. UserError if it alone does not."""
    why = find_run_error([part.partial for part in output.parts])
    if why is None:
        return True
    if find_run_error([part.path for part in source.parts]) is None:
        raise UserError(
            f"--verify: {output.path} does not run where {source.path} does, and was not written: {why}; keep the type of tensors that "
            "--tensor-type names, or report this"
        )
    console.note(f"--verify: not run, since {source.path} does not run either: {why}")
    return False
