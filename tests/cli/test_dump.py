"""python -m ggml_ext.dump as a real process: gguf-dump that knows our types and ends in one line."""

import json
import os
import subprocess
import sys

import gguf
import pytest

from ggml_ext._formats import gguf_file
from helpers.commands import quantize
from helpers.errors import check_error, key, raw_gguf
from helpers.models import gaussian, write_gguf


def run_dump(*args, **kwargs) -> subprocess.CompletedProcess:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 60, **kwargs}
    return subprocess.run([sys.executable, "-m", "ggml_ext.dump", *map(str, args)], **options)


@pytest.fixture
def path(tmp_path):
    write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256), "blk.0.ffn_down.weight": gaussian(8, 256)})
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "--type", "itq3_s")
    return tmp_path / "out.gguf"


def test_dumps_our_types(path):
    result = run_dump(path)
    assert result.returncode == 0 and result.stderr == "" and "ITQ3_S  | blk.0.ffn_up.weight" in result.stdout
    described = run_dump("--json", path)
    assert json.loads(described.stdout)["tensors"]["blk.0.ffn_up.weight"]["type"] == "ITQ3_S"
    assert run_dump(path, "--no-tensors").stdout in result.stdout


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["missing.gguf"], ("missing.gguf", "No such file")),
        (["--json", "missing.gguf"], ("missing.gguf", "No such file")),
        (["."], ("directory", "GGUF")),
        (["text.gguf"], ("text.gguf is not a GGUF file",)),
        (["header.gguf"], ("header.gguf: truncated",)),
        (["data.gguf"], ("data.gguf: truncated: tensor blk.0.ffn_down.weight",)),
        (["counts.gguf"], ("counts.gguf: truncated or corrupt", "18,446,744,073,709,551,665 bytes")),
        (["big_endian.gguf"], ("big_endian.gguf: truncated or corrupt",)),
        (["--json"], ("model", "--help")),
        (["--bogus", "out.gguf"], ("--bogus", "--help")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_files_and_command_lines(path, args, parts):
    folder, data = path.parent, path.read_bytes()
    (folder / "text.gguf").write_text("text")
    (folder / "header.gguf").write_bytes(data[:50])
    (folder / "data.gguf").write_bytes(data[: max(t.offset + t.n_bytes for t in gguf_file.GGUFFile(path).tensors) - 1])
    raw_gguf(folder / "counts.gguf", key(b"k", 9, (5).to_bytes(4, "little") + (2**62).to_bytes(8, "little")), 1)
    (folder / "big_endian.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(10))
    check_error(run_dump(*args, cwd=folder), *parts)


def test_big_endian_files_are_gguf_dumps_own(tmp_path):
    """The quantizer refuses them, gguf reads them."""
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a.weight", gaussian(4, 32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    result = run_dump(tmp_path / "in.gguf")
    assert result.returncode == 0 and "BIG endian" in result.stdout and "a.weight" in result.stdout


def test_standard_output_that_cannot_be_written(path):
    with open("/dev/full", "w") as full:
        result = run_dump(path, stdout=full)
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("error: cannot write to standard output: No space")
    reader, writer = os.pipe()
    os.close(reader)
    result = run_dump(path, stdout=writer)
    os.close(writer)
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("error: standard output was closed")
    assert "Traceback" not in result.stderr and "BrokenPipe" not in result.stderr
