#!/usr/bin/env python3
"""Train an MTP layer for the reference model, and measure how many of its drafts are accepted.

    pip install torch tokenizers
    mtp_drafts.py train OUT.gguf [--steps 700] [--threads 1]
    mtp_drafts.py measure MODEL.gguf ... [--prompts 40] [--tokens 160] [--drafts 3] [--text data/heldout.txt]

train    The layer learns to predict what the frozen model predicts, from the token and the model's hidden state at the token before it, on the
         Python files that loud_model.py reads. It begins as a copy of the last layer. The result is a MiMo 2 model (mtp_model.py).
measure  llama-server with --spec-type draft-mtp continues excerpts of the text, greedily. Print the drafted and accepted tokens.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import urllib.request
from pathlib import Path

import gguf
import numpy as np

import mtp_model
from ggml_ext._console.cli import run_script
from server import running_server

ROOT = Path(__file__).resolve().parents[2]
REFERENCE, HELD_OUT = ROOT / "data" / "model-f16.gguf", ROOT / "data" / "heldout.txt"
N_CONTEXT, BATCH = 160, 4
FIRST = 8  # position whose prediction counts for training: the first ones have little to go by
LEARNING_RATE, NORM_RATE = 1e-3, 3e-3
PROMPT = 400  # characters of a prompt


def train(args: argparse.Namespace) -> None:
    """Train the layer and write the model every 100 steps."""
    import torch
    from torch.nn import functional

    import loud_model

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    reader = gguf.GGUFReader(REFERENCE)
    n, n_heads = (reader.fields[f"llama.{key}"].contents() for key in ("block_count", "attention.head_count"))
    weights = mtp_model.read_weights(reader)
    main = {name: torch.from_numpy(values.astype(np.float32)) for name, values in weights.items()}
    layer = {name: torch.nn.Parameter(torch.from_numpy(values.copy())) for name, values in mtp_model.start_layer(weights, n - 1).items()}
    named = {f"blk.{n}.{name}.weight": weight for name, weight in layer.items()}
    tokens = loud_model.read_corpus(loud_model.make_tokenizer(reader))
    print(f"{len(tokens)/1e6:.1f}M tokens", flush=True)
    matrices, vectors = ([w for w in layer.values() if w.ndim == n_dims] for n_dims in (2, 1))
    optimizer = torch.optim.AdamW([{"params": matrices, "lr": LEARNING_RATE}, {"params": vectors, "lr": NORM_RATE}], betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (0.51 + 0.49 * math.cos(math.pi * step / args.steps)))
    agreements: list[float] = []
    for step in range(args.steps):
        batch = torch.stack([tokens[start : start + N_CONTEXT] for start in torch.randint(len(tokens) - N_CONTEXT, (BATCH,))])
        embeddings = main["token_embd.weight"][batch]
        with torch.no_grad():
            hidden = loud_model.run_layers(main, embeddings, range(n), n_heads)
            expected = functional.linear(loud_model.norm(main, "output_norm.weight", hidden), main["token_embd.weight"])
            before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        inputs = [loud_model.norm(layer, name, x) for name, x in (("nextn.enorm", embeddings), ("nextn.hnorm", before))]
        x = loud_model.run_layers(named, functional.linear(torch.cat(inputs, -1), layer["nextn.eh_proj"]), [n], n_heads)
        logits = functional.linear(loud_model.norm(layer, "nextn.shared_head_norm", x), main["token_embd.weight"])
        logits, expected = logits[:, FIRST:].flatten(0, 1), expected[:, FIRST:].flatten(0, 1)
        functional.cross_entropy(logits, expected.softmax(-1)).backward()
        torch.nn.utils.clip_grad_norm_(layer.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        agreements.append((logits.argmax(-1) == expected.argmax(-1)).float().mean().item())
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}, top-1 agreement with the model {np.mean(agreements[-20:]):.3f}", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            mtp_model.write_with_mtp_layers(REFERENCE, args.out, [{name: weight.detach().numpy() for name, weight in layer.items()}])


def count_drafts(model: Path, args: argparse.Namespace) -> tuple[int, int]:
    """Return the number of drafted and of accepted tokens."""
    text, drafted, accepted = args.text.read_text(), 0, 0
    options = ("--ctx-size", 1024, "--parallel", 1, "--threads", args.threads, "--no-webui", "--spec-type", "draft-mtp", "--spec-draft-n-max", args.drafts)
    with running_server(model, *options) as url:
        for i in range(args.prompts):
            start = i * (len(text) - PROMPT) // args.prompts
            body = {"prompt": text[start : start + PROMPT], "n_predict": args.tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            request = urllib.request.Request(url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as answer:
                timings = json.load(answer)["timings"]
            drafted, accepted = drafted + timings["draft_n"], accepted + timings["draft_n_accepted"]
    return drafted, accepted


def measure(args: argparse.Namespace) -> None:
    for model in args.models:
        drafted, accepted = count_drafts(model, args)
        rate = accepted / drafted
        print(f"{model.name}: {accepted:,} of {drafted:,} drafted tokens accepted, {rate:.1%} +- {math.sqrt(rate * (1 - rate) / drafted):.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, positional, options in (
        ("train", {"dest": "out", "type": Path}, {"steps": 700, "threads": 1}),
        ("measure", {"dest": "models", "type": Path, "nargs": "+"}, {"prompts": 40, "tokens": 160, "drafts": 3, "threads": 2}),
    ):
        command = commands.add_parser(name)
        command.add_argument(**positional)
        for option, value in options.items():
            command.add_argument(f"--{option}", type=int, default=value, help="(default: %(default)s)")
    command.add_argument("--text", type=Path, default=HELD_OUT, help="(default: data/heldout.txt)")
    args = parser.parse_args()
    {"train": train, "measure": measure}[args.command](args)


if __name__ == "__main__":
    sys.exit(run_script(main))
