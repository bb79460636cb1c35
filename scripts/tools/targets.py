#!/usr/bin/env python3
"""Types chosen for a target against fixed ones of the same size: file size, KL divergence, and what was predicted.

    targets.py [-m MODEL] [-f TEXT] [--imatrix FILE] [--recipes itq2_t,itq3_t_m,Q2_K,...] [-c 256] [--chunks 60] [-t N]
               [--options "--effort fast"] [--target-options "--target-types ..."] [--out DIR]

Each recipe, a --type of this quantizer (q4_k_m) or a file type of llama-quantize (Q4_K_M), is made with the importance matrix and its usual types for
embeddings and output; then the quantizer makes a file of at most the same size with --target-size. Both are scored with
llama-perplexity --kl-divergence on the text, which chooses nothing: importances come from --imatrix or the built-in text, what errors
cost from the end of the built-in one. Prints a line of Markdown for each as it is done.
"""
from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from ggml_ext._base.threads import usable_processors
from ggml_ext._base.units import MIB
from ggml_ext._calibration import calibration
from ggml_ext._console.cli import run_script
from perplexity import MODEL, TEXT
from perplexity_run import OUR_TYPES, BaseLogits, imatrix, kl_divergence, quantize_ours, run_tool, save_base_logits

RECIPES = "ccq2,itq2_t,itq2_t_m,IQ2_M,Q2_K,itq3_s,itq3_t,itq3_t_m,IQ3_S,Q3_K_M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", type=Path, default=MODEL)
    add("-f", "--file", type=Path, default=TEXT, help="text to score")
    add("--imatrix", type=Path, help="importance matrix (default: of the built-in text, with whole second moments)")
    add("--recipes", default=RECIPES, help=f"default: {RECIPES}")
    add("-c", "--ctx-size", type=int, default=256)
    add("--chunks", type=int, default=60)
    add("-t", "--threads", type=int, default=usable_processors())
    add("--options", default="", help="for both of our own files, such as \"--effort fast\"")
    add("--target-options", default="", help="for the files with a target alone")
    add("--out", type=Path, default=Path("build/targets"), help="folder for the files and for what is kept; the files are removed")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / f"logits-{args.model.stem}-{args.file.stem}-{args.ctx_size}-{args.chunks}.bin"
    base = (BaseLogits.read(saved) if saved.exists()
            else save_base_logits(args.model, args.file, saved, args.ctx_size, args.chunks, args.threads))
    importance = args.imatrix or args.out / f"{args.model.stem}.imatrix.gguf"
    if not importance.exists():
        imatrix(args.model, calibration.TEXT, importance, calibration.N_CONTEXT, threads=args.threads, kinds=["full"])
    options = ["--imatrix", str(importance), "--threads", str(args.threads), "--quiet", *shlex.split(args.options)]
    fixed, chosen, report = (args.out / name for name in ("fixed.gguf", "chosen.gguf", "chosen.json"))
    print("| recipe | MiB | KL divergence | chosen: MiB | KL divergence | predicted |\n" + "| --- " * 6 + "|", flush=True)
    for recipe in args.recipes.split(","):
        if recipe in OUR_TYPES or recipe.islower():
            quantize_ours(args.model, fixed, recipe, *options)
        else:
            run_tool("llama-quantize", "--imatrix", importance, args.model, fixed, recipe, args.threads)
        size = fixed.stat().st_size
        found = kl_divergence(fixed, base, args.threads)["Mean KLD"]
        fixed.unlink()
        quantize_ours(args.model, chosen, "auto", "--target-size", str(size), "--report", str(report), *options,
                      *shlex.split(args.target_options))
        better = kl_divergence(chosen, base, args.threads)["Mean KLD"]
        predicted = json.loads(report.read_text())["predicted_kl_divergence"]
        print(f"| {recipe.upper() if recipe in OUR_TYPES else recipe} | {size / MIB:.3f} | {found.value:.4f} +- {found.error:.4f} | {chosen.stat().st_size / MIB:.3f} | "
              f"{better.value:.4f} +- {better.error:.4f} | {predicted:.4f} |", flush=True)
        chosen.unlink()


if __name__ == "__main__":
    sys.exit(run_script(main))
