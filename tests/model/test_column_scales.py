"""Column scales: groups of a graph, the function of scaled files, LoRA adapters, and the streams of sequential quantization."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggml_ext import inspect as inspector
from ggml_ext import scale_adapter
from ggml_ext._base.errors import UserError
from ggml_ext._commands.scaling_adapters import SCALED_FOR, hash_entry
from ggml_ext._formats.column_scales import KEY, ColumnScales, ScaledFile
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._native import graph as _graph
from ggml_ext._native.graph import read_scale_groups
from ggml_ext._native.streams import LayerStreams
from ggml_ext._sequential.sums import Sums
from helpers.architectures import write_models
from helpers.commands import quantize, run_main, run_quantize, tool
from helpers.errors import check_error
from helpers.models import ROOT, finish, gaussian, read_tensors

TEXT = ROOT / "data" / "heldout.txt"
# What the graphs of these architectures have besides Llama's: biases, parallel layers, experts with shared ones, low-rank queries, states.
GROUPS = {
    "gpt2": {("attn_norm.bias,attn_norm", "attn_qkv"), ("ffn_norm.bias,ffn_norm", "ffn_up")},
    "command-r": {("attn_norm", "attn_q,attn_v,attn_k,ffn_gate,ffn_up")},
    "qwen2moe": {("ffn_norm", "ffn_gate_inp,ffn_gate_exps,ffn_up_exps,ffn_gate_shexp,ffn_up_shexp,ffn_gate_inp_shexp"), ("ffn_up_shexp", "ffn_down_shexp")},
    "deepseek2": {("attn_q_a_norm", "attn_q_b"), ("ffn_up_shexp", "ffn_down_shexp")},
    "falcon-h1": {("ffn_up.bias,ffn_up", "ffn_down"), ("attn_v.bias,attn_v", "attn_output")},
}


def class_names(names: tuple[str, ...]) -> str:
    return ",".join(re.sub(r"^blk\.\d+\.|\.weight$", "", name) for name in names)


def test_groups_of_the_reference_model(model):
    groups = read_scale_groups([model])
    assert all(g.is_exact for g in groups)
    expected = {("attn_norm", "attn_q,attn_v,attn_k", 256, 1), ("attn_v", "attn_output", 64, 2), ("ffn_norm", "ffn_gate,ffn_up", 256, 1),
                ("ffn_up", "ffn_down", 768, 1)}
    assert {(class_names(g.producers), class_names(g.consumers), g.block, g.repeat) for g in groups} == expected
    assert len(groups) == 8 * len(expected)  # not output_norm, because the output matrix is the token embeddings


@pytest.mark.parametrize("architecture", GROUPS)
def test_groups_of_other_graphs(architecture, tmp_path):
    found = set()
    for path in write_models(architecture, tmp_path):
        groups = read_scale_groups([path])
        assert all(g.is_exact for g in groups)
        found |= {(class_names(g.producers), class_names(g.consumers)) for g in groups}
    assert GROUPS[architecture] <= found, found


@pytest.mark.nightly
def test_groups_of_all_architectures_are_exact(tmp_path):
    paths = write_models("all", tmp_path)
    groups = {path.stem: read_scale_groups([path]) for path in paths}
    assert not [name for name, found in groups.items() if not all(g.is_exact for g in found)]
    assert [name for name, found in groups.items() if not found] == ["hrm_text-dense"]  # its layers run more than once


@pytest.fixture(scope="module")
def loud() -> Path:
    """The reference model, trained on with loud channels: its scales differ more from one."""
    return ROOT / "data" / "model-loud-f16.gguf"


@pytest.fixture(scope="module")
def scaled(loud, tmp_path_factory):
    """The model in Q8_0 with column scales."""
    out = tmp_path_factory.mktemp("scaled") / "scaled.gguf"
    quantize(loud, out, "--type", "q8_0", "--column-scales", "--importance", "diagonal", "--calibration-chunks", "4", "--verify")
    return out


@pytest.fixture(scope="module")
def plain(loud, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "plain.gguf"
    quantize(loud, out, "--type", "q8_0")
    return out


def run_perplexity(model, base, *more) -> str:
    command = [tool("llama-perplexity"), "-m", model, "-f", TEXT, "-c", "256", "--chunks", "4", "-t", "2", "--kl-divergence-base", base, *more]
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, timeout=300).stdout


def divergence(model, base, *more) -> float:
    return float(re.search(r"Mean\s+KLD:\s+(-?[\d.]+)", run_perplexity(model, base, "--kl-divergence", *more))[1])


def test_scaled_file_computes_the_same(loud, scaled, plain, tmp_path):
    """Both files have the rounding errors of Q8_0 alone, of equal energy before a column's scale; a factor of 4 allows for that."""
    assert KEY in GGUFFile(scaled).metadata and len(ColumnScales.read(GGUFFile(scaled)).columns) == 7 * 8
    norms = [read_tensors(path)["blk.3.ffn_norm.weight"].data for path in (loud, scaled)]
    assert np.abs(norms[1] / norms[0]).max() > 1.2
    run_perplexity(loud, tmp_path / "base")
    assert divergence(scaled, tmp_path / "base") < 4 * divergence(plain, tmp_path / "base")


def test_inspect_compares_scaled_weights(loud, scaled):
    done = run_main(inspector.main, scaled, "--against", loud, "--json")
    assert done.returncode == 0, done.stderr
    changed = [float(nmse) for nmse in re.findall(r'"relative_squared_error": ([\d.e-]+)', done.stdout)]
    assert changed and max(changed) < 1e-4  # Q8_0 has 3e-5


def test_files_with_different_scales_are_not_compared(loud, scaled, plain):
    check_error(run_main(inspector.main, plain, "--against", scaled), "have different column scales")
    check_error(run_main(inspector.main, scaled, "--against", plain), "column scales need f32, f16 or bf16")
    check_error(run_quantize(loud, scaled.with_name("out.gguf"), "--type", "itq3_t", "--no-propagate", "--calibration-chunks", "2", "--calibrate-with", scaled), "have different column scales")


def test_scales_need_a_source_of_floats(plain, tmp_path):
    done = quantize(plain, tmp_path / "out.gguf", "--type", "itq3_t", "--column-scales", "--calibration-chunks", "2")
    assert "no effect: --column-scales" in done.stderr and KEY not in GGUFFile(tmp_path / "out.gguf").metadata


def test_killed_program_is_an_error(model, monkeypatch):
    """Column scales that a repeated run lacks would discard what the first one has written."""
    monkeypatch.setattr(_graph, "run_captured", lambda *_: (-9, "", ""))
    with pytest.raises(UserError, match="pass --no-column-scales"):
        read_scale_groups([model])


def test_requantized_file_keeps_the_scales(scaled, tmp_path):
    quantize(scaled, tmp_path / "out.gguf", "--type", "itq3_t", "--calibration-chunks", "4")
    assert GGUFFile(tmp_path / "out.gguf").value(KEY) == GGUFFile(scaled).value(KEY)


def write_adapter(path, scaled_for: str | None = None):
    """Write a LoRA adapter of rank 4, large enough to change the model's results visibly. scaled_for: value of SCALED_FOR."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4)
    if scaled_for is not None:
        writer.add_string(SCALED_FOR, scaled_for)
    for layer in range(8):
        for i, (name, columns, rows) in enumerate((("attn_q", 256, 256), ("attn_v", 256, 128), ("attn_output", 256, 256), ("ffn_up", 256, 768), ("ffn_down", 768, 256))):
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_a", 6 * gaussian(4, columns, seed=10 * layer + i).astype(np.float16))
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_b", 2 * gaussian(rows, 4, seed=10 * layer + i + 5))
    finish(writer)
    return path


def test_adapters_of_the_original_model(loud, scaled, plain, tmp_path):
    """Programs of ggml-ext scale an adapter when they load it; one that was converted for this model is used as it is."""
    adapter, base = write_adapter(tmp_path / "adapter.gguf"), tmp_path / "base"
    run_perplexity(loud, base, "--lora", adapter)
    limit = 4 * divergence(plain, base, "--lora", adapter)
    assert divergence(scaled, base, "--lora", adapter) < limit < divergence(scaled, base) / 4
    done = run_main(scale_adapter.main, scaled, adapter, tmp_path / "converted.gguf")
    assert done.returncode == 0, done.stderr
    assert divergence(scaled, base, "--lora", tmp_path / "converted.gguf") < limit
    entry = GGUFFile(scaled).value(KEY)
    assert divergence(scaled, base, "--lora", write_adapter(tmp_path / "unscaled.gguf", hash_entry(entry))) > limit
    for other in (loud, scaled):  # a model without scales, and one with others
        command = [tool("llama-perplexity"), "-m", other, "-f", TEXT, "--lora", write_adapter(tmp_path / "other.gguf", hash_entry(entry if other == loud else "other"))]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
        assert done.returncode and "was converted for a model with other column scales" in done.stdout + done.stderr


def test_export_lora_refuses_scaled_models(scaled, tmp_path):
    command = [tool("llama-export-lora"), "-m", scaled, "--lora", write_adapter(tmp_path / "a.gguf"), "-o", tmp_path / "out.gguf"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode and "has column scales, which this program ignores" in done.stdout + done.stderr


def test_streams_take_scaled_weights(loud, scaled, tmp_path):
    """If all weights of the quantized model are the scaled ones in F16, its inputs are those of the original divided by s, up to rounding."""
    source, scales = GGUFFile(loud), ColumnScales.read(GGUFFile(scaled))
    file = ScaledFile(source, scales)
    (tmp_path / "text").write_bytes(TEXT.read_bytes()[-9000:])
    command = [tool("ggml-ext-streams"), "-m", loud, "-f", tmp_path / "text", "-c", 64, "-b", 64, "--chunks", 2, "-t", 2]
    with LayerStreams([*map(str, command)], tmp_path) as streams, ThreadPoolExecutor(2) as pool:
        for tensor in source.tensors:
            if tensor.name in scales:
                streams.replace(tensor.name, tensor.type.name, file.rows(tensor, 0, tensor.n_rows))
        for k in range(2):
            streams.enter_layer(k)
            for g, group in enumerate(streams.layers[k]):
                factors = scales.column_factors(group.products[0].weight)
                assert factors is not None
                sums, unscaled = Sums(group, pool, factors), Sums(group, pool)
                arrays = streams.compute_inputs(k, g, 0, False)
                for s in (sums, unscaled):
                    s.add(arrays)
                    s.flush()
                # the rounding of halves, 2^-11, in weights and inputs of two layers
                assert np.linalg.norm(sums.d) < 0.01 * np.linalg.norm(sums.h) < np.linalg.norm(unscaled.d)
            streams.advance()


def test_sequential_quantization_with_scales(loud, tmp_path):
    """The scales are on by default and left out on request. With so little text their gain of 5 to 10 % drowns: files of two runs that
    round differently scatter by 4 %. Scales applied wrongly cost far more than the 10 % allowed here.
    """
    flags = ["--type", "itq2_t", "--effort", "fast", "--propagate", "--calibration-chunks", "4"]
    quantize(loud, tmp_path / "with.gguf", *flags, "--verify")
    quantize(loud, tmp_path / "without.gguf", *flags, "--no-column-scales")
    keys = [KEY in GGUFFile(tmp_path / name).metadata for name in ("with.gguf", "without.gguf")]
    assert keys == [True, False]
    run_perplexity(loud, tmp_path / "base")
    with_scales, without = (divergence(tmp_path / name, tmp_path / "base") for name in ("with.gguf", "without.gguf"))
    assert with_scales < 1.1 * without
