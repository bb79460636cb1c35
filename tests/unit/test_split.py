"""Split models: every command reads the parts of llama-gguf-split as one model."""

import os
import shutil
import subprocess

import gguf
import pytest

from ggml_ext import inspect
from ggml_ext import quantize as program
from ggml_ext._formats.split import PART_NAME, SPLIT_KEYS, part_names
from helpers.commands import tool
from helpers.errors import files
from helpers.models import gaussian, write_gguf

MATRICES = {f"blk.{i}.ffn_{name}.weight": gaussian(8, n, seed=i) for i in range(3) for name, n in (("up", 256), ("down", 512))}
N_PARTS = 3  # of two tensors


def run_gguf_split(*args):
    done = subprocess.run([tool("llama-gguf-split"), *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def split(source, prefix, *flags):
    run_gguf_split("--split", *flags, source, prefix)
    return sorted(prefix.parent.glob(f"{prefix.name}-*.gguf"))


@pytest.fixture(scope="module")
def single_file(tmp_path_factory):
    tensors = MATRICES | {"output_norm.weight": gaussian(256)}
    return write_gguf(tmp_path_factory.mktemp("whole") / "in.gguf", tensors, fill=lambda w: w.add_name("some"))


@pytest.fixture(scope="module")
def split_model(single_file):
    return split(single_file, single_file.parent / "made", "--split-max-tensors", "3")


@pytest.fixture
def parts(split_model, tmp_path):
    return [shutil.copy(p, tmp_path) for p in split_model]


@pytest.fixture
def quantize(capsys):
    """Return a function that runs the quantizer in this process and returns standard error."""

    def run(source, out, *flags, code=0):
        exit_code = program.main([str(source), str(out), *(flags or ("--type", "itq3_s", "--importance", "none"))])
        err = capsys.readouterr().err
        assert exit_code == code, err
        return err

    return run


@pytest.fixture
def expect_error(quantize, tmp_path):
    """Return a function that checks for one error line and an unchanged directory."""

    def run(source, *words):
        before = files(tmp_path)
        (line,) = quantize(source, tmp_path / "out.gguf", code=1).splitlines()
        assert line.startswith("error: ") and all(s in line for s in words), line
        assert files(tmp_path) == before

    return run


def test_part_names_are_parsed():
    assert part_names("m-00002-of-00003.gguf") == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert part_names("a-00001-of-00002-00001-of-00001.gguf") == ["a-00001-of-00002-00001-of-00001.gguf"]
    for name in ("m.gguf", "m-1-of-3.gguf", "m-00001-of-00003.gguf.part", "-00001-of-00002.gguf"):
        assert part_names(name) == [name] and not PART_NAME.fullmatch(name)


@pytest.mark.parametrize("first_argument", range(N_PARTS))
def test_any_part_selects_the_model(single_file, split_model, tmp_path, first_argument, quantize):
    """The bytes equal those from the single file."""
    assert len(split_model) == N_PARTS
    quantize(single_file, tmp_path / "whole.gguf")
    quantize(split_model[first_argument], tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert not fields.keys() & set(SPLIT_KEYS) and fields["general.name"].contents() == "some"


def test_first_part_without_tensors(single_file, tmp_path, quantize):
    parts = split(single_file, tmp_path / "made", "--split-max-tensors", "3", "--no-tensor-first-split")
    assert len(parts) == N_PARTS + 1 and not gguf.GGUFReader(parts[0]).tensors
    quantize(parts[0], tmp_path / "out.gguf")
    assert [t.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors] == [t.name for t in gguf.GGUFReader(single_file).tensors]


def test_parts_may_be_links(split_model, tmp_path, quantize):
    """The hub client's cache has links to files that are named by their checksums."""
    (tmp_path / "blobs").mkdir()
    for i, part in enumerate(split_model):
        shutil.copy(part, tmp_path / "blobs" / f"{i:064x}")
        (tmp_path / part.name).symlink_to(tmp_path / "blobs" / f"{i:064x}")
    quantize(tmp_path / split_model[0].name, tmp_path / "out.gguf")


def test_inspect_compares_with_the_parts(split_model, tmp_path, quantize, capsys):
    quantize(split_model[0], tmp_path / "out.gguf", "--type", "ditto3", "--importance", "none")
    assert inspect.main([str(tmp_path / "out.gguf"), "--against", str(split_model[1])]) == 0
    output = capsys.readouterr().out
    assert "7 tensors" in output and "EXCEEDED" not in output


def test_parts_can_be_merged(split_model, tmp_path):
    """The tool that llama.cpp's error recommends is installed and merges the parts."""
    run_gguf_split("--merge", split_model[0], tmp_path / "merged.gguf")
    assert len(gguf.GGUFReader(tmp_path / "merged.gguf").tensors) == len(MATRICES) + 1


@pytest.mark.slow
@pytest.mark.parametrize("linked", [False, True])
def test_calibration_reads_parts(model, tmp_path, linked, quantize):
    """Runs the real llama-imatrix, which finds the parts by the first one's name."""
    parts = split(model, tmp_path / "made", "--split-max-tensors", "20")
    if linked:
        for i, part in enumerate(parts):
            part.rename(tmp_path / f"{i}.blob")
            part.symlink_to(tmp_path / f"{i}.blob")
    flags = ("--type", "itq3_s", "--importance", "diagonal", "--calibration-chunks", "2", "--threads", "1", "--force")
    assert "calibration: diagonal Hessians" in quantize(parts[1], tmp_path / "out.gguf", *flags)
    cache = tmp_path / "made.imatrix.gguf"
    assert cache.is_file() and "reusing" in quantize(parts[0], tmp_path / "again.gguf", *flags)
    # One weight of the last part differs.
    content = bytearray(parts[-1].read_bytes())
    content[-2] ^= 1
    parts[-1].write_bytes(content)
    assert "computing it again" in quantize(parts[0], tmp_path / "again.gguf", *flags)


def test_missing_part_is_refused(parts, tmp_path, expect_error):
    os.unlink(parts[1])
    expect_error(parts[0], "made-00002-of-00003.gguf is missing", str(tmp_path))
    os.unlink(parts[0])
    expect_error(parts[2], "made-00001-of-00003.gguf and 1 more is missing")


def test_renamed_part_is_refused(parts, tmp_path, expect_error):
    os.rename(parts[1], tmp_path / "second.gguf")
    expect_error(tmp_path / "second.gguf", "part 2 of 3", "-00002-of-00003.gguf")


def test_parts_in_another_order_are_refused(parts, expect_error):
    first, second = (open(p, "rb").read() for p in parts[1:])
    for path, content in zip(parts[1:], (second, first)):
        with open(path, "wb") as f:
            f.write(content)
    expect_error(parts[0], "00002-of-00003.gguf must have split.no 1", "it has split.no 2")


@pytest.mark.parametrize("kind", ["not split", "other count", "same tensors", "fewer tensors", "no GGUF file"])
def test_part_of_another_model_is_refused(parts, tmp_path, kind, expect_error):
    tensors = {name: MATRICES[name] for name in list(MATRICES)[: 1 if kind == "fewer tensors" else 3]}

    def fill(writer):
        if kind != "not split":
            writer.add_uint16("split.no", 1)
            writer.add_uint16("split.count", 4 if kind == "other count" else 3)
            writer.add_int32("split.tensors.count", 7)

    if kind == "fewer tensors":
        tensors = {f"other.{name}": value for name, value in tensors.items()}
    write_gguf(tmp_path / "other.gguf", tensors, fill=fill)
    os.replace(tmp_path / "other.gguf", parts[1])
    if kind == "no GGUF file":
        with open(parts[1], "wb") as f:
            f.write(b"<html>")
    message = {
        "not split": "it has none", "other count": "split.count 4", "same tensors": "is in",
        "fewer tensors": "5 tensors, split.tensors.count is 7", "no GGUF file": "is not a GGUF file",
    }[kind]
    expect_error(parts[0], "-of-00003.gguf", message)


def test_truncated_part_is_refused(parts, expect_error):
    with open(parts[2], "r+b") as f:
        f.truncate(os.path.getsize(parts[2]) - 100)
    expect_error(parts[0], "made-00003-of-00003.gguf: truncated")


def test_output_may_not_replace_a_part(parts, tmp_path, quantize):
    before = files(tmp_path)
    assert "same file as IN" in quantize(parts[0], parts[2], "--type", "itq3_s", "--force", code=1)
    assert files(tmp_path) == before


def test_wrong_number_of_tensors_is_refused(parts, expect_error):
    reader = gguf.GGUFReader(parts[0], "r+")
    reader.fields["split.tensors.count"].parts[-1][0] = 8
    reader.data.flush()
    expect_error(parts[0], "7 tensors, split.tensors.count is 8")
