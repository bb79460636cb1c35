"""python -m ggml_ext.export: upstream files from ggml-ext files, their errors, and the model card."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from ggml_ext import TYPES, WEIGHT_TYPES, export, quantize
from ggml_ext._base.signals import StopRequest
from ggml_ext._commands import exporting
from ggml_ext._commands.options import QuantizeOptions
from ggml_ext._commands.settings import Settings
from ggml_ext._console.arguments import from_namespace
from ggml_ext._native import library
from ggml_ext._output.output import Output
from ggml_ext._plan.file_types import uniform_file_type
from helpers import writing
from helpers.commands import quantize as write_quantized
from helpers.importances import write_imatrix
from helpers.models import ROOT, gaussian, read_tensors, write_gguf
from helpers.moments_files import correlated, write_moments
from helpers.native import run_upstream
from helpers.weights import relative_mse
from perplexity_run import UNIFORM, perplexity

TEXT = ROOT / "data" / "heldout.txt"
# Rows of 512, and of 64, which types of 256 do not fit; the embeddings are also the output matrix.
SHAPES = {"token_embd.weight": (64, 512), "blk.0.attn_q.weight": (32, 512), "blk.0.ffn_down.weight": (32, 64),
          "output_norm.weight": (512,)}
# Keys of an imatrix; the embeddings have none.
SEEN = {f"blk.0.{name}.weight": (np.linspace(1, 9, n, dtype=np.float32)[None], [1]) for name, n in (("attn_q", 512), ("ffn_down", 64))}
# Upstream types except those that need an imatrix.
PLAIN = sorted(name for name, t in exporting.UPSTREAM_TYPES.items() if t not in exporting.IMATRIX_TYPES)


def describe(writer: gguf.GGUFWriter) -> None:
    writer.add_name("A model")
    writer.add_repo_url("https://huggingface.co/some-org/A-Model")
    writer.add_license("apache-2.0")
    writer.add_languages(["en", "no"])
    writer.add_tags(["text-generation"])
    writer.add_file_type(1)


@pytest.fixture(scope="module")
def quantized(lib, tmp_path_factory) -> Path:
    """Quantize every matrix to a ggml-ext type, embeddings too, with epsilons and a recorded imatrix in the metadata."""
    folder = tmp_path_factory.mktemp("ours")
    tensors = {name: gaussian(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
    source = write_gguf(folder / "f16.gguf", tensors, fill=describe)
    write_quantized(source, folder / "ours.gguf", "--type", "ditto3", "--pure")
    return folder / "ours.gguf"


run, run_successfully, run_failing = (partial(f, main=export.main) for f in (writing.run, writing.run_successfully, writing.run_failing))


@pytest.mark.parametrize("name", PLAIN)
def test_every_upstream_type_keeps_the_weights(quantized, tmp_path, capsys, name):
    """gguf's own reader knows only upstream types; the errors equal those of the summary."""
    out = tmp_path / "stock.gguf"
    # Blocks of 128 and 64 need no fallback.
    text, _ = run_successfully(capsys, quantized, out, "--type", name, "--tensor-type", f"ffn_down={'q8_0' if name == 'q1_0' else name}")
    before, after = read_tensors(quantized), read_tensors(out)
    assert not {t.tensor_type.name.lower() for t in after.values()} & TYPES.keys()
    target = after["blk.0.attn_q.weight"].tensor_type
    assert target == exporting.UPSTREAM_TYPES[name]
    assert (after["output_norm.weight"].data == before["output_norm.weight"].data).all()
    weights = {}
    try:
        for key in ("blk.0.attn_q.weight", "token_embd.weight"):
            weights[key] = [gguf.quants.dequantize(t[key].data, t[key].tensor_type) for t in (before, after)]
    except NotImplementedError:
        return  # gguf dequantizes most types
    error = relative_mse(weights["blk.0.attn_q.weight"][1], weights["blk.0.attn_q.weight"][0])
    reported = float(re.search(rf"blk\.\*\.attn_q\.weight +{name} +([\d.]+)", text.partition("NMSE")[2])[1])
    assert abs(reported - error) < 1e-6 + 1e-3 * error  # six decimals; the library and numpy may round a last bit differently
    # Types of two and three values lose more than half; q2_k's error is 0.07 on Gaussian weights.
    assert error < (0.7 if target in (T.TQ1_0, T.TQ2_0, T.Q1_0) else 0.1)
    assert relative_mse(*reversed(weights["token_embd.weight"])) < 0.1  # at least q6_k


def test_export_removes_ggml_ext_metadata(quantized, tmp_path, capsys):
    run_successfully(capsys, quantized, tmp_path / "stock.gguf", "--type", "q4_k", "--quiet")
    before, after = (gguf.GGUFReader(p).fields for p in (quantized, tmp_path / "stock.gguf"))
    assert any(k.startswith("ggml_ext.ditto3") for k in before)
    assert not [k for k in after if k.startswith(("ggml_ext.", "quantize.imatrix."))]
    assert after["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_S
    assert after["general.quantization_version"].contents() == 2
    kept = {k for k in before if not k.startswith(("ggml_ext.", "GGUF.")) and k != "general.file_type"}
    assert all(after[k].contents() == before[k].contents() for k in kept) and "general.name" in kept


@pytest.mark.parametrize("name", exporting.UPSTREAM_TYPES)
def test_every_type_has_a_file_type(name):
    assert uniform_file_type(exporting.UPSTREAM_TYPES[name]) in gguf.LlamaFileType._value2member_map_


def types_of(path: Path) -> dict[str, str]:
    return {n: t.tensor_type.name.lower() for n, t in read_tensors(path).items()}


@pytest.mark.parametrize(("flags", "expected"), [
    (["--type", "q4_k"], ("q6_k", "q4_k", "q5_0")),  # the output's rule; rows of 64 by llama.cpp's fallback
    (["--type", "q8_0"], ("q8_0", "q8_0", "q8_0")),
    (["--type", "q4_k", "--pure"], ("q4_k", "q4_k", "q5_0")),
    (["--type", "Q2_K", "--tensor-type", "ffn_down=q5_1", "--tensor-type", "token_embd=iq4_nl"], ("iq4_nl", "q2_k", "q5_1")),
    (["--type", "bf16"], ("bf16", "bf16", "bf16")),
])
def test_type_flags_choose_types(quantized, tmp_path, capsys, flags, expected):
    out = tmp_path / "stock.gguf"
    run_successfully(capsys, quantized, out, *flags)
    assert list(types_of(out).values()) == [*expected, "f32"]


def test_upstream_types_are_copied_by_default(lib, tmp_path, capsys):
    source = write_gguf(tmp_path / "f16.gguf", {"token_embd.weight": gaussian(64, 512), "output.weight": gaussian(64, 512),
                                                "blk.0.attn_q.weight": gaussian(32, 512)})
    write_quantized(source, tmp_path / "ours.gguf", "--type", "itq3_s")
    before = read_tensors(tmp_path / "ours.gguf")
    run_successfully(capsys, tmp_path / "ours.gguf", tmp_path / "a.gguf", "--type", "q5_k")
    after = read_tensors(tmp_path / "a.gguf")
    for name, qtype in (("token_embd.weight", "q3_k"), ("output.weight", "q6_k")):
        assert after[name].tensor_type.name.lower() == qtype and (after[name].data == before[name].data).all()
    for flags in (["--type", "q5_k", "--pure"], ["--type", "f16"]):
        run_successfully(capsys, tmp_path / "ours.gguf", tmp_path / "b.gguf", *flags, "--force")
        assert set(types_of(tmp_path / "b.gguf").values()) == {flags[1]}


def test_errors_of_both_types_add(lib, tmp_path, capsys):
    """Measured against the original, which the exporter does not read."""
    source = write_gguf(tmp_path / "f16.gguf", {"blk.0.attn_q.weight": gaussian(64, 512)})
    write_quantized(source, tmp_path / "ours.gguf", "--type", "itq3_s")
    run_successfully(capsys, tmp_path / "ours.gguf", tmp_path / "q.gguf", "--type", "q4_k")
    tensors = [read_tensors(tmp_path / f"{name}.gguf")["blk.0.attn_q.weight"] for name in ("f16", "ours", "q")]
    f16, quantized, q = (gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors)
    # Independent sums over 32,768 weights: their product term is about 1/sqrt(32768) of twice the root of both errors, here 0.2e-3.
    assert abs(relative_mse(q, f16) - relative_mse(quantized, f16) - relative_mse(q, quantized)) < 1e-3


def test_added_error_is_reported(quantized, tmp_path, capsys):
    text, err = run_successfully(capsys, quantized, tmp_path / "q.gguf", "--type", "q4_k")
    match = re.search(r"^ditto3 -> q4_k adds an NMSE of ([\d.]+) to that of ditto3, "
                     r"([\d.]+) for Gaussian weights: about ([\d.]+) times", text, re.M)
    added, expected, times = map(float, match.groups())
    before, after = (read_tensors(p)["blk.0.attn_q.weight"] for p in (quantized, tmp_path / "q.gguf"))
    measured = relative_mse(*(gguf.quants.dequantize(t.data, t.tensor_type) for t in (after, before)))
    assert abs(added - measured) < 0.005 * measured and expected == WEIGHT_TYPES["ditto3"].usual_rel_mse  # three digits
    assert abs(times - (1 + added / expected)) < 0.006
    assert "rows of 64: q5_0 instead of q4_k, which needs a multiple of 256" in err


def test_types_need_their_importance_matrix(quantized, tmp_path, capsys):
    error = run_failing(capsys, quantized, tmp_path / "q.gguf", "--type", "iq2_xxs")
    assert "blk.0.attn_q.weight: iq2_xxs needs an imatrix: pass --imatrix FILE" in error
    write_imatrix(tmp_path / "imatrix.gguf", SEEN, chunks=4)
    out, _ = run_successfully(capsys, quantized, tmp_path / "q.gguf", "--type", "iq2_xxs", "--imatrix", tmp_path / "imatrix.gguf")
    # The embeddings are also the output matrix.
    assert list(types_of(tmp_path / "q.gguf").values()) == ["q6_k", "iq2_xxs", "iq4_nl", "f32"]
    assert "weighted" in out
    assert gguf.GGUFReader(tmp_path / "q.gguf").fields["quantize.imatrix.chunks_count"].contents() == 4


def test_hessians_are_used(quantized, tmp_path, capsys):
    """With the Hessians of the imatrix the export adds less output error: measured 0.77."""
    name, losses = "blk.0.attn_q.weight", {}
    x = correlated(8192, 512)
    for kind in ("diagonal", "block"):
        path = write_moments(tmp_path / f"{kind}.gguf", {name: x}, kind, keys={"imatrix.moments": None} if kind == "diagonal" else {})
        out, _ = run_successfully(capsys, quantized, tmp_path / f"{kind}-q.gguf", "--type", "q4_k", "--imatrix", path)
        assert f"importance  = {kind}, of {path}" in out
        before, after = (read_tensors(f)[name] for f in (quantized, tmp_path / f"{kind}-q.gguf"))
        errors = gguf.quants.dequantize(after.data, after.tensor_type) - gguf.quants.dequantize(before.data, before.tensor_type)
        losses[kind] = float((np.square(errors @ x.T, dtype=np.float64)).sum())
    assert losses["block"] < 0.85 * losses["diagonal"], losses


def test_missing_library_uses_importances_or_refuses_the_type(quantized, tmp_path, capsys, monkeypatch):
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", SEEN)
    monkeypatch.setattr(library, "load", lambda: None)
    out, rest = tmp_path / "out.gguf", ("--tensor-type", "token_embd=q8_0")
    error = run_failing(capsys, quantized, out, "--type", "q4_0", *rest, "--imatrix", imatrix)
    assert "tensor blk.0.attn_q.weight: q4_0 has no numpy encoder with an imatrix" in error
    assert r"--tensor-type 'blk\.0\.attn_q\.weight=q8_0'" in error and not out.exists()
    run_successfully(capsys, quantized, out, "--type", "q4_0", *rest)
    assert types_of(out)["blk.0.attn_q.weight"] == "q4_0"
    # The hint names only flags that the program has.
    assert r"--tensor-type 'token_embd\.weight=q8_0'" in run_failing(capsys, quantized, out, "--type", "q4_0", "--force")


def test_resumed_export_writes_the_same_bytes(quantized, tmp_path, capsys, monkeypatch):
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    run_successfully(capsys, quantized, whole, "--type", "q4_k", "--quiet")
    finish = Output.finish

    def stop(self, *args):
        finish(self, *args)
        if len(self.finished) == 2:
            raise StopRequest(2)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish", stop)
        code, _, err = run(capsys, quantized, out, "--type", "q4_k", "--quiet")
    assert code == 130 and "repeat the command to resume after 2 of 4 tensors" in err and not out.exists()
    _, err = run_successfully(capsys, quantized, out, "--type", "q4_k", "--summary")
    assert "resuming after 2 of 4 tensors" in err and out.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf", "whole.gguf"]


def test_dry_run_writes_nothing(quantized, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, _ = run_successfully(capsys, quantized, "--type", "q4_k", "--dry-run")
    assert "ditto3 -> q4_k" in text and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flags", "parts"), [
    (["--type", "q4_kk"], ["--type: unknown type 'q4_kk': did you mean 'q4_k'?"]),
    (["--type", "itq3_t"], ["unknown type 'itq3_t': it is a ggml-ext type, for ggml-ext quantize; known types: bf16"]),
    (["--type", "q4_k", "--tensor-type", "attn=itq3_s"], ["--tensor-type: unknown type 'itq3_s': it is a ggml-ext type"]),
    (["--type", "q4_k", "--no-fallback"], ["--no-fallback: tensor blk.0.ffn_down.weight, rows of 64: q5_0 instead of q4_k"]),
    (["--type", "q4_k", "--threads", "0"], ["--threads: got 0"]),
    (["--type", "q4_k", "--dry-run", "--model-card", "x.md"], ["--model-card: --dry-run writes nothing"]),
    (["--type", "q4_k", "--model-card", "none/x.md"], ["--model-card: the directory", "does not exist"]),
])
def test_bad_options_are_refused(quantized, tmp_path, capsys, monkeypatch, flags, parts):
    monkeypatch.chdir(tmp_path)
    error = run_failing(capsys, quantized, "out.gguf", *flags)
    assert all(part in error for part in parts), error
    assert not list(tmp_path.iterdir())


def test_bad_files_are_refused(quantized, tmp_path, capsys):
    stock = write_gguf(tmp_path / "stock.gguf", {"blk.0.attn_q.weight": gaussian(32, 512)})
    out = tmp_path / "out.gguf"
    assert "has no tensor in a ggml-ext type, so every llama.cpp loads it" in run_failing(capsys, stock, out, "--type", "q4_k")
    assert "none.gguf" in run_failing(capsys, tmp_path / "none.gguf", out, "--type", "q4_k")
    copy = shutil.copy(quantized, tmp_path / "copy.gguf")
    assert "is the same file as IN" in run_failing(capsys, copy, copy, "--type", "q4_k", "--force")
    assert "exists: choose another name or pass --force" in run_failing(capsys, copy, stock, "--type", "q4_k")
    assert "OUT is missing" in run_failing(capsys, copy, "--type", "q4_k")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.gguf", "stock.gguf"]


# --- the complete model ---


@pytest.mark.extra_build
def test_upstream_llama_cpp_runs_the_export(model, tmp_path, capsys):
    """In F16 the file has the perplexity of its source, and an unmodified program loads it."""
    quantized, f16, q8 = (tmp_path / f"{n}.gguf" for n in ("ours", "f16", "q8"))
    write_quantized(model, quantized, "--type", "itq3_s", *UNIFORM)
    run_successfully(capsys, quantized, f16, "--type", "f16", "--quiet")
    run_successfully(capsys, quantized, q8, "--type", "q8_0", "--quiet")
    perplexities = [perplexity(path, TEXT, n_chunks=4, threads=1).value for path in (quantized, f16, q8)]
    print(perplexities)
    # Activations are rounded to 8 bits for ggml-ext types and Q8_0, to 16 for F16: measured 0.1 % between the three. A misplaced block
    # costs whole units.
    assert max(perplexities) / min(perplexities) < 1.01
    for path in (f16, q8):
        done = run_upstream(path)
        assert done.returncode == 0, done.stderr[-2000:]


# --- model cards ---


def front_matter(text: str) -> dict:
    """Parse the YAML of a card: keys with a word, a JSON string or a list of those."""
    head, fields = re.match(r"---\n(.*?)\n---\n\n# ", text, re.DOTALL)[1], {}
    for line in head.splitlines():
        item, (key, _, value) = re.match(r"- (.*)", line), line.partition(": ")
        word = item[1] if item else value
        word = json.loads(word) if word.startswith('"') else word
        if item:
            fields[list(fields)[-1]].append(word)
        else:
            fields[key.rstrip(":")] = word or []
    return fields


def test_export_writes_a_card(quantized, tmp_path, capsys):
    run_successfully(capsys, quantized, tmp_path / "q.gguf", "--type", "q4_k", "--model-card", tmp_path / "README.md", "--threads", 1)
    text = (tmp_path / "README.md").read_text()
    assert front_matter(text) == {
        "base_model": ["some-org/A-Model"], "base_model_relation": "quantized", "license": "apache-2.0", "language": ["en", "no"],
        "library_name": "gguf", "tags": ["text-generation", "gguf", "llama.cpp"], "quantized_by": "ggml-ext",
    }
    assert "# A model, Q4_K\n" in text and "llama-server -m q.gguf" in text and "every program that is built on llama.cpp" in text
    before, after = (read_tensors(p)["blk.0.attn_q.weight"] for p in (quantized, tmp_path / "q.gguf"))
    error = relative_mse(*(gguf.quants.dequantize(t.data, t.tensor_type) for t in (after, before)))
    assert f"| blk.*.attn_q.weight | 1 | 16,384 | Q4_K | 4.5 | {error:.3g} |" in text
    assert "| output_norm.weight | 1 | 512 | F32 | 32 | unchanged |" in text
    assert "weights w of ours.gguf, which is quantized itself" in text and str(tmp_path) not in text and str(quantized.parent) not in text
    assert "ggml-ext export ours.gguf q.gguf --type q4_k\n" in text
    assert f"{(tmp_path / 'q.gguf').stat().st_size / 2**20:,.1f} MiB" in text


def test_quantizer_writes_a_card(lib, tmp_path, capsys):
    """Parents of a fine-tune are not the model itself; keys with secrets and directories are left out; strings are quoted."""
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_name("Tuned: 1")
        writer.add_base_model_count(1)
        writer.add_base_model_repo_url(0, "https://huggingface.co/org/Parent")
        writer.add_license("other")
        writer.add_license_name("A: licence")
        writer.add_string("general.quantized_by", "someone")

    weights = {f"blk.{i}.attn_q.weight": gaussian(32, 512, seed=i) for i in range(2)}
    source = write_gguf(tmp_path / "f16.gguf", weights, fill=fill)
    args = [source, tmp_path / "q.gguf", "--type", "itq3_s", "--no-calibration", "--model-card", tmp_path / "q.md"]
    assert quantize.main([str(a) for a in args]) == 0
    text = (tmp_path / "q.md").read_text()
    assert front_matter(text) == {
        "base_model": ["org/Parent"], "license": "other", "license_name": "A: licence", "library_name": "gguf",
        "tags": ["gguf", "llama.cpp", "ggml-ext"], "quantized_by": "someone",
    }
    assert "The model was made from org/Parent." in text and "It needs the package ggml-ext" in text
    tensors = read_tensors(tmp_path / "q.gguf")
    both = [np.concatenate([gguf.quants.dequantize(t.data, t.tensor_type) for t in found.values()])
            for found in (tensors, read_tensors(source))]
    assert f"| blk.*.attn_q.weight | 2 | 32,768 | ITQ3_S | 3.125 | {relative_mse(*both):.3g} |" in text
    assert "Calibration: none." in text and str(tmp_path) not in text
    assert "ggml-ext quantize f16.gguf q.gguf --type itq3_s --no-calibration\n" in text
    assert quantize.main([str(a) for a in [*args, "--force"]]) == 0
    assert quantize.main([str(a) for a in [*args[:1], tmp_path / "new.gguf", *args[2:]]]) == 1
    assert f"--model-card: {tmp_path / 'q.md'} exists: name another file or pass --force" in capsys.readouterr().err


def test_card_escapes_names(lib, tmp_path, capsys):
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_name("evil\n---\n# <b>x</b> | [a](javascript:1)")
        writer.add_license("mi\x7ft")

    source = write_gguf(tmp_path / "f16.gguf", {"blk.0.attn_q.weight": gaussian(32, 512)}, fill=fill)
    args = [source, tmp_path / "q.gguf", "--type", "itq3_s", "--no-calibration", "--model-card", tmp_path / "q.md"]
    assert quantize.main([str(a) for a in [*args, "--report", tmp_path / "q.md"]]) == 1
    assert f"--model-card: {tmp_path / 'q.md'} is the same file as --report: name another file" in capsys.readouterr().err
    assert quantize.main([str(a) for a in args]) == 0
    text = (tmp_path / "q.md").read_text()
    assert front_matter(text)["license"] == "mi t" and "\x7f" not in text and text.count("\n---\n") == 1
    assert "# evil --- \\# \\<b\\>x\\</b\\> \\| \\[a\\](javascript:1), ITQ3_S\n" in text


def test_card_command_has_no_token():
    words = ["out.gguf", "--hf-repo", "org/name", "--hf-token", "secret", "--type", "itq3_t", "--tensor-type", "a=q8_0", "--tensor-type", "b=q8_0",
             "--imatrix", "/home/me/i.gguf"]
    options = from_namespace(QuantizeOptions, quantize.build_parser().parse_args(words))
    assert Settings.parse(options).command == (
        "ggml-ext quantize out.gguf --type itq3_t --tensor-type a=q8_0 --tensor-type b=q8_0 --hf-repo org/name "
        "--imatrix i.gguf"
    )
