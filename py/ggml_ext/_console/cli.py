"""What the commands of the package share: one line and exit code 1 for every error, output that may be closed."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from .._base.encoding import escape_for, to_argument, to_utf8
from .._base.errors import UserError
from .._base.package import __version__
from .._base.signals import StopRequest, stop_on_signals
from .._native import library

DEBUG_VARIABLE = "GGML_EXT_DEBUG"


class Parser(argparse.ArgumentParser):
    """Bad command lines end like all bad input: one line and exit code 1. Names of files after -- may begin with a dash."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register("type", None, to_utf8)  # of all values that are no names of files

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        return super().parse_known_args(self._protected(args), namespace)

    def parse_known_intermixed_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        return super().parse_known_intermixed_args(self._protected(args), namespace)

    def _protected(self, args: Sequence[str] | None) -> list[str]:
        """The words, with ./ before names after -- that begin with a dash. Path() takes it away again.

        Up to Python 3.12 parse_intermixed_args() parses twice, and the -- is lost before the second time.
        """
        words = list(sys.argv[1:] if args is None else args)
        if "--" in words and all(action.type is Path for action in self._get_positional_actions()):
            first = words.index("--") + 1
            words[first:] = map(to_argument, words[first:])
        return words


class _Version(argparse.Action):
    """Looks the libraries up only where it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_) -> NoReturn:
        llama_cpp, ggml = library.upstream_versions()
        print(f"ggml-ext {__version__} (llama.cpp {llama_cpp}, ggml {ggml})")
        parser.exit()


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """What every command has."""
    parser.add_argument(
        "--debug", action="store_true", help=f"show where an unexpected error came from, for a report; or set {DEBUG_VARIABLE}=1"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of ggml-ext and its llama.cpp")


def add_threads_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-t", "--threads", metavar="N", type=int, help="default: all processors that this process may use, no more than CPU quotas allow"
    )


def add_device_options(parser: argparse.ArgumentParser, what: str = "") -> None:
    """Where llama.cpp's programs compute; they get these as they are. what: begins the help of each."""
    add = parser.add_argument
    add("-ngl", "--n-gpu-layers", metavar="N", help=f"{what}layers to keep in the memory of a GPU, as llama.cpp's programs take it")
    add("--device", metavar="LIST", help=f"{what}devices to compute on, as llama.cpp's programs take it; none: the CPU alone")
    add("--rpc", metavar="SERVERS", help=f"{what}other machines, host:port with commas, each running rpc-server")


def add_terminal_options(parser: argparse.ArgumentParser) -> None:
    """How much a program says that makes a model."""
    add = parser.add_argument
    add("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")
    add("--summary", action="store_true", help="print no line for each tensor, only warnings and the summary")
    add("-q", "--quiet", action="store_true", help="print errors and warnings only, and nothing about fallbacks")


@contextlib.contextmanager
def writing_to_stdout(way_out: str) -> Iterator[None]:
    """Standard output is written within it, and flushed at its end. UserError if that fails."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        _discard_stdout()
        raise UserError(f"cannot write to standard output: {e.strerror}; {way_out}") from e


def _discard_stdout() -> None:
    """What is left in its buffer goes nowhere: Python would fail again at exit, with a code of its own."""
    with contextlib.suppress(OSError, AttributeError):  # of an object that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_text(text: str, way_out: str) -> None:
    """To standard output, above a progress bar; nothing if there is none. UserError if it cannot be written."""
    if sys.stdout is not None:
        with writing_to_stdout(way_out):
            tqdm.write(escape_for(text, sys.stdout), file=sys.stdout)


def print_error(text: str, trace: str | None) -> None:
    """The line that a command ends with. trace: a traceback to show above it."""
    print(escape_for(f"{trace or ''}error: {text}", sys.stderr), file=sys.stderr)


def run_command(
    run: Callable[[], None],
    stopped: Callable[[], str],
    way_out: str,
    show: Callable[[str, str | None], None] = print_error,
    args: argparse.Namespace | None = None,
) -> int:
    """Exit code of run(): 0, 1 for an error that one line on stderr explains, or 128 + the signal that ended it.

    stopped: what to say of the output in that case. way_out: what to do if standard output cannot be written. show: prints
    that line, which does not begin with "error: ", and a traceback if there is one. args: where run() puts the command line, for
    --debug. What is left of the work is in the attribute `kept` of an exception.
    """
    trace = None
    try:
        with stop_on_signals():
            run()
    except UserError as e:
        error, message, code = e, str(e), 1
        trace = _trace(e, args) if e.__cause__ is not None else None
    except StopRequest as e:
        error, message, code = e, f"interrupted, {stopped()}", 128 + e.number
    except BrokenPipeError as e:
        _discard_stdout()
        error, message, code = e, f"standard output was closed; {way_out}", 1
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
    """The line for a bug, or for a relative name in a folder that is no more. is_shown: its traceback; has_option: --debug."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the current folder was removed: change to another one, or name all files from the root on"
    how = "the traceback above" if is_shown else f"the traceback that {'--debug' if has_option else f'{DEBUG_VARIABLE}=1'} shows"
    return f"unexpected {type(error).__name__}: {error}; please report it with {how}"


def _trace(error: BaseException, args: argparse.Namespace | None) -> str | None:
    """The traceback of an exception and of what caused it, if it is to be shown."""
    if getattr(args, "debug", False) or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        return "".join(traceback.format_exception(error))
    return None


def run_script(main: Callable[[], None]) -> int:
    """run_command() for the scripts of the project, in which RuntimeError, OSError and subprocess.SubprocessError say which
    program or file failed, and why."""

    def run() -> None:
        try:
            main()
        except BrokenPipeError:
            raise
        except (RuntimeError, OSError, subprocess.SubprocessError) as e:
            raise UserError(str(e)) from e

    return run_command(run, lambda: "the results are not complete", "run it with its output open")
