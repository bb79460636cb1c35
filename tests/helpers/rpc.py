"""A running RPC server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path

from helpers.commands import tool


@contextlib.contextmanager
def rpc_server(folder: Path, device: str = "CPU", environment: dict[str, str] | None = None):
    """Run the package's ggml-rpc-server on one CPU thread or a device, and yield its endpoint; fail if the server exits by itself."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen([tool("ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", device],
                                  stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
        assert server.poll() is None, log.read_text()
    finally:
        server.terminate()
        server.wait(timeout=30)
