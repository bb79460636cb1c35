"""What becomes of OUT: nothing is lost, a stopped run goes on, two runs do not meet, parts load, what was written is checked.

In this process where that shows the same: a program starts in a second, and there are many cases.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys

import gguf
import numpy as np
import pytest

from ggml_ext import quantize as program
from ggml_ext._base.files import hidden, locked_folder, remove_leftovers
from ggml_ext._base.signals import SIGNALS
from ggml_ext._encode.codec import Codec
from ggml_ext._formats import chunks
from ggml_ext._jobs import settings
from ggml_ext._output import conversion, verify
from ggml_ext._output import output as _output
from ggml_ext._output.output import Output
from ggml_ext._output.parts import split_parts
from helpers.commands import quantize_command, tool
from helpers.errors import check_error, files, own_mount_namespace, raw_gguf
from helpers.importances import importances, write_imatrix
from helpers.models import ROOT, gaussian, read_tensors, write_gguf

NAMES = [f"blk.{i}.{part}.weight" for i in range(3) for part in ("attn_norm", "ffn_up", "ffn_down")]


@pytest.fixture
def source(tmp_path):
    """Matrices of two chunks; the second's weights are below what DITTO3's scales reach."""
    tensors = {}
    for i, name in enumerate(NAMES):
        tensors[name] = gaussian(256, seed=i) if "norm" in name else gaussian(12, 512, seed=i) * (1e-9 if name == NAMES[2] else 1)
    return write_gguf(tmp_path / "in.gguf", tensors, "F32")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_WEIGHTS", 6 * 512)


FLAGS = ("--type", "ditto3", "--importance", "none", "--fallback-above", "3", "-t", "2")


def run(capsys, *args) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the quantizer."""
    capsys.readouterr()
    code = program.main([str(a) for a in args])
    return code, *capsys.readouterr()


def run_well(capsys, *args) -> tuple[str, str]:
    code, out, err = run(capsys, *args)
    assert code == 0, err
    return out, err


def run_badly(capsys, *args, parts=(), code=1) -> str:
    found, _, err = run(capsys, *args)
    check_error(subprocess.CompletedProcess([], found, "", err), *parts, code=code)
    return err


STOP = """
import os, signal, sys
from ggml_ext import quantize
from ggml_ext._formats import chunks
from ggml_ext._jobs import settings
from ggml_ext._output.output import Output
chunks.CHUNK_WEIGHTS = 6 * 512
write = Output.write
def stop(self, data):
    write(self, data)
    if len(self.finished) == int(sys.argv[1]) and self._written > 512:
        self._file.flush()
        os.kill(os.getpid(), int(sys.argv[2]))
Output.write = stop
sys.exit(quantize.main(sys.argv[3:]))
"""


def run_and_stop(n_finished: int, number: int, *args) -> subprocess.CompletedProcess:
    """A process that gets a signal inside the tensor after n_finished, with a part of it written."""
    command = [sys.executable, "-c", STOP, n_finished, int(number), *args]

    def default_signals():  # shells ignore SIGINT in the background
        for n in SIGNALS:
            signal.signal(n, signal.SIG_DFL)

    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120, preexec_fn=default_signals)


@contextlib.contextmanager
def encoded(monkeypatch):
    """Names of the tensors that are encoded within it."""
    names = []
    convert = Codec.convert

    def note(self, rows, tensor, *others):
        names.append(tensor.name)
        return convert(self, rows, tensor, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "convert", note)
        yield names


@pytest.mark.parametrize("flags", [(), ("--split-max-size", "1M")], ids=["whole", "split"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_a_stopped_run_goes_on_with_the_same_bytes(lib, source, tmp_path, capsys, monkeypatch, number, flags):
    """Epsilons in the header and a fallback among what was done before."""
    flags = (*FLAGS, *flags)
    (tmp_path / "whole").mkdir()
    is_split = "--split-max-size" in flags
    if is_split:  # parts of about three tensors
        monkeypatch.setattr(settings, "parse_split_size", lambda text: 8000)
        smaller = "settings.parse_split_size = lambda text: 8000\nsys.exit"
        monkeypatch.setattr(sys.modules[__name__], "STOP", STOP.replace("sys.exit", smaller))
    run_well(capsys, source, tmp_path / "whole" / "out.gguf", *flags)
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "out.gguf"
    result = run_and_stop(5, number, source, out, *flags)
    left = sorted(p.name for p in out.parent.iterdir())
    assert all(name.startswith(".out") for name in left) and ".out.gguf.partial.json" in left
    if number == signal.SIGINT:
        check_error(result, "interrupted, ", "was not written; the same command goes on after 5 of 9 tensors", code=130)
    else:
        assert result.returncode == -signal.SIGKILL
    with encoded(monkeypatch) as names:
        stdout, err = run_well(capsys, source, out, *flags)
    assert sorted(set(names)) == sorted(NAMES[5:])
    assert "note: an earlier run was stopped: going on after 5 of 9 tensors\n" in err
    assert "iq4_nl instead of ditto3 for the errors" in stdout
    assert files(out.parent) == files(tmp_path / "whole")
    assert len(files(out.parent)) == (3 if is_split else 1)


def test_stopped_in_the_first_tensor_nothing_is_left(lib, source, tmp_path):
    before = files(tmp_path)
    check_error(run_and_stop(0, signal.SIGTERM, source, tmp_path / "out.gguf", *FLAGS), "out.gguf was not written", code=143)
    assert files(tmp_path) == before


@pytest.fixture
def stopped(lib, source, tmp_path, capsys, monkeypatch):
    """What a killed run of FLAGS left after five tensors: OUT, and what it has to become."""
    expected = tmp_path / "expected.gguf"
    run_well(capsys, source, expected, *FLAGS)
    out = tmp_path / "out.gguf"

    def kill(self, *args):
        if len(self.finished) == 5:
            raise KeyboardInterrupt
        finish(self, *args)

    finish = Output.finish
    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish", kill)
        with pytest.raises(KeyboardInterrupt):
            program.main([str(a) for a in (source, out, *FLAGS)])
    assert sorted(p.name for p in tmp_path.glob(".out*")) == [".out.gguf.partial", ".out.gguf.partial.json"]
    return out, expected.read_bytes()


def only_out(out) -> bool:
    return [p.name for p in out.parent.iterdir() if "out" in p.name] == [out.name]


@pytest.mark.parametrize(
    ("damage", "n_left"),
    [
        ("data", 2),
        ("cut journal", 4),
        ("cut data", 4),
        ("no journal", 0),
        ("empty journal", 0),
        ("other journal", 0),
        ("no data", 0),
    ],
)
def test_what_is_damaged_is_made_again(source, stopped, capsys, monkeypatch, damage, n_left):
    """After a power cut, say."""
    out, expected = stopped
    partial, journal = hidden(out), hidden(out).with_name(hidden(out).name + ".json")
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    if damage == "data":
        data = bytearray(partial.read_bytes())
        # in the third tensor: the last bytes of what is finished are behind it
        data[-sum(json.loads(line)["n_bytes"] for line in lines[4:]) - 6000] ^= 1
        partial.write_bytes(data)
    elif damage == "cut journal":
        journal.write_text("".join(lines)[:-20])
    elif damage == "cut data":
        with open(partial, "r+b") as f:
            f.truncate(partial.stat().st_size - 2 * (12 * 512 * 106 // 256))  # the sixth tensor, and of the fifth
    elif damage == "no journal":
        journal.unlink()
    elif damage == "empty journal":
        journal.write_text("")
    elif damage == "other journal":
        head = {"format": 1, "made_from": {}, "files": ["/etc/passwd", "../in.gguf", "in.gguf"]}
        journal.write_text(json.dumps(head) + "\n" + "".join(lines[1:]))
    else:
        partial.unlink()
    with encoded(monkeypatch) as names:
        _, err = run_well(capsys, source, out, *FLAGS)
    n_done = len(NAMES) - len(set(names))
    assert n_done == n_left
    assert out.read_bytes() == expected and only_out(out) and source.exists()
    assert ("started anew" in err) == (n_done == 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_bytes": "12"}, {"n_bytes": -1}, {"tensor": "2"}, {"sha256": 7}, {"seconds": "a"}, {"seconds": float("nan")},
        {"accuracy": {"error": "x"}}, {"accuracy": 3}, {"warnings": "none"}, {"warnings": [1]}, {"type": ["IQ4_NL"]},
        {"type": "DITTO3"},  # in which it has another size
    ],
    ids=str,
)
def test_a_journal_with_values_of_the_wrong_kind_counts_up_to_them(source, stopped, capsys, monkeypatch, wrong):
    """Of the tensor in IQ4_NL."""
    out, expected = stopped
    journal = hidden(out).with_name(hidden(out).name + ".json")
    lines = journal.read_text().splitlines()
    assert json.loads(lines[3])["type"] == "IQ4_NL"
    lines[3] = json.dumps(json.loads(lines[3]) | wrong)
    journal.write_text("\n".join(lines) + "\n")
    with encoded(monkeypatch) as names:
        _, err = run_well(capsys, source, out, *FLAGS)
    assert "going on after 2 of 9" in err and len(set(names)) == 7
    assert out.read_bytes() == expected and only_out(out)


@pytest.mark.parametrize("head", ["[" * 100_000, "[]", '{"format": 1, "made_from": {}, "files": 5}', '{"format": 1, "made_from": [], "files": []}',
                                  json.dumps({"format": 1, "made_from": {}, "files": [".é" + "x" * 300 + ".partial", ".\ud800.partial"]})],
                         ids=["nested", "list", "files", "made_from", "names"])
def test_a_journal_that_is_none_starts_anew(source, stopped, capsys, head):
    out, expected = stopped
    journal = hidden(out).with_name(hidden(out).name + ".json")
    journal.write_text("\n".join([head, *journal.read_text().splitlines()[1:], ""]))
    _, err = run_well(capsys, source, out, *FLAGS)
    assert "started anew" in err and out.read_bytes() == expected and only_out(out)


def test_a_run_of_something_else_starts_anew_and_says_so(source, stopped, capsys, monkeypatch, tmp_path):
    out, expected = stopped
    left = {p: p.read_bytes() for p in tmp_path.glob(".out*")}
    imatrix = write_imatrix(tmp_path / "im.gguf", {n: (np.ones((1, 512), np.float32), [1]) for n in NAMES if "ffn" in n})
    weights = source.read_bytes()

    def again(*flags, what):
        for path, data in left.items():
            path.write_bytes(data)
        with encoded(monkeypatch) as names:
            _, err = run_well(capsys, source, out, "--force", *flags)
        note = re.search(r": started anew, what it left is not of the same (.*) and was removed: .out.gguf.partial$", err, re.M)
        assert note and what in note[1].split(", "), err
        assert set(names) == set(NAMES) and only_out(out)
        return out.read_bytes()

    # first while the input is as it was, or that would differ too
    assert again(*FLAGS[:-4], "-t", "1", what="options") != expected
    assert again("--type", "ditto3", "--imatrix", imatrix, "--fallback-above", "3", what="importance") != expected
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "__version__", "0.0.9")
        again(*FLAGS, what="version")
    source.write_bytes(weights[:-4] + np.float32(0.5).tobytes())
    assert again(*FLAGS, what="input") != expected


def test_another_imatrix_of_the_same_name_starts_anew(lib, source, tmp_path, capsys, monkeypatch):
    """Values of the importance matrix are in no header."""
    out, imatrix = tmp_path / "out.gguf", tmp_path / "im.gguf"
    flags = ("--type", "ditto3", "--imatrix", imatrix, "-t", "1")
    write_imatrix(imatrix, {n: (importances(1, 512, seed=7), [4]) for n in NAMES if "ffn" in n})
    result = run_and_stop(4, signal.SIGKILL, source, out, *flags)
    assert result.returncode == -signal.SIGKILL
    run_well(capsys, source, tmp_path / "first.gguf", *flags)
    write_imatrix(imatrix, {n: (importances(1, 512, seed=8), [4]) for n in NAMES if "ffn" in n})
    _, err = run_well(capsys, source, out, *flags)
    assert "not of the same importance and was removed" in err
    run_well(capsys, source, tmp_path / "second.gguf", *flags)
    assert out.read_bytes() == (tmp_path / "second.gguf").read_bytes() != (tmp_path / "first.gguf").read_bytes()


def test_two_runs_on_one_out(lib, source, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    with Output(out, force=False):
        run_badly(capsys, source, out, *FLAGS, "--force", parts=("another run is writing", "out.gguf", "wait for its end"))
        run_well(capsys, source, tmp_path / "other.gguf", *FLAGS)
    assert not out.exists()
    run_well(capsys, source, out, *FLAGS)
    assert only_out(out)


def test_the_lock_is_of_the_file_that_has_the_name(tmp_path, monkeypatch):
    """A run may end, and remove the journal, between another's opening it and locking it."""
    out, opened = tmp_path / "out.gguf", []

    def open_file(path):
        opened.append(path)
        f = real(path)
        if len(opened) == 1:
            path.unlink()
        return f

    real = _output.open_file
    monkeypatch.setattr(_output, "open_file", open_file)
    with Output(out, force=False) as output:
        assert len(opened) == 2 and output.journal_path.exists()
        monkeypatch.setattr(_output, "open_file", real)
        with pytest.raises(_output.UserError, match="another run"), Output(out, force=False):
            pass
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("links", [True, False], ids=["", "no hard links"])
def test_a_file_that_appears_meanwhile_is_not_lost(lib, source, tmp_path, capsys, monkeypatch, links):
    out, complete = tmp_path / "out.gguf", Output.complete

    def appear(self, headers):
        complete(self, headers)
        out.write_text("precious")

    def no_links(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "complete", appear)
        run_badly(capsys, source, out, *FLAGS, parts=("out.gguf appeared", "--force", "goes on after 9 of 9 tensors"))
    assert out.read_text() == "precious"
    run_badly(capsys, source, out, *FLAGS, parts=("exists",))
    assert out.read_text() == "precious" and hidden(out).exists()  # what is done is not lost either
    with encoded(monkeypatch) as names:
        run_well(capsys, source, out, *FLAGS, "--force")
    assert not names and list(read_tensors(out)) == NAMES and only_out(out)


@pytest.fixture
def small_parts(monkeypatch):
    """Flags for parts of about three tensors of `source`."""
    monkeypatch.setattr(settings, "parse_split_size", lambda text: 8000)
    return *FLAGS, "--split-max-size", "1M"


def part_files(folder) -> list:
    return [folder / f"out-{i}-of-00003.gguf" for i in ("00001", "00002", "00003")]


@pytest.mark.parametrize("links", [True, False], ids=["", "no hard links"])
def test_a_part_that_appears_meanwhile_costs_no_other_part(lib, source, tmp_path, capsys, monkeypatch, small_parts, links):
    parts, complete = part_files(tmp_path), Output.complete

    def appear(self, headers):
        complete(self, headers)
        parts[1].write_text("precious")

    def no_links(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    out = tmp_path / "out.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(Output, "complete", appear)
        run_badly(capsys, source, out, *small_parts, parts=("out-00002-of-00003.gguf appeared", "goes on after 9 of 9 tensors"))
    assert parts[1].read_text() == "precious" and not parts[0].exists() and not parts[2].exists()
    parts[1].unlink()
    with encoded(monkeypatch) as names:
        run_well(capsys, source, out, *small_parts)
    assert not names and [n for p in parts for n in read_tensors(p)] == NAMES
    assert {p.name for p in tmp_path.iterdir()} == {source.name, *(p.name for p in parts)}


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_replacing_is_for_all_parts_or_none(lib, source, tmp_path, capsys, monkeypatch, small_parts, is_split):
    """One that cannot be replaced leaves the old files as they were, and what was made for the next run."""
    out, replace_file, refused = tmp_path / "out.gguf", os.replace, []
    flags, olds = (small_parts, part_files(tmp_path)) if is_split else (FLAGS, [out])
    for i, path in enumerate(olds):
        path.write_text(f"old {i}")

    def refuse(a, b):
        if b == olds[-1] and not refused:
            refused.append(b)
            raise OSError(errno.EBUSY, "Device or resource busy")
        replace_file(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        said = (f"OUT: {olds[-1]} could not be put in its place: Device or resource busy", "the same command goes on after 9 of 9 tensors")
        run_badly(capsys, source, out, *flags, "--force", parts=said)
    assert [path.read_text() for path in olds] == [f"old {i}" for i in range(len(olds))]
    with encoded(monkeypatch) as names:
        run_well(capsys, source, out, *flags, "--force")
    assert not names and [n for p in olds for n in read_tensors(p)] == NAMES
    assert {p.name for p in tmp_path.iterdir()} == {source.name, *(p.name for p in olds)}


@pytest.mark.parametrize("flag", ["--report", "--model-card"])
def test_what_appears_in_place_of_a_report_is_not_lost(lib, source, tmp_path, capsys, monkeypatch, flag):
    out, beside, publish = tmp_path / "out.gguf", tmp_path / "about.json", Output.publish

    def appear(self):
        publish(self)
        beside.write_text("precious")

    monkeypatch.setattr(Output, "publish", appear)
    run_badly(capsys, source, out, *FLAGS, flag, beside, parts=(flag, "about.json appeared meanwhile", "out.gguf is written"))
    assert beside.read_text() == "precious" and list(read_tensors(out)) == NAMES
    assert {p.name for p in tmp_path.iterdir()} == {source.name, "out.gguf", "about.json"}
    run_well(capsys, source, out, *FLAGS, flag, beside, "--force")
    assert beside.read_text() != "precious"


def test_permissions_of_a_replaced_file_stay(lib, source, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    run_well(capsys, source, out, *FLAGS)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~mask
    out.chmod(0o640)
    run_well(capsys, source, out, *FLAGS, "--force")
    assert stat.S_IMODE(out.stat().st_mode) == 0o640


def test_killed_between_two_names_the_first_is_not_written_to(lib, source, tmp_path, capsys):
    """The partial file is OUT by another name then."""
    out = tmp_path / "out.gguf"
    run_well(capsys, source, out, *FLAGS)
    os.link(out, hidden(out))
    other = tmp_path / "kept.gguf"
    os.link(out, other)
    before = other.read_bytes()
    run_well(capsys, source, out, "--type", "itq3_s", "--importance", "none", "--force")
    assert other.read_bytes() == before != out.read_bytes()


def test_links_in_place_of_partial_files_are_not_followed(lib, source, tmp_path, capsys):
    """Their names can be guessed."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    hidden(tmp_path / "out.gguf").symlink_to(precious)
    journal = hidden(tmp_path / "out.gguf").with_name(".out.gguf.partial.json")
    journal.symlink_to(precious)
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, parts=("cannot write",))
    journal.unlink()
    run_well(capsys, source, tmp_path / "out.gguf", *FLAGS)
    assert precious.read_text() == "precious" and not (tmp_path / "out.gguf").is_symlink()


def test_a_disk_that_gets_full_half_way(lib, source, tmp_path, capsys):
    """A limit of the file size stands for it: the file system itself says there is room."""
    out, limit = tmp_path / "out.gguf", 12_000  # of 20 kB
    command = quantize_command(source, out, *FLAGS)
    set_limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=set_limit)
    check_error(result, "no space left on device", "out.gguf needs 0.02 MiB", "free some space", "goes on after 5 of 9 tensors")
    _, err = run_well(capsys, source, out, *FLAGS)
    assert "going on after 5 of 9" in err and only_out(out)


def test_a_folder_on_a_read_only_file_system(lib, source, tmp_path, capsys, monkeypatch):
    """A real one where the machine lets us mount one: before any work, in one line."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if prefix := own_mount_namespace():
        script = f'mount -t tmpfs -o ro tmpfs "{folder}"; exec "$@"'
        command = quantize_command(source, folder / "out.gguf", *FLAGS)
        result = subprocess.run([*prefix, script, "sh", *command], capture_output=True, text=True)
        check_error(result, "cannot write", "out.gguf", "Read-only file system", "choose a folder that may be written")
    else:
        def refuse(path, *args):
            raise OSError(errno.EROFS, "Read-only file system", path)

        monkeypatch.setattr(_output, "open_file", refuse)
        run_badly(capsys, source, folder / "out.gguf", *FLAGS, parts=("cannot write", "Read-only file system"))
    assert not any(folder.iterdir())


@pytest.mark.parametrize("flags", [(), ("--split-max-size", "1M")], ids=["whole", "split"])
def test_report_and_verify(lib, source, tmp_path, capsys, flags):
    out, report = tmp_path / "out.gguf", tmp_path / "report.json"
    stdout, _ = run_well(capsys, source, out, *FLAGS, "--verify", "--report", report, *flags)
    assert "verified: 9 tensors read back" in stdout
    found = json.loads(report.read_text())
    if flags:
        out = tmp_path / "out-00001-of-00001.gguf"
    assert found["output"] == [{"path": str(out), "bytes": out.stat().st_size}]
    assert found["verified"] and found["type"] == "ditto3" and found["options"].endswith("fallback-above=3")
    for tensor, record in zip(read_tensors(out).values(), found["tensors"], strict=True):
        assert (tensor.name, tensor.tensor_type.name.lower(), tensor.n_bytes) == (record["name"], record["type"], record["bytes"])
        assert hashlib.sha256(tensor.data.tobytes()).hexdigest() == record["sha256"]
    by_name = {t["name"]: t for t in found["tensors"]}
    assert by_name[NAMES[2]]["type"] == "iq4_nl" and 0.02 < by_name[NAMES[1]]["relative_squared_error"] < 0.06
    assert "relative_squared_error" not in by_name[NAMES[0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.gguf", out.name, "report.json"])


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--report", "no/report.json"], ("--report", "folder", "does not exist")),
        (["--report", "out.gguf"], ("--report", "same file as OUT")),
        (["--report", "out-00001-of-00001.gguf", "--split-max-size", "1G"], ("--report", "same file as OUT")),
        (["--report", "in.gguf", "--force"], ("--report", "same file as IN")),
        (["--report", "old.json"], ("--report", "old.json exists", "--force")),
        (["--report", "."], ("--report", "not a regular file")),
        (["--report", "new.json", "--dry-run"], ("--report", "--dry-run")),
        (["--verify", "--dry-run"], ("--verify", "--dry-run")),
        (["--split-max-size", "2"], ("--split-max-size", "'2'", "such as 2G")),
        (["--split-max-size", "0M"], ("--split-max-size", "'0M'")),
        (["--split-max-size", "1.5G"], ("--split-max-size", "'1.5G'")),
        (["--log-format", "xml"], ("--log-format", "xml", "--help")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_options(source, tmp_path, capsys, monkeypatch, flags, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    before = files(tmp_path)
    run_badly(capsys, "in.gguf", "out.gguf", *FLAGS, *flags, parts=parts)
    assert files(tmp_path) == before


def flip(path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(("position", "part"), [(-100, f"tensor {NAMES[-1]}"), (6, "the header")], ids=["data", "header"])
def test_verify_finds_what_the_disk_changed(lib, source, tmp_path, capsys, monkeypatch, position, part):
    complete = Output.complete

    def damage(self, headers):
        complete(self, headers)
        flip(self.parts[0].partial, position)

    monkeypatch.setattr(Output, "complete", damage)
    monkeypatch.setattr(verify, "same", lambda a, b: True)  # the bytes alone
    before = files(tmp_path)
    parts = ("--verify", part, "differs from what was written")
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, "--verify", parts=parts)
    assert files(tmp_path) == before
    run_well(capsys, source, tmp_path / "out.gguf", *FLAGS)  # nobody looked


def test_verify_finds_errors_other_than_those_found_while_writing(lib, source, tmp_path, capsys, monkeypatch):
    """Memory that fails under the encoder's result, say."""
    convert = Codec.convert

    def wrong(self, rows, tensor, *others):
        data, accuracy = convert(self, rows, tensor, *others)
        if tensor.name == NAMES[4]:
            data = data.copy()
            data[0, 20] ^= 64
        return data, accuracy

    monkeypatch.setattr(Codec, "convert", wrong)
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, "--verify", parts=(f"tensor {NAMES[4]} decodes to other weights",))


def test_log_format_json(lib, source, tmp_path, capsys):
    """Every line of both streams, errors too."""
    out, err = run_well(capsys, source, tmp_path / "out.gguf", *FLAGS, "--log-format", "json", "--tensor-type", "xyz=q8_0")
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["tensor"] * 9 + ["summary"]
    assert [e["name"] for e in events[:-1]] == NAMES and events[3]["index"] == 4 and all(e["time"] for e in events)
    assert events[-1]["output"][0]["bytes"] == (tmp_path / "out.gguf").stat().st_size
    told = [json.loads(line) for line in err.splitlines()]
    assert [(t["event"], t["text"]) for t in told] == [("warning", "--tensor-type xyz=q8_0 matches no tensor")]
    code, out, err = run(capsys, source, tmp_path / "out.gguf", *FLAGS, "--log-format", "json")
    assert code == 1 and not out and json.loads(err)["event"] == "error" and "exists" in json.loads(err)["text"]
    out, err = run_well(capsys, source, *FLAGS, "--log-format", "json", "--dry-run")
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["tensor"] * 9 + ["summary"] and events[-1]["bits_per_weight"] > 3 and not err
    out, err = run_well(capsys, source, tmp_path / "quiet.gguf", *FLAGS, "--log-format", "json", "-q")
    assert out == err == ""


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--log-format", "json"], "required: --type"),
        (["--log-format=json", "--type"], "--type: expected one argument"),
        (["--log-f", "json", "--no-such-flag"], "--no-such-flag"),
        (["--threads", "many", "--log-form=json"], "--threads: invalid int value: 'many'"),
        (["--log-format", "text", "-t", "0", "--log-format", "json"], "required: --type"),
        (["--log-format", "json", "--log-format", "xml"], "invalid choice: 'xml'"),
        (["--log-format", "json", "--tensor"], "--tensor"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_command_lines_are_objects_too(tmp_path, capsys, flags, part):
    code, out, err = run(capsys, tmp_path / "in.gguf", tmp_path / "out.gguf", *flags)
    (line,) = err.splitlines()
    found = json.loads(line)
    assert (code, out, found["event"]) == (1, "", "error") and part in found["text"]


@pytest.mark.parametrize("flags", [["--log-format", "text"], ["--log-format"], ["--log-format", "xml"], ["--", "--log-format", "json"]])
def test_bad_command_lines_are_text_otherwise(tmp_path, capsys, flags):
    run_badly(capsys, tmp_path / "in.gguf", "--no-such-flag", *flags)


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "expected"),
    [
        ([5, 5, 5, 5], 10, [(0, 2), (2, 4)]),
        ([5, 6, 5, 4, 1], 10, [(0, 1), (1, 2), (2, 5)]),
        ([50, 1, 50, 50], 10, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([5, 5], 100, [(0, 2)]),
        ([5, 5], None, [(0, 2)]),
    ],
)
def test_which_tensors_go_into_which_part(tmp_path, sizes, max_bytes, expected):
    """As should_split() of llama-gguf-split has it, which refuses a first tensor that is too large."""
    parts = split_parts(tmp_path / "a.b.gguf", sizes, max_bytes)
    assert [(p.first, p.last) for p in parts] == expected
    if max_bytes is None:
        assert parts[0].path.name == "a.b.gguf"
    else:
        assert [p.path.name for p in parts] == [f"a.b-{i + 1:05}-of-{len(expected):05}.gguf" for i in range(len(expected))]


@pytest.fixture(scope="module")
def split_model(model, lib, tmp_path_factory):
    """The reference model whole and in parts of a megabyte."""
    folder = tmp_path_factory.mktemp("split")
    for flags in ((), ("--split-max-size", "1M")):
        args = (model, folder / "m.gguf", "--type", "itq3_s", "--importance", "none", "-q", *flags)
        assert program.main([str(a) for a in args]) == 0
    return folder


def test_parts_hold_what_the_whole_file_holds(split_model):
    """Keys and their types as llama-gguf-split writes them."""
    whole = gguf.GGUFReader(split_model / "m.gguf")
    parts = [gguf.GGUFReader(split_model / f"m-{i + 1:05}-of-00004.gguf") for i in range(4)]
    assert len(list(split_model.iterdir())) == 5
    tensors = [t for part in parts for t in part.tensors]
    assert [t.name for t in tensors] == [t.name for t in whole.tensors]
    for a, b in zip(tensors, whole.tensors, strict=True):
        assert a.tensor_type == b.tensor_type and np.array_equal(a.data, b.data), a.name
    keys = {"split.no", "split.count", "split.tensors.count"}
    for i, part in enumerate(parts):
        assert sum(-(-t.n_bytes // 32) * 32 for t in part.tensors) <= 1_000_000
        found = {k: f for k, f in part.fields.items() if not k.startswith("GGUF.")}
        assert set(found) == (keys | {k for k in whole.fields if not k.startswith("GGUF.")} if i == 0 else keys)
        assert [found[k].contents() for k in sorted(keys)] == [4, i, len(tensors)]
        assert [found[k].types[0].name for k in sorted(keys)] == ["UINT16", "UINT16", "INT32"]


@pytest.mark.slow
def test_parts_with_tensors_of_another_type_are_no_larger(lib, tmp_path, capsys):
    """Weights below what ITQ3_T's scales reach become IQ4_NL, and a whole part has such."""
    source = write_gguf(tmp_path / "in.gguf", {f"blk.{i}.ffn_up.weight": 1e-8 * gaussian(512, 256, seed=i) for i in range(24)}, "F32")
    flags = ("--type", "itq3_t", "--effort", "fast", "--importance", "none", "--split-max-size", "1M", "-q")
    found = {}
    for name, more in (("planned", ()), ("replaced", ("--fallback-above", "3"))):
        run_well(capsys, source, tmp_path / f"{name}.gguf", *flags, *more)
        parts = [list(read_tensors(p).values()) for p in sorted(tmp_path.glob(f"{name}-*.gguf"))]
        assert [t.name for part in parts for t in part] == list(read_tensors(source))
        found[name] = [sum(t.n_bytes for t in part) for part in parts]
    assert max(found["planned"]) * 4.5 / 3.0625 > 1_000_000  # what the same parts would have
    assert max(found["replaced"]) <= 1_000_000


@pytest.mark.slow
def test_llama_cpp_loads_the_parts(split_model, tmp_path):
    """Its loader names the parts itself; perplexities of one chunk are the same to the last digit."""
    found = []
    for name in ("m.gguf", "m-00001-of-00004.gguf"):
        log = tmp_path / f"{name}.log"
        with open(log, "w") as f:  # its last lines may be lost in a pipe
            command = [tool("llama-perplexity"), "-m", split_model / name, "-f", ROOT / "data" / "heldout.txt", "-c", 256]
            command += ["--chunks", 1, "-t", 2]
            subprocess.run([str(c) for c in command], stdout=f, stderr=subprocess.STDOUT, check=True, timeout=300)
        found += re.findall(r"\[1\](\d+\.\d+),", log.read_text())
    assert len(found) == 2 and found[0] == found[1]


def test_parts_never_replace_what_is_there(lib, source, tmp_path, capsys):
    old = tmp_path / "out-00001-of-00001.gguf"
    old.write_text("precious")
    flags = ("--split-max-size", "1G")
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, *flags, parts=("out-00001-of-00001.gguf exists", "--force"))
    assert old.read_text() == "precious"
    shutil.copy(source, old)
    flags = (*flags, "--force")
    run_badly(capsys, old, tmp_path / "out.gguf", *FLAGS, *flags, parts=("out-00001-of-00001.gguf is the same file as IN",))
    assert old.read_bytes() == source.read_bytes()
    run_well(capsys, source, tmp_path / "out.gguf", *FLAGS, *flags)
    assert list(read_tensors(old)) == NAMES and not (tmp_path / "out.gguf").exists()


def test_parts_keep_another_alignment(lib, tmp_path, capsys):
    tensors = {n: gaussian(4, 256, seed=i) for i, n in enumerate(NAMES[1:3])}
    source = write_gguf(tmp_path / "in.gguf", tensors, fill=lambda w: w.add_custom_alignment(128))
    flags = ("--type", "itq3_s", "--importance", "none", "--verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "parse_split_size", lambda text: 500)
        run_well(capsys, source, tmp_path / "out.gguf", *flags, "--split-max-size", "1M")
    second = gguf.GGUFReader(tmp_path / "out-00002-of-00002.gguf")
    assert second.alignment == 128 and second.tensors[0].data_offset % 128 == 0


def test_tensors_that_overlap_are_refused(tmp_path, capsys):
    path = raw_gguf(tmp_path / "in.gguf", tensors=[(b"a.weight", (256, 2), 1, 0), (b"b.weight", (256, 2), 1, 1024 - 32)])
    run_badly(capsys, path, tmp_path / "out.gguf", *FLAGS, parts=("tensor b.weight begins at byte", "inside tensor a.weight"))
    path = raw_gguf(tmp_path / "in.gguf", tensors=[(b"b.weight", (256, 2), 1, 1024), (b"a.weight", (256, 2), 1, 0)])
    run_well(capsys, path, tmp_path / "out.gguf", *FLAGS)


def test_an_importance_matrix_of_zeros_is_refused(lib, source, tmp_path, capsys):
    entries = {n: (np.zeros((1, 512), np.float32), [4]) for n in NAMES if "ffn" in n}
    path = write_imatrix(tmp_path / "im.gguf", entries)
    args = (source, tmp_path / "out.gguf", "--type", "ditto3", "--imatrix", path)
    run_badly(capsys, *args, parts=("--imatrix", "im.gguf", "nothing but zeros", "llama-imatrix -m MODEL -f TEXT"))
    write_imatrix(path, entries | {NAMES[1]: (np.ones((1, 512), np.float32), [4])})
    run_well(capsys, *args)


def test_leftovers_of_a_killed_calibration_are_removed_and_named(tmp_path):
    """Not those of a run that goes on, nor one that was made this moment."""
    folders = {name: tmp_path / f".calibration-{name}" for name in ("killed", "running", "fresh")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "imatrix.gguf").write_text("x")
        if name != "fresh":
            os.utime(folder, (0, 0))
    told = []
    with locked_folder(folders["running"]) as has_lock:
        assert has_lock
        remove_leftovers(tmp_path, ".calibration-", told.append)
    assert told == [f"removed what a killed run left: {folders['killed']}"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".calibration-fresh", ".calibration-running"]


def peak_memory(*args) -> int:
    """Bytes of a quantizer's process. A child's peak starts at that of the process that starts it: a small one stands between."""
    between = (
        "import resource, subprocess, sys; subprocess.check_call(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", between, *quantize_command(*args, "-q")]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(result.stdout) * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(lib, tmp_path):
    """Rows of a 70B model's widest matrices, sparse: from 29 to 117 million weights (58 to 235 MB) it takes no more memory,
    and 70B do not either (scripts/tools/quantize_cost.py)."""
    import quantize_cost

    peaks = []
    for n_rows in (1024, 4096):
        path = tmp_path / f"{n_rows}.gguf"
        ne = (28672, n_rows)
        tensor = gguf.GGMLQuantizationType.F16
        of = [quantize_cost.Tensor("blk.0.ffn_down.weight", ne, tensor, 0, 2 * ne[0] * ne[1])]
        quantize_cost.write_model(path, of)
        flags = ("--type", "itq3_s", "--tensor-type", "down=q8_0", "-t", "2")
        peaks.append(peak_memory(path, tmp_path / f"out-{n_rows}.gguf", *flags))
    grown = peaks[1] - peaks[0]
    # Of 176 MB more in the input and 94 MB more in the output. Allocators and the order of threads make some MB.
    print(f"peak memory {peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB")
    assert grown < 50e6 and peaks[1] < 300e6


def test_a_70b_model_is_planned_within_a_small_memory(lib, tmp_path):
    """All 722 tensors, 141 GB of zeros that take no room; the whole size is known before anything is written."""
    import quantize_cost

    model = quantize_cost.tensors("llama-3.1-70b")
    assert len(model) == 80 * 9 + 2 and 69.5e9 < sum(t.n_elements for t in model) < 71e9
    quantize_cost.write_model(tmp_path / "in.gguf", model)
    assert (tmp_path / "in.gguf").stat().st_blocks * 512 < 1e6 < 140e9 < (tmp_path / "in.gguf").stat().st_size
    peak = peak_memory(tmp_path / "in.gguf", tmp_path / "out.gguf", "--type", "itq3_t", "--dry-run")
    print(f"peak memory {peak / 1e6:.0f} MB")
    assert peak < 300e6
