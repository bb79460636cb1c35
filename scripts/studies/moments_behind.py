#!/usr/bin/env python3
"""Second moments collected again behind the layers quantized so far: what they gain over those of the source model.

    moments_behind.py -m MODEL -f TEXT -o OUT.gguf [--type itq2_t] [--layers 5] [--chunks 100] [-c 512] [-t N]

A few layers at a time: llama-imatrix --moments full --layers on the model whose earlier layers hold quantized values, then the
quantizer for these layers alone. OUT is the model with the values of all its blocks' matrices as they come out, in F16, to be
compared with the type on the source's own moments:

    scripts/tools/perplexity.py -m MODEL -f SCORED --calibration TEXT --types itq2_t+full,OUT.gguf
"""
from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import gguf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from ggml_ext._base.threads import usable_cores
from ggml_ext._console.cli import run_script
from ggml_ext._formats.gguf_file import GGUFFile
from perplexity_run import quantize_ours, run_tool  # noqa: E402


def layer_of(name: str) -> int:
    """-1 for tensors outside the blocks."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def put_values(quantized: Path, model: Path, layers: range) -> None:
    """What the matrices of these layers are in a quantized file, into an F16 model in place."""
    source = {t.name: t for t in gguf.GGUFReader(quantized).tensors}
    target = gguf.GGUFReader(model, "r+")
    for t in target.tensors:
        if layer_of(t.name) in layers and len(t.shape) > 1:
            s = source[t.name]
            values = gguf.quants.dequantize(s.data, s.tensor_type)
            t.data[:] = values.astype(t.data.dtype).reshape(t.data.shape)
    target.data.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="in F16")
    add("-f", "--file", type=Path, required=True, help="text to calibrate with")
    add("-o", "--out", type=Path, required=True)
    add("--type", default="itq2_t")
    add("--layers", type=int, default=5, help="quantized at a time (5)")
    add("--chunks", type=int, default=100)
    add("-c", "--ctx-size", type=int, default=512)
    add("-t", "--threads", type=int, default=usable_cores())
    args = parser.parse_args()
    n_layers = 1 + max(layer_of(t.name) for t in GGUFFile(args.model).tensors)
    with tempfile.TemporaryDirectory(dir=args.out.resolve().parent) as tmp:
        current, moments, quantized = (Path(tmp) / name for name in ("model.gguf", "imatrix.gguf", "quantized.gguf"))
        shutil.copyfile(args.model, current)
        for first in range(0, n_layers, args.layers):
            layers = range(first, min(first + args.layers, n_layers))
            run_tool("llama-imatrix", "-m", current, "-f", args.file, "-o", moments, "-c", args.ctx_size, "--chunks", args.chunks,
                     "-t", args.threads, "--moments", "full", "--layers", f"{layers[0]}-{layers[-1]}")
            others = "|".join(str(i) for i in range(n_layers) if i not in layers)
            keep = ["--tensor-type", rf"blk\.({others})\.=f16"] if others else []
            quantize_ours(args.model, quantized, args.type, "--pure", "--token-embedding-type", "f16", "--output-tensor-type", "f16",
                          *keep, "--quiet", "--imatrix", str(moments), "--importance", "full")
            put_values(quantized, current, layers)
            print(f"layers {layers[0]} to {layers[-1]} done", flush=True)
        os.replace(current, args.out)


if __name__ == "__main__":
    sys.exit(run_script(main))
