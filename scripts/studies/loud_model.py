#!/usr/bin/env python3
"""Make the reference model with loud columns: a few input channels with tens of times the energy of the others, as in large models.

    pip install torch tokenizers
    loud_model.py [OUT.gguf] [--steps 620] [--threads 1]

The reference model was trained with orthogonalized updates, which keep channels equal. This script raises the weights of some channels of the
norms and of ffn_up, adds a constant to two channels of the residual stream, and trains on with AdamW, as large models are trained: on the
Python files of the interpreter's library, sympy and torch. The files of data/heldout.txt are excluded by the hash that chose them. A run takes
an hour on one thread. Its weights depend on the versions of these packages.
"""
from __future__ import annotations

import argparse
import hashlib
import math
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import torch
from torch.nn import functional

from changed_model import write_changed
from ggml_ext._console.cli import run_script

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "data" / "model-f16.gguf"
N_CONTEXT, BATCH = 256, 16
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
HELD_OUT = (0, 1)  # of 64 hash values; the reference model's files were split in the same way

Weights = dict[str, torch.nn.Parameter]


def read_corpus(tokenizer: object) -> torch.Tensor:
    """Return the tokens of all files, each after the token 0."""
    directories = [Path(sysconfig.get_path("stdlib")), *(Path(sysconfig.get_path("purelib")) / name for name in ("sympy", "torch"))]
    paths = [path for directory in directories for path in sorted(directory.rglob("*.py"))
             if "site-packages" not in path.relative_to(directory).parts]
    texts = [text for path in paths if 400 <= len(text := path.read_bytes().decode("utf-8", "replace")) <= 400_000]
    tokens = [np.array([0, *tokenizer.encode(text).ids], np.uint16) for text in texts
              if hashlib.md5(text.encode()).digest()[0] % 64 not in HELD_OUT]
    np.random.default_rng(0).shuffle(tokens)
    return torch.from_numpy(np.concatenate(tokens).astype(np.int64))


def make_tokenizer(reader: gguf.GGUFReader) -> object:
    """Return the byte-level BPE of the file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@torch.no_grad()
def raise_channels(weights: Weights, n_layers: int) -> None:
    """Multiply channels by 4 to 16, and divide the columns that read them by the square root of that."""
    random = torch.Generator().manual_seed(0)

    def choose(n: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randperm(of, generator=random)[:n], 4 ** (1 + torch.rand(n, generator=random))

    embeddings = weights["token_embd.weight"]
    constants = torch.tensor([1.0, -1.0]) * 8 * embeddings.square().mean().sqrt()
    embeddings[:, torch.randperm(embeddings.shape[1], generator=random)[:2]] += constants
    for k in range(n_layers):
        block = f"blk.{k}."
        for norm, readers in (("attn_norm", ("attn_q", "attn_k", "attn_v")), ("ffn_norm", ("ffn_gate", "ffn_up"))):
            channels, factors = choose(6, embeddings.shape[1])
            weights[f"{block}{norm}.weight"][channels] *= factors
            for reader in readers:
                weights[f"{block}{reader}.weight"][:, channels] /= factors.sqrt()
        channels, factors = choose(12, weights[f"{block}ffn_up.weight"].shape[0])
        weights[f"{block}ffn_up.weight"][channels] *= factors[:, None]
        weights[f"{block}ffn_down.weight"][:, channels] /= factors.sqrt()


def norm(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weights[name], 1e-5)


def run_layers(weights: Weights, x: torch.Tensor, layers: Iterable[int], n_heads: int) -> torch.Tensor:
    """Return the output of layers for their input, (batch, context, columns)."""
    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[name])

    n_batch, n_context, n_columns = x.shape
    head_size = n_columns // n_heads
    angles = torch.outer(torch.arange(n_context), 10000.0 ** (-torch.arange(0, head_size, 2) / head_size))
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    for k in layers:
        block = f"blk.{k}."
        h = norm(weights, f"{block}attn_norm.weight", x)
        q, key, value = (product(f"{block}attn_{name}.weight", h).view(n_batch, n_context, -1, head_size).transpose(1, 2) for name in "qkv")
        attended = functional.scaled_dot_product_attention(rotate(q), rotate(key), value, is_causal=True, enable_gqa=True)
        x = x + product(f"{block}attn_output.weight", attended.transpose(1, 2).reshape(n_batch, n_context, -1))
        h = norm(weights, f"{block}ffn_norm.weight", x)
        x = x + product(f"{block}ffn_down.weight", functional.silu(product(f"{block}ffn_gate.weight", h)) * product(f"{block}ffn_up.weight", h))
    return x


def forward(weights: Weights, tokens: torch.Tensor, n_layers: int, n_heads: int) -> torch.Tensor:
    """Return the logits, (batch, context, vocabulary), of tokens, (batch, context)."""
    x = run_layers(weights, weights["token_embd.weight"][tokens], range(n_layers), n_heads)
    return functional.linear(norm(weights, "output_norm.weight", x), weights["token_embd.weight"])


def train(weights: Weights, tokens: torch.Tensor, n_steps: int, n_layers: int, n_heads: int) -> None:
    """Train with AdamW, and print the loss every 20 steps."""
    matrices = [weight for weight in weights.values() if weight.ndim == 2]
    vectors = [weight for weight in weights.values() if weight.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}], LEARNING_RATE,
                                  betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / n_steps))
        starts = torch.randint(len(tokens) - N_CONTEXT - 1, (BATCH,), generator=random)
        batch = torch.stack([tokens[start : start + N_CONTEXT + 1] for start in starts])
        logits = forward(weights, batch[:, :-1], n_layers, n_heads)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *vectors], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 20 == 19:
            print(f"step {step + 1}, loss {np.mean(losses[-20:]):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "data" / "model-loud-f16.gguf")
    parser.add_argument("--steps", type=int, default=620, help="of 4,096 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args()
    reader = gguf.GGUFReader(REFERENCE)
    n_layers, n_heads = (reader.fields[f"llama.{key}"].contents() for key in ("block_count", "attention.head_count"))
    torch.set_num_threads(args.threads)
    weights = {tensor.name: torch.nn.Parameter(torch.from_numpy(np.array(tensor.data, np.float32))) for tensor in reader.tensors}
    tokens = read_corpus(make_tokenizer(reader))
    print(f"{len(tokens)/1e6:.1f}M tokens", flush=True)
    raise_channels(weights, n_layers)
    train(weights, tokens, args.steps, n_layers, n_heads)
    trained = ((t.name, weights[t.name].detach().numpy().astype(t.data.dtype)) for t in reader.tensors)
    write_changed(reader, args.out, trained, {"general.name": "pycoder-loud"})


if __name__ == "__main__":
    sys.exit(run_script(main))
