"""What all commands share: tracebacks on request, names of files as the system allows them."""

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


@pytest.mark.parametrize("order", [
    ["--type", "itq3_s", "--", "-in.gguf", "-out.gguf"],
    ["./-in.gguf", "--type", "itq3_s", "--", "-out.gguf"],
    ["--type", "itq3_s", "./-in.gguf", "--", "-out.gguf"],
    ["--", "-in.gguf", "-out.gguf", "--type", "itq3_s"],
], ids=["last", "OUT last", "beside IN", "options too"])
def test_names_that_begin_with_a_dash(source, monkeypatch, order):
    monkeypatch.chdir(source.parent)
    source.rename("-in.gguf")
    done = run_main(quantize.main, "--importance", "none", *order)
    if order[-1] == "itq3_s":  # all after -- are names
        assert done.returncode == 1 and "unrecognized arguments: " in done.stderr and "itq3_s" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in source.parent.iterdir()) == ["-in.gguf", "-out.gguf"]
    done = run_main(export.main, "--type", "q8_0", "--", "-out.gguf", "-stock.gguf")
    assert done.returncode == 0 and source.with_name("-stock.gguf").exists(), done.stderr
    for args in (["--", "-out.gguf"], ["--against", "./-in.gguf", "--", "-out.gguf"]):
        done = run_main(inspect.main, *args)
        assert done.returncode == 0 and "itq3_s" in done.stdout, done.stderr
    for args in (["--", "-out.gguf"], ["--json", "--", "-out.gguf"]):
        done = run_main(dump.main, *args)
        assert done.returncode == 0 and "ITQ3_S" in done.stdout, done.stderr
    assert json.loads(done.stdout)["filename"] == "-out.gguf"


def test_what_a_card_says_of_names_that_begin_with_a_dash(source, monkeypatch):
    """Its commands are to be copied."""
    monkeypatch.chdir(source.parent)
    source.rename("-in.gguf")
    done = run_main(quantize.main, "--type", "itq3_s", "--importance", "none", "--model-card", "card.md", "--", "-in.gguf", "-out.gguf")
    assert done.returncode == 0, done.stderr
    card = source.with_name("card.md").read_text()
    assert "llama-server -m ./-out.gguf" in card and "ggml_ext.quantize ./-in.gguf ./-out.gguf --type itq3_s" in card


def test_an_option_still_needs_its_value(source):
    done = run_main(quantize.main, source, "--type", "--", "-out.gguf")
    assert done.returncode == 1 and "--type: expected one argument" in done.stderr
