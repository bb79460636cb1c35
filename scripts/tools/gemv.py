#!/usr/bin/env python3
"""Matrix times vector: our kernels against unpack-to-float plus OpenBLAS's sgemv, and against F32 sgemv.

    gemv.py [--types itq3_s,ccq2,ditto3,q3_k,...] [--shapes 4096x4096,...] [--rounds 7] [--threads 2] [--json FILE]
    gemv.py --columns 1,2,3,4,6,7,8,16,32 [--types itq3_s,itq3_t,q3_k,...] [--shapes 2048x8192] [--rounds 7] [--threads 2] [--json FILE]
    gemv.py --columns 1,4,32 --act-prec ...
    bench.py --gemv ...

The paper Ditto (section 4) replaces loops of a quantised product by calls of BLAS; this is the same comparison. Both sides
read several copies of the matrix in turn, so that none stays in a cache, and use as many threads. "unpack + sgemv" decodes
panels of rows with the type's own to_float into a buffer that stays in the L2 cache and calls cblas_sgemv on each; it is
given the better of two panel sizes, and of the whole matrix at once. "sgemv" has the matrix in F32. Prints microseconds,
medians over the rounds, and the ratios of the same round. OpenBLAS comes with the package scipy-openblas32.

With --act-prec: what activations more exact than 8 bits cost (docs/reference/act-prec.md), each number of columns against itself with 8 bits.

With --columns: what products with several columns cost against one, by the least time over the rounds, the numbers of columns in
turn. With one thread the time is that thread's own, which programs beside it disturb less. Q4_0 is not repacked, as in a model it is.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import gguf
import numpy as np

from ggml_ext import TYPES
from ggml_ext._base.threads import usable_cores
from ggml_ext._console.cli import run_script
from ggml_ext._native import library
from ggml_graph import Graph

DEFAULT_TYPES = "itq3_s,ccq2,ditto3,q3_k,q2_k"
COLUMN_TYPES = "itq3_s,ccq2,ditto3,ditto5,itq4_t,itq3_t,itq2_t,itq4_t64,itq3_t64,itq2_t64,q3_k,iq3_s,q4_0"
DEFAULT_SHAPES = "4096x4096,4096x14336,14336x4096"
GGML_PREC_F16 = 20
COPIES_BYTES = 192 << 20  # more than any cache that two cores share


def openblas(n_threads: int) -> ctypes.CDLL:
    try:
        import scipy_openblas32
    except ImportError:
        sys.exit("error: OpenBLAS is missing; needed for the comparison with cblas_sgemv: pip install scipy-openblas32")
    dll = ctypes.CDLL(str(next(Path(scipy_openblas32.get_lib_dir()).glob("libscipy_openblas*"))))
    dll.scipy_openblas_set_num_threads(c_int(n_threads))
    return dll


def sgemv(blas: ctypes.CDLL, a: int, n_rows: int, n_cols: int, x: np.ndarray, y: int) -> None:
    """y = A x, A row-major at address a."""
    row_major, no_trans = 101, 111
    blas.scipy_cblas_sgemv(c_int(row_major), c_int(no_trans), c_int(n_rows), c_int(n_cols), c_float(1), c_void_p(a),
                           c_int(n_cols), c_void_p(x.ctypes.data), c_int(1), c_float(0), c_void_p(y), c_int(1))


def seconds(work, *args, clock=time.perf_counter) -> float:
    start = clock()
    work(*args)
    return clock() - start


def ggml_libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    path = library.load().path
    base = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return base, ctypes.CDLL(str(next(path.parent.glob("libggml-cpu*.so*"))))


def quantized(type_name: str, n_rows: int, n_cols: int, rng: np.random.Generator) -> tuple[int, np.ndarray]:
    """Type id and bytes of a random matrix."""
    weights = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
    if type_name == "f32":
        return int(gguf.GGMLQuantizationType.F32), weights
    type_id = int(TYPES[type_name].id if type_name in TYPES else gguf.GGMLQuantizationType[type_name.upper()])
    return type_id, library.load().quantize(type_id, weights)


class Matrix:
    """Copies of one random matrix of a type, and the ways to multiply it by x."""

    def __init__(self, type_name: str, n_rows: int, n_cols: int, n_threads: int, blas: ctypes.CDLL):
        self.n_rows, self.n_cols, self.n_threads, self.blas = n_rows, n_cols, n_threads, blas
        base, cpu = ggml_libraries()
        rng = np.random.default_rng(1)
        self.x = rng.standard_normal(n_cols).astype(np.float32)
        self.type_id, data = quantized(type_name, n_rows, n_cols, rng)
        self.row_bytes = data.nbytes // n_rows
        self.n_copies = min(256, max(2, -(-COPIES_BYTES // data.nbytes)))
        self.graph = Graph(base, cpu, self.n_copies * (data.nbytes + 4 * n_rows + 4096) + 4 * n_cols + (16 << 20))
        copies = [self.graph.tensor(self.type_id, data, (n_rows, n_cols)) for _ in range(self.n_copies)]
        self.addresses = [base.ggml_get_data(t) for t in copies]
        x = self.graph.tensor(int(gguf.GGMLQuantizationType.F32), self.x, (1, n_cols))
        self.nodes = [self.graph.node("mul_mat", t, x) for t in copies]
        self.plan = self.graph.plan(*self.nodes)
        self.y = np.zeros(n_rows, np.float32)
        self.to_float = ctypes.CFUNCTYPE(None, c_void_p, POINTER(c_float), c_int64)
        traits = base.ggml_get_type_traits
        traits.restype = POINTER(library._TypeTraits)
        self.decode = traits(self.type_id).contents.to_float
        self.pool = ThreadPoolExecutor(n_threads)

    def ours(self) -> float:
        """Seconds a product of ggml's mul_mat."""
        return seconds(self.graph.run, self.plan, self.n_threads) / self.n_copies

    def result(self) -> np.ndarray:
        return self.graph.read(self.nodes[0], (self.n_rows,))

    def _panels(self, address: int, buffer: np.ndarray, first: int, last: int, n: int) -> None:
        """Rows first .. last - 1 in panels of n, decoded into the thread's own buffer."""
        for row in range(first, last, n):
            rows = min(n, last - row)
            self.decode(address + row * self.row_bytes, buffer.ctypes.data_as(POINTER(c_float)), rows * self.n_cols)
            sgemv(self.blas, buffer.ctypes.data, rows, self.n_cols, self.x, self.y.ctypes.data + 4 * row)

    def unpack_sgemv(self, panel_bytes: int) -> float:
        """Seconds a product; every thread decodes and multiplies its own rows, panel by panel."""
        share = -(-self.n_rows // self.n_threads)
        n = max(1, min(share, panel_bytes // (4 * self.n_cols)))
        self.blas.scipy_openblas_set_num_threads(c_int(1))
        buffers = [np.zeros((n, self.n_cols), np.float32) for _ in range(self.n_threads)]

        def work():
            for address in self.addresses:
                list(self.pool.map(lambda i: self._panels(address, buffers[i], i * share, min(self.n_rows, (i + 1) * share), n),
                                   range(self.n_threads)))

        elapsed = seconds(work) / self.n_copies
        self.blas.scipy_openblas_set_num_threads(c_int(self.n_threads))
        return elapsed

    def sgemv(self) -> float:
        """Seconds of F32 sgemv; only of a matrix of type f32."""
        def work():
            for address in self.addresses:
                sgemv(self.blas, address, self.n_rows, self.n_cols, self.x, self.y.ctypes.data)
        return seconds(work) / self.n_copies


PANELS = {"256 KB": 256 << 10, "1 MB": 1 << 20, "whole": 1 << 40}


def compare(type_names: list[str], shape: tuple[int, int], rounds: int, threads: int) -> list[dict]:
    """Rows {"type", "shape", "us", "unpack_us", "sgemv_us", "x unpack + sgemv", "x sgemv", "panel"}, types in turn."""
    blas = openblas(threads)
    f32 = Matrix("f32", *shape, threads, blas)
    rows = []
    for name in type_names:
        matrix = Matrix(name, *shape, threads, blas)
        matrix.ours(), f32.sgemv()  # threads and pages
        ours = matrix.result()
        matrix.unpack_sgemv(PANELS["1 MB"])
        # activations are rounded to 8 bits by our kernels alone: about 0.5 % of the result's norm
        difference = np.linalg.norm(ours - matrix.y) / np.linalg.norm(matrix.y)
        if not difference < 0.05:
            sys.exit(f"error: {name}: the two ways differ by {difference:.3f} of the result's norm")
        samples = [(matrix.ours(), f32.sgemv(), {p: matrix.unpack_sgemv(n) for p, n in PANELS.items()}) for _ in range(rounds)]
        panel = min(PANELS, key=lambda p: statistics.median(s[2][p] for s in samples))
        rows.append({
            "type": name, "shape": "x".join(map(str, shape)), "panel": panel,
            "us": 1e6 * statistics.median(s[0] for s in samples),
            "unpack_us": 1e6 * statistics.median(s[2][panel] for s in samples),
            "sgemv_us": 1e6 * statistics.median(s[1] for s in samples),
            "x unpack + sgemv": statistics.median(s[2][panel] / s[0] for s in samples),
            "x sgemv": statistics.median(s[1] / s[0] for s in samples)})
    return rows


def columns_cost(type_name: str, shape: tuple[int, int], n_columns: list[int], rounds: int, threads: int,
                 copies_bytes: int = COPIES_BYTES, prec: int | None = None) -> dict[int, float]:
    """Least seconds of a product with each number of columns; several copies of the matrix in turn, copies_bytes in all. With
    a precision of the activations, a ggml_prec: n columns with it under the key -n, in turn with the others."""
    n_rows, n_cols = shape
    rng = np.random.default_rng(1)
    type_id, data = quantized(type_name, n_rows, n_cols, rng)
    n_copies = max(1, -(-copies_bytes // data.nbytes))
    results = 4 * n_rows * n_copies * sum(n_columns) * (2 if prec else 1)
    work = rounds * len(n_columns) * (8 << 20) * (3 if prec else 1)  # ggml takes its work buffer from the context anew in every run
    with Graph(*ggml_libraries(), n_copies * data.nbytes + results + work + (64 << 20)) as graph:
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


def print_columns(args: argparse.Namespace) -> None:
    n_columns = sorted({1, *map(int, args.columns.split(","))})
    shown = n_columns if args.act_prec else n_columns[1:]
    what = "f16 / q8, {}" if args.act_prec else "x {}"
    table = []
    print("| matrix | type | us | " + " | ".join(map(what.format, shown)) + " |\n|" + " --- |" * (len(shown) + 3))
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
    parser.add_argument("--types", help=f"default: {DEFAULT_TYPES}; with --columns {COLUMN_TYPES}")
    parser.add_argument("--shapes", help=f"rows x columns (default: {DEFAULT_SHAPES}; with --columns 2048x8192)")
    parser.add_argument("--columns", help="cost of products with so many columns against one, e.g. 1,2,3,4,6,7,8,16,32")
    parser.add_argument("--act-prec", action="store_true", help="with --columns: cost of activations in f16 against those in 8 bits")
    parser.add_argument("--copies-mb", type=int, default=COPIES_BYTES >> 20,
                        help="with --columns: size of the matrix's copies; 0: one, which may stay in a cache (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    args = parser.parse_args(argv)
    args.types = args.types or (COLUMN_TYPES if args.columns else DEFAULT_TYPES)
    args.shapes = args.shapes or ("2048x8192" if args.columns else DEFAULT_SHAPES)
    if args.columns:
        return print_columns(args)
    table = []
    print("| matrix | type | us | unpack + sgemv us | ratio | F32 sgemv us | ratio |\n|" + " --- |" * 7)
    for shape in args.shapes.split(","):
        for row in compare(args.types.lower().split(","), tuple(map(int, shape.split("x"))), args.rounds, args.threads):
            table.append(row)
            print(f"| {row['shape']} | {row['type'].upper()} | {row['us']:.0f} | {row['unpack_us']:.0f} ({row['panel']}) | "
                  f"{row['x unpack + sgemv']:.1f} | {row['sgemv_us']:.0f} | {row['x sgemv']:.1f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    sys.exit(run_script(main))
