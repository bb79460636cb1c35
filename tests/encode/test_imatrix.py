"""--imatrix: the tensors equal llama-quantize's, experts have their own values, and bad files give one clear line."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggml_ext import quants
from ggml_ext._base.errors import UserError
from ggml_ext._encode import codec
from ggml_ext._encode.tensor_calibration import TensorCalibration
from ggml_ext._formats import gguf_file, imatrix
from ggml_ext._formats.tensor_types import TARGET_TYPES
from helpers.commands import quantize, run_quantize
from helpers.errors import check_error, files, quantize_error
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
from helpers.models import ROOT, gaussian, read_tensors, write_gguf
from perplexity_run import imatrix as run_llama_imatrix


@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["ditto3", "itq3_s"])
def test_tensors_equal_llama_quantizes(model, lib, tmp_path, type_name):
    """Every upstream type takes its own code path. The embeddings have importances too, as with llama-imatrix --process-output."""
    rng = np.random.default_rng(5)
    matrices = {n: t for n, t in read_tensors(model).items() if len(t.shape) == 2}
    entries = {n: (importances(1, int(t.shape[0]), i), rng.choice([0.4, 2.5, 3.7, 100.0], 1)) for i, (n, t) in enumerate(matrices.items())}
    flags = ["--imatrix", write_imatrix(tmp_path / "im.gguf", entries), "--token-embedding-type", "q3_k"]
    for pattern, other in {"attn_v": "iq4_nl", r"blk\.0\.attn_k": "iq2_xxs", "attn_q": "q4_0"}.items():
        flags += ["--tensor-type", f"{pattern}={other}"]
    reference = llama_quantize(model, tmp_path / "theirs.gguf", type_name, *flags)
    quantize(model, tmp_path / "ours.gguf", "--type", type_name, *flags)
    assert_same_tensors(tmp_path / "ours.gguf", reference)
    ours, expected = (gguf.GGUFReader(p).fields for p in (tmp_path / "ours.gguf", reference))
    names = {"quantize.imatrix.file": "im.gguf", "quantize.imatrix.dataset": "text.txt"}  # llama-quantize writes paths
    for key in ("file", "dataset", "entries_count", "chunks_count"):
        key = f"quantize.imatrix.{key}"
        if key in names:
            assert ours[key].contents() == names[key] and ours[key].types == expected[key].types
        else:
            assert (ours[key].types, ours[key].contents()) == (expected[key].types, expected[key].contents()), key
    # without the imatrix the tensors differ
    plain = [*flags[2:4], *(f.replace("iq2_xxs", "q4_0") for f in flags[4:])]
    quantize(model, tmp_path / "plain.gguf", "--type", type_name, *plain)
    differences = differing(tmp_path / "ours.gguf", tmp_path / "plain.gguf")
    assert {"token_embd.weight", "blk.1.attn_v.weight", "blk.1.attn_q.weight", "blk.1.ffn_up.weight"} <= differences


@pytest.mark.parametrize("dataset", ["/home/someone/text.txt", r"C:\Users\someone\text.txt", "text.txt"])
def test_output_has_no_calibration_paths(tmp_path, source, dataset):
    path = write_imatrix(tmp_path / "im.gguf", GOOD, datasets=(dataset,))
    quantize(source, tmp_path / "out.gguf", "--type", "ditto3", "--imatrix", path)
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert [fields[f"quantize.imatrix.{key}"].contents() for key in ("file", "dataset")] == ["im.gguf", "text.txt"]


@pytest.mark.slow
def test_file_written_by_llama_imatrix(model, lib, tmp_path):
    path = run_llama_imatrix(model, ROOT / "data" / "heldout.txt", tmp_path / "im.gguf", n_chunks=2)
    flags = ["--imatrix", path, "--pure", "--token-embedding-type", "q8_0"]
    reference = llama_quantize(model, tmp_path / "theirs.gguf", "ditto3", *flags)
    result = quantize(model, tmp_path / "ours.gguf", "--type", "ditto3", *flags)
    assert result.stderr == ""
    assert_same_tensors(tmp_path / "ours.gguf", reference)


@pytest.mark.parametrize("encoder", ["c", "numpy"])
def test_every_expert_has_its_own_importances(lib, tmp_path, monkeypatch, encoder):
    """Chunks end inside an expert."""
    source = moe_source(tmp_path / "in.gguf")
    sums = importances(3, 256)
    entries = {EXPERTS: (sums, [5, 3, 2]), UP: (importances(1, 320), [4]), DOWN: (importances(1, 256), [4])}
    path = write_imatrix(tmp_path / "im.gguf", entries)
    np.testing.assert_array_equal(imatrix.ImportanceMatrix(path).values(tensor_of(EXPERTS, 256, 40, 3)), sums / np.float32([[5], [3], [2]]))
    reference = llama_quantize(source, tmp_path / "theirs.gguf", "ditto3", "--imatrix", path)
    from ggml_ext import quantize as program
    from ggml_ext._formats import chunks

    monkeypatch.setattr(chunks, "CHUNK_WEIGHTS", 7 * 256)
    up = [] if encoder == "c" else ["--tensor-type", "ffn_up=f16"]
    assert program.main([str(source), str(tmp_path / "ours.gguf"), "--type", "ditto3", "--imatrix", str(path), "--encoder", encoder, *up]) == 0
    if encoder == "c":
        assert_same_tensors(tmp_path / "ours.gguf", reference)
    assert np.array_equal(read_tensors(tmp_path / "ours.gguf")[EXPERTS].data, read_tensors(reference)[EXPERTS].data)
    plain = quantize(source, tmp_path / "plain.gguf", "--type", "ditto3", *up) and tmp_path / "plain.gguf"
    assert differing(tmp_path / "ours.gguf", plain) == {EXPERTS, DOWN} | ({UP} if encoder == "c" else set())


@pytest.mark.parametrize("type_name", ["itq3_t", "itq2_t"])
def test_blocks_of_64_use_their_own_importances(lib, tmp_path, type_name):
    """Each block of 64 gets the importances of its own columns and expert.

    numpy writes what C writes, and importances shifted by 64 columns give other bytes.
    """
    source = write_gguf(tmp_path / "in.gguf", {EXPERTS: gaussian(2, 4, 576), UP: gaussian(8, 320, seed=2)})
    entries = {EXPERTS: (importances(2, 576), [5, 2]), UP: (importances(1, 320), [4])}
    for name, shift in (("im", 0), ("shifted", 64)):
        path, rolled = tmp_path / f"{name}.gguf", {k: (np.roll(s, shift, axis=1), counts) for k, (s, counts) in entries.items()}
        write_imatrix(path, rolled)
        for encoder in ("c", "numpy"):
            out = tmp_path / f"{name}-{encoder}.gguf"
            quantize(source, out, "--type", type_name, "--imatrix", path, "--encoder", encoder)
        assert not differing(tmp_path / f"{name}-c.gguf", tmp_path / f"{name}-numpy.gguf")
    assert {t.tensor_type.name.lower() for t in read_tensors(tmp_path / "im-c.gguf").values()} == {f"{type_name}64"}
    assert differing(tmp_path / "im-c.gguf", tmp_path / "shifted-c.gguf") == {EXPERTS, UP}
    # the last block of the last expert by itself
    importance = imatrix.ImportanceMatrix(tmp_path / "im.gguf").values(tensor_of(EXPERTS, 576, 4, 2))[1:, -64:]
    weights = gaussian(2, 4, 576)[1, 3:, -64:].astype(np.float16).astype(np.float32)
    expected = quants.reference(f"{type_name}64").quantize_blocks(weights, importance)
    actual = read_tensors(tmp_path / "im-c.gguf")[EXPERTS].data.reshape(8, -1)[-1, -expected.size :]
    np.testing.assert_array_equal(actual, expected[0])


@pytest.mark.parametrize("qtype", [t for t in TARGET_TYPES.values() if codec.Codec(None).can_encode(t) and t not in codec.FLOAT_TYPES])
def test_numpy_equals_c_or_is_refused(lib, qtype):
    """So --encoder numpy writes the same bytes with an imatrix."""
    rows, importance = gaussian(4, 512), importances(1, 512)[0]
    same = np.array_equal(codec.Codec(lib).encode(rows, qtype, importance), codec.Codec(None).encode(rows, qtype, importance))
    assert same != (qtype in codec.UNWEIGHTED_IN_NUMPY)


def test_overflow_in_an_encoder_is_reported(lib):
    """Importances beyond what a file may hold make IQ4_NL write NaN for constants; the error is one line."""
    rows = np.full((4, 512), -0.0371, np.float32)
    importance = (10.0 ** np.random.default_rng(11).uniform(-38, 38, (1, 512))).astype(np.float32)
    tensor = gguf_file.Tensor(UP, (512, 4), gguf.GGMLQuantizationType.F32, 0, rows.nbytes)
    with pytest.raises(UserError, match=f"{UP}: rows 8 to 11 are not finite as iq4_nl"):
        codec.Codec(lib).convert(rows.view(np.uint8), tensor, 8, gguf.GGMLQuantizationType.IQ4_NL, TensorCalibration(importance))


@pytest.fixture
def source(tmp_path):
    return write_gguf(tmp_path / "in.gguf", {UP: gaussian(8, 256), DOWN: gaussian(8, 512), EXPERTS: gaussian(3, 4, 256)})


GOOD = {UP: (importances(1, 256), [4]), DOWN: (importances(1, 512), [4]), EXPERTS: (importances(3, 256), [1, 2, 3])}


def replace_value(entries: dict, name: str, index: int, value: float) -> dict:
    sums = entries[name][0].copy()
    sums[-1, index] = value
    return entries | {name: (sums, entries[name][1])}


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        (GOOD | {DOWN: (importances(1, 256), [4])}, (DOWN, "has 256 values", "needs 512 (1 x 512 columns)", "another model")),
        (GOOD | {EXPERTS: (importances(2, 256), [1, 2])}, (EXPERTS, "has 512", "needs 768 (3 x 256 columns)")),
        ({"blk.0.attn_q.weight": (importances(1, 256), [4])}, ("another model", "blk.0.attn_q.weight", UP, "llama-imatrix -m MODEL")),
        (replace_value(GOOD, DOWN, 17, np.nan), (DOWN, "value 17", "nan")),
        (replace_value(GOOD, EXPERTS, 17, np.inf), (EXPERTS, "value 529", "inf")),
        (replace_value(GOOD, DOWN, 17, -1), (DOWN, "value 17", "-1", "not negative")),
        (replace_value(GOOD, DOWN, 17, 1e17), (DOWN, "an importance is 2.5e+16", "at most 1e+15")),
        (GOOD | {UP: (importances(1, 256), [np.nan])}, (UP, "counts", "nan")),
        (GOOD | {UP: (importances(1, 256), [-3])}, (UP, "counts", "-3")),
        (GOOD | {UP: (importances(1, 256), None)}, (UP, "no .counts")),
        (GOOD | {UP: (importances(1, 256), [1, 2, 3])}, (UP, "256 sums", "3 counts")),
        (GOOD | {UP: (importances(1, 256).astype(np.float16), [1])}, (UP, "f16", "must be f32")),
    ],
    ids=["size", "experts", "model", "nan", "inf", "negative", "huge", "nan_count", "negative_count", "no_counts", "counts", "f16"],
)
def test_bad_importances_are_reported(tmp_path, source, entries, parts):
    path = write_imatrix(tmp_path / "im.gguf", entries)
    quantize_error(tmp_path, source, "--imatrix", "im.gguf", *parts, flags=["--imatrix", path])
    assert not (tmp_path / "out.gguf").exists()


def test_other_files_are_refused(tmp_path, source):
    quantize_error(tmp_path, source, "in.gguf", "no tensor named *.in_sum2", flags=["--imatrix", source])
    quantize_error(tmp_path, source, "missing.gguf", "No such file", flags=["--imatrix", tmp_path / "missing.gguf"])
    quantize_error(tmp_path, source, "directory", flags=["--imatrix", tmp_path])
    write_imatrix(tmp_path / "im.gguf", GOOD, keys=False)
    quantize_error(tmp_path, source, "im.gguf", "imatrix.datasets", flags=["--imatrix", tmp_path / "im.gguf"])
    data = write_imatrix(tmp_path / "im.gguf", GOOD).read_bytes()
    (tmp_path / "im.gguf").write_bytes(data[:-1000])
    quantize_error(tmp_path, source, "im.gguf", "truncated", flags=["--imatrix", tmp_path / "im.gguf"])


def test_types_that_need_importances_fail_without(tmp_path, source, lib):
    """Without an entry for the tensor they fail; test_tensors_equal_llama_quantizes covers them with one."""
    partial = write_imatrix(tmp_path / "im.gguf", {DOWN: GOOD[DOWN]})
    for flags, part in (([], "pass --imatrix FILE"), (["--imatrix", partial], "im.gguf has none for it")):
        quantize_error(tmp_path, source, UP, "iq2_xs", "needs an imatrix", part, "--tensor-type",
                       flags=[*flags, "--tensor-type", "ffn_up=iq2_xs"])


def test_numpy_refuses_types_without_weighted_encoder(tmp_path, source):
    path = write_imatrix(tmp_path / "im.gguf", GOOD)
    flags = ["--encoder", "numpy", "--tensor-type", "ffn_up=q4_0"]
    quantize_error(tmp_path, source, UP, "q4_0 has no numpy encoder with an imatrix", flags=["--imatrix", path, *flags])
    quantize(source, tmp_path / "out.gguf", "--type", "ditto3", *flags)


def test_partial_files_give_warnings(tmp_path, source):
    path = write_imatrix(tmp_path / "im.gguf", {DOWN: GOOD[DOWN], "blk.9.ffn_up.weight": GOOD[UP]})
    result = quantize(source, tmp_path / "out.gguf", "--type", "ditto3", "--imatrix", path)
    first, second = result.stderr.splitlines()
    assert f"no entries for 2 of 3 tensors, which are quantized without: {UP}, {EXPERTS}" in first
    assert "entries for 1 tensors that the model lacks, such as blk.9.ffn_up.weight" in second


def test_layer_without_importances_is_named(tmp_path):
    """Class names alone would be ambiguous: other layers have importances for them."""
    names = [f"blk.{i}.{name}.weight" for i in range(2) for name in ("attn_q", "attn_k", "ffn_up")]
    source = write_gguf(tmp_path / "in.gguf", {name: gaussian(8, 256) for name in names})
    path = write_imatrix(tmp_path / "im.gguf", {name: GOOD[UP] for name in names[:3]})
    (line,) = quantize(source, tmp_path / "out.gguf", "--type", "ditto3", "--imatrix", path).stderr.splitlines()
    assert line.endswith("no entries for 3 of 6 tensors, which are quantized without: attn_q, attn_k, ffn_up in layer 1"), line


def test_embeddings_of_another_size_are_ignored(tmp_path, lib):
    """As llama-quantize does: older files count the vocabulary there."""
    source = write_gguf(tmp_path / "in.gguf", {"token_embd.weight": gaussian(32, 256), UP: gaussian(8, 256)})
    path = write_imatrix(tmp_path / "im.gguf", {UP: GOOD[UP], "token_embd.weight": (importances(1, 32), [1])})
    result = quantize(source, tmp_path / "out.gguf", "--type", "ditto3", "--imatrix", path)
    assert "token_embd.weight has 32 values, the model needs 256 (1 x 256 columns): quantized without it" in result.stderr


def test_unused_entries_may_have_another_size(tmp_path, source):
    """Their absence is not reported either."""
    path = write_imatrix(tmp_path / "im.gguf", {DOWN: (importances(1, 64), [1]), EXPERTS: GOOD[EXPERTS]})
    flags = ["--imatrix", path, "--tensor-type", "ffn_(up|down)[.]=q8_0"]
    quantize_error(tmp_path, source, DOWN, "64 values", f"--exclude-weights {DOWN}", flags=["--imatrix", path])
    assert quantize(source, tmp_path / "out.gguf", "--type", "ditto3", *flags).stderr == ""


def test_include_and_exclude_weights(tmp_path, source, lib):
    """The result is that of a file without the others."""
    path, part = write_imatrix(tmp_path / "im.gguf", GOOD), write_imatrix(tmp_path / "part.gguf", {DOWN: GOOD[DOWN]})
    quantize(source, tmp_path / "part.out", "--type", "ditto3", "--imatrix", part)
    for i, flags in enumerate((["--include-weights", "ffn_down"], ["--exclude-weights", "ffn_up", "--exclude-weights", "exps"])):
        out = tmp_path / f"{i}.out"
        assert quantize(source, out, "--type", "ditto3", "--no-propagate", "--imatrix", path, *flags).stderr == ""
        assert not differing(out, tmp_path / "part.out")
        assert " ".join(f[2:] + "=" if f.startswith("--") else f for f in flags).replace("= ", "=") in gguf.GGUFReader(out).fields["ggml_ext.options"].contents()


@pytest.mark.parametrize(("flags", "parts"), [
    (["--include-weights", "a", "--exclude-weights", "b"], ["--include-weights and --exclude-weights: pass one of them"]),
    (["--exclude-weights", "attn"], ["--exclude-weights attn: ", "im.gguf has no entry of such a tensor"]),
    (["--exclude-weights", "blk"], ["--exclude-weights leaves no entry of", "--importance none"]),
])
def test_bad_weight_selections_are_reported(tmp_path, source, flags, parts):
    path = write_imatrix(tmp_path / "im.gguf", GOOD)
    quantize_error(tmp_path, source, *parts, flags=["--imatrix", path, *flags])


def test_dry_run_checks_the_imatrix(tmp_path, source):
    path = write_imatrix(tmp_path / "im.gguf", replace_value(GOOD, UP, 0, np.nan))
    before = files(tmp_path)
    check_error(run_quantize(source, "--type", "ditto3", "--dry-run", "--imatrix", path), UP, "nan")
    assert files(tmp_path) == before


def test_messages_name_the_full_command():
    """Without -m and -f llama-imatrix does nothing, so each "with llama-imatrix" in a message is followed by both."""
    texts = [(p.name, " ".join(p.read_text().split()).replace('" "', "").replace('" f"', "")) for p in Path(imatrix.__file__).parent.glob("*.py")]
    commands = [(name, text[match.start() : match.end() + 17]) for name, text in texts for match in re.finditer("with llama-imatrix", text)]
    assert commands and not [(name, command) for name, command in commands if not command.endswith(" -m MODEL -f TEXT")]
