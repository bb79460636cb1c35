"""llama.cpp's programs, which lie in the package beside the libraries they need, as commands of the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from .._base.errors import UserError
from .._base.package import FOLDER

DIR_VARIABLE = "GGML_EXT_LIB_DIR"


def native_folder() -> Path:
    """Where libraries and programs are, all of one build: the folder that GGML_EXT_LIB_DIR names or, if that is unset, the package's."""
    named = os.environ.get(DIR_VARIABLE)
    return Path(os.path.abspath(named)) if named else FOLDER / "bin"


def library_conflict() -> str:
    """The variable that lets another build's libraries in before those of native_folder(), and the way out; nothing if none does."""
    ours = {path.name for path in native_folder().glob("lib*")}
    for variable in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
        for folder in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            names = [name for name in sorted(ours) if os.path.lexists(os.path.join(folder, name))]
            if names and not os.path.samefile(folder, native_folder()):
                return f"{variable} names {folder}, which has another {names[0]}: unset it, or leave that folder out"
    return ""


def find_tool(name: str) -> Path | None:
    """Path of a program, such as "llama-server"; None if it was not built with the package.

    UserError if GGML_EXT_LIB_DIR names a folder without it: the package's own may be of another build than the libraries there.
    """
    path = native_folder() / (name + (".exe" if sys.platform == "win32" else ""))
    if path.exists():
        return path
    if directory := os.environ.get(DIR_VARIABLE):
        raise UserError(f"{DIR_VARIABLE} is {directory}, which has no {path.name}: point it to the folder of a whole build or unset it")
    return None


def require_tool(name: str) -> Path:
    """find_tool(), or UserError."""
    path = find_tool(name)
    if path is None:
        raise UserError(f"{name} was not built with this package: reinstall ggml-ext with a C++ compiler, or from a wheel")
    return path


def device_options(n_gpu_layers: str | None, device: str | None, rpc: str | None) -> tuple[str, ...]:
    """Where the programs compute, as they take it."""
    given = {"-ngl": n_gpu_layers, "--device": device, "--rpc": rpc}
    return tuple(word for flag, value in given.items() if value is not None for word in (flag, str(value)))


def tool_path(name: str) -> Path:
    """find_tool(), or SystemExit with one line."""
    try:
        path = find_tool(name)
    except UserError as e:
        raise SystemExit(f"error: {e}") from e
    if path is None:
        folder = native_folder()
        raise SystemExit(f"error: {name} is not in {folder}: ggml-ext was installed without its native part; reinstall it")
    return path


def run() -> None:
    """Entry point of every command of llama.cpp in pyproject.toml's [project.scripts]: becomes the program of the same name."""
    name = Path(sys.argv[0]).name.removesuffix(".exe")
    exec_program({"rpc-server": "ggml-rpc-server"}.get(name, name), sys.argv[1:])


def exec_program(name: str, words: list[str]) -> NoReturn:
    """Runs a program in place of this one. SystemExit with one line where it is missing."""
    path = str(tool_path(name))
    if sys.platform == "win32":
        import subprocess

        sys.exit(subprocess.call([path, *words]))
    os.execv(path, [path, *words])
