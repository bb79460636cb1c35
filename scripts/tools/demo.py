#!/usr/bin/env python3
"""`make demo`: the embedded model in ITQ3_S, a text from it, and a table of types from one run.

    demo.py [--rounds 3] [--chunks 600] [--json FILE]

Perplexity is on the beginning of data/heldout.txt, which the model never saw. In the files of the table all block
matrices have the row's type and the embeddings Q8_0, so that the rows differ in nothing else. Importance matrices come
from the end of the text, which is not scored. Decode speed is of a synthetic model of Llama-3.2-1B's block shape: the embedded
one is too small to be bound by its weights.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from bench import measure, summarise
from perplexity_run import block_types, imatrix, perplexity, quantize_ours, quantize_uniform, split_text
from synth_model import write_model

from ggml_ext._tools import tool_path

ROOT = Path(__file__).resolve().parents[2]
MODEL, TEXT = ROOT / "data" / "model-f16.gguf", ROOT / "data" / "heldout.txt"
OUT = ROOT / "build" / "demo"
# row of the table -> (type, options of the quantizer)
ROWS = {"F16": ("f16", []), "Q3_K": ("q3_k", []), "IQ3_S": ("iq3_s", []), "IQ3_S, with imatrix": ("iq3_s", []),
        "IQ3_XXS, with imatrix": ("iq3_xxs", []), "ITQ3_T": ("itq3_t", []), "ITQ3_T, with imatrix": ("itq3_t", []),
        "DITTO3": ("ditto3", []), "ITQ3_S": ("itq3_s", []), "ITQ3_S, paper's ternary": ("itq3_s", ["--itq3-levels", "3"]),
        "Q2_K": ("q2_k", []), "Q2_K, with imatrix": ("q2_k", []), "IQ2_XXS, with imatrix": ("iq2_xxs", []),
        "ITQ2_T": ("itq2_t", []), "ITQ2_T, with imatrix": ("itq2_t", []), "CCQ2": ("ccq2", []),
        "CCQ2, with imatrix": ("ccq2", [])}


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def generate(model: Path, prompt: str) -> None:
    command = [tool_path("llama-completion"), "-m", model, "-p", prompt, "-n", 96, "--temp", 0.6, "--seed", 7, "-no-cnv"]
    subprocess.run([str(c) for c in command], check=True, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of the speed run (default: 3)")
    parser.add_argument("--chunks", type=int, default=600, help="chunks of 256 tokens to score (default: 600)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)

    heading("quantize")
    quantized = OUT / "model-itq3_s.gguf"
    quantize_ours(MODEL, quantized, "itq3_s", echo=True)

    heading("generate")
    generate(quantized, "def read_lines(path):\n")

    heading(f"perplexity on {TEXT.name}, {args.chunks} chunks of 256 tokens; decode speed on {args.threads} threads")
    table = {}
    with tempfile.TemporaryDirectory(dir=OUT) as tmp:
        folder = Path(tmp)
        scored, rest = split_text(TEXT, folder)
        importance = imatrix(MODEL, rest, folder / "imatrix.gguf")
        for row, (type_name, options) in ROWS.items():
            path = MODEL
            if type_name != "f16":
                path = quantize_uniform(MODEL, folder / "row.gguf", type_name, *options, echo=True,
                                        imatrix_file=importance if row.endswith("with imatrix") else None)
            score = perplexity(path, scored, n_chunks=args.chunks, threads=args.threads)
            table[row] = {"type": type_name, "perplexity": score.value, "error": score.error, "bpw": block_types(path)[1]}
            print(f"  {row}: {score.value:.3f} +- {score.error:.3f}", flush=True)

        types = list(dict.fromkeys(type_name for type_name, _ in ROWS.values()))
        models = {name: folder / f"synth-{name}.gguf" for name in types}
        for name, path in models.items():
            write_model(name, path)
        samples = measure(models, tool_path("llama-bench"), args.rounds, n_prompt=128, n_gen=32, threads=args.threads)
        speeds = {row["type"]: row for row in summarise(samples, ["q3_k"])}

    print("\n| type | bpw of the blocks | perplexity | over F16 | decode t/s | x Q3_K | prefill t/s | x Q3_K |\n|" + " --- |" * 8)
    f16 = table["F16"]["perplexity"]
    for name, row in table.items():
        speed = speeds[row["type"]]
        row.update({k: speed[k] for k in ("decode", "prefill", "decode/q3_k", "prefill/q3_k")})
        print(f"| {name} | {row['bpw']:.4g} | {row['perplexity']:.3f} | {100 * (row['perplexity'] / f16 - 1):.1f} % | "
              f"{row['decode']:.1f} | {row['decode/q3_k']:.2f} | {row['prefill']:.0f} | {row['prefill/q3_k']:.2f} |")
    print(f"\nThe standard errors of the perplexities are near {table['F16']['error']:.2f}, but all rows score the same text: "
          "their differences are known better than that.")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
