#!/usr/bin/env python3
"""Time matrix-vector products of ggml's kernels against dequantization plus OpenBLAS's sgemv, and against sgemv of an F32 matrix.

    gemv.py [--types itq3_s,ccq2,ditto3,q3_k,...] [--shapes 4096x4096,...] [--rounds 7] [--threads 2] [--json FILE]
    gemv.py --columns 1,2,3,4,6,7,8,16,32 [--types itq3_s,itq3_t,q3_k,...] [--shapes 2048x8192] [--rounds 7] [--threads 2] [--json FILE]
    gemv.py --columns 1,4,32 --act-prec ...
    gemv.py --columns 12,16,32,64,512 --peak [--shapes 2048x2048] ...
    bench.py --gemv ...

The Ditto paper (section 4) replaces the loops of a quantized product by BLAS calls; this is the same comparison. Both sides use the same number
of threads and alternate between copies of the matrix, so that no copy stays in a cache. "unpack + sgemv" dequantizes panels of rows into a buffer
in the L2 cache and calls cblas_sgemv on each, with the fastest of three panel sizes. "sgemv" has the matrix in F32. Print medians of microseconds
and of the ratios within a round. OpenBLAS comes from the package scipy-openblas32.

--columns compares products of several columns with those of one, by the minimum over the rounds. With one thread it measures the CPU time of that
thread, which other programs disturb less. Q4_0 is not repacked, although it would be in a model.

--peak prints billions of products per second and thread, and their share of what the CPU's int8 instructions can do; ggml-ext's types only.

--act-prec compares activations in F16 with those in 8 bits for each number of columns (docs/reference/act-prec.md).
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

from ggml_ext import TYPES, WEIGHT_TYPES
from ggml_ext._base.threads import usable_cores
from ggml_ext._console.cli import run_script
from ggml_ext._native import library
from ggml_graph import Graph

DEFAULT_TYPES = "itq3_s,ccq2,ditto3,q3_k,q2_k"
COLUMN_TYPES = "itq3_s,ccq2,ditto3,ditto5,itq4_t,itq3_t,itq2_t,itq1h_t,itq1_t,itq4_t64,itq3_t64,itq2_t64,q3_k,iq3_s,q4_0"
DEFAULT_SHAPES = "4096x4096,4096x14336,14336x4096"
GGML_PREC_F16 = 20
COPIES_BYTES = 192 << 20  # exceeds all caches


def load_openblas(n_threads: int) -> ctypes.CDLL:
    try:
        import scipy_openblas32
    except ImportError:
        sys.exit("error: OpenBLAS is missing, which provides cblas_sgemv: pip install scipy-openblas32")
    dll = ctypes.CDLL(str(next(Path(scipy_openblas32.get_lib_dir()).glob("libscipy_openblas*"))))
    dll.scipy_openblas_set_num_threads(c_int(n_threads))
    return dll


def sgemv(blas: ctypes.CDLL, a: int, n_rows: int, n_cols: int, x: np.ndarray, y: int) -> None:
    """Compute y = A x, with the row-major A at address a."""
    row_major, no_trans = 101, 111
    blas.scipy_cblas_sgemv(c_int(row_major), c_int(no_trans), c_int(n_rows), c_int(n_cols), c_float(1), c_void_p(a),
                           c_int(n_cols), c_void_p(x.ctypes.data), c_int(1), c_float(0), c_void_p(y), c_int(1))


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
    if type_name == "f32":
        return int(gguf.GGMLQuantizationType.F32), weights
    type_id = int(TYPES[type_name].id if type_name in TYPES else gguf.GGMLQuantizationType[type_name.upper()])
    return type_id, library.load().quantize(type_id, weights)


class Matrix:
    """Copies of a random matrix of one type, and three ways to time its product with x."""

    def __init__(self, type_name: str, n_rows: int, n_cols: int, n_threads: int, blas: ctypes.CDLL):
        self.n_rows, self.n_cols, self.n_threads, self.blas = n_rows, n_cols, n_threads, blas
        base, cpu = load_ggml()
        rng = np.random.default_rng(1)
        self.x = rng.standard_normal(n_cols).astype(np.float32)
        self.type_id, data = quantize_random(type_name, n_rows, n_cols, rng)
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

    def time_mul_mat(self) -> float:
        """Return the seconds of ggml's mul_mat."""
        return seconds(self.graph.run, self.plan, self.n_threads) / self.n_copies

    def result(self) -> np.ndarray:
        return self.graph.read(self.nodes[0], (self.n_rows,))

    def _multiply_panels(self, address: int, buffer: np.ndarray, first: int, last: int, n: int) -> None:
        """Dequantize rows first .. last - 1 in panels of n into the thread's buffer, and multiply each by x."""
        for row in range(first, last, n):
            rows = min(n, last - row)
            self.decode(address + row * self.row_bytes, buffer.ctypes.data_as(POINTER(c_float)), rows * self.n_cols)
            sgemv(self.blas, buffer.ctypes.data, rows, self.n_cols, self.x, self.y.ctypes.data + 4 * row)

    def time_unpack_sgemv(self, panel_bytes: int) -> float:
        """Return the seconds of dequantization plus sgemv; each thread has its own rows and works panel by panel."""
        share = -(-self.n_rows // self.n_threads)
        n = max(1, min(share, panel_bytes // (4 * self.n_cols)))
        self.blas.scipy_openblas_set_num_threads(c_int(1))
        buffers = [np.zeros((n, self.n_cols), np.float32) for _ in range(self.n_threads)]

        def work():
            for address in self.addresses:
                list(self.pool.map(lambda i: self._multiply_panels(address, buffers[i], i * share, min(self.n_rows, (i + 1) * share), n),
                                   range(self.n_threads)))

        elapsed = seconds(work) / self.n_copies
        self.blas.scipy_openblas_set_num_threads(c_int(self.n_threads))
        return elapsed

    def time_sgemv(self) -> float:
        """Return the seconds of sgemv; the type must be f32."""
        def work():
            for address in self.addresses:
                sgemv(self.blas, address, self.n_rows, self.n_cols, self.x, self.y.ctypes.data)
        return seconds(work) / self.n_copies


PANELS = {"256 KB": 256 << 10, "1 MB": 1 << 20, "full": 1 << 40}


def compare(type_names: list[str], shape: tuple[int, int], rounds: int, threads: int) -> list[dict]:
    """Time the three products of each type; return a row of the table per type."""
    blas = load_openblas(threads)
    f32 = Matrix("f32", *shape, threads, blas)
    rows = []
    for name in type_names:
        matrix = Matrix(name, *shape, threads, blas)
        matrix.time_mul_mat(), f32.time_sgemv()  # warm up threads and pages
        result = matrix.result()
        matrix.time_unpack_sgemv(PANELS["1 MB"])
        # mul_mat rounds activations to 8 bits, which is about 0.5 % of the result's norm
        difference = np.linalg.norm(result - matrix.y) / np.linalg.norm(matrix.y)
        if not difference < 0.05:
            sys.exit(f"error: {name}: mul_mat and unpack + sgemv differ by {difference:.3f} of the result's norm (limit 0.05)")
        samples = [(matrix.time_mul_mat(), f32.time_sgemv(), {p: matrix.time_unpack_sgemv(n) for p, n in PANELS.items()})
                   for _ in range(rounds)]
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
            peak = int8_peak()  # anew for each type, since the clock varies
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
    parser.add_argument("--types", help=f"default: {DEFAULT_TYPES}; with --columns {COLUMN_TYPES}")
    parser.add_argument("--shapes", help=f"rows x columns (default: {DEFAULT_SHAPES}; with --columns 2048x8192)")
    parser.add_argument("--columns", help="compare products of these numbers of columns with one, for example 1,2,3,4,6,7,8,16,32")
    parser.add_argument("--peak", action="store_true", help="with --columns: compare with the peak of the CPU's int8 instructions")
    parser.add_argument("--act-prec", action="store_true", help="with --columns: compare activations in F16 with 8 bits")
    parser.add_argument("--copies-mb", type=int, default=COPIES_BYTES >> 20,
                        help="with --columns: total size of the matrix's copies; 0: one copy, which may stay in a cache (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements per product (default: 7)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="default: all usable cores")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    if args.peak and (not args.columns or args.act_prec or args.json):
        parser.error("--peak needs --columns, and neither --act-prec nor --json")
    args.types = args.types or (",".join(sorted(WEIGHT_TYPES)) if args.peak else COLUMN_TYPES if args.columns else DEFAULT_TYPES)
    args.shapes = args.shapes or ("2048x8192" if args.columns else DEFAULT_SHAPES)
    if args.columns:
        return print_peak(args) if args.peak else print_columns(args)
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
