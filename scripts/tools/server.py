"""Run the package's llama-server for the duration of a `with` block, for scripts and tests.

    with running_server(model, "--ctx-size", 512) as url:
        urllib.request.urlopen(url + "/health")
"""
from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ggml_ext._native.programs import tool_path


def last_lines(log: Path, n: int = 3) -> str:
    """Return the last n lines of a log, joined into one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-n:]) or "no output"


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:  # not reachable, or 503 while the model loads
        return False


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def stop(process: subprocess.Popen, seconds: float = 10) -> None:
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Address(str):
    """The URL of a server, with its process."""

    process: subprocess.Popen


@contextlib.contextmanager
def running_server(model: Path | str, *args, program: Path | None = None, port: int = 0, log: Path | None = None,
                   seconds: float = 120) -> Iterator[Address]:
    """Start llama-server on the loopback interface, wait until it has loaded the model, and end it with the block.

    Args:
        args: further options of llama-server.
        program: the server to run (default: the package's).
        port: 0 for a free port that the system chooses.
        log: file for the server's output (default: a temporary one).
        seconds: time limit for loading the model.

    Raises:
        RuntimeError: the server ended or did not load the model in time; the message has its last lines.
    """
    with contextlib.ExitStack() as stack:
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "llama-server.log"
        command = [program or tool_path("llama-server"), "-m", model, "--host", "127.0.0.1", "--port", port, *args]
        with log.open("wb") as output:
            process = subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                       preexec_fn=end_with_parent if sys.platform == "linux" else None)
        stack.callback(stop, process)
        deadline = time.monotonic() + seconds
        while True:
            # from the log, because on a busy port another server could answer
            address = re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))
            if address and is_healthy(address[1]):
                break
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with exit code {process.returncode}: {last_lines(log)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not load {model} within {seconds:g} s: {last_lines(log)}")
            time.sleep(0.1)
        url = Address(address[1])
        url.process = process
        yield url
