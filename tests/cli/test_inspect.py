"""python -m ggml_ext.inspect in a real process: what it lists, checks and refuses."""

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest

from ggml_ext._encode.accuracy import VALUES_KEY, read_epsilons
from ggml_ext._formats import gguf_file
from helpers.commands import quantize
from helpers.errors import check_error
from helpers.inspecting import inspect, run_inspect
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.moments_files import correlated, write_moments
from helpers.weights import relative_mse

UP, DOWN, EMBD = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "token_embd.weight"
TENSORS = {
    EMBD: gaussian(16, 256),
    UP: gaussian(40, 512, seed=2),
    DOWN: gaussian(24, 256, seed=3),
    "blk.0.ffn_gate_exps.weight": gaussian(3, 8, 256, seed=4),
    "blk.0.attn_norm.weight": gaussian(256, seed=5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    write_gguf(folder / "in.gguf", TENSORS)
    quantize(folder / "in.gguf", folder / "out.gguf", "--type", "ditto3", "--token-embedding-type", "q8_0", "--tensor-type", "ffn_down=itq3_s")
    return folder


def test_inspect_lists_tensors_types_and_bits(folder):
    epsilons = read_epsilons(gguf_file.GGUFFile(folder / "out.gguf"))
    rows = inspect(folder / "out.gguf")
    assert list(rows)[:6] == ["tensor", *TENSORS]
    assert rows[EMBD] == ["256", "x", "16", "q8_0", "8.5"]
    assert rows[UP] == ["512", "x", "40", "ditto3", "3.312", f"{epsilons[UP]:.6g}"]
    assert rows[DOWN] == ["256", "x", "24", "itq3_s", "3.125"]
    assert rows["blk.0.ffn_gate_exps.weight"][:6] == ["256", "x", "8", "x", "3", "ditto3"]
    assert rows["blk.0.attn_norm.weight"] == ["256", "f32", "32"]
    n, n_bytes = (sum(getattr(t, a) for t in read_tensors(folder / "out.gguf").values()) for a in ("n_elements", "n_bytes"))
    assert rows["5"] == ["tensors,", f"{n:,}", "weights,", f"{n_bytes / 2**20:.2f}", "MiB,", f"{n_bytes * 8 / n:.4g}", "bpw"]
    assert rows["epsilon"] == "is recorded for 2 of 2 ditto3 tensors".split()


@pytest.mark.parametrize("numpy_only", [False, True], ids=["library", "numpy"])
def test_errors_match_numpy(folder, monkeypatch, numpy_only, capsys):
    """Reads the file in chunks of a few rows."""
    from ggml_ext import inspect as program
    from ggml_ext._formats import chunks
    from ggml_ext._native import library

    if numpy_only:
        monkeypatch.setattr(library, "load", lambda: None)
    elif library.load() is None:
        pytest.skip("libggml-base is not built into the installed package")
    monkeypatch.setattr(chunks, "CHUNK_WEIGHTS", 7 * 256)
    assert program.main([str(folder / "out.gguf"), "--against", str(folder / "in.gguf")]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    originals, stored = read_tensors(folder / "in.gguf"), read_tensors(folder / "out.gguf")
    for name in TENSORS:
        a, b = (gguf.quants.dequantize(t[name].data, t[name].tensor_type) for t in (stored, originals))
        largest = np.abs(a.astype(np.float64) - b).max()
        assert rows[name][-3:] == [f"{relative_mse(a, b):.6f}", f"{largest:.6g}", "ok"], name


def test_file_against_itself_has_no_errors(folder):
    rows = inspect(folder / "out.gguf", "--against", folder / "out.gguf")
    assert all(rows[name][-3:] == ["0.000000", "0", "ok"] for name in TENSORS)


def write_changed(folder, tmp_path, change):
    """Copy out.gguf and change its bytes by change(data, file)."""
    data = bytearray((folder / "out.gguf").read_bytes())
    change(data, gguf_file.GGUFFile(folder / "out.gguf"))
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    return path


def find_tensor(file, name):
    return next(t for t in file.tensors if t.name == name)


def test_too_small_epsilon_is_reported(folder, tmp_path):
    """A single float32 step is noticed: the bound is tight."""
    values = gguf_file.GGUFFile(folder / "out.gguf").floats(VALUES_KEY)

    def change(data, file):
        offset = data.index(file.metadata[VALUES_KEY].raw) + 16
        data[offset : offset + 4] = np.nextafter(np.nextafter(values[0], np.float32(0)), np.float32(0)).tobytes()

    path = write_changed(folder, tmp_path, change)
    inspect(path)
    result = run_inspect(path, "--against", folder / "in.gguf")
    check_error(result, UP, "largest error", "recorded epsilon", "in.gguf")
    assert [line.split()[-1] for line in result.stdout.splitlines() if line.startswith("blk.0.ffn_up")] == ["EXCEEDED"]
    assert "NMSE of all weights" in result.stdout  # the table is complete


def test_changed_blocks_are_reported(folder, tmp_path):
    def change(data, file):
        start = find_tensor(file, UP).offset
        data[start + 2 : start + 10] = np.full(8, 127, np.int8).tobytes()

    check_error(run_inspect(write_changed(folder, tmp_path, change), "--against", folder / "in.gguf"), UP, "largest error")


def test_damaged_scales_are_reported(folder, tmp_path):
    def change(data, file):
        start = find_tensor(file, DOWN).offset
        data[start : start + 2] = np.float16(np.nan).tobytes()

    check_error(run_inspect(write_changed(folder, tmp_path, change), "--against", folder / "in.gguf"), DOWN, "rows 0 to 23", "NaN or Inf")


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_invalid_epsilon_is_refused(folder, tmp_path, value):
    def change(data, file):
        offset = data.index(file.metadata[VALUES_KEY].raw) + 16
        data[offset : offset + 4] = np.float32(value).tobytes()

    check_error(run_inspect(write_changed(folder, tmp_path, change)), UP, "recorded epsilon")


def test_epsilon_of_another_tensor_is_refused(folder, tmp_path):
    def change(data, file):
        offset = data.index(UP.encode())  # in the metadata, before the tensors' names
        data[offset : offset + len(UP)] = DOWN.encode().ljust(len(UP), b"x")[: len(UP)]

    check_error(run_inspect(write_changed(folder, tmp_path, change)), "records an epsilon for blk.0.ffn_down", "not a ditto3 tensor")


@pytest.mark.parametrize("other", ["missing", "more", "shape", "type"])
def test_other_file_as_original_is_refused(folder, tmp_path, other):
    tensors = dict(TENSORS)
    name = UP
    if other == "missing":
        del tensors[UP]
    elif other == "more":
        name = "blk.1.ffn_up.weight"
        tensors[name] = gaussian(2, 256)
    elif other == "shape":
        tensors[UP] = gaussian(20, 1024)
    path = write_gguf(tmp_path / "other.gguf", tensors)
    if other == "type":
        data = path.read_bytes()
        offset = data.index(UP.encode()) + len(UP) + 4 + 16
        assert data[offset] == 1  # f16, the size of i16
        path.write_bytes(data[:offset] + bytes([25]) + data[offset + 1 :])
    parts = {"shape": ("[512, 40]", "[1024, 20]"), "type": ("ditto3", "i16", "cannot be compared")}.get(other, ("is not in",))
    check_error(run_inspect(folder / "out.gguf", "--against", path), name, "other.gguf", *parts)


def test_bad_files_and_flags_are_refused(folder, tmp_path):
    check_error(run_inspect(tmp_path / "missing.gguf"), "missing.gguf", "No such file")
    check_error(run_inspect(folder / "out.gguf", "--against", tmp_path / "missing.gguf"), "missing.gguf")
    check_error(run_inspect(folder), "directory")
    check_error(run_inspect(), "FILE", "--help")
    check_error(run_inspect(folder / "out.gguf", "-t", "0"), "--threads", "got 0")
    (tmp_path / "text.gguf").write_text("text")
    check_error(run_inspect(tmp_path / "text.gguf"), "not a GGUF file")


def test_closed_standard_output_is_ignored(folder):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-m", "ggml_ext.inspect", folder / "out.gguf"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    check_error(subprocess.CompletedProcess([], result.returncode, "", result.stderr), "standard output was closed")


@pytest.mark.parametrize("kind", ["diagonal", "block"])
def test_weighted_errors_match_the_summary(tmp_path, lib, kind):
    """Includes experts."""
    experts = "blk.0.ffn_gate_exps.weight"
    inputs = {UP: correlated(600, 512), experts: [correlated(600, 256, seed=i) for i in range(3)]}
    imatrix = write_moments(tmp_path / "m.gguf", inputs)
    write_gguf(tmp_path / "in.gguf", TENSORS)
    flags = ["--imatrix", imatrix, "--importance", kind]
    summary = quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "--type", "itq3_t", *flags).stdout
    rows = inspect(tmp_path / "out.gguf", "--against", tmp_path / "in.gguf", *flags)
    for name in (UP, experts):
        start = name.replace(".0.", ".*.")
        (line,) = [line for line in summary.splitlines() if line.startswith(start) and len(line.split()) == 5]
        assert rows[name][-4:-1] == line.split()[2:4] + [rows[name][-2]] and 0 < float(rows[name][-3]) < 0.03
    assert len(rows["tensor"]) == len(inspect(tmp_path / "out.gguf", "--against", tmp_path / "in.gguf")["tensor"]) + 1
    assert rows["weighted"][:2] == ["NMSE", f"({kind},"]
    assert "quantized" in inspect(tmp_path / "out.gguf", "--against", tmp_path / "in.gguf")


@pytest.mark.parametrize(("flags", "parts"), [
    (["--imatrix", "m.gguf"], ("--imatrix", "--against")),
    (["--against", "in.gguf", "--importance", "block"], ("--importance", "--imatrix FILE")),
    (["--against", "in.gguf", "--imatrix", "m.gguf", "--importance", "none"], ("'none'", "diagonal, block, full")),
    (["--against", "in.gguf", "--imatrix", "m.gguf", "--importance", "full"], ("--importance full", "block-diagonal")),
    (["--against", "in.gguf", "--imatrix", "width.gguf"], (UP, "256 values", "needs 512", "another model")),
    (["--against", "in.gguf", "--imatrix", "names.gguf"], ("names.gguf", "no tensor", "another model")),
])
def test_bad_importance_is_refused(folder, flags, parts):
    write_moments(folder / "m.gguf", {UP: correlated(600, 512)})
    write_moments(folder / "width.gguf", {UP: correlated(600, 256)})
    write_moments(folder / "names.gguf", {"blk.9.ffn_up.weight": correlated(600, 256)})
    check_error(run_inspect("out.gguf", *flags, cwd=folder), *parts)
