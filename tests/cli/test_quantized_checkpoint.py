"""Checkpoints and GGUF files in 8 and 4 bits as sources: the bytes of the way through a 16-bit file, which is not written."""

import gguf
import pytest

from ggml_ext._source import checkpoint as _checkpoint
from ggml_ext._source import converted_file
from helpers.checkpoint_files import N_LAYERS, write_checkpoint, write_gpt_oss
from helpers.checkpoint_folder import Workspace
from helpers.commands import quantize
from helpers.models import gaussian, read_tensors, write_gguf

torch = pytest.importorskip("torch", reason="the extra hf is not installed")
save_file = pytest.importorskip("safetensors.torch", reason="the extra hf is not installed").save_file
MXFP4 = gguf.GGMLQuantizationType.MXFP4
FP8, FP4_LEVELS = torch.float8_e4m3fn, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8_blocks(name, w):
    """Return weights with a scale for blocks of 128 times 128, as DeepSeek's checkpoints store them."""
    tiles = w.reshape(w.shape[0] // 128, 128, w.shape[1] // 128, 128)
    scale = tiles.abs().amax(dim=(1, 3)) / 448
    return {f"{name}.weight": (tiles / scale[:, None, :, None]).reshape(w.shape).to(FP8), f"{name}.weight_scale_inv": scale}


def fp8_channels(name, w):
    scale = w.abs().amax(dim=1, keepdim=True) / 448
    return {f"{name}.weight": (w / scale).to(FP8), f"{name}.weight_scale": scale.bfloat16()}


def int4_groups(name, w):
    """Return eight 4-bit integers per int32, with a scale for 128 weights."""
    groups = w.reshape(w.shape[0], -1, 128)
    scale = groups.abs().amax(dim=2, keepdim=True) / 7
    codes = ((groups / scale).round().long() + 8).reshape(w.shape[0], -1, 8)
    packed = (codes << torch.arange(0, 32, 4)).sum(dim=2)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale[..., 0].bfloat16(), f"{name}.weight_shape": torch.tensor(w.shape)}


def nvfp4(name, w):
    """Return two E2M1 codes per byte, with an E4M3 scale for 16 weights and one for the tensor."""
    groups = w.reshape(w.shape[0], -1, 16)
    scale_2 = groups.abs().amax() / (6 * 448)
    scale = (groups.abs().amax(dim=2) / 6 / scale_2).to(FP8)
    scaled = groups / (scale.float() * scale_2)[..., None].clamp(min=1e-30)
    codes = (scaled.abs()[..., None] - FP4_LEVELS).abs().argmin(dim=-1) + 8 * (scaled < 0)
    codes = codes.reshape(w.shape[0], -1, 2)
    packed = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)
    return {f"{name}.weight": packed, f"{name}.weight_scale": scale, f"{name}.weight_scale_2": scale_2}


def compressed(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


FORMATS = {
    "bf16": (lambda name, w: {f"{name}.weight": w.bfloat16()}, None),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 channels": (fp8_channels, compressed(num_bits=8, type="float", strategy="channel") | {"format": "float-quantized"}),
    "int4": (int4_groups, compressed(num_bits=4, type="int", strategy="group", group_size=128) | {"format": "pack-quantized"}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


def write_lenient_converter(directory):
    """Write a converter that takes every tokenizer: the real one knows those of gpt-oss by a hash of what they do."""
    path, real = directory / "convert_hf_to_gguf.py", _checkpoint.CONVERTER
    for name in ("conversion", "gguf-py"):
        (directory / name).symlink_to(real.parent / name)
    path.write_text("\n".join((
        "import runpy",
        "from conversion.base import TextModel",
        "TextModel.get_vocab_base_pre = lambda self, tokenizer: 'default'",
        f"runpy.run_path({str(real)!r}, run_name='__main__')",
    )))
    return path


def write_quantized(directory, name):
    """Write a checkpoint whose linear layers have one of FORMATS."""
    store, config = FORMATS[name]
    write_checkpoint(directory, **({} if config is None else {"quantization_config": config}))
    from safetensors.torch import load_file

    values = {}
    for key, w in load_file(directory / "model.safetensors").items():
        values |= store(key.removesuffix(".weight"), w.float()) if key.endswith("_proj.weight") else {key: w}
    save_file({k: v.contiguous() for k, v in values.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_16_bit_file(tmp_path, capsys, monkeypatch, name):
    """Few converted tensors are on the disk at a time."""
    source = write_quantized(tmp_path / "model", name)
    workspace = Workspace(tmp_path / "work", source, capsys)
    flags = ("--allow-requantize", "--type", "q4_0")
    monkeypatch.setattr(converted_file, "KEPT_BYTES", 0)
    largest, read_size = 0, converted_file.Converter.read_size

    def measure(self):
        nonlocal largest
        n = read_size(self)
        (directory,) = workspace.out.parent.glob(".converted-*")
        largest = max(largest, sum(512 * p.stat().st_blocks for p in directory.iterdir()))
        return n

    monkeypatch.setattr(converted_file.Converter, "read_size", measure)
    assert "tensor by tensor" in workspace.run(*flags)
    result = workspace.out.read_bytes()
    kept = tmp_path / "kept.gguf"
    workspace.run(*flags, "--keep-gguf", kept, "--force")
    assert workspace.out.read_bytes() == result and [*workspace.out.parent.iterdir()] == [workspace.out]
    print(name, largest, kept.stat().st_size)
    assert 0 < largest < kept.stat().st_size


def test_mxfp4_experts_are_read_from_the_checkpoint(tmp_path, capsys, monkeypatch):
    """Its experts keep their bits, as in the converter's file; with --allow-requantize they have the bytes of the way through BF16."""
    monkeypatch.setattr(_checkpoint, "CONVERTER", write_lenient_converter(tmp_path))
    workspace = Workspace(tmp_path / "work", write_gpt_oss(tmp_path / "model"), capsys)
    kept, wide = tmp_path / "kept.gguf", tmp_path / "wide.gguf"
    experts = [f"blk.{i}.ffn_{name}_exps.weight" for i in range(N_LAYERS) for name in ("gate", "up", "down")]
    workspace.run("--tensor-type", "exps=mxfp4", "--keep-gguf", kept)
    source, result = read_tensors(kept), read_tensors(workspace.out)
    assert all(result[name].tensor_type == source[name].tensor_type == MXFP4 and (result[name].data == source[name].data).all() for name in experts)
    assert result["blk.0.attn_q.weight"].tensor_type == gguf.GGMLQuantizationType["ITQ3_S"]
    workspace.run("--allow-requantize", "--force")
    quantize(kept, wide, "--type", "bf16", "--allow-requantize")
    quantize(wide, tmp_path / "through.gguf", "--type", "itq3_s", "--no-calibration")
    direct, through = (read_tensors(path) for path in (workspace.out, tmp_path / "through.gguf"))
    assert all((direct[name].data == through[name].data).all() for name in direct) and direct[experts[0]].tensor_type != MXFP4


def test_calibration_runs_the_complete_file(tmp_path):
    """Another run finds the imatrix, and writes no file for it."""
    source = write_quantized(tmp_path / "model", "fp8 blocks")
    flags = ("--type", "q4_k", "--importance", "block", "--calibration-chunks", "2", "--threads", "1", "--no-propagate")
    done = quantize(source, tmp_path / "a.gguf", *flags)
    assert "writing the GGUF file of the checkpoint" in done.stderr and "which llama-imatrix reads" in done.stderr
    again = quantize(source, tmp_path / "b.gguf", *flags)
    assert "writing the GGUF file" not in again.stderr and "same model and text" in again.stderr
    quantize(source, tmp_path / "c.gguf", *flags, "--keep-gguf", tmp_path / "kept.gguf", "--imatrix", tmp_path / "model.imatrix.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "q8_0"])
def test_gguf_files_are_decoded_in_memory(tmp_path, lib, name):
    """BF16 holds the values of 4-bit floats, and F32 those of Q8_0."""
    source = write_gguf(tmp_path / "f32.gguf", {"token_embd.weight": gaussian(16, 256), "blk.0.ffn_up.weight": gaussian(64, 256, seed=1)},
                        fill=lambda w: w.add_block_count(1))
    quantized, wide = tmp_path / "quantized.gguf", tmp_path / "wide.gguf"
    quantize(source, quantized, "--type", name, "--pure", "--no-calibration")
    quantize(quantized, wide, "--type", "f32" if name == "q8_0" else "bf16", "--allow-requantize")
    flags = ("--type", "itq3_t", "--no-calibration")
    quantize(quantized, tmp_path / "direct.gguf", *flags, *([] if name == "q8_0" else ["--allow-requantize"]))
    quantize(wide, tmp_path / "through.gguf", *flags)
    direct, through = (read_tensors(tmp_path / f"{n}.gguf")["blk.0.ffn_up.weight"] for n in ("direct", "through"))
    assert direct.tensor_type == gguf.GGMLQuantizationType["ITQ3_T"] and (direct.data == through.data).all()
