#!/usr/bin/env python3
"""What more bits for a part of the block matrices buy: the measurements behind the mixed files of py/ggml_ext/_recipes.py.

    sensitivity.py [-m MODEL] [-f TEXT] [--base itq2_t] [--better itq3_t] [--parts REGEX,REGEX,...] [--chunks 300] [-t N]

Quantizes the model once in the base type, with second moments of blocks from the end of the text, and once for each part with
the tensors whose names match in the better type. Prints how far the KL divergence from the F16 model falls, and by how much
for each tenth of a bit a weight of the file's blocks: the parts to upgrade first are those with the largest last column.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from ggml_ext._base.threads import usable_cores
from ggml_ext._console.cli import run_script
from perplexity import MODEL, TEXT
from perplexity_run import block_types, imatrix, kl_divergence, quantize_uniform, save_base_logits, split_text

PARTS = "attn_q,attn_k,attn_v,attn_output,ffn_gate,ffn_up,ffn_down,blk\\.0\\.,blk\\.1\\.,blk\\.6\\.,blk\\.7\\."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", type=Path, default=MODEL)
    add("-f", "--file", type=Path, default=TEXT)
    add("--base", default="itq2_t")
    add("--better", default="itq3_t")
    add("--parts", default=PARTS, help=f"default: {PARTS}")
    add("-c", "--ctx-size", type=int, default=256)
    add("--chunks", type=int, default=300)
    add("-t", "--threads", type=int, default=usable_cores())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        scored, rest = split_text(args.file, folder)
        base = save_base_logits(args.model, scored, folder / "logits.bin", args.ctx_size, args.chunks, args.threads)
        importance = imatrix(args.model, rest, folder / "imatrix.gguf", args.ctx_size, threads=args.threads, kinds=["block"])

        def measure(*options: str) -> tuple[float, float, float]:
            path = folder / "q.gguf"
            quantize_uniform(args.model, path, args.base, *options, imatrix_file=importance, kind="block")
            found = kl_divergence(path, base, args.threads)
            return block_types(path)[1], found["Mean PPL(Q)"].value, found["Mean KLD"].value

        bpw, ppl, kld = measure()
        print("| in the better type | bpw of the blocks | perplexity | KL divergence | less | less a tenth of a bit |\n" + "| --- " * 6 + "|")
        print(f"| none | {bpw:.4f} | {ppl:.3f} | {kld:.5f} | | |")
        for part in args.parts.split(","):
            bpw1, ppl1, kld1 = measure("--tensor-type", f"{part}={args.better}")
            gain = kld - kld1
            print(f"| {part} | {bpw1:.4f} | {ppl1:.3f} | {kld1:.5f} | {gain:.5f} | {gain / (10 * (bpw1 - bpw)):.5f} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
