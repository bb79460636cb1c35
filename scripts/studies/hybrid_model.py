#!/usr/bin/env python3
"""Turn the reference model into a hybrid as Qwen 3.5: gated delta nets in three of four layers, gated attention in the fourth.

    pip install torch tokenizers
    hybrid_model.py OUT.gguf [--heads 2] [--head-size 128] [--experts 0] [--steps 200] [--threads 1]

Embeddings, norms and feed-forward matrices begin as those of the reference model. In the first half of the steps each new part learns the output of
the attention that it replaces. Then the model learns the reference's predictions. Both use the Python files that loud_model.py reads. A delta net has
HEADS value heads, so its decays (ssm_alpha) and input gates (ssm_beta) are matrices of HEADS rows. With --experts each token uses two experts, which
begin as the same neurons with noise, and a shared one. The file is written every 50 steps.
"""
from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from torch.nn import functional

import loud_model
from changed_model import copy_tokenizer, finish
from ggml_ext._console.cli import run_script
from loud_model import N_CONTEXT, REFERENCE, Weights, norm
from mtp_model import split_pairs

N_LAYERS, WIDTH, N_FF, N_HEADS, N_KV, HEAD = 8, 256, 768, 4, 2, 64
N_USED, N_SHARED, NOISE = 2, 256, 0.3  # experts of a token, neurons of the shared one, what experts differ by at first
KERNEL, CHUNK, INTERVAL = 4, 64, 4  # of the convolution; tokens of the delta rule at once; layers with one attention
BATCH, LEARNING_RATE, SLOW_RATE = 4, 3e-3, 7e-4  # SLOW_RATE: of what the reference model has


def is_attention(layer: int) -> bool:
    return layer % INTERVAL == INTERVAL - 1


def start_experts(old: Weights, block: str, n_experts: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the feed-forward matrices of a layer as a shared expert, and experts that begin as the other neurons with noise."""
    gate, up, down = (old[f"{block}ffn_{name}.weight"].detach() for name in ("gate", "up", "down"))
    parts = {"gate": (gate[:N_SHARED], gate[N_SHARED:]), "up": (up[:N_SHARED], up[N_SHARED:]), "down": (2 * down[:, :N_SHARED], down[:, N_SHARED:])}
    new = {"ffn_gate_inp": torch.randn(n_experts, WIDTH, generator=random) / WIDTH**0.5, "ffn_gate_inp_shexp": torch.zeros(WIDTH)}
    for name, (shared, other) in parts.items():
        new[f"ffn_{name}_shexp"] = shared
        new[f"ffn_{name}_exps"] = other * (1 + NOISE * torch.randn(n_experts, *other.shape, generator=random))
    return new


def start_weights(reference: Weights, heads: int, size: int, n_experts: int) -> Weights:
    """Return the weights before training, with the names of the GGUF file."""
    random = torch.Generator().manual_seed(0)
    key_heads = max(1, heads // 2)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) / columns**0.5

    weights = {name: weight.detach() for name, weight in reference.items() if ".attn_" not in name or "attn_norm" in name}
    for k in range(N_LAYERS):
        block, old = f"blk.{k}.", {n: reference[f"blk.{k}.attn_{n}.weight"].detach().numpy() for n in ("q", "k", "v", "output")}
        weights[f"{block}post_attention_norm.weight"] = weights.pop(f"{block}ffn_norm.weight")
        if is_attention(k):
            q = torch.from_numpy(split_pairs(old["q"], N_HEADS)).view(N_HEADS, HEAD, WIDTH)
            new = {"attn_q": torch.cat((q, torch.zeros_like(q)), 1).flatten(0, 1), "attn_k": torch.from_numpy(split_pairs(old["k"], N_KV)),
                   "attn_v": torch.from_numpy(old["v"]), "attn_output": 2 * torch.from_numpy(old["output"]),
                   "attn_q_norm": torch.full((HEAD,), 1.5), "attn_k_norm": torch.full((HEAD,), 1.5)}
        else:
            channels = size * (2 * key_heads + heads)
            steps = torch.exp(torch.linspace(math.log(1e-3), math.log(0.1), heads))
            new = {"attn_qkv": matrix(channels, WIDTH), "attn_gate": matrix(heads * size, WIDTH), "ssm_alpha": matrix(heads, WIDTH),
                   "ssm_beta": matrix(heads, WIDTH), "ssm_out": matrix(WIDTH, heads * size), "ssm_norm": torch.ones(size),
                   "ssm_conv1d": functional.pad(0.9 * torch.ones(channels, 1), (KERNEL - 1, 0)) + 0.1 * matrix(channels, KERNEL)}
            weights[f"{block}ssm_dt.bias"] = steps.expm1().log()
            weights[f"{block}ssm_a"] = -torch.linspace(1, 16, heads)
        if n_experts:
            new |= start_experts(reference, block, n_experts, random)
            weights = {name: weight for name, weight in weights.items() if not name.startswith(f"{block}ffn_")}
        weights |= {f"{block}{name}.weight": weight for name, weight in new.items()}
    return {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Return q^T S of each token, with S = exp(g) (I - beta k k^T) S + beta k v^T; q, k and v are (batch, heads, tokens, size)."""
    n_batch, n_heads, n_tokens, size = q.shape
    q, k, v, g, beta = (x.reshape(n_batch, n_heads, n_tokens // CHUNK, CHUNK, -1) for x in (q, k, v, g, beta))
    sums = g.cumsum(-2)
    decays = (sums - sums.mT).masked_fill(torch.ones(CHUNK, CHUNK).triu(1).bool(), -torch.inf).exp()
    mixed = torch.linalg.solve_triangular(  # changes of the state in a chunk, which depend on each other; the diagonal counts as one
        (beta * (k @ k.mT) * decays).tril(-1), beta * torch.cat((v, sums.exp() * k), -1), upper=False, unitriangular=True)
    new, read = mixed.split(size, -1)
    inner, q, last = (q @ k.mT) * decays, q * sums.exp(), sums[..., -1:, :]
    k = k * (last - sums).exp()
    state, outputs = torch.zeros(n_batch, n_heads, size, size), []
    for c in range(n_tokens // CHUNK):
        changes = new[:, :, c] - read[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + inner[:, :, c] @ changes)
        state = last[:, :, c].exp() * state + k[:, :, c].mT @ changes
    return torch.stack(outputs, 2).flatten(2, 3)


def run_delta_net(weights: Weights, block: str, h: torch.Tensor) -> torch.Tensor:
    heads, size = len(weights[f"{block}ssm_a"]), len(weights[f"{block}ssm_norm.weight"])
    n_batch, n_tokens, _ = h.shape

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{block}{name}.weight"])

    x = functional.pad(product("attn_qkv", h).mT, (KERNEL - 1, 0))
    x = functional.silu(functional.conv1d(x, weights[f"{block}ssm_conv1d.weight"][:, None], groups=x.shape[1])).mT
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in x.split([(x.shape[-1] - heads * size) // 2] * 2 + [heads * size], -1))
    q, k = ((x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5)).repeat(1, heads // x.shape[1], 1, 1) for x in (q, k))
    g = weights[f"{block}ssm_a"] * functional.softplus(product("ssm_alpha", h) + weights[f"{block}ssm_dt.bias"])
    out = delta_rule(q * size**-0.5, k, v, g.mT[..., None], product("ssm_beta", h).sigmoid().mT[..., None]).transpose(1, 2)
    gate = functional.silu(product("attn_gate", h)).view(n_batch, n_tokens, heads, size)
    return product("ssm_out", (norm(weights, f"{block}ssm_norm.weight", out) * gate).flatten(2))


def run_attention(weights: Weights, block: str, h: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(h.shape[1]), 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)

    q, k, v = (functional.linear(h, weights[f"{block}attn_{name}.weight"]) for name in "qkv")
    q, gate = q.unflatten(-1, (N_HEADS, 2, HEAD)).unbind(-2)
    k, v = (x.unflatten(-1, (N_KV, HEAD)).transpose(1, 2) for x in (k, v))
    q, k = (rotate(norm(weights, f"{block}attn_{name}_norm.weight", x)) for name, x in (("q", q.transpose(1, 2)), ("k", k)))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2) * gate.sigmoid()
    return functional.linear(out.flatten(2), weights[f"{block}attn_output.weight"])


def run_mixer(weights: Weights, k: int, x: torch.Tensor) -> torch.Tensor:
    h = norm(weights, f"blk.{k}.attn_norm.weight", x)
    return x + (run_attention if is_attention(k) else run_delta_net)(weights, f"blk.{k}.", h)


def run_ffn(weights: Weights, k: int, x: torch.Tensor, norm_name: str = "post_attention_norm") -> torch.Tensor:
    h = norm(weights, f"blk.{k}.{norm_name}.weight", x)

    def expert(h: torch.Tensor, kind: str, index: int | None = None) -> torch.Tensor:
        gate, up, down = (weights[f"blk.{k}.ffn_{name}{kind}.weight"] for name in ("gate", "up", "down"))
        gate, up, down = (gate, up, down) if index is None else (gate[index], up[index], down[index])
        return functional.linear(functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down)

    if (router := weights.get(f"blk.{k}.ffn_gate_inp.weight")) is None:
        return x + expert(h, "")
    shared = expert(h, "_shexp") * (h @ weights[f"blk.{k}.ffn_gate_inp_shexp.weight"]).sigmoid()[..., None]
    rows = h.flatten(0, 1)
    logits, used = functional.linear(rows, router).topk(N_USED, -1)
    parts, out = logits.softmax(-1), torch.zeros_like(rows)
    for e in range(len(router)):
        token, rank = torch.nonzero(used == e, as_tuple=True)
        out = out.index_add(0, token, expert(rows[token], "_exps", e) * parts[token, rank, None])
    return x + shared + out.view_as(x)


def predict(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(norm(weights, "output_norm.weight", x), weights["token_embd.weight"])


def find_loss(weights: Weights, reference: Weights, tokens: torch.Tensor, by_layer: bool) -> torch.Tensor:
    """Return the mean error of attention and delta nets for the reference's inputs, or the cross-entropy from the reference's predictions."""
    no_ffn = {name: weight[:0] if "ffn_gate" in name or "ffn_up" in name else weight[:, :0] if "ffn_down" in name else weight
              for name, weight in reference.items()}
    x, pairs = reference["token_embd.weight"][tokens].detach(), []
    with torch.no_grad():
        for k in range(N_LAYERS):
            pairs.append((x, loud_model.run_layers(no_ffn, x, [k], N_HEADS)))
            x = run_ffn(reference, k, pairs[-1][1], "ffn_norm")
        expected = predict(reference, x).softmax(-1) if not by_layer else None
    if by_layer:
        return sum((run_mixer(weights, k, x) - y).square().sum() / (y - x).square().sum() for k, (x, y) in enumerate(pairs)) / N_LAYERS
    x = weights["token_embd.weight"][tokens]
    for k in range(N_LAYERS):
        x = run_ffn(weights, k, run_mixer(weights, k, x))
    return functional.cross_entropy(predict(weights, x).flatten(0, 1), expected.flatten(0, 1))


def train(weights: Weights, reference: Weights, tokens: torch.Tensor, args: argparse.Namespace, reader: gguf.GGUFReader) -> None:
    """Train with AdamW, print the loss every 10 steps and write the file every 50."""
    is_new = {name: any(part in name for part in (".attn_q", ".attn_k", ".attn_v", ".attn_o", ".attn_gate", ".ssm_", "_inp")) for name in weights}
    groups = [{"params": [w for name, w in weights.items() if is_new[name] == new and (w.ndim > 1) == decay], "lr": rate,
               "weight_decay": 0.1 if decay else 0.0} for new, rate in ((True, LEARNING_RATE), (False, SLOW_RATE)) for decay in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (0.52 + 0.48 * math.cos(math.pi * step / args.steps)))
    random = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        starts = torch.randint(len(tokens) - N_CONTEXT, (BATCH,), generator=random)
        loss = find_loss(weights, reference, torch.stack([tokens[start : start + N_CONTEXT] for start in starts]), step < args.steps // 2)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 10 == 9:
            print(f"step {step + 1}, loss {loss.item():.3f}", flush=True)
        if step % 50 == 49 or step + 1 == args.steps:
            write_model(reader, args.out, weights)


def write_model(reader: gguf.GGUFReader, out: Path, weights: Weights) -> None:
    """Write the weights with the tokenizer of the reference model, matrices in F16."""
    heads, size = len(weights["blk.0.ssm_a"]), len(weights["blk.0.ssm_norm.weight"])
    arch = "qwen35moe" if (router := weights.get("blk.0.ffn_gate_inp.weight")) is not None else "qwen35"
    numbers = {
        "context_length": 1024, "embedding_length": WIDTH, "feed_forward_length": N_FF, "block_count": N_LAYERS, "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV, "attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD,
        "ssm.conv_kernel": KERNEL, "ssm.state_size": size, "ssm.group_count": max(1, heads // 2), "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * size, "full_attention_interval": INTERVAL,
    } | ({} if router is None else {"expert_count": len(router), "expert_used_count": N_USED, "expert_feed_forward_length": N_FF - N_SHARED,
                                    "expert_shared_feed_forward_length": N_SHARED})
    writer = gguf.GGUFWriter(out, arch)
    for key, value in numbers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_array(f"{arch}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    copy_tokenizer(writer, reader)
    for name, weight in weights.items():
        writer.add_tensor(name, weight.detach().numpy().astype(np.float16 if weight.ndim > 1 and "conv1d" not in name and "_inp" not in name else np.float32))
    finish(writer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for option, value in {"heads": 2, "head-size": 128, "experts": 0, "steps": 200, "threads": 1}.items():
        parser.add_argument(f"--{option}", type=int, default=value, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reader = gguf.GGUFReader(REFERENCE)
    reference = {t.name: torch.nn.Parameter(torch.from_numpy(np.array(t.data, np.float32))) for t in reader.tensors}
    tokens = loud_model.read_corpus(loud_model.make_tokenizer(reader))
    print(f"{len(tokens)/1e6:.1f}M tokens", flush=True)
    train(start_weights(reference, args.heads, args.head_size, args.experts), reference, tokens, args, reader)


if __name__ == "__main__":
    sys.exit(run_script(main))
