"""Shared by all commands: the parser, standard output, and errors as one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from .._base.encoding import escape_for, to_argument, to_utf8
from .._base.errors import UserError
from .._base.package import __version__
from .._base.signals import StopRequest, stop_on_signals
from .._native import library

DEBUG_VARIABLE = "GGML_EXT_DEBUG"

STDOUT_HINT = "direct it to a file, or to a program that reads all of it"


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError. File names after -- may begin with a dash."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", None, to_utf8)  # for all values except file names

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_known_args(self._protect_paths(args), namespace)

    def parse_known_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_known_intermixed_args(self._protect_paths(args), namespace)

    def _protect_paths(self, args: Sequence[str] | None) -> list[str]:
        """Prefix ./ to file names after -- that begin with a dash. Path() removes it again.

        Needed up to Python 3.12, whose parse_intermixed_args() parses twice and loses the -- in between.
        """
        words = list(sys.argv[1:] if args is None else args)
        if "--" in words and all(action.type is Path for action in self._get_positional_actions()):
            first = words.index("--") + 1
            words[first:] = map(to_argument, words[first:])
        return words


class _Version(argparse.Action):
    """Print the versions, which needs the libraries."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        llama_cpp, ggml = library.upstream_versions()
        print(f"ggml-ext {__version__} (llama.cpp {llama_cpp}, ggml {ggml})")
        parser.exit()


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add --debug and --version, which every command has."""
    parser.add_argument(
        "--debug", action="store_true", help=f"show the traceback of an unexpected error, for a report; or set {DEBUG_VARIABLE}=1"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of ggml-ext and its llama.cpp")


@contextlib.contextmanager
def writing_to_stdout() -> Iterator[None]:
    """Flush standard output at the end. Raise UserError if writing fails."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        _discard_stdout()
        raise UserError(f"cannot write to standard output: {e.strerror}; {STDOUT_HINT}") from e


def _discard_stdout() -> None:
    """Discard the buffer, because flushing it at exit would fail again with another exit code."""
    with contextlib.suppress(OSError, AttributeError):  # an object without fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_text(text: str) -> None:
    """Print above a progress bar, if there is a standard output. Raise UserError if writing fails."""
    if sys.stdout is not None:
        with writing_to_stdout():
            tqdm.write(escape_for(text, sys.stdout), file=sys.stdout)


def print_error(text: str, trace: str | None) -> None:
    """Print the last line of a command. trace: a traceback to show above it."""
    print(escape_for(f"{trace or ''}error: {text}", sys.stderr), file=sys.stderr)


def run_command(
    run: Callable[[], None],
    stopped: Callable[[], str],
    show: Callable[[str, str | None], None] = print_error,
    args: argparse.Namespace | None = None,
) -> int:
    """Run a command and print how it failed.

    Args:
        run: the command. The attribute `kept` of its exceptions says how to resume.
        stopped: returns the state of the output after an interrupt.
        show: prints an error without "error: ", and its traceback or None.
        args: the namespace that run() fills, for --debug.

    Returns:
        The exit code: 0, 1 for an error that one line on stderr explains, or 128 + the number of a signal.
    """
    error: BaseException
    trace = None
    try:
        with stop_on_signals():
            run()
    except UserError as e:
        error, message, code = e, str(e), 1
        trace = _trace(e, args) if e.__cause__ is not None else None
    except StopRequest as e:
        error, message, code = e, f"interrupted, {e.state or stopped()}", 128 + e.number
    except BrokenPipeError as e:
        _discard_stdout()
        error, message, code = e, f"standard output was closed; {STDOUT_HINT}", 1
    except MemoryError as e:
        error, message, code = e, "out of memory; pass a smaller --threads", 1
        trace = _trace(e, args)
    except Exception as e:
        trace = _trace(e, args)
        error, message, code = e, _describe_unexpected(e, trace is not None, args is not None), 1
    else:
        return 0
    if kept := getattr(error, "kept", None):
        message += f"; {kept}"
    show(message, trace)
    return code


def _describe_unexpected(error: Exception, is_shown: bool, has_option: bool) -> str:
    """Describe an unexpected exception. is_shown: with its traceback; has_option: the command has --debug."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the current directory was removed: change to another one, or use absolute paths"
    how = "the traceback above" if is_shown else f"the traceback that {'--debug' if has_option else f'{DEBUG_VARIABLE}=1'} shows"
    return f"unexpected {type(error).__name__}: {error}; please report it with {how}"


def _trace(error: BaseException, args: argparse.Namespace | None) -> str | None:
    """Format the traceback of an exception and its causes, with --debug."""
    if getattr(args, "debug", False) or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        return "".join(traceback.format_exception(error))
    return None


def run_script(main: Callable[[], None]) -> int:
    """Run a script of the project, and print RuntimeError, OSError and SubprocessError as one line."""

    def run() -> None:
        try:
            main()
        except BrokenPipeError:
            raise
        except (RuntimeError, OSError, subprocess.SubprocessError) as e:
            raise UserError(str(e)) from e

    return run_command(run, lambda: "the results are not complete")
