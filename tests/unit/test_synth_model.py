"""scripts/tools/synth_model.py: shapes, and rows that do not fit the type."""

import pytest

import synth_model
from ggml_ext._base.errors import UserError
from helpers.models import read_tensors


def test_rows_that_do_not_fit_get_the_fallback(lib, tmp_path, capsys):
    """896 is a multiple of 64, 4864 of 256."""
    synth_model.write_model("itq3_t", tmp_path / "out.gguf", "qwen2.5-0.5b", 1)
    tensors = {n: (t.shape.tolist(), t.tensor_type.name) for n, t in read_tensors(tmp_path / "out.gguf").items()}
    assert tensors["blk.0.attn_k.weight"] == ([896, 128], "ITQ3_T64")
    assert tensors["blk.0.ffn_up.weight"] == ([896, 4864], "ITQ3_T64")
    assert tensors["blk.0.ffn_down.weight"] == ([4864, 896], "ITQ3_T")
    classes = "attn_q, attn_k, attn_v, attn_output, ffn_gate, ffn_up"
    assert f"rows of 896: itq3_t64 (3.25 bpw) in place of itq3_t: {classes} in layer 0\n" in capsys.readouterr().err


def test_heads_may_be_wider_than_the_embedding(lib, tmp_path, monkeypatch):
    """gpt-oss has 64 heads of 64 and an embedding of 2880; here there are 8 and 320, with experts."""
    assert synth_model.SHAPES["gpt-oss-20b"] == (2880, 2880, 64, 64, 8, 32, 4)
    monkeypatch.setitem(synth_model.SHAPES, "small", (320, 320, 64, 8, 2, 4, 2))
    synth_model.write_model("itq2_t", tmp_path / "out.gguf", "small", 2)
    tensors = {n: (t.shape.tolist(), t.tensor_type.name) for n, t in read_tensors(tmp_path / "out.gguf").items()}
    assert tensors["blk.1.attn_q.weight"] == ([320, 512], "ITQ2_T64")
    assert tensors["blk.1.attn_v.weight"] == ([320, 128], "ITQ2_T64")
    assert tensors["blk.1.attn_output.weight"] == ([512, 320], "ITQ2_T")
    assert tensors["blk.1.ffn_down_exps.weight"] == ([320, 320, 4], "ITQ2_T64")


def test_unknown_types_are_named(tmp_path):
    with pytest.raises(UserError, match="TYPE: unknown type 'itq3_x'"):
        synth_model.write_model("itq3_x", tmp_path / "out.gguf")
