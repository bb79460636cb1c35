"""Programs that are run for their result, with their output heard as it comes."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .._base.signals import defer_signals
from .programs import library_conflict

POLL_SECONDS = 1.0  # seconds until a signal is noticed at the latest
# Of OpenMP's threads: those that spin while they wait take the processors from whatever else runs there. llama-imatrix on SmolLM2-135M, two
# cores of a Zen 4 EPYC: 12 chunks in 22 s either way; beside a test suite on the same cores 100 chunks were not through in 10 minutes, spinning.
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "passive"}
# Where gdb is there an abort would be shown with its backtrace, whose last line says nothing of what was wrong.
NO_BACKTRACE = {"GGML_NO_BACKTRACE": "1"}
# What the dynamic linkers of Linux and macOS say.
NOT_LINKED = "symbol lookup error|undefined symbol|error while loading shared libraries|Symbol not found|Library not loaded"


def run_streamed(
    command: list[str], folder: Path, heard: Callable[[str], None], env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output of a program. heard() gets all of the output so far whenever there is more; the program never outlives
    this call."""
    log = bytearray()
    with start_program(command, folder, env, subprocess.DEVNULL, subprocess.STDOUT) as process:
        while True:
            # a signal that comes just before a read is handled after it, and the program may say nothing for long
            if not select.select([process.stdout], [], [], POLL_SECONDS)[0]:
                continue
            if not (piece := process.stdout.read(65536)):
                break
            log += piece
            heard(log.decode(errors="replace"))
        code = process.wait()
    return code, log.decode(errors="replace")


def run_logged(command: list[str], folder: Path, heard: Callable[[str], None] | None = None) -> tuple[int, str]:
    """Exit code and output of a program, which never outlives this call. The output goes through a file: into a pipe
    llama-perplexity sometimes loses its last lines. heard() gets all of the output so far every second."""
    with tempfile.NamedTemporaryFile() as log:
        with start_program(command, folder, None, subprocess.DEVNULL, subprocess.STDOUT, log) as process:
            code = _wait(process, lambda: None if heard is None else heard(_text(log)))
        return code, _text(log)


def run_captured(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a program that is timed, with threads as its user has them; it never outlives
    this call."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as log:
        with start_program(command, folder, dict(os.environ), subprocess.DEVNULL, log, out) as process:
            code = _wait(process, lambda: None)
        return code, _text(out), _text(log)


def _wait(process: subprocess.Popen, turn: Callable[[], None]) -> int:
    """Its exit code. turn: called every second."""
    while (code := process.poll()) is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        turn()
    return code


def _text(file: IO) -> str:
    """What a program wrote; by the name, since the file itself has one position with the program."""
    return Path(file.name).read_bytes().decode(errors="replace")


@contextlib.contextmanager
def start_program(
    command: list[str], folder: Path, env: dict[str, str] | None, stdin: int, stderr: int | IO, stdout: int | IO = subprocess.PIPE
) -> Iterator[subprocess.Popen]:
    """A program, ended if it has not ended by itself. env: this process's, where its threads are PATIENT unless the user says otherwise;
    NO_BACKTRACE in any. stdin, stderr, stdout: as subprocess takes them; pipes are not buffered."""
    env = NO_BACKTRACE | (PASSIVE_WAIT | os.environ if env is None else env)
    # a group of its own: an interrupt from the keyboard comes to this process alone, which ends the program
    with contextlib.ExitStack() as held:
        held.enter_context(defer_signals())  # one that came while the program starts would leave it running
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, start_new_session=True,
        )
        try:
            held.close()
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()


def describe_failure(program: str, code: int, log: str, on: str = "", way_out: str = "", less_memory: str = "free some memory") -> str:
    """What to say of a program that failed. on: what it worked on, from "for" on; less_memory: the way out where memory ran out: Linux
    kills a program then, without a word."""
    on = f" {on}" if on else ""
    if code == -getattr(signal, "SIGKILL", 0):
        return f"{program} was killed{on}, most likely because memory ran out: {less_memory}"
    if re.search(NOT_LINKED, log):
        way_out = library_conflict() or way_out
    how = f"exited with {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"{program} {how}{on}: {last_error(log)}" + (f"; {way_out}" if way_out else "")


def last_error(log: str) -> str:
    """The last line that says what is wrong, else the last one; without time stamps and colours."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not set(line) <= set(".")]
    errors = [m[1] for line in lines if (m := re.match(r"[\d.]+ E (.*)", line))]
    errors = errors or [line for line in lines if re.search(r"\b(error|failed|assert)", line, re.I)]
    return " ".join((errors or lines or ["it said nothing"])[-1].split())[:300]
