"""Programs that are run for their result, with their output heard as it comes."""

from __future__ import annotations

import select
import subprocess
from collections.abc import Callable
from pathlib import Path

PATIENCE = 1.0  # seconds until a signal is noticed at the latest


def run_heard(
    command: list[str], folder: Path, heard: Callable[[str], None], env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output of a program. heard() gets all of the output so far whenever there is more; the program never outlives
    this call."""
    log = bytearray()
    # a group of its own: an interrupt from the keyboard comes to this process alone, which ends the program
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
        start_new_session=True,
    )
    try:
        while True:
            # a signal that comes just before a read is handled after it, and the program may say nothing for long
            if not select.select([process.stdout], [], [], PATIENCE)[0]:
                continue
            if not (piece := process.stdout.read(65536)):
                break
            log += piece
            heard(log.decode(errors="replace"))
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
    return code, log.decode(errors="replace")
