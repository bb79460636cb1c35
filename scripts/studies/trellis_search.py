#!/usr/bin/env python3
"""The search behind the codes of ITQ4_T, ITQ3_T and ITQ2_T: trellis_values and trellis_offset of ggml_ext/types.toml.

    trellis_search.py [--bits 4|3|2] [--map 'p0^p1^p2|p0^e'] [--seeds 4] [--steps 8000,4000] [--blocks 64,320]
    trellis_search.py --maps [--bits 4|3|2] [--steps 3000,1000]
    trellis_search.py --compare

ggml_ext/types/trellis.h says what the tables and the indices mean. For each seed values are annealed, first on a small sample of Gaussian
blocks, then on a larger one: two of them change places, one is nudged, or all are fitted to the paths that the blocks take, and a worse
code is kept with a chance that falls from step to step. The large sample matters: on 48 blocks alone annealing finds what suits these
blocks. The score is the relative squared error of the best paths through the trellis, with any state before a block and one scale for
all; that of other blocks chooses among the seeds. Values are scaled and rounded to integers whose greatest sum is at most 127. A seed
takes a core of a Zen 4 EPYC four minutes. Needs a C compiler, `cc`.

--map takes another pair of indices, of p0 = pair(t), p1 = pair(t-1) ..., e = quad(t), or for four bits c0, c1, c2. --maps compares those
that decoders make with few operations, one seed each. --compare: errors of the codes of types.toml with other starts and scales.
"""
from __future__ import annotations

import argparse
import ctypes
import functools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_suffix(".c")
COMPILE = ("cc", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
BLOCK, STATES, BITS = 256, 4096, (4, 3, 2)
TEST_BLOCKS = 4096  # a million weights
JUDGE_BLOCKS = 1024  # that choose among seeds
MAX_CODE = 127
FIRST_TABLES, FIRST_FITS = 12, 3  # random ones, each fitted so often, of which the best is where annealing begins
QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])
# The first table's part of the energy at the beginning, by bits a symbol, and the code's spread: large values cost bits that small
# errors would need, the more of them there are.
SHARES, SPREADS = {4: (0.75, 0.97), 3: (0.5, 0.8), 2: (0.5, 0.8)}, {4: 1.15, 3: 1.03, 2: 1.03}
# How much worse a code may be, of its error, for a chance of 1/e: at the first step, at the first on the larger sample, at the last
HEAT = (0.03, 0.002, 0.0002)
SWAP, NUDGE = 0.75, 0.9   # odds of the changes, cumulative; the others are fits

# The two indices of the types, then others that were tried. A shift of a field to another group's costs no decoder much, nor does an
# exclusive or of whole words.
MAPS = {
    4: ("c0^c2|c1", "c0|c1^c2", "c0^c1|c1^c2", "c0^c2|c0^c1"),
    3: ("p0^p1^p2|p0^e", "p0^p1^p2|p2^e", "p0^p1^p2|p1^e", "p0^p2|p0^e", "p0^p2|p1^e", "p0|p2^e", "p0^p1|p2^e", "p1^p2|p0^e", "p0^e|p1^p2"),
    2: ("p0^p4|p2", "p0^p4|p1^p3", "p0^p4|p0^p2", "p0^p4|p0^p2^p4", "p0^p4|p0^p1^p3", "p0^p2^p4|p1^p3", "p0^p3^p4|p1^p2", "p0^p3|p2^p4"),
}

# States that may stand before a block: all, zero, those of a start byte, or in a circle the block's own last one.
N_STARTS = {"free": STATES, "zero": 1, "byte": 256, "circle": 0}
# column -> (start, scale of one byte, scales tried); the last is the format
COLUMNS = {"free start": ("free", False, 2), "zero start": ("zero", False, 2), "circle": ("circle", False, 2),
           "start byte": ("byte", False, 2), "E5M3, 1 try": ("byte", True, 1), "2 tries": ("byte", True, 2),
           "3 tries": ("byte", True, 3)}
FORMAT = "3 tries"

Tables = list[np.ndarray]  # two of 16


class CompilerError(Exception):
    """There is no C compiler, or it fails."""


@functools.cache
def load():
    """trellis_search() of the C file."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "trellis_search.so"
        try:
            subprocess.run([*COMPILE, str(SOURCE), "-o", str(path), "-lm"], capture_output=True, text=True, check=True)
        except OSError as e:
            raise CompilerError(f"cannot run the C compiler {COMPILE[0]!r}: {e.strerror}") from e
        except subprocess.CalledProcessError as e:
            why = next((line for line in e.stderr.splitlines() if "error" in line), f"exit code {e.returncode}")
            raise CompilerError(f"the C compiler {COMPILE[0]!r} fails on {SOURCE.name}: {why}") from e
        function = ctypes.CDLL(str(path)).trellis_search
    p = ctypes.c_void_p
    function.argtypes = [ctypes.c_int, p, p, ctypes.c_int64, ctypes.c_int, p, p]
    return function


def sample(seed: int, n: int, scaled: bool = False) -> np.ndarray:
    """Gaussian blocks float32 (n, 256); if `scaled` under scales over two octaves, for scales of one byte to show."""
    x = np.random.default_rng(seed).standard_normal((n, BLOCK)).astype(np.float32)
    return x * np.exp2(np.random.default_rng(seed + 1).uniform(-1, 1, (n, 1))).astype(np.float32) if scaled else x


def e5m3_beside(v: np.ndarray, tried: list[np.ndarray]) -> np.ndarray:
    """The scales of three mantissa bits next to v (n,): the nearer one, if it was not tried, or else the other."""
    mantissa, exponent = np.frexp(v)
    lo = np.ldexp(np.floor(mantissa * 16) / 16, exponent)
    up = lo + np.ldexp(1 / 16, exponent)
    near = np.where(v - lo < up - v, lo, up)
    seen = np.any([near == d for d in tried], axis=0) if tried else np.zeros(len(v), bool)
    return np.where(seen, lo + up - near, near)


class Encoder:
    """Best paths of blocks through the trellis of K bits a weight."""

    def __init__(self, k: int):
        self.k = k
        self._search = load()

    def paths(self, x: np.ndarray, code: np.ndarray, n_starts: int, ends: np.ndarray | None = None) -> np.ndarray:
        """States (n, 256) of blocks x (n, 256) in units of the code (4096,)."""
        x, code = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(code, np.float32)
        ends = ends if ends is None else np.ascontiguousarray(ends, np.uint16)
        states = np.empty(x.shape, np.uint16)
        if self._search(self.k, code.ctypes.data, x.ctypes.data, len(x), n_starts, ends if ends is None else ends.ctypes.data,
                        states.ctypes.data):
            raise MemoryError
        return states

    def encode(self, x: np.ndarray, code: np.ndarray, start: str = "free", e5m3: bool = False,
               n_tries: int = 1) -> tuple[float, np.ndarray, np.ndarray]:
        """Relative squared error of blocks x, and states and scales of the last try.

        The first scale tried gives the code the block's energy, each next one is the least-squares scale of the path found.
        """
        energy = (x.astype(np.float64) ** 2).sum(1)
        best, tried = energy.copy(), []
        want = np.sqrt(energy / BLOCK) / code.std()
        for _ in range(n_tries):
            d = e5m3_beside(want, tried) if e5m3 else want
            tried.append(d)
            y = x * (1 / d).astype(np.float32)[:, None]
            # Where a circle closes is taken from a search with the joint in the middle.
            ends = self.paths(np.roll(y, BLOCK // 2, 1), code, STATES)[:, BLOCK // 2 - 1] if start == "circle" else None
            states = self.paths(y, code, N_STARTS[start], ends)
            v = code[states]
            want = (x * v).sum(1) / (v * v).sum(1)
            d = d if e5m3 else want
            best = np.minimum(best, ((x - d[:, None] * v) ** 2).sum(1))
        return float(best.sum() / energy.sum()), states, d

    def error(self, x: np.ndarray, code: np.ndarray, *args) -> float:
        return self.encode(x, code, *args)[0]

    def errors(self, x: np.ndarray, code: np.ndarray) -> dict[str, float]:
        return {name: self.error(x, code, *how) for name, how in COLUMNS.items()}


def indices(k: int, of_map: str) -> Tables:
    """Indices into the two value tables of all states. ValueError for a map that names no field."""
    c = [np.arange(STATES) >> k * i & (1 << k) - 1 for i in range(12 // k)]
    if k == 4:
        fields = {f"c{i}": symbols for i, symbols in enumerate(c)}
    else:
        fields = {f"p{i}": (c[i] & 3) << 2 | c[i + 1] & 3 for i in range(len(c) - 1)}
    if k == 3:
        fields["e"] = sum((c[i] >> 2) << 3 - i for i in range(4))
    sides = [side.strip().split("^") for side in of_map.split("|")]
    if len(sides) != 2 or not fields.keys() >= {name for side in sides for name in side}:
        raise ValueError(f"{of_map!r} is no map of {k} bits: two sides with | between them, each of {', '.join(fields)} with ^ between them")
    return [functools.reduce(np.bitwise_xor, (fields[name] for name in side)) for side in sides]


def code_of(index: Tables, values: Tables) -> np.ndarray:
    return values[0][index[0]] + values[1][index[1]]


def fit(x: np.ndarray, states: np.ndarray, index: Tables) -> Tables:
    """Least-squares values for the paths that blocks take."""
    at, target = [i[states].ravel() for i in index], x.ravel()
    normal, right = np.zeros((32, 32)), np.zeros(32)
    for p in range(2):
        right[16 * p:16 * p + 16] = np.bincount(at[p], target, 16)
        for q in range(2):
            normal[16 * p:16 * p + 16, 16 * q:16 * q + 16] = np.bincount(at[p] * 16 + at[q], minlength=256).reshape(16, 16)
    normal += 1e-3 * np.eye(32)  # what one table gains the other may lose: no unique solution
    solution = np.linalg.solve(normal, right)
    return [solution[:16], solution[16:]]


@dataclass
class Code:
    """Values on a sample: the error, and the states of the paths, from which the next fit is made."""

    values: Tables
    error: float
    states: np.ndarray


class Search:
    """Annealing of the values of one map."""

    def __init__(self, k: int, of_map: str, seed: int, n_blocks: tuple[int, int]):
        self.encoder, self.index, self.rng = Encoder(k), indices(k, of_map), np.random.default_rng(seed)
        self.samples = [sample(300 + seed + 1000 * i, n) for i, n in enumerate(n_blocks)]
        x = self.samples[0]
        self.best = self.now = min((self._first(x) for _ in range(FIRST_TABLES)), key=lambda code: code.error)
        self.first_error = self.best.error

    def _measured(self, x: np.ndarray, values: Tables) -> Code:
        code = code_of(self.index, values)
        states = self.encoder.paths(x, code, STATES)
        return Code(values, float(((x - code[states]) ** 2).mean(dtype=np.float64) / (x.astype(np.float64) ** 2).mean()), states)

    def _first(self, x: np.ndarray) -> Code:
        share, spread = self.rng.uniform(*SHARES[self.encoder.k]), SPREADS[self.encoder.k]
        values = [spread * np.sqrt(part) * self.rng.permutation(QUANTILES) for part in (share, 1 - share)]
        for _ in range(FIRST_FITS):
            values = fit(x, self._measured(x, values).states, self.index)
        return self._measured(x, values)

    def _changed(self, x: np.ndarray) -> Tables:
        rng, odds = self.rng, self.rng.random()
        if odds >= NUDGE:
            return fit(x, self.now.states, self.index)
        values = [table.copy() for table in self.now.values]
        table = values[rng.integers(2)]
        if odds < SWAP:
            i, j = rng.choice(16, 2, False)
            table[[i, j]] = table[[j, i]]
        else:
            table[rng.integers(16)] += 0.15 * rng.standard_normal() * table.std()
        return values

    def anneal(self, x: np.ndarray, n_steps: int, hot: float, cold: float) -> None:
        """On blocks x, whose errors count from now on."""
        self.best = self.now = self._measured(x, self.best.values)
        for step in range(n_steps):
            limit = self.now.error * hot * (cold / hot) ** (step / n_steps)
            code = self._measured(x, self._changed(x))
            if code.error < self.now.error or self.rng.random() < np.exp((self.now.error - code.error) / limit):
                self.now = code
                self.best = min(self.best, code, key=lambda c: c.error)

    def run(self, n_steps: tuple[int, int]) -> None:
        for i, x in enumerate(self.samples):
            self.anneal(x, n_steps[i], *HEAT[i:i + 2])

    def error(self, x: np.ndarray) -> float:
        """Of the best values on other blocks."""
        return self._measured(x, self.best.values).error


def rounded(search: Search, x: np.ndarray) -> tuple[Tables, float]:
    """Values as integers from 0, and the offset: of several widths the one of least error."""
    values, best = search.best.values, None
    width, least = sum(np.ptp(t) for t in values), sum(t.min() for t in values)
    for factor in np.linspace(0.9, 1.0, 21) * MAX_CODE / width:
        integers = [np.round(factor * (t - t.min())).astype(int) for t in values]
        if sum(t.max() for t in integers) > MAX_CODE:
            continue
        offset = float(np.round(-least * factor))  # whole: CUDA's tiles hold code - offset in a byte
        error = search.encoder.error(x, code_of(search.index, integers) - offset)
        if best is None or error < best[0]:
            best = error, integers, offset
    return best[1:]


def toml(values: Tables, offset: float) -> str:
    """Rows of types.toml."""
    return f"trellis_values = [{values[0].tolist()},\n{' ' * 18}{values[1].tolist()}]\ntrellis_offset = {offset}"


def search(k: int, of_map: str, n_seeds: int, n_steps: tuple[int, int], blocks: tuple[int, int]) -> None:
    best, judge = None, sample(302, JUDGE_BLOCKS)
    print(f"K = {k}, {of_map}: relative squared errors of {blocks[0]} blocks at first, of {blocks[1]} when annealed, of {JUDGE_BLOCKS} others")
    for seed in range(1, n_seeds + 1):
        found = Search(k, of_map, seed, blocks)
        found.run(n_steps)
        error = found.error(judge)
        print(f"  seed {seed:2}   {found.first_error:.5f} -> {found.best.error:.5f}   {error:.5f}", flush=True)
        if best is None or error < best[0]:
            best = error, seed, found
    _, seed, found = best
    values, offset = rounded(found, judge)
    test = sample(401, TEST_BLOCKS, scaled=True)
    errors = found.encoder.errors(test, code_of(found.index, values) - offset)
    before = found.encoder.error(test, code_of(found.index, found.best.values), *COLUMNS[FORMAT])
    print(f"\n# seed {seed}; errors of {TEST_BLOCKS} other blocks: format {errors[FORMAT]:.5f}, before rounding {before:.5f}")
    print("# " + ", ".join(f"{name} {error:.5f}" for name, error in errors.items()))
    print(toml(values, offset))


def compare_maps(k: int, n_steps: tuple[int, int], blocks: tuple[int, int]) -> None:
    test = sample(501, JUDGE_BLOCKS)
    print(f"| K = {k} | relative squared error of {JUDGE_BLOCKS} Gaussian blocks, any start, one scale |\n| --- | --- |")
    for of_map in MAPS[k]:
        found = Search(k, of_map, 1, blocks)
        found.run(n_steps)
        print(f"| {of_map.replace('|', ', ')} | {found.error(test):.5f} |", flush=True)


def shipped(k: int) -> np.ndarray:
    """The code of types.toml, without its offset."""
    rows = tomllib.loads((ROOT / "ggml_ext" / "types.toml").read_text())["type"]
    row = next(r for r in rows if r["name"] == f"itq{k}_t")
    return code_of(indices(k, MAPS[k][0]), [np.array(t) for t in row["trellis_values"]]) - row["trellis_offset"]


def compare() -> None:
    test = sample(501, TEST_BLOCKS, scaled=True)
    print(f"Relative squared errors of {TEST_BLOCKS} Gaussian blocks. Four columns with exact scales, two tries; then E5M3\n"
          f"scales with a start byte, of which {FORMAT} are the format.\n")
    print(f"| code | {' | '.join(COLUMNS)} |\n|" + " --- |" * (1 + len(COLUMNS)))
    for k in BITS:
        cells = [f"{error:.5f}" for error in Encoder(k).errors(test, shipped(k)).values()]
        print(f"| ITQ{k}_T | {' | '.join(cells)} |", flush=True)


def two_counts(text: str) -> tuple[int, int]:
    try:
        small, large = map(int, text.split(","))
    except ValueError:
        small = large = 0
    if min(small, large) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not two positive numbers with a comma between them")
    return small, large


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, choices=BITS, default=3, help="new bits a weight (default: 3)")
    parser.add_argument("--map", help="indices of the search (default: those of the type)")
    parser.add_argument("--seeds", type=int, default=4, help="searches, of which the best counts (default: 4)")
    parser.add_argument("--steps", type=two_counts, default=(8000, 4000), metavar="SMALL,LARGE",
                        help="changes tried on the two samples (default: 8000,4000)")
    parser.add_argument("--blocks", type=two_counts, default=(64, 320), metavar="SMALL,LARGE",
                        help="blocks of the two samples (default: 64,320)")
    parser.add_argument("--maps", action="store_true", help="a search of each map instead, and their errors")
    parser.add_argument("--compare", action="store_true", help="no search: errors of the codes of types.toml")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error("--seeds must be positive")
    try:
        of_map = args.map or MAPS[args.bits][0]
        indices(args.bits, of_map)
    except ValueError as e:
        parser.error(f"--map: {e}")
    try:
        if args.compare:
            compare()
        elif args.maps:
            compare_maps(args.bits, args.steps, args.blocks)
        else:
            search(args.bits, of_map, args.seeds, args.steps, args.blocks)
    except CompilerError as e:
        print(f"trellis_search.py: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
