"""Files that are written never take the place of those that are read, kept beside OUT or not yet whole: refused before anything runs."""

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
def folder(tmp_path, monkeypatch, lib):
    """With a model, an importance matrix under several names, a text, and a file that is older than all of it."""
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "in.gguf", {NAME: gaussian(8, 256)})
    write_imatrix(tmp_path / "im.gguf", {NAME: (np.ones((1, 256), np.float32), [4])})
    (tmp_path / "old.gguf").write_text("old")
    (tmp_path / "text.txt").write_text("Some words in a row. " * 1000)
    (tmp_path / "sub").mkdir()
    os.symlink("im.gguf", tmp_path / "link.gguf")
    os.link("im.gguf", tmp_path / "second.gguf")
    return tmp_path


def refused(folder, main, *args, parts):
    """One line, and nothing in the folder is another than before."""
    before = files(folder), sorted(p.name for p in folder.iterdir())
    result = run_main(main, *args)
    check_error(subprocess.CompletedProcess([], result.returncode, "", result.stderr), *parts)
    assert (files(folder), sorted(p.name for p in folder.iterdir())) == before


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
def test_what_is_read_is_not_replaced(folder, out, flags, part):
    refused(folder, quantize.main, "in.gguf", out, "--type", "itq3_s", "--force", *flags, parts=(part,))


def test_a_part_of_a_split_model_does_not_replace_the_importance_matrix(folder):
    (folder / "im.gguf").rename("out-00001-of-00001.gguf")
    flags = ("--type", "itq3_s", "--force", "--split-max-size", "1G", "--imatrix", "out-00001-of-00001.gguf")
    refused(folder, quantize.main, "in.gguf", "out.gguf", *flags, parts=("OUT: ", "out-00001-of-00001.gguf is the same file as --imatrix"))


@pytest.mark.parametrize("name", ["out-00007-of-00009.gguf", "out.gguf"])
def test_nothing_has_a_name_of_the_parts(folder, name):
    flags = ("--type", "itq3_s", "--force", "--split-max-size", "1G", *NONE, "--report", name)
    refused(folder, quantize.main, "in.gguf", "out.gguf", *flags, parts=(f"--report: {name} is the same file as OUT",))


@pytest.mark.parametrize("args", [("im.gguf",), ("out.gguf", "--model-card", "second.gguf")], ids=" ".join)
def test_an_export_does_not_replace_what_it_reads(folder, args):
    run_main(quantize.main, "in.gguf", "ours.gguf", "--type", "itq3_s", *NONE)
    refused(folder, export.main, "ours.gguf", *args, "--type", "q4_0", "--force", *IMATRIX, parts=("is the same file as --imatrix",))


KEPT = ["in.imatrix.gguf", "in.imatrix.json", "in.imatrix.layers-0-3.gguf", "in.imatrix.layers-0-3.json", "in.choice.json"]


@pytest.mark.parametrize("flag", ["OUT", "--report", "--model-card"])
@pytest.mark.parametrize("name", KEPT)
def test_nothing_has_the_name_of_kept_results(folder, name, flag):
    args = [name] if flag == "OUT" else ["out.gguf", flag, name]
    parts = (f"{flag}: {name} is where ", "of in is kept: ")
    refused(folder, quantize.main, "in.gguf", *args, "--target-bpw", "4", "--force", *NONE, "--sensitivity", "usual", parts=parts)


def test_kept_results_of_others_and_elsewhere_are_no_matter(folder):
    flags = ("--type", "itq3_s", *NONE, "--report", "sub/in.choice.json", "--model-card", "out.choice.json")
    assert run_main(quantize.main, "in.gguf", "other.imatrix.gguf", *flags).returncode == 0
    assert sorted(p.name for p in (folder / "sub").iterdir()) == ["in.choice.json"]


UNFINISHED = [".out.gguf.partial", ".out.gguf.partial.json", ".out-00001-of-00001.gguf.partial", ".out-00001-of-00001.gguf.replaced",
              ".report.json.4321.part"]


@pytest.mark.parametrize("flag", ["OUT", "--report", "--model-card"])
@pytest.mark.parametrize("name", UNFINISHED)
def test_nothing_has_the_name_of_an_unfinished_file(folder, name, flag):
    args = [name] if flag == "OUT" else ["out.gguf", flag, name]
    parts = (f"{flag}: {name}: such names are those of files that are not yet whole",)
    refused(folder, quantize.main, "in.gguf", *args, "--type", "itq3_s", *NONE, parts=parts)
    (folder / name).write_text("of another run")
    refused(folder, quantize.main, "in.gguf", *args, "--type", "itq3_s", "--force", *NONE, parts=parts)


@pytest.mark.parametrize("what", ["IN", "--imatrix", "--imatrix-from"])
@pytest.mark.parametrize("name", [".out.gguf.partial", ".out.gguf.partial.json", ".out-00001-of-00001.gguf.partial"])
def test_what_is_read_is_no_unfinished_file_of_out(folder, name, what):
    flag = "--split-max-size 1G" if "-of-" in name else "--pure"
    os.rename({"IN": "in.gguf", "--imatrix": "im.gguf", "--imatrix-from": "text.txt"}[what], name)
    source, given = (name, NONE) if what == "IN" else ("in.gguf", [what, name])
    refused(folder, quantize.main, source, "out.gguf", "--type", "itq3_s", *flag.split(), *given, "--force", parts=("OUT: ", what, name))


def test_names_are_those_that_are_used(tmp_path):
    """The long ones too."""
    for path in (tmp_path / "out.gguf", tmp_path / ("x" * 240 + ".gguf")):
        with write_atomically(path) as part:
            part.touch()
            names = [part, partial_path(path), reserved_paths.journal_of(path), Part(path, 0, 1).replaced]
        assert all(re.fullmatch(reserved_paths.UNFINISHED, p.name) for p in names) and not re.fullmatch(reserved_paths.UNFINISHED, path.name)
