#!/usr/bin/env python3
"""Compare files of a target size with fixed types of the same size: file size, KL divergence and its prediction.

    targets.py --bpw 2.5,3,3.5,4 [-m MODEL] ...
    targets.py [-m MODEL] [-f TEXT] [--imatrix FILE] [--recipes itq2_t,itq3_t_m,Q2_K,...] [-c 256] [--chunks 60] [-t N]
               [--options "--effort fast"] [--target-options "--target-types ..."] [--out DIR]

A recipe is a --type of ggml-ext (q4_k_m) or a file type of llama-quantize (Q4_K_M), with its usual types for embeddings and output. For each, make a
file of at most the same size with --target-size. Score both with llama-perplexity --kl-divergence on a text that was not used for
calibration. Both files use --imatrix, by default one of the built-in text. Print a line of Markdown for each recipe.

--bpw takes bits per weight in place of recipes. For each, quantize compares the chosen types with the best fixed type that fits, on a text of its own.
Make both files, score them as above, and print which one quantize wrote.
"""
from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from ggml_ext._base.threads import usable_cores
from ggml_ext._base.units import MIB
from ggml_ext._calibration import calibration
from ggml_ext._console.cli import run_script
from perplexity import MODEL, TEXT
from perplexity_run import EXT_TYPES, BaseLogits, imatrix, kl_divergence, quantize_with_ggml_ext, run_tool, save_base_logits

RECIPES = "ccq2,itq2_t,itq2_t_m,IQ2_M,Q2_K,itq3_s,itq3_t,itq3_t_m,IQ3_S,Q3_K_M"


def compare_sizes(args: argparse.Namespace, base: BaseLogits, options: list[str]) -> None:
    """Print a line for each size of --bpw: both files' predicted KL divergence, that of quantize's comparison, and that on the scored text."""
    chosen, fixed, report = (args.out / name for name in ("chosen.gguf", "fixed.gguf", "report.json"))
    print("| bpw | file | MiB | predicted | measured by quantize | KL divergence | written |\n" + "| --- " * 7 + "|", flush=True)
    for bpw in args.bpw.split(","):
        target = ["auto", "--target-bpw", bpw, *options, *shlex.split(args.target_options)]
        quantize_with_ggml_ext(args.model, chosen, *target, "--report", str(report))
        check = json.loads(report.read_text())["target_check"]
        if check["written"] == "auto":
            quantize_with_ggml_ext(args.model, fixed, check["files"][1]["type"], *options)
        else:
            chosen.rename(fixed)  # quantize wrote the fixed type
            quantize_with_ggml_ext(args.model, chosen, *target, "--no-target-check")
        for path, file in zip((chosen, fixed), check["files"], strict=True):
            kld = kl_divergence(path, base, args.threads)["Mean KLD"]
            name = "chosen types" if file["type"] == "auto" else file["type"].upper()
            measured = " | ".join(f"{value:.4f} +- {error:.4f}" for value, error in (file["kl_divergence"], kld))
            print(f"| {bpw} | {name} | {path.stat().st_size / MIB:.3f} | {file['predicted_kl_divergence']:.4f} | {measured} | "
                  f"{'yes' if check['written'] == file['type'] else ''} |", flush=True)
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", type=Path, default=MODEL)
    add("-f", "--file", type=Path, default=TEXT, help="text to score")
    add("--imatrix", type=Path, help="imatrix (default: of the built-in text, with the full Hessian)")
    add("--recipes", default=RECIPES, help=f"default: {RECIPES}")
    add("--bpw", help="bits per weight of targets, with commas")
    add("-c", "--ctx-size", type=int, default=256)
    add("--chunks", type=int, default=60)
    add("-t", "--threads", type=int, default=usable_cores())
    add("--options", default="", help="options of both ggml-ext files, such as \"--effort fast\"")
    add("--target-options", default="", help="options of the files with a target")
    add("--out", type=Path, default=Path("build/targets"), help="directory for temporary files, logits and the imatrix")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / f"logits-{args.model.stem}-{args.file.stem}-{args.ctx_size}-{args.chunks}.bin"
    base = (BaseLogits.read(saved) if saved.exists()
            else save_base_logits(args.model, args.file, saved, args.ctx_size, args.chunks, args.threads))
    importance = args.imatrix or args.out / f"{args.model.stem}.imatrix.gguf"
    if not importance.exists():
        imatrix(args.model, calibration.TEXT, importance, calibration.N_CONTEXT, threads=args.threads, kinds=["full"])
    options = ["--imatrix", str(importance), "--threads", str(args.threads), "--quiet", *shlex.split(args.options)]
    if args.bpw:
        compare_sizes(args, base, options)
        return
    fixed, chosen, report = (args.out / name for name in ("fixed.gguf", "chosen.gguf", "chosen.json"))
    print("| recipe | MiB | KL divergence | chosen: MiB | KL divergence | predicted |\n" + "| --- " * 6 + "|", flush=True)
    for recipe in args.recipes.split(","):
        if recipe in EXT_TYPES or recipe.islower():
            quantize_with_ggml_ext(args.model, fixed, recipe, *options)
        else:
            run_tool("llama-quantize", "--imatrix", importance, args.model, fixed, recipe, args.threads)
        size = fixed.stat().st_size
        fixed_kld = kl_divergence(fixed, base, args.threads)["Mean KLD"]
        fixed.unlink()
        quantize_with_ggml_ext(
            args.model, chosen, "auto", "--target-size", str(size), "--report", str(report), *options, *shlex.split(args.target_options)
        )
        chosen_kld = kl_divergence(chosen, base, args.threads)["Mean KLD"]
        predicted = json.loads(report.read_text())["predicted_kl_divergence"]
        print(f"| {recipe.upper() if recipe in EXT_TYPES else recipe} | {size / MIB:.3f} | {fixed_kld.value:.4f} +- {fixed_kld.error:.4f} | "
              f"{chosen.stat().st_size / MIB:.3f} | {chosen_kld.value:.4f} +- {chosen_kld.error:.4f} | {predicted:.4f} |", flush=True)
        chosen.unlink()


if __name__ == "__main__":
    sys.exit(run_script(main))
