#!/usr/bin/env python3
"""Search the codes of the trellis types: trellis_values and trellis_offset of ggml_ext/types.toml.

    trellis_search.py [--type itq3_t] [--seeds 4] [--steps 8000,4000] [--blocks 64,320]

ggml_ext/types/trellis.h defines the tables and their indices. The search is simulated annealing with several seeds, first on a small sample of
Gaussian blocks, then on a larger one, because a small sample alone leads to overfitting. A step swaps two values, changes one, or fits all values to
the blocks' current paths. The objective is the NMSE of the best paths, with any state before a block and one scale for all blocks. Other blocks
choose among the seeds. The values are then scaled and rounded to integers with sums up to 127. A seed takes four minutes on one core of a Zen 4
EPYC. Requires a C compiler, `cc`.
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

SOURCE = Path(__file__).with_suffix(".c")
COMPILE = ("cc", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
BLOCK, STATES = 256, 4096
# bits per symbol and weights per step
SHAPES = {"itq4_t": (4, 1), "itq3_t": (3, 1), "itq2_t": (2, 1), "itq1h_t": (3, 2), "itq1_t": (2, 2)}
TEST_BLOCKS = 4096  # a million weights
JUDGE_BLOCKS = 1024  # choose among seeds
MAX_CODE = 127
FIRST_TABLES, FIRST_FITS = 12, 3  # random tables and fits of each; annealing starts from the best
QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])
# By type: range of the first table's initial share of the energy, and initial standard deviation of the code. With more bits, larger
# values are worth their cost.
SHARES = {"itq4_t": (0.75, 0.97)} | dict.fromkeys(("itq3_t", "itq2_t", "itq1h_t", "itq1_t"), (0.5, 0.8))
SPREADS = {"itq4_t": 1.15, "itq3_t": 1.03, "itq2_t": 1.03, "itq1h_t": 0.95, "itq1_t": 0.87}
# Relative increase of the error that is accepted with probability 1/e: first step, first step on the larger sample, last step
HEAT = (0.03, 0.002, 0.0002)
SWAP, NUDGE = 0.75, 0.9   # cumulative probabilities; the remaining changes are fits

# The two indices of each weight of a step, separated by |: p0 = pair(t), p1 = pair(t-1) ..., e = quad(t), or for four bits c0, c1, c2. Shifting a
# field and XORing full words are cheap in every decoder.
MAPS = {"itq4_t": "c0^c2|c1", "itq3_t": "p0^p1^p2|p0^e", "itq2_t": "p0^p4|p2", "itq1h_t": "p0^p1^p2|p0^e|p0^p2|p0^e",
        "itq1_t": "p0^p4|p0^p2^p4|p0^p2|p0^p2^p4"}
START_BYTES = 256  # states that may precede a block
N_TRIES = 3  # scale candidates

Tables = list[np.ndarray]  # two tables of 16 values for each weight of a step


class CompilerError(Exception):
    """The C compiler is missing or fails."""


@functools.cache
def load():
    """Compile and load trellis_search() of the C file."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        path = Path(tmp) / "trellis_search.so"
        try:
            subprocess.run([*COMPILE, str(SOURCE), "-o", str(path), "-lm"], capture_output=True, text=True, check=True)
        except OSError as e:
            raise CompilerError(f"cannot run the C compiler {COMPILE[0]!r}: {e.strerror}") from e
        except subprocess.CalledProcessError as e:
            reason = next((line for line in e.stderr.splitlines() if "error" in line), f"exit code {e.returncode}")
            raise CompilerError(f"the C compiler {COMPILE[0]!r} fails on {SOURCE.name}: {reason}") from e
        function = ctypes.CDLL(str(path)).trellis_search
    p = ctypes.c_void_p
    function.argtypes = [ctypes.c_int, ctypes.c_int, p, p, ctypes.c_int64, ctypes.c_int, p]
    return function


def sample(seed: int, n: int, scaled: bool = False) -> np.ndarray:
    """Draw Gaussian blocks, float32 (n, 256); if `scaled`, with scales over two octaves, which shows the rounding of E5M3 scales."""
    x = np.random.default_rng(seed).standard_normal((n, BLOCK)).astype(np.float32)
    return x * np.exp2(np.random.default_rng(seed + 1).uniform(-1, 1, (n, 1))).astype(np.float32) if scaled else x


def nearest_e5m3(v: np.ndarray, tried: list[np.ndarray]) -> np.ndarray:
    """Return the nearest scale with three mantissa bits to each v (n,), or its other neighbour if that was tried."""
    mantissa, exponent = np.frexp(v)
    lo = np.ldexp(np.floor(mantissa * 16) / 16, exponent)
    up = lo + np.ldexp(1 / 16, exponent)
    near = np.where(v - lo < up - v, lo, up)
    seen = np.any([near == d for d in tried], axis=0) if tried else np.zeros(len(v), bool)
    return np.where(seen, lo + up - near, near)


class Encoder:
    """Finds the best paths of blocks through the trellis of a type."""

    def __init__(self, name: str):
        self.k, self.v = SHAPES[name]
        self._search = load()

    def paths(self, x: np.ndarray, code: np.ndarray, n_starts: int = STATES) -> np.ndarray:
        """Return the states (n, 256/V) of blocks x (n, 256), which are in units of the code (V, 4096)."""
        x, code = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(code, np.float32)
        states = np.empty((len(x), BLOCK // self.v), np.uint16)
        if self._search(self.k, self.v, code.ctypes.data, x.ctypes.data, len(x), n_starts, states.ctypes.data):
            raise MemoryError
        return states

    def error(self, x: np.ndarray, code: np.ndarray) -> float:
        """Return the NMSE of blocks x, float32 (n, 256), in the format: a start byte and E5M3 scales.

        The first scale candidate gives the code the block's energy. Each next one is the least-squares scale of the last path.
        """
        energy = (x.astype(np.float64) ** 2).sum(1)
        best, tried = energy.copy(), []
        ideal = np.sqrt(energy / BLOCK) / code.std()
        for _ in range(N_TRIES):
            d = nearest_e5m3(ideal, tried)
            tried.append(d)
            v = decode(code, self.paths(x * (1 / d).astype(np.float32)[:, None], code, START_BYTES))
            ideal = (x * v).sum(1) / (v * v).sum(1)
            best = np.minimum(best, ((x - d[:, None] * v) ** 2).sum(1))
        return float(best.sum() / energy.sum())


def decode(code: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Return the values (n, steps*V) of states (n, steps), of a code (V, 4096)."""
    return np.moveaxis(code[:, states], 0, -1).reshape(len(states), -1)


def indices(name: str) -> Tables:
    """Return the indices of all states into the value tables."""
    k = SHAPES[name][0]
    c = [np.arange(STATES) >> k * i & (1 << k) - 1 for i in range(12 // k)]
    if k == 4:
        fields = {f"c{i}": symbols for i, symbols in enumerate(c)}
    else:
        fields = {f"p{i}": (c[i] & 3) << 2 | c[i + 1] & 3 for i in range(len(c) - 1)}
    if k == 3:
        fields["e"] = sum((c[i] >> 2) << 3 - i for i in range(4))
    return [functools.reduce(np.bitwise_xor, (fields[field] for field in side.split("^"))) for side in MAPS[name].split("|")]


def make_code(index: Tables, values: Tables) -> np.ndarray:
    """Return the values of all states (V, 4096)."""
    terms = [table[i] for table, i in zip(values, index, strict=True)]
    return np.array([a + b for a, b in zip(terms[::2], terms[1::2], strict=True)])


def fit(x: np.ndarray, states: np.ndarray, index: Tables) -> Tables:
    """Fit the values to the paths of blocks by least squares."""
    tables = []
    for v in range(len(index) // 2):
        entries, target = [i[states].ravel() for i in index[2 * v:2 * v + 2]], x[:, v::len(index) // 2].ravel()
        normal, right = np.zeros((32, 32)), np.zeros(32)
        for p in range(2):
            right[16 * p:16 * p + 16] = np.bincount(entries[p], target, 16)
            for q in range(2):
                normal[16 * p:16 * p + 16, 16 * q:16 * q + 16] = np.bincount(entries[p] * 16 + entries[q], minlength=256).reshape(16, 16)
        normal += 1e-3 * np.eye(32)  # singular without it: a constant can move from one table to the other
        solution = np.linalg.solve(normal, right)
        tables += [solution[:16], solution[16:]]
    return tables


@dataclass
class Code:
    """Values with their error on a sample and the states of its paths, for the next fit."""

    values: Tables
    error: float
    states: np.ndarray


class Search:
    """Simulated annealing of the values of a type."""

    def __init__(self, name: str, seed: int, n_blocks: tuple[int, int]):
        self.name, self.encoder, self.index, self.rng = name, Encoder(name), indices(name), np.random.default_rng(seed)
        self.samples = [sample(300 + seed + 1000 * i, n) for i, n in enumerate(n_blocks)]
        x = self.samples[0]
        self.best = self.current = min((self._random_code(x) for _ in range(FIRST_TABLES)), key=lambda code: code.error)
        self.first_error = self.best.error

    def _measure(self, x: np.ndarray, values: Tables) -> Code:
        code = make_code(self.index, values)
        states = self.encoder.paths(x, code)
        return Code(values, float(((x - decode(code, states)) ** 2).mean(dtype=np.float64) / (x.astype(np.float64) ** 2).mean()), states)

    def _random_code(self, x: np.ndarray) -> Code:
        share, spread = self.rng.uniform(*SHARES[self.name]), SPREADS[self.name]
        values = [spread * np.sqrt(part) * self.rng.permutation(QUANTILES) for _ in range(self.encoder.v) for part in (share, 1 - share)]
        for _ in range(FIRST_FITS):
            values = fit(x, self._measure(x, values).states, self.index)
        return self._measure(x, values)

    def _change_values(self, x: np.ndarray) -> Tables:
        rng, odds = self.rng, self.rng.random()
        if odds >= NUDGE:
            return fit(x, self.current.states, self.index)
        values = [table.copy() for table in self.current.values]
        table = values[rng.integers(len(values))]
        if odds < SWAP:
            i, j = rng.choice(16, 2, False)
            table[[i, j]] = table[[j, i]]
        else:
            table[rng.integers(16)] += 0.15 * rng.standard_normal() * table.std()
        return values

    def anneal(self, x: np.ndarray, n_steps: int, hot: float, cold: float) -> None:
        """Run n_steps on blocks x, with temperatures from `hot` to `cold`."""
        self.best = self.current = self._measure(x, self.best.values)
        for step in range(n_steps):
            limit = self.current.error * hot * (cold / hot) ** (step / n_steps)
            code = self._measure(x, self._change_values(x))
            if code.error < self.current.error or self.rng.random() < np.exp((self.current.error - code.error) / limit):
                self.current = code
                self.best = min(self.best, code, key=lambda c: c.error)

    def run(self, n_steps: tuple[int, int]) -> None:
        for i, x in enumerate(self.samples):
            self.anneal(x, n_steps[i], *HEAT[i:i + 2])

    def error(self, x: np.ndarray) -> float:
        """Return the NMSE of the best values on other blocks."""
        return self._measure(x, self.best.values).error


def round_values(search: Search, x: np.ndarray) -> tuple[Tables, float]:
    """Round the values to integers from 0 with the best of several scales; return them and the offset."""
    values, best = search.best.values, None
    pairs = [values[i:i + 2] for i in range(0, len(values), 2)]  # of each weight of a step
    lows = [sum(t.min() for t in pair) for pair in pairs]
    width = max(sum(t.max() for t in pair) - min(lows) for pair in pairs)
    for factor in np.linspace(0.9, 1.0, 21) * MAX_CODE / width:
        offset = float(np.round(-min(lows) * factor))  # an integer, because CUDA's tiles hold code - offset in a byte
        integers = []
        for pair, low in zip(pairs, lows, strict=True):
            first, second = (np.round(factor * (t - t.min())).astype(int) for t in pair)
            integers += [first + int(np.round(offset + factor * low)), second]
        if max(a.max() + b.max() for a, b in zip(integers[::2], integers[1::2], strict=True)) > MAX_CODE:
            continue
        error = search.encoder.error(x, make_code(search.index, integers) - offset)
        if best is None or error < best[0]:
            best = error, integers, offset
    return best[1:]


def toml(values: Tables, offset: float) -> str:
    """Format the values as lines of types.toml."""
    tables = f",\n{' ' * 18}".join(str(table.tolist()) for table in values)
    return f"trellis_values = [{tables}]\ntrellis_offset = {offset}"


def search_code(name: str, n_seeds: int, n_steps: tuple[int, int], blocks: tuple[int, int]) -> None:
    """Search with several seeds and print the best code."""
    best, judge = None, sample(302, JUDGE_BLOCKS)
    print(f"{name}: NMSE of {blocks[0]} blocks before annealing, of {blocks[1]} after it, of {JUDGE_BLOCKS} others")
    for seed in range(1, n_seeds + 1):
        search = Search(name, seed, blocks)
        search.run(n_steps)
        error = search.error(judge)
        print(f"  seed {seed:2}   {search.first_error:.5f} -> {search.best.error:.5f}   {error:.5f}", flush=True)
        if best is None or error < best[0]:
            best = error, seed, search
    _, seed, search = best
    values, offset = round_values(search, judge)
    test = sample(401, TEST_BLOCKS, scaled=True)
    rounded, unrounded = (search.encoder.error(test, code) for code in (make_code(search.index, values) - offset,
                                                                       make_code(search.index, search.best.values)))
    print(f"\n# seed {seed}; NMSE of {TEST_BLOCKS} other blocks: {rounded:.5f}, before rounding {unrounded:.5f}")
    print(toml(values, offset))


def parse_counts(text: str) -> tuple[int, int]:
    try:
        small, large = map(int, text.split(","))
    except ValueError:
        small = large = 0
    if min(small, large) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be two positive numbers separated by a comma")
    return small, large


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=SHAPES, default="itq3_t", help="(default: itq3_t)")
    parser.add_argument("--seeds", type=int, default=4, help="number of searches; the best is printed (default: 4)")
    parser.add_argument("--steps", type=parse_counts, default=(8000, 4000), metavar="SMALL,LARGE",
                        help="annealing steps on the two samples (default: 8000,4000)")
    parser.add_argument("--blocks", type=parse_counts, default=(64, 320), metavar="SMALL,LARGE",
                        help="blocks of the two samples (default: 64,320)")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: needed at least 1")
    try:
        search_code(args.type, args.seeds, args.steps, args.blocks)
    except CompilerError as e:
        print(f"trellis_search.py: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
