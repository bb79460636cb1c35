"""Common to all commands: tracebacks on request and file names of any bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from ggml_ext import __main__ as everything
from ggml_ext import export, inspect, libdir, quantize
from ggml_ext._base import encoding
from ggml_ext._base.errors import UserError
from ggml_ext._commands import exporting, inspecting, opening
from helpers.commands import run_main, tool
from helpers.errors import check_error
from helpers.models import gaussian, write_gguf

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOCALES = {"UTF-8": {"LC_ALL": "C.UTF-8"}, "ASCII": ASCII}


@pytest.fixture
def source(tmp_path):
    return write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)})


def raise_unexpected(*_, **__):
    return {}["no such key"]


def list_commands(source) -> dict:
    """Return for each command main(), a function that it calls early, and a valid command line."""
    out = source.with_name("out.gguf")
    return {
        "quantize": (quantize, "open_source", [source, out, "--type", "itq3_s", "--importance", "none"], opening),
        "export": (export, "open_model", [source, out, "--type", "q8_0"], exporting),
        "inspect": (inspect, "open_model", [source], inspecting),
        "libdir": (libdir, "find_library_directory", [], libdir),
    }


@pytest.mark.parametrize("name", ["quantize", "export", "inspect", "libdir"])
def test_unexpected_error_has_a_traceback_on_request(source, monkeypatch, name):
    module, called, args, owner = list_commands(source)[name]
    monkeypatch.setattr(owner, called, raise_unexpected)
    line = "error: unexpected KeyError: 'no such key'; please report it with the traceback"
    done = run_main(module.main, *args)
    assert done.returncode == 1 and done.stderr == f"{line} that --debug shows\n"
    for flags, value in (["--debug"], "0"), ([], "1"):
        monkeypatch.setenv("GGML_EXT_DEBUG", value)
        done = run_main(module.main, *args, *flags)
        *trace, last = done.stderr.splitlines()
        assert done.returncode == 1 and last == f"{line} above"
        assert trace[0].startswith("Traceback") and any("in raise_unexpected" in t for t in trace), trace
    assert not source.with_name("out.gguf").exists()


def test_json_has_the_traceback(source, monkeypatch):
    module, called, args, owner = list_commands(source)["quantize"]
    monkeypatch.setattr(owner, called, raise_unexpected)
    (line,) = run_main(module.main, *args, "--log-format", "json", "--debug").stderr.splitlines()
    told = json.loads(line)
    assert told["event"] == "error" and told["text"].endswith("the traceback above") and "in raise_unexpected" in told["traceback"]
    (line,) = run_main(module.main, *args, "--log-format", "json").stderr.splitlines()
    assert "traceback" not in json.loads(line)


def test_user_error_has_the_traceback_of_its_cause(source, monkeypatch):
    def missing(*_):
        try:
            open(source.with_name("missing"))
        except OSError as e:
            raise UserError("one line") from e

    def plain(*_):
        raise UserError("one line")

    for failing, is_shown in ((missing, True), (plain, False)):
        monkeypatch.setattr(inspecting, "open_model", failing)
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
def test_names_may_begin_with_a_dash(source, monkeypatch, order):
    monkeypatch.chdir(source.parent)
    source.rename("-in.gguf")
    done = run_main(quantize.main, "--importance", "none", *order)
    if order[-1] == "itq3_s":  # every argument after -- is a name
        assert done.returncode == 1 and "unrecognized arguments: " in done.stderr and "itq3_s" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in source.parent.iterdir()) == ["-in.gguf", "-out.gguf"]
    done = run_main(export.main, "--type", "q8_0", "--", "-out.gguf", "-stock.gguf")
    assert done.returncode == 0 and source.with_name("-stock.gguf").exists(), done.stderr
    for args in (["--", "-out.gguf"], ["--against", "./-in.gguf", "--", "-out.gguf"]):
        done = run_main(inspect.main, *args)
        assert done.returncode == 0 and "itq3_s" in done.stdout, done.stderr


def test_card_commands_work_with_names_that_begin_with_a_dash(source, monkeypatch):
    monkeypatch.chdir(source.parent)
    source.rename("-in.gguf")
    done = run_main(quantize.main, "--type", "itq3_s", "--importance", "none", "--model-card", "card.md", "--", "-in.gguf", "-out.gguf")
    assert done.returncode == 0, done.stderr
    card = source.with_name("card.md").read_text()
    assert "llama-server -m ./-out.gguf" in card and "ggml-ext quantize ./-in.gguf ./-out.gguf --type itq3_s" in card


def test_option_without_a_value_is_refused(source):
    done = run_main(quantize.main, source, "--type", "--", "-out.gguf")
    assert done.returncode == 1 and "--type: expected one argument" in done.stderr


def run_command(module: str, *args, env: dict, code: int = 0) -> tuple[bytes, bytes]:
    """Run a command as a process, check its exit code, and return both streams."""
    command = [sys.executable, "-m", f"ggml_ext.{module}", *args]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONIOENCODING"} | env
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def read_json(data: bytes):
    """Parse JSON that every reader accepts: UTF-8 without lone surrogates."""
    value = json.loads(data.decode())
    json.dumps(value, ensure_ascii=False).encode()
    return value


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no names that are not UTF-8")
@pytest.mark.slow
@pytest.mark.parametrize("locale", LOCALES)
def test_names_need_not_be_utf8(source, locale):
    env, shown = LOCALES[locale], "d\\xff\u00e9"
    folder = source.parent / os.fsdecode(b"d\xff\xc3\xa9")
    folder.mkdir()
    path = source.rename(folder / os.fsdecode(b"in\xff\xc3\xa9.gguf"))
    quantized, stock, report, card, picture = (folder / os.fsdecode(b"\xff\xc3\xa9" + end) for end in (b"o.gguf", b"s.gguf", b".json", b".md", b".svg"))
    args = [path, quantized, "--type", "itq3_s", "--importance", "none", "--report", report, "--model-card", card, "--verify"]
    out, err = run_command("quantize", *args, "--log-format", "json", env=env)
    assert read_json(report.read_bytes())["input"] == f"{source.parent}/{shown}/in\\xff\u00e9.gguf"
    assert read_json(out.splitlines()[-1])["output"][0]["path"].endswith(f"/{shown}/\\xff\u00e9o.gguf")
    assert all(b"--verify: cannot run a token" in line for line in err.splitlines())  # the source has none either
    assert "ggml-ext quantize 'in\\xff\u00e9.gguf'" in card.read_text("utf-8")
    _, err = run_command("quantize", *args, "--log-format", "json", env=env, code=1)
    assert f"/{shown}/\\xff\u00e9o.gguf exists: choose another name" in read_json(err)["text"]
    assert b"d\\xff" in run_command("quantize", *args, env=env, code=1)[1]
    assert b"as requested" in run_command("quantize", *args, "--force", env=env)[0]
    run_command("quantize", path, folder / os.fsdecode(b"\xffsplit.gguf"), *args[2:6], "--split-max-size", "1M", "--quiet", env=env)
    run_command("export", quantized, stock, "--type", "q8_0", env=env)
    out, _ = run_command("inspect", quantized, "--against", path, "--json", "--picture", picture, env=env)
    assert read_json(out)["file"].endswith("\\xff\u00e9o.gguf") and picture.stat().st_size


def test_ascii_streams_escape_characters(tmp_path):
    """Streams escape what they cannot show; options and files keep it."""

    def names(writer: gguf.GGUFWriter) -> None:
        writer.add_string("general.\u00f6", "\u65e5")

    source = write_gguf(tmp_path / "in.gguf", {"blk.0.gr\u00f6\u00dfe.weight": gaussian(8, 256)}, fill=names)
    args = [source, tmp_path / "out.gguf", "--type", "itq3_s", "--importance", "none", "--tensor-type", "gr\u00f6\u00dfe=itq3_t".encode()]
    out, err = run_command("quantize", *args, env=ASCII)
    assert b"gr\\xf6\\xdfe.weight" in out and b"itq3_t" in out and not err
    assert "gr\u00f6\u00dfe=itq3_t" in gguf.GGUFReader(tmp_path / "out.gguf").fields["ggml_ext.options"].contents()
    for module, *flags in (["inspect"], ["inspect", "--json"]):
        out, _ = run_command(module, tmp_path / "out.gguf", *flags, env=ASCII)
        assert out.isascii() and (b"\\u00f6" in out if flags else b"gr\\xf6\\xdfe" in out), out
    out, _ = run_command("inspect", tmp_path / "out.gguf", "--tensor", "gr\u00f6\u00dfe".encode(), env=ASCII)
    assert b"1 tensors" in out


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no names that are not UTF-8")
@pytest.mark.parametrize("locale", LOCALES)
def test_library_directory_is_printed_unchanged(tmp_path, lib, locale):
    link = tmp_path / os.fsdecode(b"d\xff\xc3\xa9")
    link.symlink_to(lib.path.parent)
    out, _ = run_command("libdir", env=LOCALES[locale] | {"GGML_EXT_LIB_DIR": os.fspath(link)})
    assert out == os.fsencode(link) + b"\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows removes no folder that is in use")
def test_removed_current_directory_is_reported(source):
    """Absolute paths work; a relative path is an error with its cause."""
    whole, gone = source.with_name("out.gguf"), source.with_name("gone")

    def run_in_removed_directory(module, *args) -> subprocess.CompletedProcess:
        gone.mkdir()
        line = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, "-m", f"ggml_ext.{module}", *map(str, args)]
        return subprocess.run(line, cwd=gone, capture_output=True, text=True, timeout=120)

    flags = ["--type", "itq3_s", "--importance", "none"]
    for module, *args in (
        ["quantize", source, whole, *flags, "--report", source.with_name("report.json")], ["quantize", source, "--dry-run", *flags],
        ["export", whole, source.with_name("stock.gguf"), "--type", "q8_0"], ["inspect", whole, "--against", source],
        ["libdir"],
    ):
        done = run_in_removed_directory(module, *args)
        assert done.returncode == 0, done.stderr
    for module, *args in (
        ["quantize", source, "out.gguf", *flags], ["quantize", ".", whole, *flags, "--force"],
        ["quantize", source, whole, *flags, "--force", "--report", "report.json"], ["export", whole, "stock.gguf", "--type", "q8_0"],
    ):
        done = run_in_removed_directory(module, *args)
        assert done.returncode == 1 and done.stderr.startswith("error: the current directory was removed: change to"), done.stderr
    for module, *args in ["inspect", "in.gguf"], ["quantize", "in.gguf", "--dry-run", *flags]:
        done = run_in_removed_directory(module, *args)
        assert done.returncode == 1 and done.stderr.startswith(("error: cannot read in.gguf", "error: the current directory was removed")), done.stderr


def test_names_are_encoded_for_streams():
    assert encoding.to_utf8("a\u65e5\U0001f600") == "a\u65e5\U0001f600"
    assert encoding.to_utf8("\ud800") == "\\ud800"
    assert encoding.to_utf8("\udcc3\udca9 \udcff") == "\u00e9 \\xff"
    assert json.loads(encoding.to_json({"\udcff": ["\udcff", (1, None)]})) == {"\\xff": ["\\xff", [1, None]]}
    assert Path(encoding.to_file_name("\u00e9")) == Path("\u00e9")


# --- one command for all

def test_every_command_is_a_subcommand():
    """Each has its own name in --help and gets the remaining arguments."""
    listed = run_main(everything.main)
    assert listed.returncode == 0 and all(name in listed.stdout for name in everything.COMMANDS)
    for name in set(everything.COMMANDS) - {"serve"}:
        done = run_main(everything.main, name, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: ggml-ext {name} "), done.stdout
    check_error(run_main(everything.main, "quantize", "no.gguf", "out.gguf", "--type", "itq3_t"), "no.gguf")
    check_error(run_main(everything.main, "quantise"), "unknown command 'quantise'", "quantize")
    check_error(run_main(everything.main, "--type", "itq3_t"), "--type")
    assert run_main(everything.main, "--version").stdout.startswith("ggml-ext ")


def test_serve_runs_llama_server():
    tool("llama-server")
    done = subprocess.run([sys.executable, "-m", "ggml_ext", "serve", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and "version" in done.stderr + done.stdout
