"""OUT in parts, as llama-gguf-split writes them."""

import re
import shutil
import subprocess

import gguf
import numpy as np
import pytest

from ggml_ext import quantize as program
from ggml_ext._commands import options
from ggml_ext._output.parts import split_parts
from helpers import writing
from helpers.commands import tool
from helpers.models import ROOT, gaussian, read_tensors, write_gguf
from helpers.writing import FLAGS, NAMES, run_failing, run_successfully

small_chunks, source = writing.small_chunks, writing.source


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
def test_tensors_are_assigned_to_parts(tmp_path, sizes, max_bytes, expected):
    """Follows should_split() of llama-gguf-split, which refuses a first tensor that is too large."""
    parts = split_parts(tmp_path / "a.b.gguf", sizes, max_bytes)
    assert [(p.first, p.last) for p in parts] == expected
    if max_bytes is None:
        assert parts[0].path.name == "a.b.gguf"
    else:
        assert [p.path.name for p in parts] == [f"a.b-{i + 1:05}-of-{len(expected):05}.gguf" for i in range(len(expected))]


@pytest.fixture(scope="module")
def split_model(model, lib, tmp_path_factory):
    """Quantize the reference model to one file and to parts of a megabyte."""
    folder = tmp_path_factory.mktemp("split")
    for flags in ((), ("--split-max-size", "1M")):
        args = (model, folder / "m.gguf", "--type", "itq3_s", "--importance", "none", "-q", *flags)
        assert program.main([str(a) for a in args]) == 0
    return folder


def test_parts_equal_the_single_file(split_model):
    """Keys and their types are llama-gguf-split's."""
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
        fields = {k: f for k, f in part.fields.items() if not k.startswith("GGUF.")}
        assert set(fields) == (keys | {k for k in whole.fields if not k.startswith("GGUF.")} if i == 0 else keys)
        assert [fields[k].contents() for k in sorted(keys)] == [4, i, len(tensors)]
        assert [fields[k].types[0].name for k in sorted(keys)] == ["UINT16", "UINT16", "INT32"]


@pytest.mark.slow
def test_fallback_tensors_stay_within_the_part_size(lib, tmp_path, capsys):
    """Weights below ITQ3_T's scales become IQ4_NL; one part has only such weights."""
    source = write_gguf(tmp_path / "in.gguf", {f"blk.{i}.ffn_up.weight": 1e-8 * gaussian(512, 256, seed=i) for i in range(24)}, "F32")
    flags = ("--type", "itq3_t", "--effort", "fast", "--importance", "none", "--split-max-size", "1M", "-q")
    sizes = {}
    for name, more in (("planned", ()), ("replaced", ("--fallback-above", "3"))):
        run_successfully(capsys, source, tmp_path / f"{name}.gguf", *flags, *more)
        parts = [list(read_tensors(p).values()) for p in sorted(tmp_path.glob(f"{name}-*.gguf"))]
        assert [t.name for part in parts for t in part] == list(read_tensors(source))
        sizes[name] = [sum(t.n_bytes for t in part) for part in parts]
    assert max(sizes["planned"]) * 4.5 / 3.0625 > 1_000_000  # the size of the same parts in IQ4_NL
    assert max(sizes["replaced"]) <= 1_000_000


@pytest.mark.slow
def test_llama_cpp_loads_the_parts(split_model, tmp_path):
    """The loader finds the parts by name; the perplexity of one chunk agrees in every digit."""
    perplexities = []
    for name in ("m.gguf", "m-00001-of-00004.gguf"):
        log = tmp_path / f"{name}.log"
        with open(log, "w") as f:  # a pipe may lose the last lines
            command = [tool("llama-perplexity"), "-m", split_model / name, "-f", ROOT / "data" / "heldout.txt", "-c", 256]
            command += ["--chunks", 1, "-t", 2]
            subprocess.run([str(c) for c in command], stdout=f, stderr=subprocess.STDOUT, check=True, timeout=300)
        perplexities += re.findall(r"\[1\](\d+\.\d+),", log.read_text())
    assert len(perplexities) == 2 and perplexities[0] == perplexities[1]


def test_parts_never_replace_existing_files(lib, source, tmp_path, capsys):
    old = tmp_path / "out-00001-of-00001.gguf"
    old.write_text("precious")
    flags = ("--split-max-size", "1G")
    run_failing(capsys, source, tmp_path / "out.gguf", *FLAGS, *flags, parts=("out-00001-of-00001.gguf exists", "--force"))
    assert old.read_text() == "precious"
    shutil.copy(source, old)
    flags = (*flags, "--force")
    run_failing(capsys, old, tmp_path / "out.gguf", *FLAGS, *flags, parts=("out-00001-of-00001.gguf is the same file as IN",))
    assert old.read_bytes() == source.read_bytes()
    run_successfully(capsys, source, tmp_path / "out.gguf", *FLAGS, *flags)
    assert list(read_tensors(old)) == NAMES and not (tmp_path / "out.gguf").exists()


def test_parts_keep_the_alignment(lib, tmp_path, capsys):
    tensors = {n: gaussian(4, 256, seed=i) for i, n in enumerate(NAMES[1:3])}
    source = write_gguf(tmp_path / "in.gguf", tensors, fill=lambda w: w.add_custom_alignment(128))
    flags = ("--type", "itq3_s", "--importance", "none", "--verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "parse_split_size", lambda text: 500)
        run_successfully(capsys, source, tmp_path / "out.gguf", *flags, "--split-max-size", "1M")
    second = gguf.GGUFReader(tmp_path / "out-00002-of-00002.gguf")
    assert second.alignment == 128 and second.tensors[0].data_offset % 128 == 0
