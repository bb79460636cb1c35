"""Inputs that change, fail, hold weights that no type stores, or are on drives with limited features."""

import errno
import fcntl
import os
import re
import shutil

import numpy as np
import pytest

from ggml_ext._base.errors import UserError
from ggml_ext._base.files import remove_stale_directories
from ggml_ext._base.locks import lock_directory
from ggml_ext._commands import quantizing
from ggml_ext._encode.codec import Codec
from ggml_ext._output.output import Output
from helpers import writing
from helpers.errors import files, raw_gguf
from helpers.importances import write_imatrix
from helpers.moments_files import correlated, write_moments
from helpers.writing import FLAGS, NAMES, is_only_output, record_encoded, run_failing, run_successfully

small_chunks, source = writing.small_chunks, writing.source


def rewrite(path):
    path.write_bytes(path.read_bytes())


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def replace_by_copy(path):
    shutil.copy2(path, copy := path.with_name("copy.gguf"))
    os.replace(copy, path)


def change_during_writing(monkeypatch, change, path):
    """Apply a change before the fifth tensor."""
    start = Output.start

    def change_and_write(self, tensor):
        start(self, tensor)
        if tensor == 4:
            change(path)

    monkeypatch.setattr(Output, "start", change_and_write)


@pytest.mark.parametrize(("change", "message"), [
    (rewrite, "in.gguf was written to while it was read"),
    (truncate, "in.gguf changed while it was read, from"),
    (replace_by_copy, "in.gguf was replaced by another file while"),
    (os.remove, "in.gguf was moved or removed while"),
])
def test_changed_input_discards_the_output(lib, source, tmp_path, capsys, monkeypatch, change, message):
    change_during_writing(monkeypatch, change, source)
    run_failing(capsys, source, tmp_path / "out.gguf", *FLAGS, "--verify", parts=(message, "run it again"))
    assert {p.name for p in tmp_path.iterdir()} <= {source.name}


def test_changed_importance_matrix_is_reported(lib, source, tmp_path, capsys, monkeypatch):
    path = write_moments(tmp_path / "im.gguf", {n: correlated(700, 512) for n in NAMES if "ffn" in n})
    change_during_writing(monkeypatch, rewrite, path)
    run_failing(capsys, source, tmp_path / "out.gguf", "--type", "itq3_s", "--imatrix", path, parts=("im.gguf was written to while it was read",))
    assert {p.name for p in tmp_path.iterdir()} == {source.name, path.name}


def test_changed_input_explains_other_failures(lib, source, tmp_path, capsys, monkeypatch):
    """An example is a program that ends with a bus error."""
    def fail(*args):
        truncate(source)
        raise UserError("llama-imatrix exited with -7")

    monkeypatch.setattr(quantizing, "calibrate_for_plan", fail)
    run_failing(capsys, source, tmp_path / "out.gguf", *FLAGS, parts=("in.gguf changed while it was read, from",))


def test_read_error_names_the_file(lib, source, tmp_path, capsys, monkeypatch):
    pread = os.pread

    def fail(fd, n_bytes, start):
        if start > 4096:
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, n_bytes, start)

    monkeypatch.setattr(os, "pread", fail)
    run_failing(capsys, source, tmp_path / "out.gguf", *FLAGS, parts=("cannot read", "in.gguf at byte", "Input/output error"))


def test_error_keeps_finished_tensors(lib, source, tmp_path, capsys, monkeypatch):
    out, convert = tmp_path / "out.gguf", Codec.convert

    def fail(self, rows, tensor, *others):
        if tensor.name == NAMES[5]:
            raise UserError("no memory")
        return convert(self, rows, tensor, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "convert", fail)
        run_failing(capsys, source, out, *FLAGS, parts=("no memory", "resume after 5 of 9 tensors"))
    with record_encoded(monkeypatch) as names:
        run_successfully(capsys, source, out, *FLAGS)
    assert set(names) == set(NAMES[5:]) and is_only_output(out)


def bad_weights(source):
    """Spoil the last two tensors: one weight is too large, one is NaN."""
    data = bytearray(source.read_bytes())
    offset = source.stat().st_size - 4
    data[offset:] = np.float32(np.nan).tobytes()
    before = 12 * 512 * 4
    data[offset - before : offset - before + 4] = np.float32(1e6).tobytes()
    source.write_bytes(data)


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=" ".join)
def test_weights_that_cannot_be_stored_are_refused_first(lib, source, tmp_path, capsys, monkeypatch, flags):
    bad_weights(source)
    monkeypatch.setattr(quantizing, "calibrate_for_plan", lambda *args: pytest.fail("calibrated"))
    out = [] if flags else [tmp_path / "out.gguf"]
    message = (f"tensor {NAMES[7]}: weight 6,143", "is 1e+06", f"--tensor-type '{re.escape(NAMES[7])}=f32'", f"1 more tensor has such weights: {NAMES[8]}")
    run_failing(capsys, source, *out, *FLAGS, *flags, parts=message)
    run_failing(capsys, source, *out, *FLAGS, *flags, "--tensor-type", f"{NAMES[7]}=f32", parts=(f"tensor {NAMES[8]}: weight 6,143", "nan"))
    assert {p.name for p in tmp_path.iterdir()} == {source.name}


def test_target_avoids_types_that_cannot_hold_the_weights(lib, source, tmp_path, capsys):
    bad_weights(source)
    run_failing(capsys, source, "--target-bpw", "4", "--dry-run", parts=(f"tensor {NAMES[7]}: weight 6,143",))


def test_overlapping_tensors_are_refused(tmp_path, capsys):
    path = raw_gguf(tmp_path / "in.gguf", tensors=[(b"a.weight", (256, 2), 1, 0), (b"b.weight", (256, 2), 1, 1024 - 32)])
    run_failing(capsys, path, tmp_path / "out.gguf", *FLAGS, parts=("tensor b.weight begins at byte", "inside tensor a.weight"))
    path = raw_gguf(tmp_path / "in.gguf", tensors=[(b"b.weight", (256, 2), 1, 1024), (b"a.weight", (256, 2), 1, 0)])
    run_successfully(capsys, path, tmp_path / "out.gguf", *FLAGS)


def test_importance_matrix_of_zeros_is_refused(lib, source, tmp_path, capsys):
    entries = {n: (np.zeros((1, 512), np.float32), [4]) for n in NAMES if "ffn" in n}
    path = write_imatrix(tmp_path / "im.gguf", entries)
    args = (source, tmp_path / "out.gguf", "--type", "ditto3", "--imatrix", path)
    run_failing(capsys, *args, parts=("--imatrix", "im.gguf", "only zeros", "llama-imatrix -m MODEL -f TEXT"))
    write_imatrix(path, entries | {NAMES[1]: (np.ones((1, 512), np.float32), [4])})
    run_successfully(capsys, *args)


def test_leftovers_of_a_killed_calibration_are_removed(tmp_path):
    """Files of a running calibration and new files stay."""
    folders = {name: tmp_path / f".calibration-{name}" for name in ("killed", "running", "fresh")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "imatrix.gguf").write_text("x")
        if name != "fresh":
            os.utime(folder, (0, 0))
    told = []
    with lock_directory(folders["running"]) as has_lock:
        assert has_lock
        remove_stale_directories(tmp_path, ".calibration-", told.append)
    assert told == [f"removed temporary files of a killed run: {folders['killed']}"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".calibration-fresh", ".calibration-running"]


def test_drive_without_optional_features_works(lib, source, tmp_path, capsys, monkeypatch):
    """Some network and FUSE drives refuse locks, hard links, modes and fsync(), and do not tell their size."""
    def refuse(error: int):
        def function(*args) -> None:
            raise OSError(error, os.strerror(error))

        return function

    plain, out = tmp_path / "plain.gguf", tmp_path / "drive" / "out.gguf"
    out.parent.mkdir()
    run_successfully(capsys, source, plain, *FLAGS)
    for module, name, error in ((fcntl, "flock", errno.ENOLCK), (os, "link", errno.EPERM), (os, "chmod", errno.EPERM), (os, "fsync", errno.EINVAL)):
        monkeypatch.setattr(module, name, refuse(error))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    for flags in ((), ("--force",)):
        run_successfully(capsys, source, out, *FLAGS, "--verify", *flags)
        assert files(out.parent) == {"out.gguf": plain.read_bytes()}
