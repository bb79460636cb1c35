"""Quant mixes: which tensors get the better type, their size, and --effort."""

import numpy as np
import pytest

from ggml_ext import TYPES
from ggml_ext._plan.recipes import RECIPES
from helpers.commands import quantize, run_quantize
from helpers.models import gaussian, read_tensors, write_gguf

NAMES = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    tensors = {f"blk.{i}.{name}.weight": gaussian(8, 256, seed=10 * i + k) for i in range(3) for k, name in enumerate(NAMES)}
    tensors |= {"token_embd.weight": gaussian(16, 256), "blk.0.attn_norm.weight": gaussian(256)}
    return write_gguf(tmp_path_factory.mktemp("recipes") / "in.gguf", tensors, fill=lambda w: w.add_block_count(3))


@pytest.mark.parametrize(("name", "expected"), [
    ("itq3_t_m", ["ITQ3_T", "Q4_K", "Q4_K", "Q4_K", "ITQ3_T", "ITQ3_T", "ITQ3_T"]),
    ("itq2_t_m", ["ITQ3_T", "ITQ3_T", "Q4_K", "ITQ3_T", "ITQ2_T", "ITQ2_T", "ITQ2_T"]),
    ("itq1h_t_m", ["ITQ3_T", "ITQ3_T", "Q4_K", "ITQ3_T", "ITQ1H_T", "ITQ1H_T", "ITQ1H_T"]),
])
@pytest.mark.parametrize("options", [[], ["--pure"]])
def test_mix_assigns_types(tmp_path, model_file, lib, name, expected, options):
    quantize(model_file, tmp_path / "out.gguf", "--type", name, *options)
    tensors = read_tensors(tmp_path / "out.gguf")
    first_layer = {"ITQ2_T": "ITQ3_T", "ITQ1H_T": "ITQ2_T"}
    for i in range(3):
        types = [first_layer.get(t, t) if i == 0 else t for t in expected]
        assert [tensors[f"blk.{i}.{n}.weight"].tensor_type.name for n in NAMES] == types
    base = TYPES[RECIPES[name].base]
    embd = base.name if options else base.output  # without output.weight the embeddings are the output matrix
    assert tensors["token_embd.weight"].tensor_type.name == embd.upper()
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"


def test_mix_of_experts_gives_bits_to_what_all_tokens_use(tmp_path, lib):
    expected = {
        "blk.0.attn_v": "ITQ4_T", "blk.0.ffn_down_exps": "ITQ2_T", "blk.0.ffn_gate_inp": "F32", "blk.1.attn_q": "ITQ4_T", "blk.1.ffn_up": "ITQ4_T",
        "blk.1.ffn_up_exps": "ITQ1H_T", "blk.1.ffn_up_chexps": "ITQ1H_T", "blk.1.ffn_up_shexp": "ITQ4_T", "blk.1.shortconv.in_proj": "ITQ4_T"}
    sizes = {name: (4, 8, 256) if "exps" in name else (8, 256) for name in expected}
    source = write_gguf(tmp_path / "in.gguf", {f"{name}.weight": gaussian(*size) for name, size in sizes.items()}, "F32", fill=lambda w: w.add_block_count(2))
    quantize(source, tmp_path / "out.gguf", "--type", "itq1h_t_m")
    assert {name.removesuffix(".weight"): t.tensor_type.name for name, t in read_tensors(tmp_path / "out.gguf").items()} == expected


def test_override_has_priority(tmp_path, model_file, lib):
    quantize(model_file, tmp_path / "out.gguf", "--type", "itq2_t_m", "--tensor-type", "attn_v=q8_0")
    assert read_tensors(tmp_path / "out.gguf")["blk.1.attn_v.weight"].tensor_type.name == "Q8_0"


def test_file_records_its_mix(tmp_path, model_file, lib):
    import gguf

    quantize(model_file, tmp_path / "out.gguf", "--type", "ITQ2_T_M", "--effort", "fast")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["ggml_ext.type"].contents() == "itq2_t_m"
    assert fields["ggml_ext.options"].contents() == "effort=fast"
    assert fields["general.file_type"].contents() == TYPES["itq2_t"].id


def test_effort_changes_the_error(tmp_path, model_file, lib):
    errors = {}
    for effort in ("fast", "normal", "best"):
        quantize(model_file, tmp_path / f"{effort}.gguf", "--type", "itq2_t", "--effort", effort)
        tensor = read_tensors(tmp_path / f"{effort}.gguf")["blk.1.ffn_up.weight"]
        x = read_tensors(model_file)["blk.1.ffn_up.weight"].data.astype(np.float64)
        errors[effort] = ((lib.dequantize(TYPES["itq2_t"].id, np.ascontiguousarray(tensor.data), 256) - x) ** 2).sum()
    assert errors["best"] <= errors["normal"] < errors["fast"]


@pytest.mark.parametrize("options", [["--type", "itq2_t_x"], ["--type", "itq2_t", "--effort", "hard"]])
def test_bad_input_is_refused(tmp_path, model_file, options):
    done = run_quantize(model_file, tmp_path / "out.gguf", *options)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and options[-1] in done.stderr
    assert ("itq2_t_m" if len(options) == 2 else "fast, normal, best") in done.stderr
    assert not (tmp_path / "out.gguf").exists()
