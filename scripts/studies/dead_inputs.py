#!/usr/bin/env python3
"""What becomes of columns whose inputs were zero in the calibration: errors by type and floor, or a model and a text to measure on.

    dead_inputs.py                                  relative squared error of dead columns, weighted one of the others: Gaussian weights
    dead_inputs.py MODEL.gguf OUT.gguf TEXT OUT.txt a llama model of twice the width whose new channels only tokens with digits use, and
                                                    the text without its digits to calibrate with
"""
from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from ggml_ext._console.cli import run_script
from ggml_ext._formats.imatrix import BLOCK
from ggml_ext._native import library

FLOORS = (0, 1e-8, 1e-4, 1e-2, 1e-1, 1)
DEAD = {"16 in a row": slice(32, 48), "32 in a row": slice(32, 64), "a block": slice(0, BLOCK), "every other": slice(0, BLOCK, 2)}
TYPES = (T.Q2_K, T.Q3_K, T.Q4_K, T.Q6_K, T.Q4_0, T.Q5_0, T.IQ4_NL, T.IQ4_XS, T.IQ3_S, T.IQ2_XS)


def table() -> None:
    lib, rng = library.load(), np.random.default_rng(1)
    weights = np.float32(0.02) * rng.standard_normal((64, 2 * BLOCK), np.float32)
    importance = rng.lognormal(0, 1, 2 * BLOCK).astype(np.float32)
    print(f"floor, of the mean: {FLOORS}; dead / others")
    for target in TYPES:
        for name, dead in DEAD.items():
            known, is_dead = importance.copy(), np.zeros(2 * BLOCK, bool)
            known[dead], is_dead[dead] = 0, True
            mean = np.repeat(known.reshape(-1, BLOCK).mean(axis=1), BLOCK)
            line = []
            for floor in FLOORS:
                taken = np.maximum(known, np.float32(floor) * np.where(mean > 0, mean, 1))
                stored = lib.dequantize(int(target), lib.quantize(int(target), weights, imatrix=taken), 2 * BLOCK)
                error, energy = (stored - weights) ** 2, weights**2
                line.append(f"{error[:, is_dead].sum() / energy[:, is_dead].sum():.4f} / {(error @ known).sum() / (energy @ known).sum():.5f}")
            print(f"{target.name:7} {name:12}", *line, sep="  ")


def widen(source: Path, out: Path) -> None:
    reader = gguf.GGUFReader(source)
    value = {name: field.contents() for name, field in reader.fields.items()}
    width, key = value["llama.embedding_length"], "llama.attention.layer_norm_rms_epsilon"
    doubled = ("llama.embedding_length", "llama.attention.head_count", "llama.attention.head_count_kv")
    changed = {name: 2 * value[name] for name in doubled} | {key: value[key] / 2}
    writer, rng = gguf.GGUFWriter(out, "llama"), np.random.default_rng(1)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, changed.get(name, value[name]), field.types[0], sub)
    has_digit = np.array([any(c.isdigit() for c in token) for token in value["tokenizer.ggml.tokens"]])
    for t in reader.tensors:
        w = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        if w.ndim == 1:
            w = np.float32(np.sqrt(0.5)) * np.pad(w, (0, width), "mean")
        else:
            rows = 0 if t.name.startswith(("token_embd", "output.")) or "ffn_gate" in t.name or "ffn_up" in t.name else len(w)
            noise = w.std() * rng.standard_normal((len(w), width), np.float32)
            if t.name == "token_embd.weight":
                noise[~has_digit] = 0
            elif "attn_output" in t.name or "ffn_down" in t.name:  # whose inputs are not the stream
                noise[:] = 0
            w = np.concatenate([w, noise], axis=1) if "ffn_down" not in t.name else w
            w = np.pad(w, ((0, rows), (0, 0)))
        writer.add_tensor(t.name, w if w.ndim == 1 else w.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", metavar="MODEL OUT TEXT OUT")
    paths = parser.parse_args().paths
    if not paths:
        return table()
    if len(paths) != 4:
        parser.error("needs none or four paths")
    widen(*paths[:2])
    paths[3].write_text(re.sub(r"\d", "", paths[2].read_text()))


if __name__ == "__main__":
    sys.exit(run_script(main))
