"""Run llama.cpp's converter of LoRA adapters."""

from __future__ import annotations

import os
import subprocess
import sys

from .._base.errors import UserError
from .checkpoint import CONVERTER, NEEDED, require_extra

SCRIPT = CONVERTER.with_name("convert_lora_to_gguf.py")


def run() -> None:
    """Run convert_lora_to_gguf.py as an entry point of pyproject.toml. SystemExit with one line if it cannot run."""
    try:
        if not SCRIPT.is_file():
            raise UserError(f"{SCRIPT} is missing: reinstall ggml-ext")
        require_extra(NEEDED, SCRIPT.name)
    except UserError as e:
        raise SystemExit(f"error: {e}") from e
    env = {k: v for k, v in os.environ.items() if k != "NO_LOCAL_GGUF"}
    sys.exit(subprocess.call([sys.executable, str(SCRIPT), *sys.argv[1:]], env=env))
