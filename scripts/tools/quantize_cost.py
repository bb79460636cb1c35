#!/usr/bin/env python3
"""Quantize a file with the shapes of a real model, and print the time, peak memory and size.

    quantize_cost.py llama-3.1-70b --layers 1 --type itq3_t --threads 2 [--random] [--folder DIR] [-- --importance none ...]

The source is a sparse file of zeros, which takes no disk space. Encoders are faster with zeros, so --random repeats 64 random rows in each
tensor; the file then takes as much space as an F16 model. Options after -- go to `ggml-ext quantize`, which runs with --importance none unless they
name an imatrix or an importance. All files are removed at the end.
"""
from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

from ggml_ext._console.cli import run_script
from ggml_ext._formats.gguf_file import Tensor, pack_header, pad, row_bytes, string_value

# embedding size, feed-forward size, key-value columns, layers, vocabulary size, whether the output matrix is separate
SHAPES = {
    "llama-3.2-1b": (2048, 8192, 512, 16, 128256, False),
    "llama-3.1-8b": (4096, 14336, 1024, 32, 128256, True),
    "llama-3.1-70b": (8192, 28672, 1024, 80, 128256, True),
}
F16, F32 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
DISTINCT_ROWS = 64


def tensors(shape: str, n_layers: int | None = None, embeddings: bool = True) -> list[Tensor]:
    """List the tensors of a model, or of its first n_layers layers."""
    d, ff, kv, layers, vocabulary, has_output = SHAPES[shape]
    outer = [("token_embd", (d, vocabulary)), *([("output", (d, vocabulary))] if has_output else [])]
    rows = [(f"{name}.weight", ne, F16) for name, ne in outer if embeddings]
    for i in range(n_layers or layers):
        blocks = {"attn_q": (d, d), "attn_k": (d, kv), "attn_v": (d, kv), "attn_output": (d, d)}
        blocks |= {"ffn_gate": (d, ff), "ffn_up": (d, ff), "ffn_down": (ff, d)}
        rows += [(f"blk.{i}.{name}.weight", ne, F16) for name, ne in blocks.items()]
        rows += [(f"blk.{i}.{name}_norm.weight", (d,), F32) for name in ("attn", "ffn")]
    return [Tensor(name, ne, t, 0, row_bytes(t, ne[0]) * int(np.prod(ne[1:], dtype=np.int64))) for name, ne, t in rows]


def write_model(path: Path, model: list[Tensor], random: bool = False) -> None:
    """Write a GGUF file of zeros, or of random weights with a realistic magnitude."""
    header = pack_header({"general.architecture": string_value("general.architecture", "llama")}, model, [t.type for t in model], 32)
    rng = np.random.default_rng(0)
    with open(path, "wb") as f:
        f.write(header)
        for t in model:
            start = f.tell()
            if random and t.type == F16:
                rows = (rng.standard_normal((DISTINCT_ROWS, t.ne[0])) * 0.02).astype(np.float16)
                for _ in range(t.n_rows // DISTINCT_ROWS):
                    f.write(rows)
            f.seek(start + pad(t.n_bytes, 32))
        f.truncate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--type", default="itq3_t", help="default: itq3_t")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--threads", type=int, default=2, help="default: 2")
    parser.add_argument("--random", action="store_true", help="random weights instead of zeros")
    parser.add_argument("--folder", type=Path, help="directory for both files (default: the system's temporary directory)")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    with tempfile.TemporaryDirectory(dir=args.folder) as tmp:
        source, output = Path(tmp) / "in.gguf", Path(tmp) / "out.gguf"
        model = tensors(args.shape, args.layers)
        write_model(source, model, args.random)
        command = [sys.executable, "-m", "ggml_ext.quantize", source, output, "--type", args.type, "-t", args.threads, "-q"]
        command += options
        if not any(o.startswith(("--imatrix", "--importance")) for o in options):
            command += ["--importance", "none"]
        started = time.monotonic()
        subprocess.run([str(c) for c in command], check=True)
        seconds, usage = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, n = usage.ru_utime + usage.ru_stime, sum(t.n_elements for t in model)
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        print(
            f"{args.shape}, {n / 1e9:.2f} G weights, {source.stat().st_size / 1e9:.2f} GB in F16, "
            f"{output.stat().st_size / 1e9:.2f} GB as {args.type}: {seconds:.0f} s on {args.threads} threads ({cpu:.0f} s of "
            f"CPU time, {n / cpu / 1e6:.2f} M weights per second and thread), peak memory {peak / 1e6:,.0f} MB"
        )


if __name__ == "__main__":
    sys.exit(run_script(main))
