"""Print the directory of the extended llama.cpp libraries: LLAMA_CPP_LIB_PATH=$(ggml-ext libdir) for llama-cpp-python"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ._base.errors import UserError
from ._console.cli import Parser, add_common_options, run_command, writing_to_stdout
from ._native import library as _lib
from ._native.programs import not_built

# file name of libllama by platform
NAMES = {"darwin": "libllama.dylib", "win32": "llama.dll"}


def find_library_directory() -> Path:
    """Return the directory of libllama and its libraries. Raise UserError if there is none."""
    library, name = _lib.load(), NAMES.get(sys.platform, "libllama.so")
    if library is None:
        raise not_built(name)
    directory = library.path.absolute().parent
    if not (directory / name).is_file():
        raise UserError(f"{directory} has no {name}, only the libraries of ggml: reinstall ggml-ext, or unset {_lib.DIR_VARIABLE}")
    return directory


def print_path(path: Path) -> None:
    """Print the bytes of a path. Raise UserError if writing fails."""
    if sys.stdout is None:
        return
    with writing_to_stdout():
        if hasattr(sys.stdout, "buffer"):
            sys.stdout.buffer.write(os.fsencode(path) + os.linesep.encode())
        else:  # for example in a notebook
            print(path)


def main(argv: list[str] | None = None, prog: str = "ggml-ext libdir") -> int:
    """Entry point; see run_command() for the exit code."""
    parser = Parser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print the directory of this package's libllama and libmtmd, for programs that load them.",
        epilog='llama-cpp-python:\n  export LLAMA_CPP_LIB_PATH="$(ggml-ext libdir)" MTMD_CPP_LIB="$(ggml-ext libdir)"',
    )
    add_common_options(parser)
    args = argparse.Namespace()

    def run() -> None:
        parser.parse_args(argv, args)
        print_path(find_library_directory())

    return run_command(run, lambda: "nothing was changed", args=args)


if __name__ == "__main__":
    sys.exit(main())
