#!/usr/bin/env python3
"""Time products of a quantized matrix with several columns, relative to the product with one.

    columns.py --columns 1,2,3,4,6,7,8,16,32 [--types itq3_s,itq3_t,q3_k,...] [--shapes 2048x8192] [--rounds 7] [--threads 2] [--json FILE]
    columns.py --columns 1,4,32 --act-prec ...
    columns.py --columns 12,16,32,64,512 --peak [--shapes 2048x2048] ...

Products alternate between copies of the matrix, so that no copy stays in a cache, and the minimum over the rounds counts. With one thread this
measures the CPU time of that thread, which other programs disturb less. Q4_0 is not repacked, although it would be in a model.

--peak prints billions of products per second and thread, and their share of what the CPU's int8 instructions can do; ggml-ext's types only.

--act-prec compares activations in F16 with those in 8 bits for each number of columns (docs/reference/act-prec.md).
"""
from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from ctypes import c_int
from pathlib import Path

import gguf
import numpy as np

from ggml_ext import TYPES, WEIGHT_TYPES
from ggml_ext._base.threads import usable_cores
from ggml_ext._console.cli import run_script
from ggml_ext._native import library
from ggml_graph import Graph

COLUMN_TYPES = "itq3_s,ccq2,ditto3,ditto5,itq4_t,itq3_t,itq2_t,itq1h_t,itq1_t,itq4_t64,itq3_t64,itq2_t64,q3_k,iq3_s,q4_0"
GGML_PREC_F16 = 20
COPIES_BYTES = 192 << 20  # exceeds all caches


def seconds(work, *args, clock=time.perf_counter) -> float:
    """Return how long work(*args) takes."""
    start = clock()
    work(*args)
    return clock() - start


def load_ggml() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Load libggml-base and libggml-cpu."""
    path = library.load().path
    base = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return base, ctypes.CDLL(str(next(path.parent.glob("libggml-cpu*.so*"))))


def quantize_random(type_name: str, n_rows: int, n_cols: int, rng: np.random.Generator) -> tuple[int, np.ndarray]:
    """Quantize a random matrix; return its type's id and its bytes."""
    weights = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
    type_id = int(TYPES[type_name].id if type_name in TYPES else gguf.GGMLQuantizationType[type_name.upper()])
    return type_id, library.load().quantize(type_id, weights)


def columns_cost(type_name: str, shape: tuple[int, int], n_columns: list[int], rounds: int, threads: int,
                 copies_bytes: int = COPIES_BYTES, prec: int | None = None) -> dict[int, float]:
    """Return the minimum seconds of a product by its number of columns.

    Args:
        copies_bytes: total size of the copies of the matrix, which the products alternate between.
        prec: ggml_prec of the activations; the result then has -n columns too, for n columns with this precision.
    """
    n_rows, n_cols = shape
    rng = np.random.default_rng(1)
    type_id, data = quantize_random(type_name, n_rows, n_cols, rng)
    n_copies = max(1, -(-copies_bytes // data.nbytes))
    results = 4 * n_rows * n_copies * sum(n_columns) * (2 if prec else 1)
    with Graph(*load_ggml(), n_copies * data.nbytes + results + (64 << 20)) as graph:
        copies = [graph.tensor(type_id, data, shape) for _ in range(n_copies)]
        plans = {}
        for n in n_columns:
            x = graph.tensor(int(gguf.GGMLQuantizationType.F32), rng.standard_normal((n, n_cols)).astype(np.float32), (n, n_cols))
            for key in [n] if prec is None else [n, -n]:
                nodes = [graph.node("mul_mat", t, x) for t in copies]
                for node in nodes if key < 0 else []:
                    graph.base.ggml_prec_set_src(node, c_int(prec), c_int(1))
                plans[key] = graph.plan(*nodes)
        clock = time.thread_time if threads == 1 else time.perf_counter
        samples = [{n: seconds(graph.run, plan, threads, clock=clock) / n_copies for n, plan in plans.items()} for _ in range(rounds)]
    return {n: min(s[n] for s in samples) for n in plans}


def int8_peak() -> float:
    """Return the products of bytes per second that one thread can do without memory."""
    cpu = load_ggml()[1]
    if not hasattr(cpu, "ggml_ext_cpu_peak"):
        sys.exit("error: --peak needs a build for tests: make install in a checkout")
    cpu.ggml_ext_cpu_peak.restype = ctypes.c_double
    return cpu.ggml_ext_cpu_peak()


def print_peak(args: argparse.Namespace) -> None:
    n_columns = sorted(map(int, args.columns.split(",")))
    if unknown := set(args.types.lower().split(",")) - set(WEIGHT_TYPES):
        sys.exit(f"error: --peak compares ggml-ext's types, not {', '.join(sorted(unknown))}: name some with --types")
    if not int8_peak():
        sys.exit("error: --peak: the peak of this CPU's instruction set is unknown; it needs AVX2")
    print(f"peak of one thread: {int8_peak() / 1e9:.0f} billion products per second")
    print("| matrix | type | " + " | ".join(f"{n} columns" for n in n_columns) + " |\n|" + " --- |" * (len(n_columns) + 2))
    for shape in args.shapes.split(","):
        n_rows, n_cols = map(int, shape.split("x"))
        for name in args.types.lower().split(","):
            cost = columns_cost(name, (n_rows, n_cols), n_columns, args.rounds, args.threads, args.copies_mb << 20)
            peak = int8_peak()  # again for each type, since the clock varies
            rates = {n: n_rows * n_cols * n / cost[n] / args.threads for n in n_columns}
            print(f"| {shape} | {name.upper()} | " + " | ".join(f"{r / 1e9:.0f} ({100 * r / peak:.0f} %)" for r in rates.values()) + " |", flush=True)


def print_columns(args: argparse.Namespace) -> None:
    n_columns = sorted({1, *map(int, args.columns.split(","))})
    shown = n_columns if args.act_prec else n_columns[1:]
    heading = "f16 / q8, {}" if args.act_prec else "x {}"
    table = []
    print("| matrix | type | us | " + " | ".join(map(heading.format, shown)) + " |\n|" + " --- |" * (len(shown) + 3))
    for shape in args.shapes.split(","):
        for name in args.types.lower().split(","):
            prec = GGML_PREC_F16 if args.act_prec else None
            sizes = tuple(map(int, shape.split("x")))
            cost = columns_cost(name, sizes, n_columns, args.rounds, args.threads, args.copies_mb << 20, prec)
            ratios = {n: cost[-n] / cost[n] if prec else cost[n] / cost[1] for n in shown}
            table.append({"type": name, "shape": shape, "us": 1e6 * cost[1], "x q8" if prec else "x one": ratios})
            cells = [shape, name.upper(), f"{1e6 * cost[1]:.0f}", *(f"{x:.2f}" for x in ratios.values())]
            print("| " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", required=True, help="numbers of columns, for example 1,2,3,4,6,7,8,16,32")
    parser.add_argument("--types", help=f"default: {COLUMN_TYPES}; with --peak all of ggml-ext")
    parser.add_argument("--shapes", default="2048x8192", help="rows x columns (default: %(default)s)")
    parser.add_argument("--peak", action="store_true", help="compare with the peak of the CPU's int8 instructions")
    parser.add_argument("--act-prec", action="store_true", help="compare activations in F16 with 8 bits")
    parser.add_argument("--copies-mb", type=int, default=COPIES_BYTES >> 20,
                        help="total size of the matrix's copies; 0: one copy, which may stay in a cache (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements per product (default: 7)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="default: all usable cores")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    if args.peak and (args.act_prec or args.json):
        parser.error("--peak goes neither with --act-prec nor with --json")
    args.types = args.types or (",".join(sorted(WEIGHT_TYPES)) if args.peak else COLUMN_TYPES)
    (print_peak if args.peak else print_columns)(args)


if __name__ == "__main__":
    sys.exit(run_script(main))
