#!/usr/bin/env python3
"""From how many columns on is the GEMM faster than dot products? Measure both for each type on this CPU.

    gemm_columns.py [--types itq3_t,itq3_s,...] [--columns 4,6,8,...] [--shape 2048x2048] [--rounds 5]

Print the time of dot products relative to the GEMM for each number of columns of one thread, and the smallest number from which on the GEMM is
faster. gemm_columns() in ggml_ext/cpu/gemm.cpp has the numbers in use. ggml reads the switches once, so each side runs in processes of its own, in turns.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from gemv import columns_cost
from ggml_ext import WEIGHT_TYPES
from ggml_ext._console.cli import run_script

SIDES = {"dots": {"GGML_CPU_TILED_MM": "0"}, "gemm": {"GGML_CPU_TILED_MM_FORCE": "1"}}
NO_GEMM = 32  # weights per block (find_gemm())


def measure(args: argparse.Namespace) -> None:
    """Print the seconds of a product by type and number of columns, as JSON."""
    shape = tuple(map(int, args.shape.split("x")))
    n_columns = list(map(int, args.columns.split(",")))
    print(json.dumps({name: columns_cost(name, shape, n_columns, args.rounds, threads=1, copies_bytes=0) for name in args.types.split(",")}))


def run(side: str, argv: list[str]) -> dict[str, dict[str, float]]:
    command = [sys.executable, __file__, *argv, "--measure"]
    return json.loads(subprocess.run(command, env=os.environ | SIDES[side], stdout=subprocess.PIPE, text=True, check=True).stdout)


def crossover(ratios: dict[int, float]) -> str:
    """Return the smallest number of columns from which on all ratios are at least 1."""
    slower = max((n for n, ratio in ratios.items() if ratio < 1), default=0)
    faster = [n for n in ratios if n > slower]
    return str(faster[0]) if faster else f"over {slower}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    types = [name for name, t in WEIGHT_TYPES.items() if t.block_size != NO_GEMM]
    parser.add_argument("--types", default=",".join(types), help="default: all with a GEMM")
    parser.add_argument("--columns", default="4,6,7,8,9,10,11,12,13,14,16,20,24,32", help="default: %(default)s")
    parser.add_argument("--shape", default="2048x2048", help="rows x columns (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each side; the minimum counts (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        return measure(args)
    rounds = [{side: run(side, sys.argv[1:] if argv is None else argv) for side in SIDES} for _ in range(args.rounds)]
    n_columns = list(map(int, args.columns.split(",")))
    print("| type | " + " | ".join(map(str, n_columns)) + " | GEMM from |\n|" + " --- |" * (len(n_columns) + 2))
    for name in args.types.split(","):
        best = {side: {n: min(r[side][name][str(n)] for r in rounds) for n in n_columns} for side in SIDES}
        ratios = {n: best["dots"][n] / best["gemm"][n] for n in n_columns}
        print(f"| {name.upper()} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios.values()) + f" | {crossover(ratios)} |")


if __name__ == "__main__":
    sys.exit(run_script(main))
