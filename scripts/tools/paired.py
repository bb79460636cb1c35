#!/usr/bin/env python3
"""Differences in perplexity between pairs of types, with paired error bars: of the same text, token by token.

    paired.py [--pairs itq3_t:iq3_s,itq3_t+block:iq3_s+imatrix,...] [-m MODEL] [-f TEXT] [-c 256] [--chunks 600] [-t N]
              [--calibration TEXT] [--calibration-chunks 100]

llama-perplexity scores the first type of a pair against the logits of the second; ln(PPL first / PPL second) below zero says
that the first is better. Importance matrices and moments come from the end of the text, which is not scored, or from another
text (built-in: the package's own); TYPE+block and TYPE+full as in perplexity.py.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ggml_ext._base.errors import UserError
from ggml_ext._base.threads import usable_processors
from ggml_ext._console.cli import run_script
from perplexity import MODEL, TEXT, Entry, calibration_text, parse_types
from perplexity_run import imatrix, kl_divergence, quantize_uniform, save_base_logits, split_text

PAIRS = ("itq3_t:iq3_s,itq3_t:q3_k,itq2_t:q2_k,itq3_t+imatrix:iq3_s+imatrix,itq3_t+imatrix:q3_k+imatrix,"
         "itq3_t+imatrix:iq3_xxs,itq3_t+block:iq3_s+imatrix,itq2_t+block:iq2_s+imatrix,"
         "itq2_t+imatrix:q2_k+imatrix,itq2_t+imatrix:iq2_xs,itq2_t+imatrix:iq2_xxs,itq2_t_m+imatrix:iq2_s")


def parse_pairs(text: str) -> list[tuple[Entry, Entry]]:
    """UserError for what is no pair of known types."""
    pairs = []
    for word in text.split(","):
        first, colon, second = word.partition(":")
        if not colon:
            raise UserError(f"--pairs: got '{word}', need TYPE:TYPE, for example itq3_t:q3_k")
        pairs.append((*parse_types(first), *parse_types(second)))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pairs", default=PAIRS, help=f"default: {PAIRS}")
    add("-m", "--model", type=Path, default=MODEL)
    add("-f", "--file", type=Path, default=TEXT)
    add("-c", "--ctx-size", type=int, default=256)
    add("--chunks", type=int, default=600)
    add("--calibration", type=calibration_text, metavar="TEXT")
    add("--calibration-chunks", type=int, default=100)
    add("-t", "--threads", type=int, default=usable_processors())
    args = parser.parse_args()
    pairs = parse_pairs(args.pairs)
    pairs.sort(key=lambda pair: pair[1].label)  # the logits of a second type are made once
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        scored, text = (args.file, args.calibration) if args.calibration else split_text(args.file, folder)
        kinds = {entry.importance for pair in pairs for entry in pair}
        importance = imatrix(args.model, text, folder / "imatrix.gguf", args.ctx_size, args.calibration_chunks, args.threads, kinds)

        def make(entry: Entry) -> Path:
            path = folder / f"{entry.label}.gguf"
            if not path.exists():
                quantize_uniform(args.model, path, entry.type_name, imatrix_file=importance if entry.importance else None,
                                 kind=entry.importance or "imatrix")
            return path

        print("| first | second | ln(PPL first / PPL second) | in standard errors |\n| --- | --- | --- | --- |", flush=True)
        of = None
        for first, second in pairs:
            if of != second.label:
                base = save_base_logits(make(second), scored, folder / "logits.bin", args.ctx_size, args.chunks, args.threads)
                of = second.label
            value, error = kl_divergence(make(first), base, args.threads)["Mean ln(PPL(Q)/PPL(base))"]
            print(f"| {first.title} | {second.title} | {value:.5f} +- {error:.5f} | {value / error:.1f} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
