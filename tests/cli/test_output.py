"""OUT: nothing is lost, interrupted runs resume, two runs do not interfere.

Most tests run in this process: a program takes a second to start.
"""

import errno
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest

from ggml_ext import quantize as program
from ggml_ext._base.files import partial_path
from ggml_ext._base.signals import SIGNALS
from ggml_ext._commands import options
from ggml_ext._output import conversion
from ggml_ext._output import output as _output
from ggml_ext._output.output import Output
from helpers import writing
from helpers.commands import quantize_command
from helpers.errors import check_error, files, mount_namespace_prefix
from helpers.importances import importances, write_imatrix
from helpers.models import read_tensors
from helpers.writing import FLAGS, NAMES, is_only_output, part_files, record_encoded, run_failing, run_successfully

small_chunks, source, small_parts = writing.small_chunks, writing.source, writing.small_parts


STOP = """
import os, signal, sys
from ggml_ext import quantize
from ggml_ext._formats import chunks
from ggml_ext._commands import options
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
    """Run a process that gets a signal inside the tensor after n_finished, when a part of it is written."""
    command = [sys.executable, "-c", STOP, n_finished, int(number), *args]

    def default_signals():  # background jobs of a shell ignore SIGINT
        for n in SIGNALS:
            signal.signal(n, signal.SIG_DFL)

    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120, preexec_fn=default_signals)


@pytest.mark.parametrize("flags", [(), ("--split-max-size", "1M")], ids=["whole", "split"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_resumed_run_writes_the_same_bytes(lib, source, tmp_path, capsys, monkeypatch, number, flags):
    """The header has epsilons, and the finished tensors include a fallback."""
    flags = (*FLAGS, *flags)
    (tmp_path / "whole").mkdir()
    is_split = "--split-max-size" in flags
    if is_split:  # parts of about three tensors
        monkeypatch.setattr(options, "parse_split_size", lambda text: 8000)
        smaller = "options.parse_split_size = lambda text: 8000\nsys.exit"
        monkeypatch.setattr(sys.modules[__name__], "STOP", STOP.replace("sys.exit", smaller))
    run_successfully(capsys, source, tmp_path / "whole" / "out.gguf", *flags)
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "out.gguf"
    result = run_and_stop(5, number, source, out, *flags)
    leftovers = sorted(p.name for p in out.parent.iterdir())
    assert all(name.startswith(".out") for name in leftovers) and ".out.gguf.partial.json" in leftovers
    if number == signal.SIGINT:
        check_error(result, "interrupted, ", "was not written; repeat the command to resume after 5 of 9 tensors", code=130)
    else:
        assert result.returncode == -signal.SIGKILL
    with record_encoded(monkeypatch) as names:
        stdout, err = run_successfully(capsys, source, out, *flags)
    assert sorted(set(names)) == sorted(NAMES[5:])
    assert "note: resuming after 5 of 9 tensors\n" in err
    assert "iq4_nl instead of ditto3 (--fallback-above)" in stdout
    assert files(out.parent) == files(tmp_path / "whole")
    assert len(files(out.parent)) == (3 if is_split else 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("flags", [(), ("--force",)], ids=["new", "replacing"])
def test_interrupt_in_the_first_tensor_leaves_nothing(lib, source, tmp_path, number, code, flags):
    if flags:
        (tmp_path / "out.gguf").write_text("precious")
    before = files(tmp_path)
    check_error(run_and_stop(0, number, source, tmp_path / "out.gguf", *FLAGS, *flags), "interrupted", "out.gguf was not written", code=code)
    assert files(tmp_path) == before


@pytest.fixture
def killed_run(lib, source, tmp_path, capsys, monkeypatch):
    """Kill a run of FLAGS after five tensors; return OUT and the bytes that it must get."""
    expected = tmp_path / "expected.gguf"
    run_successfully(capsys, source, expected, *FLAGS)
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
def test_damaged_tensors_are_written_again(source, killed_run, capsys, monkeypatch, damage, n_left):
    """A power cut can damage them."""
    out, expected = killed_run
    partial, journal = partial_path(out), partial_path(out).with_name(partial_path(out).name + ".json")
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    if damage == "data":
        data = bytearray(partial.read_bytes())
        # In the third tensor: the last finished bytes come after it.
        data[-sum(json.loads(line)["n_bytes"] for line in lines[4:]) - 6000] ^= 1
        partial.write_bytes(data)
    elif damage == "cut journal":
        journal.write_text("".join(lines)[:-20])
    elif damage == "cut data":
        with open(partial, "r+b") as f:
            f.truncate(partial.stat().st_size - 2 * (12 * 512 * 106 // 256))  # the sixth tensor, and a part of the fifth
    elif damage == "no journal":
        journal.unlink()
    elif damage == "empty journal":
        journal.write_text("")
    elif damage == "other journal":
        head = {"format": _output.JOURNAL_FORMAT, "made_from": {}, "files": ["/etc/passwd", "../in.gguf", "in.gguf"]}
        journal.write_text(json.dumps(head) + "\n" + "".join(lines[1:]))
    else:
        partial.unlink()
    with record_encoded(monkeypatch) as names:
        _, err = run_successfully(capsys, source, out, *FLAGS)
    n_done = len(NAMES) - len(set(names))
    assert n_done == n_left
    assert out.read_bytes() == expected and is_only_output(out) and source.exists()
    assert ("discarding stale partial output" in err) == (n_done == 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_bytes": "12"}, {"n_bytes": -1}, {"tensor": "2"}, {"sha256": 7}, {"seconds": "a"}, {"seconds": float("nan")},
        {"accuracy": {"error": "x"}}, {"accuracy": 3}, {"warnings": "none"}, {"warnings": [1]}, {"type": ["IQ4_NL"]},
        {"type": "DITTO3"},  # it has another size in this type
    ],
    ids=str,
)
def test_journal_is_used_up_to_the_first_wrong_value(source, killed_run, capsys, monkeypatch, wrong):
    """The wrong values belong to the tensor in IQ4_NL."""
    out, expected = killed_run
    journal = partial_path(out).with_name(partial_path(out).name + ".json")
    lines = journal.read_text().splitlines()
    assert json.loads(lines[3])["type"] == "IQ4_NL"
    lines[3] = json.dumps(json.loads(lines[3]) | wrong)
    journal.write_text("\n".join(lines) + "\n")
    with record_encoded(monkeypatch) as names:
        _, err = run_successfully(capsys, source, out, *FLAGS)
    assert "resuming after 2 of 9" in err and len(set(names)) == 7
    assert out.read_bytes() == expected and is_only_output(out)


@pytest.mark.parametrize("head", ["[" * 100_000, "[]", '{"format": 2, "made_from": {}, "files": 5}', '{"format": 2, "made_from": [], "files": []}',
                                  json.dumps({"format": 2, "made_from": {}, "files": [".é" + "x" * 300 + ".partial", ".\ud800.partial"]})],
                         ids=["nested", "list", "files", "made_from", "names"])
def test_invalid_journal_restarts(source, killed_run, capsys, head):
    out, expected = killed_run
    journal = partial_path(out).with_name(partial_path(out).name + ".json")
    journal.write_text("\n".join([head, *journal.read_text().splitlines()[1:], ""]))
    _, err = run_successfully(capsys, source, out, *FLAGS)
    assert "discarding stale partial output" in err and out.read_bytes() == expected and is_only_output(out)


def test_run_with_other_inputs_restarts_with_a_note(source, killed_run, capsys, monkeypatch, tmp_path):
    out, expected = killed_run
    partial_files = {p: p.read_bytes() for p in tmp_path.glob(".out*")}
    imatrix = write_imatrix(tmp_path / "im.gguf", {n: (np.ones((1, 512), np.float32), [1]) for n in NAMES if "ffn" in n})
    weights = source.read_bytes()

    def rerun(*flags, reason):
        for path, data in partial_files.items():
            path.write_bytes(data)
        with record_encoded(monkeypatch) as names:
            _, err = run_successfully(capsys, source, out, "--force", *flags)
        note = re.search(r"discarding stale partial output \(different (.*)\): .out.gguf.partial$", err, re.M)
        assert note and reason in note[1].split(", "), err
        assert set(names) == set(NAMES) and is_only_output(out)
        return out.read_bytes()

    # First, while the input is unchanged, or that would differ too.
    assert rerun(*FLAGS[:-4], "-t", "1", reason="options") != expected
    assert rerun("--type", "ditto3", "--imatrix", imatrix, "--fallback-above", "3", reason="importance") != expected
    rerun(*FLAGS, "--effort", "fast", reason="encoder")  # what the metadata do not record
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "__version__", "0.0.9")
        rerun(*FLAGS, reason="version")
    source.write_bytes(weights[:-4] + np.float32(0.5).tobytes())
    assert rerun(*FLAGS, reason="input") != expected


def test_other_imatrix_of_the_same_name_restarts(lib, source, tmp_path, capsys, monkeypatch):
    """Values of the imatrix are in no header."""
    out, imatrix = tmp_path / "out.gguf", tmp_path / "im.gguf"
    flags = ("--type", "ditto3", "--imatrix", imatrix, "-t", "1")
    write_imatrix(imatrix, {n: (importances(1, 512, seed=7), [4]) for n in NAMES if "ffn" in n})
    result = run_and_stop(4, signal.SIGKILL, source, out, *flags)
    assert result.returncode == -signal.SIGKILL
    run_successfully(capsys, source, tmp_path / "first.gguf", *flags)
    write_imatrix(imatrix, {n: (importances(1, 512, seed=8), [4]) for n in NAMES if "ffn" in n})
    _, err = run_successfully(capsys, source, out, *flags)
    assert "stale partial output (different importance)" in err
    run_successfully(capsys, source, tmp_path / "second.gguf", *flags)
    assert out.read_bytes() == (tmp_path / "second.gguf").read_bytes() != (tmp_path / "first.gguf").read_bytes()


def test_second_run_on_the_same_out_is_refused(lib, source, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    with Output(out, force=False):
        run_failing(capsys, source, out, *FLAGS, "--force", parts=("another run is writing", "out.gguf", "wait until it ends"))
        run_successfully(capsys, source, tmp_path / "other.gguf", *FLAGS)
    assert not out.exists()
    run_successfully(capsys, source, out, *FLAGS)
    assert is_only_output(out)


def test_lock_is_taken_on_the_current_journal(tmp_path, monkeypatch):
    """Another run may end and remove the journal between opening and locking it."""
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
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_file_that_appears_during_the_run_is_kept(lib, source, tmp_path, capsys, monkeypatch, small_parts, is_split, links):
    """Also if it is the second part; then the other parts are not written either."""
    out, complete = tmp_path / "out.gguf", Output.complete
    flags, outputs = (small_parts, part_files(tmp_path)) if is_split else (FLAGS, [out])
    taken = outputs[is_split]

    def appear(self, headers):
        complete(self, headers)
        taken.write_text("precious")

    def no_links(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "complete", appear)
        run_failing(capsys, source, out, *flags, parts=(f"{taken.name} appeared", "--force", "resume after 9 of 9 tensors"))
    run_failing(capsys, source, out, *flags, parts=("exists",))
    assert taken.read_text() == "precious" and not any(path.exists() for path in outputs if path != taken)
    with record_encoded(monkeypatch) as names:
        run_successfully(capsys, source, out, *flags, "--force")
    assert not names and [n for path in outputs for n in read_tensors(path)] == NAMES
    assert {p.name for p in tmp_path.iterdir()} == {source.name, *(p.name for p in outputs)}


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_parts_are_replaced_all_or_none(lib, source, tmp_path, capsys, monkeypatch, small_parts, is_split):
    """If one part cannot be replaced, the old files stay and the new ones remain for the next run."""
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
        message = (f"OUT: {olds[-1]} cannot be written: Device or resource busy", "repeat the command to resume after 9 of 9 tensors")
        run_failing(capsys, source, out, *flags, "--force", parts=message)
    assert [path.read_text() for path in olds] == [f"old {i}" for i in range(len(olds))]
    with record_encoded(monkeypatch) as names:
        run_successfully(capsys, source, out, *flags, "--force")
    assert not names and [n for p in olds for n in read_tensors(p)] == NAMES
    assert {p.name for p in tmp_path.iterdir()} == {source.name, *(p.name for p in olds)}


@pytest.mark.parametrize("flag", ["--report", "--model-card"])
def test_file_in_place_of_a_report_is_kept(lib, source, tmp_path, capsys, monkeypatch, flag):
    out, beside, publish = tmp_path / "out.gguf", tmp_path / "about.json", Output.publish

    def appear(self):
        publish(self)
        beside.write_text("precious")

    monkeypatch.setattr(Output, "publish", appear)
    run_failing(capsys, source, out, *FLAGS, flag, beside, parts=(flag, "about.json appeared during the run", "out.gguf is written"))
    assert beside.read_text() == "precious" and list(read_tensors(out)) == NAMES
    assert {p.name for p in tmp_path.iterdir()} == {source.name, "out.gguf", "about.json"}
    run_successfully(capsys, source, out, *FLAGS, flag, beside, "--force")
    assert beside.read_text() != "precious"


def test_permissions_of_a_replaced_file_are_kept(lib, source, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    run_successfully(capsys, source, out, *FLAGS)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~mask
    out.chmod(0o640)
    run_successfully(capsys, source, out, *FLAGS, "--force")
    assert stat.S_IMODE(out.stat().st_mode) == 0o640


def test_finished_file_with_two_names_is_not_written_to(lib, source, tmp_path, capsys):
    """A run that was killed between linking OUT and removing the partial name leaves one file with two names."""
    out = tmp_path / "out.gguf"
    run_successfully(capsys, source, out, *FLAGS)
    os.link(out, partial_path(out))
    other = tmp_path / "kept.gguf"
    os.link(out, other)
    before = other.read_bytes()
    run_successfully(capsys, source, out, "--type", "itq3_s", "--importance", "none", "--force")
    assert other.read_bytes() == before != out.read_bytes()


def test_links_in_place_of_partial_files_are_not_followed(lib, source, tmp_path, capsys):
    """Others can guess the names."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    partial_path(tmp_path / "out.gguf").symlink_to(precious)
    journal = partial_path(tmp_path / "out.gguf").with_name(".out.gguf.partial.json")
    journal.symlink_to(precious)
    run_failing(capsys, source, tmp_path / "out.gguf", *FLAGS, parts=("cannot write",))
    journal.unlink()
    run_successfully(capsys, source, tmp_path / "out.gguf", *FLAGS)
    assert precious.read_text() == "precious" and not (tmp_path / "out.gguf").is_symlink()


def test_full_disk_keeps_finished_tensors(lib, source, tmp_path, capsys):
    """A limit of the file size stands for it: the file system reports enough room."""
    out, limit = tmp_path / "out.gguf", 14_000  # OUT has 22 kB
    command = quantize_command(source, out, *FLAGS)
    set_limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=set_limit)
    check_error(result, "no space left on device", "out.gguf needs 0.02 MiB", "free some space", "resume after 5 of 9 tensors")
    _, err = run_successfully(capsys, source, out, *FLAGS)
    assert "resuming after 5 of 9" in err and is_only_output(out)


def test_read_only_file_system_is_refused_first(lib, source, tmp_path, capsys, monkeypatch):
    """Uses a real one where the machine allows mounting."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if prefix := mount_namespace_prefix():
        script = f'mount -t tmpfs -o ro tmpfs "{folder}"; exec "$@"'
        command = quantize_command(source, folder / "out.gguf", *FLAGS)
        result = subprocess.run([*prefix, script, "sh", *command], capture_output=True, text=True)
        check_error(result, "cannot write", "out.gguf", "Read-only file system", "choose a writable directory")
    else:
        def refuse(path, *args):
            raise OSError(errno.EROFS, "Read-only file system", path)

        monkeypatch.setattr(_output, "open_file", refuse)
        run_failing(capsys, source, folder / "out.gguf", *FLAGS, parts=("cannot write", "Read-only file system"))
    assert not any(folder.iterdir())
