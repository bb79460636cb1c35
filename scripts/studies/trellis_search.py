#!/usr/bin/env python3
"""The search behind the codes of ITQ3_T and ITQ2_T: trellis_mix, trellis_values, trellis_offset of ggml_ext/types.toml.

    trellis_search.py [--bits 3|2] [--seeds 14] [--steps 1200,700] [--blocks 192,1024]
    trellis_search.py --compare

ggml_ext/types/trellis.h says what the tables mean. From each seed the search climbs by random changes, first on a small
sample of Gaussian blocks, then on a larger one, which also chooses among the seeds. Its score is the relative squared error of
the best paths through the trellis, with any state before a block and an exact scale. Values are then scaled and rounded to
integers whose greatest sum is at most 127. The default finds the tables of ITQ3_T (seed 5), `--bits 2 --seeds 9` those of
ITQ2_T (seed 3); a seed takes about a minute. Needs a C compiler, `cc`.

--compare: errors of the tables of types.toml with other starts and scales, and those of GF(2)-linear maps of the 12 bits.
"""
from __future__ import annotations

import argparse
import ctypes
import functools
import subprocess
import sys
import tempfile
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
BLOCK, STATES = 256, 4096
TEST_BLOCKS = 4096  # a million weights
MAX_CODE = 127
FIRST_TABLES = 20   # random ones, of which the best is where a climb begins
LINEAR_MAPS = 24
QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])
SPREADS = (0.8, 1.0, 0.6, 0.45)  # of the second table's values to the first's at the start of a climb, by seed
# Odds of the changes, cumulative: swap of two entries of a mix table, new entry, swap of two values, nudge of a value; else
# values are fitted to the paths. The larger sample is for the finer changes.
SMALL_ODDS, LARGE_ODDS = (0.6, 0.75, 0.9, 0.9), (0.6, 0.7, 0.8, 0.92)
SECOND_SWAP = 0.3  # of mix entries, on the small sample

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


def indices(k: int, mix: Tables) -> Tables:
    """Indices into the two value tables of all states."""
    c = [np.arange(STATES) >> k * i & (1 << k) - 1 for i in range(12 // k)]
    pairs = [(c[i] & 3) << 2 | c[i + 1] & 3 for i in range(0, len(c), 2)]
    if k == 3:
        a, b, e = pairs[1], pairs[0], sum((c[i] >> 2) << 3 - i for i in range(4))
    else:
        a, b, e = pairs[0], pairs[2], pairs[1]
    return [a ^ mix[0][b], e ^ mix[1][b]]


def code_of(index: Tables, values: Tables) -> np.ndarray:
    return values[0][index[0]] + values[1][index[1]]


def unit(index: Tables, values: Tables) -> Tables:
    """Values whose code has variance 1."""
    spread = code_of(index, values).std()
    return [t / spread for t in values]


def fit(encoder: Encoder, x: np.ndarray, index: Tables, values: Tables) -> Tables:
    """Least-squares values for the paths that blocks take now."""
    _, states, scales = encoder.encode(x, code_of(index, values))
    weights = np.repeat(scales**2, BLOCK)
    target = (x / scales[:, None]).ravel()
    at = [i[states].ravel() for i in index]
    normal, right = np.zeros((32, 32)), np.zeros(32)
    for p in range(2):
        right[16 * p:16 * p + 16] = np.bincount(at[p], weights * target, 16)
        for q in range(2):
            normal[16 * p:16 * p + 16, 16 * q:16 * q + 16] = np.bincount(at[p] * 16 + at[q], weights, 256).reshape(16, 16)
    normal += 1e-5 * normal.trace() / 32 * np.eye(32)  # what one table gains the other may lose: no unique solution
    solution = np.linalg.solve(normal, right)
    return unit(index, [solution[:16], solution[16:]])


def swap(rng: np.random.Generator, tables: Tables) -> None:
    table = tables[rng.integers(2)]
    i, j = rng.choice(16, 2, False)
    table[i], table[j] = table[j], table[i]


class Climb:
    """Tables on their way up: `mix`, `values` and their `error` on sample x."""

    def __init__(self, encoder: Encoder, seed: int, x: np.ndarray):
        self.encoder, self.error, self.rng = encoder, np.inf, np.random.default_rng(seed)
        for _ in range(FIRST_TABLES):
            mix = [self.rng.permutation(16) for _ in range(2)]
            self._keep_better(x, mix, [spread * self.rng.permutation(QUANTILES) for spread in (1.0, SPREADS[seed % 4])])

    def _keep_better(self, x: np.ndarray, mix: Tables, values: Tables) -> None:
        index = indices(self.encoder.k, mix)
        values = unit(index, values)
        error = self.encoder.error(x, code_of(index, values))
        if error < self.error:
            self.mix, self.values, self.error = mix, values, error

    def code(self) -> np.ndarray:
        return code_of(indices(self.encoder.k, self.mix), self.values)

    def measure(self, x: np.ndarray) -> float:
        """Errors of another sample count from now on."""
        self.error = self.encoder.error(x, self.code())
        return self.error

    def run(self, x: np.ndarray, n_steps: int, odds: tuple[float, ...], second_swap: float = 0.0) -> float:
        rng = self.rng
        for _ in range(n_steps):
            mix, values = [t.copy() for t in self.mix], [t.copy() for t in self.values]
            u = rng.random()
            if u < odds[0]:
                for _ in range(2 if second_swap and rng.random() < second_swap else 1):
                    swap(rng, mix)
            elif u < odds[1]:
                mix[rng.integers(2)][rng.integers(16)] = rng.integers(16)
            elif u < odds[2]:
                swap(rng, values)
            elif u < odds[3]:
                values[rng.integers(2)][rng.integers(16)] += 0.1 * rng.standard_normal()
            else:
                values = fit(self.encoder, x, indices(self.encoder.k, mix), values)
            self._keep_better(x, mix, values)
        return self.error


def rounded(encoder: Encoder, x: np.ndarray, mix: Tables, values: Tables) -> tuple[Tables, float]:
    """Values as integers from 0, and the offset: of several widths the one of least error."""
    index, best = indices(encoder.k, mix), None
    width = sum(np.ptp(t) for t in values)
    for factor in np.linspace(0.93, 1.0, 12) * MAX_CODE / width:
        integers = [np.round(factor * (t - t.min())).astype(int) for t in values]
        if sum(t.max() for t in integers) > MAX_CODE:
            continue
        code = code_of(index, integers).astype(float)
        offset = float(np.round(2 * code.mean()) / 2)
        error = encoder.error(x, code - offset)
        if best is None or error < best[0]:
            best = error, integers, offset
    return best[1:]


def toml(mix: Tables, values: Tables, offset: float) -> str:
    """Rows of types.toml."""
    lines = [f"{name} = [{tables[0].tolist()},\n{' ' * 18}{tables[1].tolist()}]"
             for name, tables in (("trellis_mix   ", mix), ("trellis_values", values))]
    return "\n".join([*lines, f"trellis_offset = {offset}"])


def search(k: int, n_seeds: int, steps: tuple[int, int], blocks: tuple[int, int]) -> None:
    encoder, best = Encoder(k), None
    small, large = sample(301, blocks[0]), sample(302, blocks[1])
    print(f"K = {k}: relative squared errors of {blocks[0]} and of {blocks[1]} blocks, before -> after the climb")
    for seed in range(1, n_seeds + 1):
        climb = Climb(encoder, seed, small)
        shown = f"{climb.error:.5f} -> {climb.run(small, steps[0], SMALL_ODDS, SECOND_SWAP):.5f}"
        climb.rng = np.random.default_rng(seed + 1000)  # so that a longer first climb gives the second one the same changes
        shown += f"   {climb.measure(large):.5f} -> {climb.run(large, steps[1], LARGE_ODDS):.5f}"
        print(f"  seed {seed:2}   {shown}", flush=True)
        if best is None or climb.error < best[1].error:
            best = seed, climb
    seed, climb = best
    values, offset = rounded(encoder, large, climb.mix, climb.values)
    test = sample(401, TEST_BLOCKS, scaled=True)
    errors = encoder.errors(test, code_of(indices(k, climb.mix), values) - offset)
    before = encoder.error(test, climb.code(), *COLUMNS[FORMAT])
    print(f"\n# seed {seed}; errors of {TEST_BLOCKS} other blocks: format {errors[FORMAT]:.5f}, before rounding {before:.5f}")
    print("# " + ", ".join(f"{name} {error:.5f}" for name, error in errors.items()))
    print(toml(climb.mix, values, offset))


def shipped(k: int) -> np.ndarray:
    """The code of types.toml, without its offset."""
    rows = tomllib.loads((ROOT / "ggml_ext" / "types.toml").read_text())["type"]
    row = next(r for r in rows if r["name"] == f"itq{k}_t")
    mix, values = ([np.array(t) for t in row[field]] for field in ("trellis_mix", "trellis_values"))
    return code_of(indices(k, mix), values) - row["trellis_offset"]


def linear_map(rng: np.random.Generator) -> np.ndarray:
    """Code with an index of 8 bits that are random sums mod 2 of a state's 12, four to each of two tables of quantiles."""
    while True:
        states = np.arange(STATES)
        index = np.zeros(STATES, int)
        for image in rng.integers(0, 256, 12):
            index ^= np.where(states & 1, image, 0)
            states >>= 1
        if len(np.unique(index)) == 256:
            return QUANTILES[index >> 4] + SPREADS[0] * QUANTILES[index & 15]


def compare() -> None:
    test, selection = sample(501, TEST_BLOCKS, scaled=True), sample(301, 192)
    print(f"Relative squared errors of {TEST_BLOCKS} Gaussian blocks. Four columns with exact scales, two tries; then E5M3\n"
          f"scales with a start byte, of which {FORMAT} are the format.\n")
    print(f"| code | {' | '.join(COLUMNS)} |\n|" + " --- |" * (1 + len(COLUMNS)))
    for k in (3, 2):
        encoder, rng = Encoder(k), np.random.default_rng(1)
        linear = min((linear_map(rng) for _ in range(LINEAR_MAPS)), key=lambda code: encoder.error(selection, code))
        for name, code in ((f"ITQ{k}_T", shipped(k)), (f"K = {k}, linear map, best of {LINEAR_MAPS}", linear)):
            cells = [f"{error:.5f}" for error in encoder.errors(test, code).values()]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


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
    parser.add_argument("--bits", type=int, choices=(3, 2), default=3, help="new bits a weight (default: 3)")
    parser.add_argument("--seeds", type=int, default=14, help="climbs, of which the best counts (default: 14)")
    parser.add_argument("--steps", type=two_counts, default=(1200, 700), metavar="SMALL,LARGE",
                        help="changes tried on the two samples (default: 1200,700)")
    parser.add_argument("--blocks", type=two_counts, default=(192, 1024), metavar="SMALL,LARGE",
                        help="blocks of the two samples (default: 192,1024)")
    parser.add_argument("--compare", action="store_true", help="no search: errors of the codes of types.toml, for both K")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error("--seeds must be positive")
    try:
        if args.compare:
            compare()
        else:
            search(args.bits, args.seeds, args.steps, args.blocks)
    except CompilerError as e:
        print(f"trellis_search.py: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
