"""Programs that are run for their result, with their output heard as it comes."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .._base.signals import held_signals

PATIENCE = 1.0  # seconds until a signal is noticed at the latest
# Of OpenMP's threads: those that spin while they wait take the processors from whatever else runs there. llama-imatrix on SmolLM2-135M, two
# cores of a Zen 4 EPYC: 12 chunks in 22 s either way; beside a test suite on the same cores 100 chunks were not through in 10 minutes, spinning.
PATIENT = {"OMP_WAIT_POLICY": "passive"}


def run_heard(
    command: list[str], folder: Path, heard: Callable[[str], None], env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output of a program. heard() gets all of the output so far whenever there is more; the program never outlives
    this call."""
    log = bytearray()
    with started(command, folder, env, subprocess.DEVNULL, subprocess.STDOUT) as process:
        while True:
            # a signal that comes just before a read is handled after it, and the program may say nothing for long
            if not select.select([process.stdout], [], [], PATIENCE)[0]:
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
        with started(command, folder, None, subprocess.DEVNULL, subprocess.STDOUT, log) as process:
            code = _wait(process, lambda: None if heard is None else heard(_text(log)))
        return code, _text(log)


def run_captured(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a program that is timed, with threads as its user has them; it never outlives
    this call."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as log:
        with started(command, folder, dict(os.environ), subprocess.DEVNULL, log, out) as process:
            code = _wait(process, lambda: None)
        return code, _text(out), _text(log)


def _wait(process: subprocess.Popen, turn: Callable[[], None]) -> int:
    """Its exit code. turn: called every second."""
    while (code := process.poll()) is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        turn()
    return code


def _text(file: IO) -> str:
    """What a program wrote; by the name, since the file itself has one position with the program."""
    return Path(file.name).read_bytes().decode(errors="replace")


@contextlib.contextmanager
def started(
    command: list[str], folder: Path, env: dict[str, str] | None, stdin: int, stderr: int | IO, stdout: int | IO = subprocess.PIPE
) -> Iterator[subprocess.Popen]:
    """A program, ended if it has not ended by itself. env: this process's, where its threads are PATIENT unless the user says otherwise.
    stdin, stderr, stdout: as subprocess takes them; pipes are not buffered."""
    env = PATIENT | os.environ if env is None else env
    # a group of its own: an interrupt from the keyboard comes to this process alone, which ends the program
    with contextlib.ExitStack() as held:
        held.enter_context(held_signals())  # one that came while the program starts would leave it running
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


def last_error(log: str) -> str:
    """The last line that says what is wrong, else the last one; without time stamps and colours."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not set(line) <= set(".")]
    errors = [m[1] for line in lines if (m := re.match(r"[\d.]+ E (.*)", line))]
    errors = errors or [line for line in lines if re.search(r"\b(error|failed|assert)", line, re.I)]
    return " ".join((errors or lines or ["it said nothing"])[-1].split())[:300]
