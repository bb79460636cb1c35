"""The command that makes a file again, as a model card shows it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from .._base.encoding import to_argument

# what changes nothing in the file, and what is nobody else's business
NOT_SHOWN = {
    "input", "output", "threads", "force", "report", "verify", "dry_run", "model_card", "hf_token", "keep_gguf", "memory", "encoder",
    "n_gpu_layers", "device", "rpc", "upload",
}


def shown_command(module: str, asked) -> str:
    """asked: the options of the command, a dataclass with a field for each flag. Names of files without their folders."""
    words = ["python", "-m", f"ggml_ext.{module}"]
    words += [to_argument(path.name) for path in (asked.input, asked.output) if path is not None]
    for option in dataclasses.fields(asked):
        value = getattr(asked, option.name)
        if option.name in NOT_SHOWN or value == option.default:
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            shown = to_argument(one.name) if isinstance(one, Path) else str(one)
            words += [f"--{option.name.replace('_', '-')}", *([] if one is True else [shown])]
    return shlex.join(words)
