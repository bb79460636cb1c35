"""Sequential quantization: the bytes, and errors."""

import os
import re
import signal
import subprocess
import time

import gguf
import numpy as np
import pytest

import ggml_ext
import synth_model
from ggml_ext._base.errors import UserError
from ggml_ext._base.units import GIB
from ggml_ext._calibration.cost import CalibrationCost
from ggml_ext._encode.correction import Corrector
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._native.streams import LayerStreams
from ggml_ext._sequential import estimate, layers
from ggml_ext._sequential.estimate import sums_bytes
from ggml_ext._sequential.sums import SINKS, RowSums
from helpers import architectures
from helpers.commands import quantize, quantize_command, run_quantize, tool
from helpers.models import copy_metadata, finish, read_tensors
from helpers.streams import SAME, start_streams, sums_of_squares


# tiny-experts and tiny-ragged together have what tiny has
@pytest.fixture(scope="module", params=[pytest.param("tiny", marks=pytest.mark.nightly), "tiny-experts", "tiny-ragged"])
def small(request, tmp_path_factory, lib):
    """Write a synthetic model of two layers with different experts."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    synth_model.write_model("f16", path, request.param, 2)
    return path


def quantize_sequentially(model, out, text, **options):
    return ggml_ext.quantize_model(
        model, out, **{"type": "itq2_t", "effort": "fast", "threads": 2, "propagate": True, "imatrix_from": text, "force": True, **options}
    )


def test_second_stream_matches_the_written_file(small, text, tmp_path, monkeypatch, float32_sums):
    """The Hessian of each matrix was measured behind the quantized matrices before it."""
    squares = {}

    def record(sums):
        squares.update({p.weight: np.einsum("eii->ei", sums.h) for p in sums.group.products})
        return hessian_diagonal(sums)

    hessian_diagonal = layers.hessian_diagonal
    monkeypatch.setattr(layers, "hessian_diagonal", record)
    out = tmp_path / "out.gguf"
    quantize_sequentially(small, out, text)
    expected = sums_of_squares(out, text, 512, tmp_path)
    assert len(squares) == 2 * 7 + 1 - ("output.weight" not in read_tensors(out))
    for name, actual in squares.items():
        assert np.abs(actual - expected[name]).max() <= SAME * expected[name].max(), name


def test_rows_use_error_feedback(small, text, tmp_path, monkeypatch):
    """Covers all matrices of the layers except experts, whose rows are encoded separately."""
    shapes, tokens = [], []

    def record(weights, *args, **options):
        shapes.append(weights.shape)
        return encode_with_row_feedback(weights, *args, **options)

    def record_tokens(g, n_tokens, map_items):
        tokens.append(n_tokens)
        return make_row_spans(g, n_tokens, map_items)

    encode_with_row_feedback, make_row_spans = layers.encode_with_row_feedback, layers.make_row_spans
    monkeypatch.setattr(layers, "encode_with_row_feedback", record)
    monkeypatch.setattr(layers, "make_row_spans", record_tokens)
    quantize_sequentially(small, tmp_path / "out.gguf", text, calibration_chunks=3)
    plain = [t for name, t in read_tensors(small).items() if name.startswith("blk.") and t.data.ndim == 2 and "ffn_gate_inp" not in name]
    assert sorted(shapes) == sorted(t.data.shape for t in plain)
    assert tokens.count(3 * (512 - SINKS)) == len(plain) == len(tokens) - tokens.count(0)  # the router has no gradients


@pytest.mark.parametrize(("architecture", "reason"), [("mamba", None), ("hy_v4", None), ("deepseek4", "FLASH_ATTN_EXT to keys of another form")])
def test_architectures_are_quantized_with_feedback_or_a_note(architecture, reason, letters, tmp_path, lib):
    (model,) = architectures.write_models(architecture, tmp_path)
    (long := tmp_path / "long.txt").write_text(letters.read_text() * 3)
    done = quantize(model, tmp_path / "out.gguf", "--type", "q4_0", "--propagate", "--imatrix-from", long, "--calibration-chunks", 2)
    assert done.returncode == 0 and "from quantized layers" in done.stdout + done.stderr, done.stderr
    notes = re.findall("no error feedback between rows: gradients of (.*?) \\(", done.stderr)
    assert notes == ([reason] if reason else [])


def test_number_of_threads_leaves_bytes_unchanged(small, text, tmp_path):
    for n_threads in (1, 3):
        quantize_sequentially(small, tmp_path / f"{n_threads}.gguf", text, threads=n_threads)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


NOT_IN_NUMPY = ["attn_q|attn_v|attn_output|ffn_gate|ffn_up=f16"]  # numpy takes 6 seconds per matrix


@pytest.mark.parametrize("options", [{"type": "q3_k_s"}, {"type": "iq2_xxs"}, {"type": "q4_k", "importance": "block"},
                                     {"encoder": "numpy", "tensor_type": NOT_IN_NUMPY, "token_embedding_type": "q8_0", "output_tensor_type": "q8_0"},
                                     {"type": "ditto3", "ditto_codebook": "tensor"}, {"split_max_size": "1M"}])
def test_other_types_and_options_run(options, text, tmp_path, lib):
    model = tmp_path / "model.gguf"
    synth_model.write_model("f16", model, "tiny", 1 if "encoder" in options else 2)
    result = quantize_sequentially(model, tmp_path / "out.gguf", text, **options)
    assert all(path.is_file() for path in result.paths)


def test_correction_reduces_the_stream_error(model, text, tmp_path, monkeypatch, lib):
    """Compares the error after the last layer with and without corrected targets."""
    errors = []
    for corrects in (True, False):
        if not corrects:
            monkeypatch.setattr(Corrector, "correct", lambda *_: None)
        quantize_sequentially(model, tmp_path / "out.gguf", text)
        errors.append(ggml_ext.inspect_model(tmp_path / "out.gguf").record()["stream_errors"])
    assert 0 < errors[0][-1] < 0.8 * errors[1][-1]
    n_layers = gguf.GGUFReader(model).fields["llama.block_count"].contents()
    assert [len(run_errors) for run_errors in errors] == [n_layers] * 2 and all(e > 0 for run_errors in errors for e in run_errors)


def test_repacked_matrix_is_replaced(text, tmp_path, lib):
    """Q4_0 is repacked on CPUs with AVX2 or NEON, F16 on those with AMX; the new matrix is kept next to it."""
    model, packed, quantized = (tmp_path / name for name in ("model.gguf", "packed.gguf", "ours.gguf"))
    synth_model.write_model("f16", model, "tiny", 2)
    assert quantize(model, packed, "--type", "q4_0").returncode == 0
    assert quantize(model, quantized, "--type", "itq2_t").returncode == 0
    name, errors = "blk.0.ffn_down.weight", []
    with start_streams(packed, text, 512, tmp_path) as layer_streams:
        for replaced in (False, True):
            layer_streams.enter_layer(0)
            if replaced:
                layer_streams.replace(name, "itq2_t", read_tensors(quantized)[name].data)
            errors.append(layer_streams.advance())
    assert errors[0] == 0 < errors[1]


@pytest.mark.parametrize("options", [{"type": "itq3_t"}, {"type": "q4_k_m"}, {"type": "ditto3"}, {"type": "ditto3", "ditto_codebook": "tensor"},
                                     {"effort": "best", "propagate": None, "split_max_size": "1M"}])
def test_reported_errors_are_against_the_source(options, text, tmp_path, lib):
    """The report matches --verify and inspect, within DITTO3's epsilon. Errors against corrected targets have a separate name."""
    model = tmp_path / "model.gguf"
    synth_model.write_model("f16", model, "tiny", 2)
    result = quantize_sequentially(model, tmp_path / "out.gguf", text, verify=True, calibration_chunks=2, **options)
    inspected = {t["name"]: t for t in ggml_ext.inspect_model(result.paths[0], against=model).record()["tensors"]}
    for tensor in (t for t in result.tensors if t.largest_error is not None):
        tensor_record = inspected[tensor.name]
        assert tensor.largest_error == tensor_record["largest_error"] and tensor_record["within_epsilon"]
        assert ("epsilon" in tensor_record) == (tensor.type == "ditto3")
        assert tensor.relative_squared_error == pytest.approx(tensor_record["relative_squared_error"], rel=1e-9)
        if tensor.name.startswith("blk."):
            assert 0 < tensor.target_error < tensor.weighted_relative_squared_error
        else:
            assert tensor.name != "token_embd.weight" or tensor.target_error is None


def test_table_has_errors_to_targets(text, tmp_path, lib):
    model = tmp_path / "model.gguf"
    synth_model.write_model("f16", model, "tiny", 2)
    table = quantize(model, tmp_path / "out.gguf", "--type", "itq2_t", "--propagate", "--imatrix-from", text, "--calibration-chunks", "2").stdout
    assert re.search(r"NMSE  weighted to target  largest error\n(?:.*\n)+?blk\.\*\.attn_k\.weight +itq2_t +0\.\d{6}  0\.\d{6}  0\.\d{6} ", table), table


def write_last_first(source, out):
    """Write a model with its tensors in the opposite order. llama-quantize writes output.weight first."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    copy_metadata(writer, reader)
    for t in reversed(reader.tensors):
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    finish(writer)
    return out


def test_resume_continues_after_interrupt(small, text, tmp_path):
    """The output has the order of the layers, so that each is written once it is encoded."""
    uninterrupted, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    arguments = ["--type", "itq2_t", "--effort", "best", "-t", "2", "--propagate", "--imatrix-from", text]
    source = write_last_first(small, tmp_path / "source.gguf")
    assert quantize(source, uninterrupted, *arguments).returncode == 0
    layers = [name.partition(".attn")[0] for name in read_tensors(uninterrupted) if ".attn" in name]
    assert layers == sorted(layers) and [*read_tensors(uninterrupted)][0] == "token_embd.weight"
    done = subprocess.Popen(quantize_command(source, out, *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    journal, until = tmp_path / ".out.gguf.partial.json", time.monotonic() + 120
    while time.monotonic() < until and not (journal.is_file() and journal.read_bytes().count(b"\n") > 8):
        time.sleep(0.02)
    done.send_signal(signal.SIGTERM)
    done.wait(60)
    assert done.returncode and not out.exists() and not list(tmp_path.glob(".propagation-*"))
    resumed = quantize(source, out, *arguments)
    assert resumed.returncode == 0 and "resuming after" in resumed.stderr
    assert out.read_bytes() == uninterrupted.read_bytes()


@pytest.mark.parametrize(("flags", "propagates"), [
    ({"effort": "best"}, True),
    ({"effort": "best", "propagate": False}, False),
    ({"effort": "best", "type": "q8_0"}, False),  # its encoder takes no Hessian
    ({"effort": "best", "imatrix_from": None, "no_calibration": True}, False),
    ({}, True),
    ({"effort": "fast"}, False),
])
def test_file_says_whether_it_was_quantized_sequentially(flags, propagates, text, tmp_path, lib):
    model, out = tmp_path / "model.gguf", tmp_path / "out.gguf"
    synth_model.write_model("f16", model, "tiny", 2)
    options = {"type": "itq2_t", "threads": 2, "imatrix_from": text, **flags}
    result = ggml_ext.quantize_model(model, out, **options)
    assert ("propagate" in result.options.split()) == propagates
    assert ("stream_errors" in ggml_ext.inspect_model(out).record()) == propagates


def test_graph_without_layers_is_quantized_without_propagation(letters, tmp_path, lib):
    (model,) = architectures.write_models("hrm_text", tmp_path)
    (long := tmp_path / "long.txt").write_text(letters.read_text() * 3)
    done = quantize(model, tmp_path / "out.gguf", "--type", "itq2_t", "--calibration-chunks", 2, "--imatrix-from", long)
    assert done.returncode == 0 and "no sequential quantization: " in done.stderr and "its graph uses blk.0.attn_q.bias again" in done.stderr
    assert "from quantized layers" not in done.stdout + done.stderr


@pytest.mark.parametrize(("flags", "is_sequential", "option"), [
    ("", True, None),
    ("--effort best", True, None),
    ("--effort fast", False, None),
    ("--effort fast --propagate", True, None),
    ("--no-propagate", False, None),
    ("--type q4_k_m", True, None),
    ("--type q8_0", False, None),  # its encoder takes no Hessian
    ("--type q6_k", False, None),  # above GAINING_BITS
    ("--no-calibration", False, None),
    ("--importance diagonal", False, None),
    ("--exclude-weights ffn", False, "--exclude-weights"),
    ("--fallback-above 3", False, "--fallback-above"),
])
def test_sequential_quantization_is_the_default(flags, is_sequential, option, model, text, lib):
    """An option for another purpose that excludes it is named."""
    flags = flags.split()
    given = [*([] if "--type" in flags else ["--type", "itq2_t"]), *([] if "--no-calibration" in flags else ["--imatrix-from", text]), *flags]
    done = quantize(model, "out.gguf", *given, "--calibration-chunks", 2, "--dry-run")
    lines = (done.stdout + done.stderr).splitlines()
    assert any(line.startswith("sequential quantization: ") for line in lines) == is_sequential
    assert [line for line in lines if "no sequential quantization" in line] == (
        [f"note: no sequential quantization: {option} excludes it"] if option else [])


@pytest.mark.parametrize(("flags", "ignored"), [
    ({}, None),
    ({"calibrate_with": "source"}, None),  # as with --propagate
    ({"n_gpu_layers": 1, "device": "none", "rpc": "localhost:1"}, "-ngl, --device, --rpc"),
    ({"calibrate_with": "q8_0"}, "--calibrate-with"),
])
def test_options_that_propagation_ignores_are_noted(flags, ignored, model, text, lib):
    notes = []
    options = {"type": "itq2_t", "propagate": True, "imatrix_from": text, "threads": 2, "dry_run": True, **flags}
    ggml_ext.quantize_model(model, None, log=lambda _, line: notes.append(line), **options)
    assert [line for line in notes if "no effect" in line] == ([f"no effect with --propagate: {ignored}"] if ignored else [])


# --- errors ---


@pytest.mark.parametrize(("flags", "parts"), [
    (["--imatrix", "FILE"], ["--imatrix", "from quantized layers", "--imatrix-from"]),
    (["--no-calibration"], ["--propagate and --no-calibration"]),
    (["--importance", "diagonal"], ["--propagate", "Hessians", "diagonal"]),
    (["--fallback-above", "3"], ["--propagate and --fallback-above"]),
])
def test_bad_options_are_refused(flags, parts, model, text, tmp_path):
    flags = [str(text) if f == "FILE" else f for f in flags]
    done = run_quantize(model, tmp_path / "out.gguf", "--type", "itq2_t", "--propagate", *flags)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and all(p in done.stderr.splitlines()[0] for p in parts), done.stderr
    assert not (tmp_path / "out.gguf").exists()


def quantize_error(model, out, text, *flags, env=None) -> str:
    """Return the error line of a run that must fail without output."""
    command = quantize_command(model, out, "--type", "itq2_t", "--propagate", "--imatrix-from", text, "-q", *flags)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    assert done.returncode == 1 and not out.exists() and not list(out.parent.glob(".*")), done.stderr
    (line,) = (text for text in done.stderr.splitlines() if text.startswith("error: "))
    return line


def test_dry_run_reports_the_cost(model, text, tmp_path, lib):
    done = quantize(model, tmp_path / "out.gguf", "--type", "itq2_t", "--propagate", "--imatrix-from", text, "--dry-run")
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    assert "sequential quantization: 8 layers" in done.stdout and "plus encoding" in done.stdout and "MiB of memory" in done.stdout


def test_experts_share_sums_if_memory_is_short(text, tmp_path, monkeypatch, lib):
    """Those of ffn_gate and ffn_up; each ffn_down has its own."""
    monkeypatch.setitem(synth_model.SHAPES, "wide-experts", (512, 256, 64, 8, 2, 8, 2))
    model, n_sums = tmp_path / "model.gguf", {}
    synth_model.write_model("f16", model, "wide-experts", 2)

    def record(sums):
        n_sums.update({p.weight: len(sums.h) for p in sums.group.products})
        return hessian_diagonal(sums)

    hessian_diagonal = layers.hessian_diagonal
    monkeypatch.setattr(layers, "hessian_diagonal", record)
    file = GGUFFile(model)
    own, common = (sums_bytes(CalibrationCost.read(file), file, 3 * 512, common_sums=c) for c in (False, True))
    for limit, n_gate in ((own + common) / 2, 1), (1.01 * own, 8):
        quantize_sequentially(model, tmp_path / f"{n_gate}.gguf", text, calibration_chunks=3, memory=limit / GIB)
        assert {n_sums[f"blk.1.ffn_{name}_exps.weight"] for name in ("gate", "up")} == {n_gate} and n_sums["blk.1.ffn_down_exps.weight"] == 8
        done = quantize(model, tmp_path / "dry.gguf", "--type", "itq2_t", "--propagate", "--imatrix-from", text, "--calibration-chunks", "3", "--memory",
                        f"{limit / GIB}", "--dry-run")
        assert ("the experts of a layer share the sums" in done.stderr) == (n_gate == 1), done.stderr
    assert (tmp_path / "1.gguf").read_bytes() != (tmp_path / "8.gguf").read_bytes()
    assert "the sums of a layer need" in quantize_error(model, tmp_path / "none.gguf", text, "--calibration-chunks", "3", "--memory", f"{0.9 * common / GIB}")


def test_copies_of_experts_need_memory(text, tmp_path, monkeypatch, lib):
    """Experts are transposed for gradients, and copied in BF16: neither happens if that exceeds the memory."""
    monkeypatch.setitem(synth_model.SHAPES, "wide-experts", (512, 256, 64, 8, 2, 8, 2))
    model = tmp_path / "model.gguf"
    synth_model.write_model("f16", model, "wide-experts", 1)
    monkeypatch.setattr(estimate, "sums_bytes", lambda *_: 1)
    used = []
    monkeypatch.setattr(LayerStreams, "prefer_bf16", lambda _: used.append("BF16"))
    monkeypatch.setattr(layers, "RowSums", lambda *arguments: (used.append("gradients"), RowSums(*arguments))[1])
    transposed, copied = 4 * 8 * 256 * 512, 2 * 3 * 8 * 256 * 512
    for n_bytes, expected in ((0.9 * transposed, []), (1.1 * transposed, ["gradients"]), (2 * copied, ["BF16", "gradients"])):
        used.clear()
        quantize_sequentially(model, tmp_path / "out.gguf", text, calibration_chunks=2, memory=n_bytes / GIB)
        assert used == expected


def test_too_little_memory_is_refused(model, text, tmp_path, lib):
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    line = quantize_error(model, out, text, "--memory", "0.001")
    assert "the sums of a layer need 0.0" in line and "the limit is 0.00 GiB" in line and "--memory" in line
    done = quantize(model, out, "--type", "itq2_t", "--propagate", "--imatrix-from", text, "--memory", "0.04")
    assert done.returncode == 0 and "this may be slow" in done.stderr


def test_graph_without_layers_is_refused(letters, tmp_path, lib):
    (model,) = architectures.write_models("hrm_text", tmp_path)
    text = tmp_path / "long.txt"
    text.write_text(letters.read_text() * 3)
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    assert "hrm_text" not in quantize_error(model, out, text) and "its graph uses blk.0.attn_q.bias again" in quantize_error(model, out, text)


@pytest.mark.parametrize(("name", "weight", "first"), [
    ("blk.1.attn_norm.weight", 3e38, "attn_norm-1 of "),
    ("blk.1.ffn_norm.weight", 1e25, "ffn_(gate|up|swiglu)-1 of "),
    ("output_norm.weight", 3e38, "result_norm of "),
])
def test_first_non_finite_tensor_is_named(name, weight, first, text, tmp_path, lib):
    """Finite weights whose products overflow: the gradients of no layer are finite then."""
    model, out = tmp_path / "model.gguf", tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    synth_model.write_model("f16", model, "tiny", 3)
    reader = gguf.GGUFReader(model, "r+")
    next(t for t in reader.tensors if t.name == name).data[:] = weight
    reader.data.flush()
    line = quantize_error(model, out, text)
    assert re.search(f"values that are not finite, the first in {first}", line) and "--no-calibration" in line and "leave out" not in line
    if "blk" in name:  # without gradients the streams notice it
        with start_streams(model, text, 512, tmp_path) as both, pytest.raises(UserError, match=f"the first in {first}"):
            for layer in range(2):
                both.enter_layer(layer)
                both.advance()


def test_too_few_tokens_warn(model, text, tmp_path, lib):
    result = quantize_sequentially(model, tmp_path / "out.gguf", text, calibration_chunks=2, importance="full")
    assert [w for w in result.warnings if "tokens" in w and "columns" in w]


def test_missing_program_is_refused(model, text, tmp_path, lib, monkeypatch):
    monkeypatch.setenv("GGML_EXT_LIB_DIR", str(tmp_path))
    for name in os.listdir(tool("llama-imatrix").parent):
        if "streams" not in name:
            (tmp_path / name).symlink_to(tool("llama-imatrix").parent / name)
    done = run_quantize(model, tmp_path / "out.gguf", "--type", "itq2_t", "--propagate", "--imatrix-from", text)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "ggml-ext-streams" in done.stderr.splitlines()[0]


def test_invalid_indices_are_answered_with_an_error(text, tmp_path, lib):
    """The program prints one line and continues."""
    model = tmp_path / "model.gguf"
    synth_model.write_model("f16", model, "tiny", 2)
    with start_streams(model, text, 128, tmp_path) as both:
        last = both.n_chunks
        for line in ("layer -1", "layer 3", f"inputs 0 {last} 0", "inputs 0 -1 0", "inputs 9 0 0", "inputs -1 0 0", f"advance {last}", "advance -1",
                     "learn -1", f"learn {last + 1}", "begin 0", "gradients 0"):
            with pytest.raises(UserError, match="there is no (layer|group|chunk|number of chunks) "):
                both._ask(line)
        assert list(both.begin_gradients(1)) == [0]
        for line in ("begin 1", "begin -1", "gradients 1", "gradients -1"):
            with pytest.raises(UserError, match="there is no chunk "):
                both._ask(line)
        both.enter_layer(2)
        for line in ("advance 0", "gradients 0"):  # nothing is kept after the last layer
            with pytest.raises(UserError, match="there is no layer 2 of 2"):
                both._ask(line)
        both.enter_layer(0)
        assert both.compute_inputs(0, 0, last - 1, True).x[0].shape[0] == 128


def test_text_shorter_than_a_chunk_is_refused(tmp_path, lib):
    model, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    synth_model.write_model("f16", model, "tiny", 2)
    text.write_text("Short.")
    with pytest.raises(UserError, match="the text has . tokens, but a chunk takes 128"), start_streams(model, text, 128, tmp_path):
        pass


def test_full_disk_and_existing_output_are_refused(model, text, tmp_path):
    command = list(map(str, [tool("ggml-ext-streams"), "-m", model, "-f", text, "-c", 512, "-b", 512, "-o", tmp_path / "streams"]))
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 1; exec "$@"', "bash", *command]  # a limit of one block stands for a full disk
    with pytest.raises(UserError, match="no room for .* MiB in .*streams"), LayerStreams(limited, tmp_path):
        pass
    (tmp_path / "streams").write_text("of another")
    with pytest.raises(UserError, match="cannot open .*streams: File exists"), LayerStreams(command, tmp_path):
        pass
    assert (tmp_path / "streams").read_text() == "of another"
