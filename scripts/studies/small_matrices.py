#!/usr/bin/env python3
"""Measure what bits for some matrices gain, per bit per weight of the model's layers.

    small_matrices.py MODEL.gguf REGEX ... [--types itq2_t,itq3_t] [--raised q8_0] [--alone] [--chunks 60] [--text data/heldout.txt] [--propagate]

A file has all matrices of its layers in a type. Print the KL divergence of this file, and how much it falls with the matrices of each REGEX in the
types of --raised, against the same file in the next of --types. Differences are paired over chunks of 256 tokens. --alone: the matrices of each
REGEX in the types, the others in F16. Calibration: the end of the text, which is not scored.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ggml_ext._console.cli import run_script
from ggml_ext._evaluation.figures import compare_paired, kld_sums, parse_statistics
from perplexity_run import block_types, quantize_with_ggml_ext, run_perplexity, save_base_logits, split_text

TEXT, N_CONTEXT = Path(__file__).resolve().parents[2] / "data" / "heldout.txt", 256
LAYERS = r"blk\."

Measured = tuple[float, float, float, list[float]]  # bits per weight of the layers, KL divergence, its standard error, sums over chunks


class Study:
    """Files of one model, measured on the beginning of a text."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args, self.directory, self.base = args, directory, directory / "base.logits"
        scored, self.calibration = split_text(args.text, directory)
        save_base_logits(args.model, scored, self.base, N_CONTEXT, args.chunks, args.threads)

    def measure(self, *types: str) -> Measured:
        """Measure a file. types: REGEX=TYPE, of which the first match counts."""
        out = self.directory / "out.gguf"
        named = [word for entry in types for word in ("--tensor-type", entry)]
        is_own = any("itq" in entry for entry in types)
        options = ["--propagate" if self.args.propagate and is_own else "--no-propagate", "--token-embedding-type", "f16", "--quiet"]
        quantize_with_ggml_ext(self.args.model, out, "itq2_t", *named, *options, "--imatrix-from", str(self.calibration), "-t", str(self.args.threads))

        def parse(log: str) -> tuple[float, float, list[float]] | None:
            return (figures["Mean KLD"].value, figures["Mean KLD"].error, kld_sums(log)) if (figures := parse_statistics(log)) else None

        figures = run_perplexity("statistics", parse, out, N_CONTEXT, self.args.threads, "--kl-divergence", "--kl-divergence-base", self.base)
        return block_types(out)[1], *figures


def report_gain(title: str, raised: Measured, base: Measured) -> None:
    gain, bits = compare_paired(base[3], raised[3]), raised[0] - base[0]
    print(f"{title}: KL divergence {raised[1]:.5f}, bits {raised[0]:.4f} (+{bits:.4f}), gain {gain.value:.5f} +- {gain.error:.5f}, "
          f"per bit per weight {gain.value/bits:.3f} +- {gain.error/bits:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("classes", nargs="+", metavar="REGEX")
    parser.add_argument("--types", default="itq2_t,itq3_t", help="(default: %(default)s)")
    parser.add_argument("--raised", default="q8_0", help="(default: %(default)s)")
    parser.add_argument("--text", type=Path, default=TEXT, help="(default: data/heldout.txt)")
    for option, value in {"chunks": 60, "threads": 2}.items():
        parser.add_argument(f"--{option}", type=int, default=value, help="(default: %(default)s)")
    for option in ("alone", "propagate"):
        parser.add_argument(f"--{option}", action="store_true")
    args = parser.parse_args()
    types, raised = args.types.split(","), args.raised.split(",")
    with tempfile.TemporaryDirectory() as directory:
        study = Study(args, Path(directory))
        if args.alone:
            for name, qtype in ((c, t) for c in args.classes for t in types):
                bits, kld, error, _ = study.measure(f"{name}={qtype}", f"{LAYERS}=f16")
                print(f"{name} in {qtype}: KL divergence {kld:.6f} +- {error:.6f}", flush=True)
            return
        bases = {qtype: study.measure(f"{LAYERS}={qtype}") for qtype in types}
        for i, (qtype, base) in enumerate(bases.items()):
            print(f"all in {qtype}: KL divergence {base[1]:.5f} +- {base[2]:.5f}, bits {base[0]:.4f}", flush=True)
            for name, better in ((c, t) for c in args.classes for t in raised):
                report_gain(f"{qtype}, {name} in {better}", study.measure(f"{name}={better}", f"{LAYERS}={qtype}"), base)
            if i + 1 < len(types):
                report_gain(f"{qtype}, all in {types[i + 1]}", bases[types[i + 1]], base)


if __name__ == "__main__":
    sys.exit(run_script(main))
