"""llama.cpp's programs, which the package contains next to their libraries, as commands of the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from .._base.errors import UserError
from .._base.package import PACKAGE_DIR

DIR_VARIABLE = "GGML_EXT_LIB_DIR"


def native_dir() -> Path:
    """Return the directory of the libraries and programs: that named by GGML_EXT_LIB_DIR, or the package's."""
    directory = os.environ.get(DIR_VARIABLE)
    return Path(os.path.abspath(directory)) if directory else PACKAGE_DIR / "bin"


def library_conflict() -> str:
    """Name the variable that loads another build's libraries before this package's, and the way out; empty if there is none."""
    libraries = {path.name for path in native_dir().glob("lib*")}
    for variable in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
        for directory in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            names = [name for name in sorted(libraries) if os.path.lexists(os.path.join(directory, name))]
            if names and not os.path.samefile(directory, native_dir()):
                return f"{variable} names {directory}, which has another {names[0]}: unset it, or remove that directory from it"
    return ""


def find_tool(name: str) -> Path | None:
    """Return the path of a program such as "llama-server"; None if the package was built without it.

    UserError if GGML_EXT_LIB_DIR names a directory without it, because the package's own program may not match the libraries there.
    """
    path = native_dir() / (name + (".exe" if sys.platform == "win32" else ""))
    if path.exists():
        return path
    if directory := os.environ.get(DIR_VARIABLE):
        raise UserError(f"{DIR_VARIABLE} is {directory}, which has no {path.name}: point it to the directory of a complete build or unset it")
    return None


def not_built(name: str) -> UserError:
    """Return the error that a program or library is missing."""
    return UserError(f"{name} was not built with this package: reinstall ggml-ext with a C++ compiler, or from a wheel")


def require_tool(name: str) -> Path:
    """Return the path of a program. UserError if it is missing."""
    path = find_tool(name)
    if path is None:
        raise not_built(name)
    return path


def tool_path(name: str) -> Path:
    """Return the path of a program. SystemExit with one line if it is missing."""
    try:
        return require_tool(name)
    except UserError as e:
        raise SystemExit(f"error: {e}") from e


def run() -> None:
    """Replace this process by the llama.cpp program of the same name; the entry point of all of them in pyproject.toml."""
    name = Path(sys.argv[0]).name.removesuffix(".exe")
    exec_program({"rpc-server": "ggml-rpc-server"}.get(name, name), sys.argv[1:])


def exec_program(name: str, words: list[str]) -> NoReturn:
    """Replace this process by a program. SystemExit with one line if it is missing."""
    path = str(tool_path(name))
    if sys.platform == "win32":
        import subprocess

        sys.exit(subprocess.call([path, *words]))
    os.execv(path, [path, *words])
