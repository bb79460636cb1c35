"""imatrix files in llama-imatrix's old format, and experts without tokens."""

import struct
import subprocess

import gguf
import numpy as np
import pytest

from ggml_ext import quantize as program
from ggml_ext._formats import imatrix, names
from helpers.commands import run_main, tool
from helpers.errors import check_error
from helpers.importances import (
    DOWN,
    EXPERTS,
    UP,
    assert_same_tensors,
    differing,
    importances,
    llama_quantize,
    moe_source,
    tensor_of,
    write_imatrix,
)
from helpers.inspecting import inspect_json
from helpers.moments_files import correlated, write_moments


def run_quantize(*args) -> subprocess.CompletedProcess:
    return run_main(program.main, *args)


def quantize(*args) -> subprocess.CompletedProcess:
    """Run the quantizer without calibration and require success."""
    done = run_quantize(*args, *([] if "--imatrix" in args else ["--importance", "none"]))
    assert done.returncode == 0, done.stderr
    return done


def pack_entry(name: bytes, n_calls: int, sums: np.ndarray) -> bytes:
    return struct.pack("<i", len(name)) + name + struct.pack("<ii", n_calls, sums.size) + sums.astype("<f4").tobytes()


def write_old(path, entries: dict, end: bytes = struct.pack("<ii", 7, 8) + b"some.txt"):
    """Write an old imatrix file. entries: name -> (sums, calls); end: chunks and dataset, as llama-imatrix writes them."""
    path.write_bytes(struct.pack("<i", len(entries)) + b"".join(pack_entry(n.encode(), calls, s) for n, (s, calls) in entries.items()) + end)
    return path


@pytest.fixture
def source(tmp_path):
    return moe_source(tmp_path / "in.gguf")


# 256 and 320 columns; the calls are not powers of two, so that division rounds
ENTRIES = {EXPERTS: (importances(3, 256), 5), UP: (importances(1, 320), 3), DOWN: (importances(1, 256), 7)}


@pytest.mark.parametrize("end", [struct.pack("<ii", 7, 8) + b"some.txt", struct.pack("<i", 7), b""], ids=["dataset", "chunks", "nothing"])
def test_tensors_and_keys_equal_llama_quantizes(lib, source, tmp_path, end):
    """Experts too. The odd length of a name puts the sums at odd offsets."""
    path = write_old(tmp_path / "old.dat", ENTRIES, end)
    reference = llama_quantize(source, tmp_path / "theirs.gguf", "ditto3", "--imatrix", path)
    done = quantize(source, tmp_path / "ours.gguf", "--type", "ditto3", "--imatrix", path)
    assert done.stderr.count("warning") == 0 and f"diagonal, of {path}" in done.stdout
    assert_same_tensors(tmp_path / "ours.gguf", reference)
    ours, expected = ({k: v.contents() for k, v in gguf.GGUFReader(p).fields.items() if k.startswith("quantize.imatrix.")}
                      for p in (tmp_path / "ours.gguf", reference))
    assert ours == expected | {"quantize.imatrix.file": path.name}  # llama-quantize writes its path
    quantize(source, tmp_path / "plain.gguf", "--type", "ditto3")
    assert differing(tmp_path / "ours.gguf", tmp_path / "plain.gguf") == {EXPERTS, UP, DOWN}


def test_file_converted_by_llama_imatrix(lib, source, tmp_path):
    """It merges old files into a GGUF file, in which experts have one count."""
    path = write_old(tmp_path / "old.dat", ENTRIES)
    subprocess.run([tool("llama-imatrix"), "--in-file", path, "-o", tmp_path / "new.gguf"], check=True, capture_output=True)
    for name in (path.name, "new.gguf"):
        quantize(source, tmp_path / f"{name}.out", "--type", "itq3_t", "--imatrix", tmp_path / name)
    assert differing(tmp_path / "old.dat.out", tmp_path / "new.gguf.out") == set()


def test_old_file_written_by_llama_imatrix(tmp_path):
    """The old format rounds twice more and has ones for an expert without tokens."""
    entries = {EXPERTS: (importances(3, 256), [700, 0, 2000]), UP: (importances(1, 320), [700]), DOWN: (importances(1, 256), [513])}
    command = [tool("llama-imatrix"), "--in-file", write_imatrix(tmp_path / "new.gguf", entries), "-o", tmp_path / "old.dat", "--output-format", "dat"]
    subprocess.run(command, check=True, capture_output=True)
    old, new = (imatrix.ImportanceMatrix(tmp_path / name) for name in ("old.dat", "new.gguf"))
    assert old.is_old and not new.is_old and sorted(old.names()) == sorted(new.names())
    experts = tensor_of(EXPERTS, 256, 40, 3)
    assert old.experts_without_tokens(experts) == new.experts_without_tokens(experts) == [1]
    for t in (tensor_of(UP, 320, 8), tensor_of(DOWN, 256, 8), experts):
        seen = [i for i in range(len(new.values(t))) if t is not experts or i != 1]
        np.testing.assert_allclose(old.values(t)[seen], new.values(t)[seen], rtol=4 * 2.0**-24)


def test_non_positive_call_counts_are_ignored(tmp_path):
    """Sums are then used as they are."""
    path = write_old(tmp_path / "old.dat", {UP: (importances(1, 320), 0), DOWN: (importances(1, 256), -2)})
    matrix = imatrix.ImportanceMatrix(path)
    for name, (n, _) in {UP: (320, 0), DOWN: (256, -2)}.items():
        np.testing.assert_array_equal(matrix.values(tensor_of(name, n, 8)), importances(1, n))


def test_old_importances_weight_the_errors(lib, source, tmp_path):
    path = write_old(tmp_path / "old.dat", ENTRIES)
    quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--imatrix", path)
    values = inspect_json(tmp_path / "out.gguf", "--against", source, "--imatrix", path)["tensors"]
    assert all(0 < t["weighted_relative_squared_error"] < 0.05 for t in values) and len(values) == 3


VALID_ENTRY = pack_entry(UP.encode(), 4, np.ones(320))


@pytest.mark.parametrize(("content", "parts"), [
    (b"", ("is no imatrix", "the number of entries needs 4 bytes, the file has 0", "llama-imatrix -m MODEL")),
    (b"\0\0\0\0", ("is no imatrix", "the number of entries is 0, must be 1")),
    (b"PK\3\4" + bytes(100), ("is no imatrix", "the length of the name of entry 1 of 67324752 is 0")),
    (struct.pack("<ii", 1, 64) + bytes(500), ("is no imatrix", "is 64, must be 1 to 63")),
    (struct.pack("<ii", 1, -1) + bytes(500), ("is no imatrix", "is -1")),
    (struct.pack("<ii", 1, 4) + b"a\0\xffb" + bytes(50), ("is no imatrix", "the name of entry 1 of 1 is b'a")),
    (struct.pack("<i", 1) + VALID_ENTRY[:-3], ("is no imatrix", "entry 1 of 1, blk.0.ffn_up.weight, needs")),
    (struct.pack("<i", 2) + VALID_ENTRY + VALID_ENTRY[:40], ("truncated or damaged", "entry 2 of 2")),
    (struct.pack("<i", 2) + VALID_ENTRY + VALID_ENTRY, ("truncated or damaged", "which is a duplicate")),
    (struct.pack("<i", 1) + pack_entry(UP.encode(), 4, np.ones(0)), ("the number of sums of entry 1 of 1, blk.0.ffn_up.weight, is 0",)),
    (struct.pack("<i", 2) + VALID_ENTRY + pack_entry(b"x", 4, np.ones(5))[:-20] + b"", ("truncated or damaged", "needs")),
    (struct.pack("<i", 1) + struct.pack("<i", 1) + b"x" + struct.pack("<ii", 4, 2**31 - 1), ("entry 1 of 1, x, needs 8,589,934,",)),
    (struct.pack("<i", 1) + VALID_ENTRY + struct.pack("<ii", 7, 9) + b"some.txt", ("truncated or damaged", "the dataset's name needs")),
    (struct.pack("<i", 1) + VALID_ENTRY + b"\1\2", ("truncated or damaged", "the number of chunks needs")),
    (struct.pack("<i", 1) + pack_entry(UP.encode(), 4, np.float32([1, np.nan])), (UP, "value 1 of", "nan, must be finite")),
    (struct.pack("<i", 1) + pack_entry(UP.encode(), 4, np.float32([1, -1])), (UP, "-1, must be finite and not negative")),
    (struct.pack("<i", 1) + pack_entry(UP.encode(), 1, np.float32([1, 1e16])), (UP, "an importance is 1e+16")),
    (struct.pack("<i", 1) + pack_entry(UP.encode(), 4, np.zeros(320)), ("only zeros",)),
    (struct.pack("<i", 1) + pack_entry(UP.encode(), 4, np.ones(256)), (UP, "256 values, the model needs 320", "another model")),
])
def test_bad_files_are_reported(tmp_path, source, content, parts):
    (tmp_path / "old.dat").write_bytes(content)
    done = run_quantize(source, "--type", "ditto3", "--dry-run", "--imatrix", tmp_path / "old.dat")
    check_error(done, "--imatrix: ", "old.dat", *parts)


def test_old_files_have_no_hessians(source, tmp_path):
    path = write_old(tmp_path / "old.dat", ENTRIES)
    done = run_quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--imatrix", path, "--importance", "block")
    check_error(done, "old.dat has no Hessians", "llama-imatrix --moments block")
    assert not (tmp_path / "out.gguf").exists()


# --- experts without tokens

def test_experts_without_tokens_get_the_mean_of_their_layer(lib, source, tmp_path):
    """The mean per token of the others. The result is that of an imatrix with this mean, and a warning names the experts."""
    sums = importances(3, 256)
    path = write_imatrix(tmp_path / "im.gguf", {EXPERTS: (sums, [5, 0, 2])})
    mean = (sums[0].astype(np.float64) + sums[2]) / 7
    values = imatrix.ImportanceMatrix(path).values(tensor_of(EXPERTS, 256, 40, 3))
    np.testing.assert_array_equal(values[[0, 2]], [sums[0] / np.float32(5), sums[2] / np.float32(2)])
    np.testing.assert_allclose(values[1], mean, rtol=3 * 2.0**-24)  # the means of two experts and of both, rounded to float32
    done = quantize(source, tmp_path / "ours.gguf", "--type", "ditto3", "--imatrix", path)
    assert f"1 expert saw no token and gets the mean of its layer: {EXPERTS} (1)\n" in done.stderr
    filled = write_imatrix(tmp_path / "filled.gguf", {EXPERTS: (np.float32([sums[0], values[1], sums[2]]), [5, 1, 2])})
    quantize(source, tmp_path / "filled.out", "--type", "ditto3", "--imatrix", filled)
    assert differing(tmp_path / "ours.gguf", tmp_path / "filled.out") == set()
    with_ones = write_imatrix(tmp_path / "ones.gguf", {EXPERTS: (np.float32([sums[0], np.ones(256), sums[2]]), [5, 1, 2])})
    quantize(source, tmp_path / "ones.out", "--type", "ditto3", "--imatrix", with_ones)
    assert differing(tmp_path / "ours.gguf", tmp_path / "ones.out") == {EXPERTS}


def test_ones_in_old_files_mean_no_tokens(source, tmp_path):
    """They have one number of calls, so all other experts weigh the same."""
    sums = importances(3, 256)
    sums[1] = 5
    path = write_old(tmp_path / "old.dat", {EXPERTS: (sums, 5)})
    matrix, experts = imatrix.ImportanceMatrix(path), tensor_of(EXPERTS, 256, 40, 3)
    assert matrix.experts_without_tokens(experts) == [1]
    np.testing.assert_allclose(matrix.values(experts)[1], (sums[0].astype(np.float64) + sums[2]) / 10, rtol=3 * 2.0**-24)
    assert f"1 expert saw no token and gets the mean of its layer: {EXPERTS} (1)\n" in run_quantize(
        source, "--type", "ditto3", "--dry-run", "--imatrix", path).stderr
    assert matrix.experts_without_tokens(tensor_of(EXPERTS, 768, 40)) == []  # not an expert tensor
    write_old(path, {EXPERTS: (np.full((3, 256), 5), 5)})
    matrix = imatrix.ImportanceMatrix(path)
    assert matrix.experts_without_tokens(experts) == [] and (matrix.values(experts) == 1).all()


@pytest.mark.parametrize("kind", ["block", "full"])
def test_experts_without_tokens_are_named_with_hessians_too(lib, source, tmp_path, kind):
    """test_hessian_file.py checks that they get the mean of their layer."""
    expert_inputs = [correlated(n, 256, seed=n) if n else np.zeros((0, 256), np.float32) for n in (600, 0, 300)]
    path = write_moments(tmp_path / "m.gguf", {EXPERTS: expert_inputs}, kind)
    done = run_quantize(source, "--type", "itq3_t", "--dry-run", "--imatrix", path, "--importance", kind)
    assert done.returncode == 0
    assert f"1 expert saw no token and gets the mean of its layer: {EXPERTS} (1)\n" in done.stderr
    assert f"1 experts of 1 tensors saw fewer tokens than they have columns and get mostly the mean of their layer, most in {EXPERTS}" in done.stderr


def test_lists_of_experts_are_shortened():
    values = names.list_experts({f"blk.{i}.ffn_up_exps.weight": list(range(20)) for i in range(40)})
    assert values.startswith("blk.0.ffn_up_exps.weight (0, 1, 2, 3, 4, 5, 6, 7 and 12 more), blk.1.") and values.endswith(" and 36 tensors more")
    assert names.list_experts({"a": [3], "b": [1, 2]}) == "a (3), b (1, 2)"
