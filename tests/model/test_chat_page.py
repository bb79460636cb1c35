"""llama-server's chat page in headless Chromium with an ITQ3 file, and errors of scripts/tools/server.py."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from helpers.commands import quantize, tool
from server import running_server

# The reference model has no chat template.
OPTIONS = ("--chat-template", "chatml", "--ctx-size", 512, "--n-predict", 24, "--temp", 0)


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory) -> Path:
    tool("llama-server")
    path = tmp_path_factory.mktemp("chat") / "model-itq3_s.gguf"
    quantize(model, path, "--type", "itq3_s")
    return path


def get(url: str) -> urllib.request.Request:
    return urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})  # the server has only the compressed page


def has_page(url: str) -> bool:
    try:
        return urllib.request.urlopen(get(url + "/"), timeout=10).status == 200
    except urllib.error.HTTPError as e:
        assert e.code == 404
        return False


def test_page_shows_the_answer_to_a_message(quantized):
    from helpers.browser import ask, browser

    with browser() as driver, running_server(quantized, *OPTIONS) as url:
        if not has_page(url):
            pytest.skip("llama-server was built without its chat page (npm)")
        answer = ask(driver, url, "def read_lines(path):", seconds=120)
        print(repr(answer))
        assert len(answer) > 10
        assert "model-itq3_s" in driver.find_element("tag name", "body").text


def test_exception_in_the_block_stops_the_server(quantized):
    with pytest.raises(ZeroDivisionError):
        with running_server(quantized, *OPTIONS) as url:
            1 / 0  # noqa: B018
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url + "/health", timeout=10)


def test_busy_port_is_reported(quantized):
    """The server's own error line arrives without waiting for the timeout, although another server answers on the port."""
    with running_server(quantized, *OPTIONS) as url:
        port, start = int(url.rsplit(":", 1)[1]), time.monotonic()
        with pytest.raises(RuntimeError, match=f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}"):
            with running_server(quantized, *OPTIONS, port=port):
                pass
        assert time.monotonic() - start < 30


def test_model_that_does_not_load_is_reported(tmp_path):
    tool("llama-server")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match="llama-server ended with exit code 1: .*failed to load model"):
        with running_server(tmp_path / "model.gguf", log=tmp_path / "log"):
            pass
    assert "failed to load" in (tmp_path / "log").read_text()


def test_slow_start_is_reported(quantized):
    with pytest.raises(RuntimeError, match="did not load .* within 0 s"):
        with running_server(quantized, seconds=0):
            pass
