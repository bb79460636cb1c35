"""llama.cpp's programs, which lie in the package beside the libraries they need, as commands of the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BIN = Path(__file__).parent / "bin"


def find_tool(name: str) -> Path | None:
    """Path of a program of the package, such as "llama-server"; None if it was not built."""
    path = BIN / (name + (".exe" if sys.platform == "win32" else ""))
    return path if path.exists() else None


def tool_path(name: str) -> Path:
    """find_tool(), or SystemExit with one line."""
    path = find_tool(name)
    if path is None:
        raise SystemExit(f"error: {name} is not in {BIN}: ggml-ext was installed without its native part; reinstall it")
    return path


def run() -> None:
    """Entry point of every command in pyproject.toml's [project.scripts]: becomes the program of the same name."""
    name = Path(sys.argv[0]).name.removesuffix(".exe")
    path = str(tool_path({"rpc-server": "ggml-rpc-server"}.get(name, name)))
    if sys.platform == "win32":
        import subprocess

        sys.exit(subprocess.call([path, *sys.argv[1:]]))
    os.execv(path, [path, *sys.argv[1:]])
