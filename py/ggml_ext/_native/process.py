"""Programs that are run for their result, with their output heard as it comes."""

from __future__ import annotations

import contextlib
import re
import select
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .._base.signals import held_signals

PATIENCE = 1.0  # seconds until a signal is noticed at the latest


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


def run_logged(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of a program, which never outlives this call. The output goes through a file: into a pipe
    llama-perplexity sometimes loses its last lines."""
    with tempfile.TemporaryFile() as log:
        with started(command, folder, None, subprocess.DEVNULL, subprocess.STDOUT, log) as process:
            while (code := process.poll()) is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
        log.seek(0)
        return code, log.read().decode(errors="replace")


@contextlib.contextmanager
def started(
    command: list[str], folder: Path, env: dict[str, str] | None, stdin: int, stderr: int | IO, stdout: int | IO = subprocess.PIPE
) -> Iterator[subprocess.Popen]:
    """A program, ended if it has not ended by itself. stdin, stderr, stdout: as subprocess takes them; pipes are not buffered."""
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
