#!/usr/bin/env python3
"""How fast may decode be on a GPU that is not here: the limits of MMVQ by pipe and by bandwidth, beside stock types.

    cuda_limits.py [--build build/package] [--types itq3_t,q3_K]

For each card the least of these limits, in 10^12 weights a second, and which one it is: instructions of MMVQ's inner loop
(cuda_instructions.py) by the pipe that executes them, all instructions that a multiprocessor starts, and bytes of weights. These are ceilings:
latency, short rows and what else a token takes come on top, and nothing of it has been measured on a GPU. What a GPU would have to confirm:
the rates below, whose sources are given, and that loads do not limit before. Needs what cuda_instructions.py needs; a minute of two cores.
"""
from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gguf import GGMLQuantizationType

from cuda_instructions import ROOT, TYPES, counts, disassembled
from ggml_ext._console.cli import run_script
from ggml_ext._formats.gguf_file import bits_per_weight


class Card(NamedTuple):
    """Multiprocessors, boost clock in GHz, bandwidth in GB/s: NVIDIA's data sheets, from memory."""
    multiprocessors: int
    clock: float
    bandwidth: int
    arch: str


CARDS = {"RTX 3060": Card(28, 1.777, 360, "sm_86"), "RTX 3090": Card(82, 1.695, 936, "sm_86"), "RTX 4060": Card(24, 2.46, 272, "sm_89"),
         "RTX 4090": Card(128, 2.52, 1008, "sm_89"), "RTX 5090": Card(170, 2.407, 1792, "sm_120"), "A100 80 GB": Card(108, 1.41, 2039, "sm_80"),
         "H100 SXM": Card(132, 1.83, 3350, "sm_90")}
# Results a clock and multiprocessor. 64 for ALU and FMA: the table "Throughput of Native Arithmetic Instructions" of the CUDA C++ programming
# guide, from memory; for sm_120 an assumption, which may have twice as many integer sums. That IMAD and IDP take the FMA pipe is NVIDIA's
# statement (forums.developer.nvidia.com/t/302018, post 7). Four schedulers start an instruction of 32 threads each: 128.
RATES = {"ALU": 64, "FMA": 64, "LSU": 32, "all": 128}


def limits(card: Card, name: str, n: dict[str, int]) -> dict[str, float]:
    """10^12 weights a second by what limits them. n: instructions for 32 weights (cuda_instructions.counts)."""
    bits = bits_per_weight(GGMLQuantizationType[name.upper()])
    clocks = card.multiprocessors * card.clock / 1000
    return {**{pipe: clocks * rate * 32 / n[pipe] for pipe, rate in RATES.items()}, "bandwidth": 8 * card.bandwidth / bits / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "package")
    parser.add_argument("--types", default="itq4_t,itq3_t,itq2_t,itq3_s,ditto3,ditto5,ccq2,q2_K,q3_K,q4_K,q5_K,iq2_xxs,iq3_s")
    args = parser.parse_args()
    ggml, names = args.build.resolve() / "llama.cpp" / "ggml", args.types.split(",")
    if unknown := [name for name in names if name not in TYPES]:
        sys.exit(f"error: --types: {unknown[0]} is not among {', '.join(TYPES)}")
    architectures = sorted({card.arch for card in CARDS.values()}, key=lambda a: int(a[3:]))
    with ThreadPoolExecutor(2) as pool:
        code = dict(zip(architectures, pool.map(lambda a: disassembled(a, ggml), architectures), strict=True))
    print(f"| instructions for 32 weights | {' | '.join(names)} |\n|{' --- |' * (1 + len(names))}")
    for arch in architectures:
        cells = ["{all} ({ALU}, {FMA})".format(**counts(code[arch], name, 1)) for name in names]
        print(f"| {arch}: all (ALU, FMA) | {' | '.join(cells)} |")
    print(f"\n| 10^12 weights a second, at most | {' | '.join(names)} |\n|{' --- |' * (1 + len(names))}")
    for title, card in CARDS.items():
        of_types = [limits(card, name, counts(code[card.arch], name, 1)) for name in names]
        print(f"| {title} | {' | '.join(f'{min(of.values()):.2f} {min(of, key=of.get)}' for of in of_types)} |")


if __name__ == "__main__":
    sys.exit(run_script(main))
