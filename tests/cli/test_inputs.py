"""What IN and the files beside it may do to a run: change, fail, hold what no type stores, lie on a drive that lacks something."""

import errno
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ggml_ext._base.errors import UserError
from ggml_ext._base.files import lock_directory, remove_stale_directories
from ggml_ext._commands import quantizing
from ggml_ext._encode.codec import Codec
from ggml_ext._output.output import Output
from helpers import writing
from helpers.commands import run_quantize
from helpers.errors import files, raw_gguf
from helpers.importances import write_imatrix
from helpers.models import ROOT
from helpers.moments_files import correlated, write_moments
from helpers.writing import FLAGS, NAMES, encoded, only_out, run_badly, run_well

small_chunks, source = writing.small_chunks, writing.source


def write_again(path):
    path.write_bytes(path.read_bytes())


def cut_off(path):
    os.truncate(path, path.stat().st_size // 2)


def replace_by_a_copy(path):
    shutil.copy2(path, copy := path.with_name("copy.gguf"))
    os.replace(copy, path)


def change_while_tensors_are_written(monkeypatch, change, path):
    """Before the fifth tensor."""
    start = Output.start

    def changing(self, tensor):
        start(self, tensor)
        if tensor == 4:
            change(path)

    monkeypatch.setattr(Output, "start", changing)


@pytest.mark.parametrize(("change", "said"), [
    (write_again, "in.gguf was written to while it was read"),
    (cut_off, "in.gguf changed while it was read, from"),
    (replace_by_a_copy, "in.gguf was replaced by another file while"),
    (os.remove, "in.gguf was moved or removed while"),
])
def test_an_input_that_changes_while_it_is_read(lib, source, tmp_path, capsys, monkeypatch, change, said):
    """Whatever was made of it is not kept."""
    change_while_tensors_are_written(monkeypatch, change, source)
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, "--verify", parts=(said, "run it again"))
    assert {p.name for p in tmp_path.iterdir()} <= {source.name}


def test_an_importance_matrix_that_changes_while_it_is_read(lib, source, tmp_path, capsys, monkeypatch):
    path = write_moments(tmp_path / "im.gguf", {n: correlated(700, 512) for n in NAMES if "ffn" in n})
    change_while_tensors_are_written(monkeypatch, write_again, path)
    run_badly(capsys, source, tmp_path / "out.gguf", "--type", "itq3_s", "--imatrix", path, parts=("im.gguf was written to while it was read",))
    assert {p.name for p in tmp_path.iterdir()} == {source.name, path.name}


def test_a_change_explains_what_else_fails(lib, source, tmp_path, capsys, monkeypatch):
    """A program that ends with a bus error, say."""
    def fail(*args):
        cut_off(source)
        raise UserError("llama-imatrix exited with -7")

    monkeypatch.setattr(quantizing, "find_importance", fail)
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, parts=("in.gguf changed while it was read, from",))


def test_a_disk_that_fails_names_the_file(lib, source, tmp_path, capsys, monkeypatch):
    pread = os.pread

    def fail(fd, n_bytes, start):
        if start > 4096:
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, n_bytes, start)

    monkeypatch.setattr(os, "pread", fail)
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, parts=("cannot read", "in.gguf at byte", "Input/output error"))


def test_an_error_at_a_tensor_costs_no_finished_one(lib, source, tmp_path, capsys, monkeypatch):
    out, convert = tmp_path / "out.gguf", Codec.convert

    def fail(self, rows, tensor, *others):
        if tensor.name == NAMES[5]:
            raise UserError("no memory")
        return convert(self, rows, tensor, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "convert", fail)
        run_badly(capsys, source, out, *FLAGS, parts=("no memory", "goes on after 5 of 9 tensors"))
    with encoded(monkeypatch) as names:
        run_well(capsys, source, out, *FLAGS)
    assert set(names) == set(NAMES[5:]) and only_out(out)


def bad_weights(source):
    """In the last two tensors: one that is too large, one that is none."""
    data = bytearray(source.read_bytes())
    at = source.stat().st_size - 4
    data[at:] = np.float32(np.nan).tobytes()
    before = 12 * 512 * 4
    data[at - before : at - before + 4] = np.float32(1e6).tobytes()
    source.write_bytes(data)


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=" ".join)
def test_weights_that_cannot_be_stored_are_found_first(lib, source, tmp_path, capsys, monkeypatch, flags):
    bad_weights(source)
    monkeypatch.setattr(quantizing, "find_importance", lambda *args: pytest.fail("calibrated"))
    out = [] if flags else [tmp_path / "out.gguf"]
    said = (f"tensor {NAMES[7]}: weight 6,143", "is 1e+06", f"--tensor-type '{re.escape(NAMES[7])}=f32'", f"1 more tensor has such weights: {NAMES[8]}")
    run_badly(capsys, source, *out, *FLAGS, *flags, parts=said)
    run_badly(capsys, source, *out, *FLAGS, *flags, "--tensor-type", f"{NAMES[7]}=f32", parts=(f"tensor {NAMES[8]}: weight 6,143", "nan"))
    assert {p.name for p in tmp_path.iterdir()} == {source.name}


def test_weights_that_one_type_of_a_target_cannot_hold(lib, source, tmp_path, capsys):
    bad_weights(source)
    run_badly(capsys, source, "--target-bpw", "4", "--dry-run", parts=(f"tensor {NAMES[7]}: weight 6,143",))


def test_tensors_that_overlap_are_refused(tmp_path, capsys):
    path = raw_gguf(tmp_path / "in.gguf", tensors=[(b"a.weight", (256, 2), 1, 0), (b"b.weight", (256, 2), 1, 1024 - 32)])
    run_badly(capsys, path, tmp_path / "out.gguf", *FLAGS, parts=("tensor b.weight begins at byte", "inside tensor a.weight"))
    path = raw_gguf(tmp_path / "in.gguf", tensors=[(b"b.weight", (256, 2), 1, 1024), (b"a.weight", (256, 2), 1, 0)])
    run_well(capsys, path, tmp_path / "out.gguf", *FLAGS)


def test_an_importance_matrix_of_zeros_is_refused(lib, source, tmp_path, capsys):
    entries = {n: (np.zeros((1, 512), np.float32), [4]) for n in NAMES if "ffn" in n}
    path = write_imatrix(tmp_path / "im.gguf", entries)
    args = (source, tmp_path / "out.gguf", "--type", "ditto3", "--imatrix", path)
    run_badly(capsys, *args, parts=("--imatrix", "im.gguf", "only zeros", "llama-imatrix -m MODEL -f TEXT"))
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
    with lock_directory(folders["running"]) as has_lock:
        assert has_lock
        remove_stale_directories(tmp_path, ".calibration-", told.append)
    assert told == [f"removed temporary files of a killed run: {folders['killed']}"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".calibration-fresh", ".calibration-running"]


# --- network and FUSE drives

@pytest.fixture(scope="module")
def quantize_on_drive(tmp_path_factory):
    """A function that runs the quantizer where drives refuse what the letters of tests/native/netfs.c say."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("LD_PRELOAD and a C compiler")
    path = tmp_path_factory.mktemp("netfs") / "netfs.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, ROOT / "tests" / "native" / "netfs.c", "-ldl"], check=True)
    return lambda letters, *args: run_quantize(*args, env=os.environ | {"LD_PRELOAD": str(path), "NETFS": letters})


@pytest.mark.parametrize("letters", ["v", "lhcs"])
def test_drives_that_lack_what_is_not_needed(source, tmp_path, quantize_on_drive, letters):
    """Locks, hard links, modes, fsync(), and how large they are."""
    plain, out = tmp_path / "plain.gguf", tmp_path / "drive" / "out.gguf"
    out.parent.mkdir()
    assert run_quantize(source, plain, *FLAGS).returncode == 0
    done = quantize_on_drive(letters, source, out, *FLAGS, "--verify")
    assert done.returncode == 0, done.stderr
    assert files(out.parent) == {"out.gguf": plain.read_bytes()}


@pytest.mark.parametrize("letter", ["m", "p"])
def test_drives_that_map_no_files(source, tmp_path, quantize_on_drive, letter):
    """Files are read without being mapped."""
    out = tmp_path / "out.gguf"
    done = quantize_on_drive(letter, source, out, *FLAGS, "--verify")
    assert done.returncode == 0 and out.exists(), done.stderr
