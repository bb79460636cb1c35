"""Outputs never replace inputs, caches or partial files: refused before anything runs."""

import os
import re
import subprocess

import numpy as np
import pytest

from ggml_ext import export, quantize
from ggml_ext._base.files import partial_path, write_atomically
from ggml_ext._formats import reserved_paths
from ggml_ext._output.parts import Part
from helpers.commands import run_main
from helpers.errors import check_error, files
from helpers.importances import write_imatrix
from helpers.models import gaussian, write_gguf

NAME = "blk.0.ffn_up.weight"


@pytest.fixture
def directory(tmp_path, monkeypatch, lib):
    """Fill a directory with a model, an imatrix under several names, a text, and a file that is older."""
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "in.gguf", {NAME: gaussian(8, 256)})
    write_imatrix(tmp_path / "im.gguf", {NAME: (np.ones((1, 256), np.float32), [4])})
    (tmp_path / "old.gguf").write_text("old")
    (tmp_path / "text.txt").write_text("Some words in a row. " * 1000)
    (tmp_path / "sub").mkdir()
    os.symlink("im.gguf", tmp_path / "link.gguf")
    os.link("im.gguf", tmp_path / "second.gguf")
    return tmp_path


def expect_refusal(directory, main, *args, parts):
    """Check for one error line and an unchanged directory."""
    before = files(directory), sorted(p.name for p in directory.iterdir())
    result = run_main(main, *args)
    check_error(subprocess.CompletedProcess([], result.returncode, "", result.stderr), *parts)
    assert (files(directory), sorted(p.name for p in directory.iterdir())) == before


IMATRIX, TEXT, NONE = ["--imatrix", "im.gguf"], ["--imatrix-from", "text.txt"], ["--importance", "none"]


@pytest.mark.parametrize(
    ("out", "flags", "part"),
    [
        ("im.gguf", IMATRIX, "OUT: im.gguf is the same file as --imatrix: choose another name"),
        ("link.gguf", IMATRIX, "OUT: link.gguf is the same file as --imatrix"),
        ("second.gguf", IMATRIX, "OUT: second.gguf is the same file as --imatrix"),
        ("sub/../im.gguf", IMATRIX, "OUT: sub/../im.gguf is the same file as --imatrix"),
        ("im.gguf", ["--imatrix", "link.gguf"], "OUT: im.gguf is the same file as --imatrix"),
        ("text.txt", TEXT, "OUT: text.txt is the same file as --imatrix-from"),
        ("out.gguf", [*IMATRIX, "--report", "./im.gguf"], "--report: im.gguf is the same file as --imatrix: name another file"),
        ("out.gguf", [*IMATRIX, "--model-card", "link.gguf"], "--model-card: link.gguf is the same file as --imatrix"),
        ("out.gguf", [*TEXT, "--report", "text.txt"], "--report: text.txt is the same file as --imatrix-from"),
        ("out.gguf", [*NONE, "--report", "a", "--model-card", "./sub/../a"], "--model-card: sub/../a is the same file as --report"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_output_may_not_replace_an_input(directory, out, flags, part):
    expect_refusal(directory, quantize.main, "in.gguf", out, "--type", "itq3_s", "--force", *flags, parts=(part,))


def test_part_may_not_replace_the_importance_matrix(directory):
    (directory / "im.gguf").rename("out-00001-of-00001.gguf")
    flags = ("--type", "itq3_s", "--force", "--split-max-size", "1G", "--imatrix", "out-00001-of-00001.gguf")
    expect_refusal(directory, quantize.main, "in.gguf", "out.gguf", *flags, parts=("OUT: ", "out-00001-of-00001.gguf is the same file as --imatrix"))


@pytest.mark.parametrize("name", ["out-00007-of-00009.gguf", "out.gguf"])
def test_other_outputs_may_not_have_the_name_of_a_part(directory, name):
    flags = ("--type", "itq3_s", "--force", "--split-max-size", "1G", *NONE, "--report", name)
    expect_refusal(directory, quantize.main, "in.gguf", "out.gguf", *flags, parts=(f"--report: {name} is the same file as OUT",))


@pytest.mark.parametrize("args", [("im.gguf",), ("out.gguf", "--model-card", "second.gguf")], ids=" ".join)
def test_export_may_not_replace_an_input(directory, args):
    run_main(quantize.main, "in.gguf", "ours.gguf", "--type", "itq3_s", *NONE)
    expect_refusal(directory, export.main, "ours.gguf", *args, "--type", "q4_0", "--force", *IMATRIX, parts=("is the same file as --imatrix",))


KEPT = ["in.imatrix.gguf", "in.imatrix.json", "in.imatrix.layers-0-3.gguf", "in.imatrix.layers-0-3.json", "in.choice.json"]


@pytest.mark.parametrize("flag", ["OUT", "--report", "--model-card"])
@pytest.mark.parametrize("name", KEPT)
def test_outputs_may_not_have_the_name_of_a_cache(directory, name, flag):
    args = [name] if flag == "OUT" else ["out.gguf", flag, name]
    parts = (f"{flag}: {name} is where ", "of in is kept: ")
    expect_refusal(directory, quantize.main, "in.gguf", *args, "--target-bpw", "4", "--force", *NONE, "--sensitivity", "usual", parts=parts)


def test_unused_cache_names_are_free(directory):
    flags = ("--type", "itq3_s", *NONE, "--report", "sub/in.choice.json", "--model-card", "out.choice.json")
    assert run_main(quantize.main, "in.gguf", "other.imatrix.gguf", *flags).returncode == 0
    assert sorted(p.name for p in (directory / "sub").iterdir()) == ["in.choice.json"]


UNFINISHED = [".out.gguf.partial", ".out.gguf.partial.json", ".out-00001-of-00001.gguf.partial", ".out-00001-of-00001.gguf.replaced",
              ".report.json.4321.part"]


@pytest.mark.parametrize("flag", ["OUT", "--report", "--model-card"])
@pytest.mark.parametrize("name", UNFINISHED)
def test_outputs_may_not_have_the_name_of_a_partial_file(directory, name, flag):
    args = [name] if flag == "OUT" else ["out.gguf", flag, name]
    parts = (f"{flag}: {name}: such names are those of incomplete files",)
    expect_refusal(directory, quantize.main, "in.gguf", *args, "--type", "itq3_s", *NONE, parts=parts)
    (directory / name).write_text("of another run")
    expect_refusal(directory, quantize.main, "in.gguf", *args, "--type", "itq3_s", "--force", *NONE, parts=parts)


@pytest.mark.parametrize("what", ["IN", "--imatrix", "--imatrix-from"])
@pytest.mark.parametrize("name", [".out.gguf.partial", ".out.gguf.partial.json", ".out-00001-of-00001.gguf.partial"])
def test_input_may_not_be_a_partial_file_of_out(directory, name, what):
    flag = "--split-max-size 1G" if "-of-" in name else "--pure"
    os.rename({"IN": "in.gguf", "--imatrix": "im.gguf", "--imatrix-from": "text.txt"}[what], name)
    source, flags = (name, NONE) if what == "IN" else ("in.gguf", [what, name])
    expect_refusal(directory, quantize.main, source, "out.gguf", "--type", "itq3_s", *flag.split(), *flags, "--force", parts=("OUT: ", what, name))


def test_reserved_names_are_the_names_in_use(tmp_path):
    """Includes names that are shortened."""
    for path in (tmp_path / "out.gguf", tmp_path / ("x" * 240 + ".gguf")):
        with write_atomically(path) as part:
            part.touch()
            names = [part, partial_path(path), reserved_paths.journal_of(path), Part(path, 0, 1).replaced]
        assert all(re.fullmatch(reserved_paths.UNFINISHED, p.name) for p in names) and not re.fullmatch(reserved_paths.UNFINISHED, path.name)
