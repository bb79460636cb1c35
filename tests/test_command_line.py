"""What all commands share: tracebacks on request."""

from __future__ import annotations

import json

import pytest
from conftest import gaussian, run_main, write_gguf

from ggml_ext import dump, export, inspect, libdir, quantize
from ggml_ext._errors import UserError


@pytest.fixture
def source(tmp_path):
    return write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)})


def where_it_fails(*_, **__):
    return {}["no such key"]


def commands(source) -> dict:
    """Of each command main(), what it calls early, and a good command line."""
    out = source.with_name("out.gguf")
    return {
        "quantize": (quantize, "open_source", [source, out, "--type", "itq3_s", "--importance", "none"], quantize._source),
        "export": (export, "open_model", [source, out, "--type", "q8_0"], export),
        "inspect": (inspect, "open_model", [source], inspect),
        "dump": (dump, "GGUFFile", [source], dump),
        "libdir": (libdir, "library_folder", [], libdir),
    }


@pytest.mark.parametrize("name", ["quantize", "export", "inspect", "dump", "libdir"])
def test_tracebacks_of_unexpected_errors_on_request(source, monkeypatch, name):
    module, called, args, owner = commands(source)[name]
    monkeypatch.setattr(owner, called, where_it_fails)
    line = "error: unexpected KeyError: 'no such key'; please report it with the traceback"
    done = run_main(module.main, *args)
    assert done.returncode == 1 and done.stderr == f"{line} that --debug shows\n"
    for flags, value in (["--debug"], "0"), ([], "1"):
        monkeypatch.setenv("GGML_EXT_DEBUG", value)
        done = run_main(module.main, *args, *flags)
        *trace, last = done.stderr.splitlines()
        assert done.returncode == 1 and last == f"{line} above"
        assert trace[0].startswith("Traceback") and any("in where_it_fails" in t for t in trace), trace
    assert not source.with_name("out.gguf").exists()


def test_a_traceback_in_json(source, monkeypatch):
    module, called, args, owner = commands(source)["quantize"]
    monkeypatch.setattr(owner, called, where_it_fails)
    (line,) = run_main(module.main, *args, "--log-format", "json", "--debug").stderr.splitlines()
    told = json.loads(line)
    assert told["event"] == "error" and told["text"].endswith("the traceback above") and "in where_it_fails" in told["traceback"]
    (line,) = run_main(module.main, *args, "--log-format", "json").stderr.splitlines()
    assert "traceback" not in json.loads(line)


def test_errors_of_the_user_have_a_traceback_where_another_error_is_behind(source, monkeypatch):
    def missing(*_):
        try:
            open(source.with_name("missing"))
        except OSError as e:
            raise UserError("one line") from e

    def plain(*_):
        raise UserError("one line")

    for failing, is_shown in ((missing, True), (plain, False)):
        monkeypatch.setattr(inspect, "open_model", failing)
        done = run_main(inspect.main, source, "--debug")
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == "error: one line"
        assert ("FileNotFoundError" in done.stderr) == is_shown and (done.stderr.count("\n") > 1) == is_shown
        assert run_main(inspect.main, source).stderr == "error: one line\n"
