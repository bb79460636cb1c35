"""The trellis code of ITQ3_T and ITQ2_T in numpy: ggml_ext/types/trellis.h and the encoder of ggml_ext/encode/trellis.h.

K bits a symbol, 256 symbols c[t] a block; state s[t] = c[t] | c[t-1] << K | c[t-2] << 2K ..., 12 bits.
Step t is position 32*(t%8) + t//8 of the rotated block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .._types import TYPES
from . import BLOCK_SIZE, as_blocks, e5m3_to_float32, fwht, load_rotated, pack_bits3, sum_lanes, unpack_bits3

N_STATES = 4096
N_STARTS = 256  # states that `start` can name
PASSES = 3  # TRELLIS_PASSES of encode/trellis.h
E5M3_MAX = 0xF7
POSITIONS = np.arange(BLOCK_SIZE).reshape(8, 32).T.ravel()  # of the steps
_SHIFTS = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)


@dataclass(frozen=True)
class Trellis:
    """One of the types: methods are what its module supplies."""

    name: str
    k: int  # bits a symbol

    @property
    def block_bytes(self) -> int:
        return TYPES[self.name].block_bytes

    @property
    def n_groups(self) -> int:
        """States that differ in the newest symbol alone count once."""
        return N_STATES >> self.k

    @cached_property
    def codes(self) -> np.ndarray:
        """q of all states, uint8 (4096,), by the tables of types.toml."""
        info, state = TYPES[self.name], np.arange(N_STATES)
        c = [state >> self.k * i & (1 << self.k) - 1 for i in range(12 // self.k)]
        pair = [(c[i] & 3) << 2 | c[i + 1] & 3 for i in range(0, len(c), 2)]
        if self.k == 3:
            a, b, e = pair[1], pair[0], sum((c[i] >> 2) << (3 - i) for i in range(4))
        else:
            a, b, e = pair[0], pair[2], pair[1]
        mix, values = np.array(info.trellis_mix), np.array(info.trellis_values)
        return (values[0][a ^ mix[0][b]] + values[1][e ^ mix[1][b]]).astype(np.uint8)

    @cached_property
    def values(self) -> np.ndarray:
        """q - offset, float32 (4096,)."""
        return self.codes.astype(np.float32) - np.float32(TYPES[self.name].trellis_offset)

    @cached_property
    def rms(self) -> np.float32:
        return np.float32(np.sqrt((self._planes(self.values).astype(np.float64) ** 2).sum() / N_STATES))

    def start_states(self, start: np.ndarray) -> np.ndarray:
        """The 12 - K bits before step 0: c[-1] | c[-2] << K ... from bytes."""
        s = start.astype(np.int64)
        c1, c2, c3, c4 = s >> 6, s >> 4 & 3, s >> 2 & 3, s & 3
        if self.k == 2:
            return c1 | c2 << 2 | c3 << 4 | c4 << 6
        return c1 | (s >> 1 & 1) << 2 | (c2 | (s & 1) << 2) << 3 | c3 << 6

    def symbols(self, blocks: np.ndarray) -> np.ndarray:
        """uint8 (n_blocks, 256) by step."""
        ql = blocks[:, 2:66]
        if self.k == 3:
            return unpack_bits3(ql, blocks[:, 66:])[:, POSITIONS]
        return ((ql.reshape(-1, 2, 1, 32) >> _SHIFTS) & 3).reshape(-1, BLOCK_SIZE)[:, POSITIONS]

    def states(self, blocks: np.ndarray) -> np.ndarray:
        """int64 (n_blocks, 256) by step."""
        symbols, state = self.symbols(blocks), self.start_states(blocks[:, 1])
        states = np.empty(symbols.shape, np.int64)
        for t in range(BLOCK_SIZE):
            state = (state << self.k | symbols[:, t]) & N_STATES - 1
            states[:, t] = state
        return states

    def unpack(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scale and offset of each block.

        blocks: uint8 (n_blocks, block_bytes). Returns q int8 (n_blocks, 256) in 0..127, d and offset float32 (n_blocks,), with
        rotated value = d * (q - offset). ValueError for other shapes or dtypes. Any bits are valid but those of a d that is
        Inf or NaN.
        """
        blocks = as_blocks(blocks, np.uint8, self.block_bytes)
        q = np.empty((len(blocks), BLOCK_SIZE), np.int8)
        q[:, POSITIONS] = self.codes[self.states(blocks)]
        offset = np.full(len(blocks), TYPES[self.name].trellis_offset, np.float32)
        return q, e5m3_to_float32(blocks[:, 0]), offset

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """uint8 (n_blocks, block_bytes) to weights float32 (n_blocks, 256), rotated back."""
        q, d, offset = self.unpack(blocks)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf scales give NaN weights, as in C
            return fwht(d[:, None] * (q.astype(np.float32) - offset[:, None]))

    def pack(self, states: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Inverse: the states of all steps, int64 (n_blocks, 256), and the bytes of the scales, uint8 (n_blocks,).

        The state before step 0 has to be one that a start byte can name.
        """
        symbols = np.empty(states.shape, np.uint8)
        symbols[:, POSITIONS] = states & (1 << self.k) - 1
        order = np.argsort(self.start_states(np.arange(N_STARTS)))
        start = order[states[:, 0] >> self.k].astype(np.uint8)
        low = (symbols & 3).reshape(-1, 2, 4, 32) << _SHIFTS
        parts = [d[:, None], start[:, None], np.bitwise_or.reduce(low, axis=2).reshape(-1, 64)]
        if self.k == 3:
            parts.append(pack_bits3(symbols)[1])
        return np.concatenate(parts, axis=1)

    def quantize_blocks(self, weights: np.ndarray, importance: np.ndarray | None = None, passes: int = PASSES) -> np.ndarray:
        """Weights float32 (n_blocks, 256) to uint8 (n_blocks, block_bytes), byte for byte what the C encoder writes.

        passes: scales tried a block. A block with NaN or Inf gets a d that row validation refuses.
        """
        with np.errstate(all="ignore"):
            x, finite = load_rotated(weights)
            x = np.ascontiguousarray(x[:, POSITIONS])
            x[~finite] = 0
            states, d = self._encode(x, passes)
        d[~finite] = 0xFF
        return self.pack(states, d)

    def _planes(self, by_state: np.ndarray) -> np.ndarray:
        """(4096,) to (symbols, groups): the newest symbol first."""
        return np.ascontiguousarray(by_state.reshape(self.n_groups, 1 << self.k).T)

    def search(self, x: np.ndarray) -> np.ndarray:
        """States of least squared error of x, float32 (n, 256) in units of d; trellis_search() of encode/trellis.h."""
        n, symbols, groups = len(x), 1 << self.k, self.n_groups
        code = self._planes(self.values)
        least = np.full((BLOCK_SIZE, n, groups), np.finfo(np.float32).max, np.float32)
        least[0, :, :N_STARTS] = 0

        def branch(t: int) -> np.ndarray:
            e = x[:, t, None, None] - code
            return least[t][:, None] + e * e

        cost = branch(0)
        for t in range(1, BLOCK_SIZE):
            planes = cost.reshape(n, symbols, symbols, groups // symbols).min(axis=2)
            least[t] = planes.transpose(0, 2, 1).reshape(n, groups)
            cost = branch(t)
        state = cost.transpose(0, 2, 1).reshape(n, -1).argmin(axis=1)
        states = np.empty((n, BLOCK_SIZE), np.int64)
        states[:, -1] = state
        rows, oldest = np.arange(n)[:, None], np.arange(symbols) * groups
        for t in range(BLOCK_SIZE - 1, 0, -1):
            sources = (state >> self.k)[:, None] + oldest
            e = x[:, t - 1, None] - self.values[sources]
            best = (least[t - 1][rows, sources >> self.k] + e * e).argmin(axis=1)
            state = sources[rows[:, 0], best]
            states[:, t - 1] = state
        return states

    def _encode(self, x: np.ndarray, passes: int) -> tuple[np.ndarray, np.ndarray]:
        """States (n, 256) and bytes of the scales (n,); trellis_encode() of encode/trellis.h."""
        n = len(x)
        error = sum_lanes(x * x)
        best_d = np.zeros(n, np.uint8)
        best_states = np.repeat(self._zero_path()[None], n, axis=0)
        want = np.sqrt(error * np.float32(1 / BLOCK_SIZE)) / self.rms
        tried = np.zeros((n, 256), bool)
        active = np.arange(n)
        for _ in range(passes):
            d = _next_scale(want[active], tried[active])
            active, d = active[d > 0], d[d > 0]
            if not len(active):
                break
            tried[active, d] = True
            scale = e5m3_to_float32(d.astype(np.uint8))
            y = x[active]
            states = self.search(y * (np.float32(1) / scale)[:, None])
            v = self.values[states]
            e = y - scale[:, None] * v
            found = sum_lanes(e * e)
            better = found < error[active]
            error[active[better]] = found[better]
            best_d[active[better]] = d[better]
            best_states[active[better]] = states[better]
            vv = sum_lanes(v * v)
            want[active] = np.where(vv > 0, sum_lanes(y * v) / vv, np.float32(0))
        return best_states, best_d

    def _zero_path(self) -> np.ndarray:
        return np.zeros(BLOCK_SIZE, np.int64)


def _next_scale(want: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Byte of the scale to try next, int64 (n,), or -1; trellis_next_scale() of encode/trellis.h."""
    values = e5m3_to_float32(np.arange(E5M3_MAX + 1, dtype=np.uint8))
    below = np.maximum(np.searchsorted(values, want, side="right") - 1, 0)
    lo = np.where(want < values[-1], below, E5M3_MAX)
    up = np.minimum(lo + 1, E5M3_MAX)
    up_first = values[up] - want < want - values[lo]
    choice = np.full(len(want), -1)
    for d in np.where(up_first, lo, up), np.where(up_first, up, lo):  # the nearer one last: it wins
        free = (d > 0) & ~tried[np.arange(len(d)), d]
        choice[free] = d[free]
    return choice
