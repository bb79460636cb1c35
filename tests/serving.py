"""llama-server as its users start it, and requests to it."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Server(NamedTuple):
    """A llama-server that has answered /health."""

    url: str
    pid: int

    def get(self, path: str) -> tuple[int, str, str]:
        """Status, content type and text of a page, asked for as a browser does: the chat page comes compressed alone."""
        request = urllib.request.Request(self.url + path, headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=60) as r:
            body = r.read()
            if r.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            return r.status, r.headers.get_content_type(), body.decode()

    def post(self, path: str, body: dict) -> dict:
        """The JSON answer to a request in JSON."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as r:
            return json.load(r)


@contextlib.contextmanager
def serve(program: Path, *args) -> Iterator[Server]:
    """Starts a llama-server with these arguments, waits until it is ready and ends it; AssertionError if it does not stop cleanly."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = subprocess.Popen([program, *map(str, args), "--host", "127.0.0.1", "--port", str(port)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = Server(f"http://127.0.0.1:{port}", process.pid)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, "llama-server stopped by itself"
            assert time.monotonic() < deadline, "llama-server did not get ready"
            try:
                if server.get("/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0
