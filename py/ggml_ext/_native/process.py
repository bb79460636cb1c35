"""Run programs and collect their output. No program outlives the call that started it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .._base.signals import defer_signals
from .programs import library_conflict

POLL_SECONDS = 1.0  # within which a signal is noticed
NO_BACKTRACE = {"GGML_NO_BACKTRACE": "1"}  # a backtrace by gdb would hide the message of an abort
# messages of the dynamic linkers of Linux and macOS
NOT_LINKED = "symbol lookup error|undefined symbol|error while loading shared libraries|Symbol not found|Library not loaded"
# llama.cpp's cause, followed by lines that say only that loading failed; a lack of memory is no fault of the model
NOT_LOADED = re.compile(r"error loading model(?: \w+)*: (?:\w+: )?((?!.*(?:alloc|out ?of ?\w*memory)).*)", re.I)
UNKNOWN = "unknown model architecture"


def run_streamed(
    command: list[str], directory: Path, on_output: Callable[[str], None], env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a program and return its exit code and output. on_output: called with all output so far whenever there is more."""
    log = bytearray()
    with start_program(command, directory, env, subprocess.DEVNULL, subprocess.STDOUT) as process:
        for piece in read_pieces(require_pipe(process.stdout)):
            log += piece
            on_output(log.decode(errors="replace"))
        code = process.wait()
    return code, log.decode(errors="replace")


def run_logged(command: list[str], directory: Path, on_output: Callable[[str], None] | None = None) -> tuple[int, str]:
    """Run a program and return its exit code and output. on_output: called with all output so far every second.

    The output goes through a file, because llama-perplexity sometimes loses its last lines in a pipe.
    """
    with log_file() as log:
        with start_program(command, directory, None, subprocess.DEVNULL, subprocess.STDOUT, stdout=log) as process:
            code = _wait(process, lambda: None if on_output is None else on_output(_read_text(log)))
        return code, _read_text(log)


def run_limited(command: list[str], directory: Path, seconds: float) -> tuple[int | None, str]:
    """Run a program for a limited time. Return its exit code, None if it was stopped, and its output."""
    end = time.monotonic() + seconds

    def check_time() -> None:
        if time.monotonic() > end:
            raise TimeoutError

    with log_file() as log:
        code = None
        with contextlib.suppress(TimeoutError), start_program(command, directory, None, subprocess.DEVNULL, subprocess.STDOUT, stdout=log) as process:
            code = _wait(process, check_time)
        return code, _read_text(log)


def run_captured(command: list[str], directory: Path) -> tuple[int, str, str]:
    """Run a program; returns exit code, standard output and standard error."""
    with log_file() as out, log_file() as log:
        with start_program(command, directory, None, subprocess.DEVNULL, log, stdout=out) as process:
            code = _wait(process, lambda: None)
        return code, _read_text(out), _read_text(log)


def _wait(process: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> int:
    """Wait for a program's exit code. on_tick: called every second."""
    while (code := process.poll()) is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        on_tick()
    return code


def read_pieces(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yield a program's output as it comes, until its end.

    A thread reads: a signal just before a read is handled only after it, and the program may be silent for long. Windows cannot wait for
    a pipe.
    """
    pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):  # closed after an exception
            while piece := pipe.read(65536):
                pieces.put(piece)
        pieces.put(b"")

    threading.Thread(target=read, daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            if not (piece := pieces.get(timeout=POLL_SECONDS)):
                return
            yield piece


def read_lines(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yield a program's output line by line, without a last one that has no end."""
    rest = b""
    for piece in read_pieces(pipe):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


@contextlib.contextmanager
def log_file() -> Iterator[IO[bytes]]:
    """Yield a temporary file that can be opened by its name too, which Windows allows for no NamedTemporaryFile."""
    # Windows may keep a file open for a moment after the program that wrote it has ended
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, open(Path(directory, "log"), "wb") as file:
        yield file


def _read_text(file: IO[bytes]) -> str:
    """Read a program's output by its name, because the open file shares its position with the program."""
    return Path(file.name).read_bytes().decode(errors="replace")


def require_pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """Return a stream of a process that was started with a pipe for it."""
    assert stream is not None
    return stream


@contextlib.contextmanager
def start_program(
    command: list[str], directory: Path, env: dict[str, str] | None, stdin: int, stderr: int | IO[bytes],
    stdout: int | IO[bytes] = subprocess.PIPE,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during the block and end it if it still runs afterwards.

    Args:
        command: program and arguments.
        directory: its working directory.
        env: its environment; None: this process's.
        stdin, stderr, stdout: as for subprocess.Popen; pipes are unbuffered.
    """
    env = NO_BACKTRACE | (os.environ if env is None else env)
    with contextlib.ExitStack() as deferred:
        deferred.enter_context(defer_signals())  # a signal during the start would leave the program running
        # in a session of its own, on Windows a group, so that an interrupt from the keyboard reaches this process alone, which then ends
        # the program
        process = subprocess.Popen(
            command, cwd=directory, env=env, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        try:
            deferred.close()
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    with contextlib.suppress(subprocess.TimeoutExpired):  # a program inside a GPU driver that hangs does not end
                        process.wait(60)
            for pipe in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()


def describe_failure(program: str, code: int, log: str, on: str = "", hint: str = "", less_memory: str = "free some memory") -> str:
    """Return the error message for a failed program.

    Args:
        program: its name.
        code: exit code, negative for a signal.
        log: its output.
        on: what it worked on, beginning with "for".
        hint: what the user can do.
        less_memory: what the user can do if memory ran out; Linux then kills programs silently.
    """
    on = f" {on}" if on else ""
    if code == -getattr(signal, "SIGKILL", 0):
        return f"{program} was killed{on}, most likely because memory ran out: {less_memory}"
    if re.search(NOT_LINKED, log):
        hint = library_conflict() or hint
    cause = last_error(log)
    if NOT_LOADED.search(log):
        hint = "this llama.cpp does not support it" if UNKNOWN in cause else "convert or download it again"
    how = f"exited with {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"{program} {how}{on}: {cause}" + (f"; {hint}" if hint else "")


def last_error(log: str) -> str:
    """Return why the model does not load, else the last line with an error, else the last line, without time stamps and colours."""
    if not_loaded := NOT_LOADED.search(log):
        return f"the model does not load: {not_loaded[1].strip()}"
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not set(line) <= set(".")]
    errors = [m[1] for line in lines if (m := re.match(r"[\d.]+ E (.*)", line))]
    errors = errors or [line for line in lines if re.search(r"\b(error|failed|assert)", line, re.I)]
    return " ".join((errors or lines or ["no output"])[-1].split())[:300]
