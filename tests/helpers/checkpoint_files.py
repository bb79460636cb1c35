"""Small checkpoints as transformers writes them: config.json, safetensors, a tokenizer."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np

from helpers.models import gaussian

N_EMBD, N_FF, N_LAYERS, N_HEADS, N_KV_HEADS, N_VOCAB = 256, 512, 2, 4, 2, 384
HEAD = N_EMBD // N_HEADS
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": N_EMBD, "intermediate_size": N_FF,
    "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "num_key_value_heads": N_KV_HEADS, "vocab_size": N_VOCAB,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
TEXT = "The quick brown fox jumps over the lazy dog, and 0123456789 sheep look on; nobody asked them (or the fox) why.\n"


def tensors(n_experts: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 weights by their names in transformers."""
    out = {"model.embed_tokens.weight": (N_VOCAB, N_EMBD), "model.norm.weight": (N_EMBD,), "lm_head.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYERS):
        layer = f"model.layers.{i}"
        out |= {f"{layer}.{name}_layernorm.weight": (N_EMBD,) for name in ("input", "post_attention")}
        heads = {"q": N_HEADS, "k": N_KV_HEADS, "v": N_KV_HEADS}
        out |= {f"{layer}.self_attn.{name}_proj.weight": (n * HEAD, N_EMBD) for name, n in heads.items()}
        out[f"{layer}.self_attn.o_proj.weight"] = (N_EMBD, N_EMBD)
        if not n_experts:
            out |= {f"{layer}.mlp.{name}_proj.weight": (N_FF, N_EMBD) for name in ("gate", "up")}
            out[f"{layer}.mlp.down_proj.weight"] = (N_EMBD, N_FF)
            continue
        out[f"{layer}.block_sparse_moe.gate.weight"] = (n_experts, N_EMBD)
        for e in range(n_experts):
            expert = f"{layer}.block_sparse_moe.experts.{e}"
            out |= {f"{expert}.{name}.weight": (N_FF, N_EMBD) for name in ("w1", "w3")}
            out[f"{expert}.w2.weight"] = (N_EMBD, N_FF)
    return {name: gaussian(*shape, seed=i) + (len(shape) == 1) for i, (name, shape) in enumerate(out.items())}


def write_safetensors(path: Path, values: dict[str, np.ndarray]) -> None:
    """Write bytes, and other arrays truncated to BF16: the length of a JSON header (8 bytes), the header with the offsets, the data."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, value in values.items():
        is_bytes = value.dtype == np.uint8
        raw = value.tobytes() if is_bytes else (value.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "U8" if is_bytes else "BF16", "shape": value.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def train_tokenizer() -> bytes:
    """Train a small tokenizer.model with pieces for all bytes."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT.strip()] * 10), model_writer=out, vocab_size=N_VOCAB, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, num_threads=1, minloglevel=2,
    )
    return out.getvalue()


def tokenizer_backend_files() -> dict[str, bytes]:
    """Return the tokenizer files that transformers 5 saves without a class of its own: sentencepiece's pieces in tokenizer.json."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *(chr(c) for c in range(33, 127))]
    pieces += [f"\u2581{chr(c)}" for c in range(97, 123)]
    special = [
        {"id": i, "content": pieces[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False} for i in range(3)
    ]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "pre_tokenizer": None, "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "dropout": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [["\u2581", chr(c)] for c in range(97, 123)],
        },
    }
    config = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {"tokenizer.json": json.dumps(tokenizer).encode(), "tokenizer_config.json": json.dumps(config).encode()}


def write_checkpoint(directory: Path, n_shards: int = 1, n_experts: int = 0, **config) -> Path:
    """Write a Llama checkpoint, or with experts a Mixtral one. config: changed values of config.json."""
    directory.mkdir(parents=True)
    values = tensors(n_experts)
    names = [f"model-{i + 1:05}-of-{n_shards:05}.safetensors" for i in range(n_shards)] if n_shards > 1 else ["model.safetensors"]
    shard_of = {name: names[i * n_shards // len(values)] for i, name in enumerate(values)}
    for file in names:
        write_safetensors(directory / file, {name: value for name, value in values.items() if shard_of[name] == file})
    if n_shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    config = CONFIG | (MIXTRAL if n_experts else {}) | config
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.model").write_bytes(train_tokenizer())
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}))
    return directory


def write_gpt_oss(directory: Path) -> Path:
    """Write a gpt-oss checkpoint, whose experts are in MXFP4: two E2M1 codes per byte, and a power of two for 32 weights."""
    from tokenizers import ByteLevelBPETokenizer

    directory.mkdir(parents=True)
    n_experts, rng = 4, np.random.default_rng(7)
    values = {}
    for name, value in tensors().items():
        layer, dot, part = name.partition(".mlp.")
        if not dot:
            values[name] = value
        elif part == "gate_proj.weight":  # once per layer
            values |= {f"{layer}.mlp.router.weight": gaussian(n_experts, N_EMBD, seed=8), f"{layer}.mlp.router.bias": np.zeros(n_experts, np.float32)}
            values |= {f"{layer}.self_attn.{x}_proj.bias": np.zeros(n * HEAD, np.float32) for x, n in (("q", N_HEADS), ("k", N_KV_HEADS), ("v", N_KV_HEADS))}
            values |= {f"{layer}.self_attn.o_proj.bias": np.zeros(N_EMBD, np.float32), f"{layer}.self_attn.sinks": np.zeros(N_HEADS, np.float32)}
            for matrix, rows, columns in (("gate_up_proj", 2 * N_FF, N_EMBD), ("down_proj", N_EMBD, N_FF)):
                experts = f"{layer}.mlp.experts.{matrix}"
                values[f"{experts}_blocks"] = rng.integers(0, 256, (n_experts, rows, columns // 32, 16), np.uint8)
                values[f"{experts}_scales"] = rng.integers(118, 122, (n_experts, rows, columns // 32), np.uint8)
                values[f"{experts}_bias"] = np.zeros((n_experts, rows), np.float32)
    write_safetensors(directory / "model.safetensors", values)
    (directory / "config.json").write_text(json.dumps(CONFIG | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": n_experts, "num_experts_per_tok": 2, "head_dim": HEAD,
        "sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"},
    }))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=N_VOCAB, special_tokens=["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}))
    return directory
