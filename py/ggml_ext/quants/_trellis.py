"""numpy references of the trellis types: the format of ggml_ext/types/trellis.h and the encoder of ggml_ext/encode/trellis.c.

State s[t] is the last 12 bits of the stream of symbols: c[t] | c[t-1] << K | c[t-2] << 2K ...
Weight v of step t is weight j = V*t + v of the path, at position n/8*(j%8) + j//8 of the rotated block.
Arrays "by weight", (n_blocks, n), and "by step", (n_blocks, n/V), follow the path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .._base.types import WEIGHT_TYPES, TypeInfo
from ._blocks import as_blocks, e5m3_to_float32, load_rotated, pack_bits3, rotate_back, sum_lanes, unpack_bits3
from ._metric import WINDOW, Metric, encode_rows, multiply, positions

N_STATES = 4096
N_STARTS = 256  # states that a start byte can encode
# constants of encode/trellis.c
MAX_SCALES = 6
EXTRA_FACTORS = (1.3, 1.6, 0.75)  # further scales for blocks that are not Gaussian
GAUSSIAN_LIMIT = {256: np.float32(1.15), 64: np.float32(1.30), 32: np.float32(1.42)}  # by block size
GAUSSIAN_LIMIT_FEEDBACK = {256: np.float32(1.4), 64: np.float32(1.6), 32: np.float32(1.8)}
# constants of encode/trellis-search.h
MAX_UNITS = np.float32(80)
NO_PATH = 1 << 30  # cost of a group that no path reaches: more than any path costs
LAST_SCALE_BYTE = 0xF7
NIBBLES = np.array([0, 4], np.uint8).reshape(2, 1)


def _by_weight(by_step: np.ndarray) -> np.ndarray:
    """Reshape (V, rows, steps) to (rows, steps*V)."""
    return np.moveaxis(by_step, 0, -1).reshape(by_step.shape[1], -1)


def _squared_error(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the costs of a step, int32 (n, ...): weights x, int32 (n, V, 1 ...), with values, int32 (V, ...); squares lose 16 bits each."""
    squares = [(x[:, v] - values[v]) ** 2 >> 16 for v in range(len(values))]
    return sum(squares[1:], start=squares[0])


@dataclass(frozen=True)
class Trellis:
    """The reference of a trellis type."""

    info: TypeInfo

    @property
    def k(self) -> int:
        """Bits per symbol."""
        assert self.info.trellis_bits is not None
        return self.info.trellis_bits

    @property
    def v(self) -> int:
        """Weights per symbol."""
        assert self.info.trellis_weights is not None
        return self.info.trellis_weights

    @property
    def n(self) -> int:
        """Weights per block."""
        return self.info.block_size

    @property
    def n_steps(self) -> int:
        """Symbols per block."""
        return self.n // self.v

    @cached_property
    def positions(self) -> np.ndarray:
        return positions(self.n)

    @property
    def gaussian_nmse_limit(self) -> np.float32:
        """NMSE above which a block is not Gaussian and the encoder tries extra scales."""
        return GAUSSIAN_LIMIT[self.n] * np.float32(self.info.usual_rel_mse)

    @property
    def n_groups(self) -> int:
        """Number of states without their newest symbol."""
        return N_STATES >> self.k

    @cached_property
    def codes(self) -> np.ndarray:
        """Codes q that the states give each weight of a step, uint8 (V, 4096)."""
        state = np.arange(N_STATES)
        c = [state >> self.k * i & (1 << self.k) - 1 for i in range(12 // self.k)]
        pair = [(c[i] & 3) << 2 | c[i + 1] & 3 for i in range(len(c) - 1)]
        if self.k == 4:
            i0, i1 = [c[0] ^ c[2]], c[1]
        elif self.k == 3:
            i0, i1 = [pair[0] ^ pair[1] ^ pair[2], pair[0] ^ pair[2]], pair[0] ^ sum((c[i] >> 2) << (3 - i) for i in range(4))
        else:
            i0, i1 = [pair[0] ^ pair[4], pair[0] ^ pair[2]], pair[2] if self.v == 1 else pair[0] ^ pair[2] ^ pair[4]
        values = np.array(self.info.trellis_values)
        return np.array([values[2 * v][i0[v]] + values[2 * v + 1][i1] for v in range(self.v)], np.uint8)

    @cached_property
    def values(self) -> np.ndarray:
        """q - offset, float32 (V, 4096)."""
        return self.codes.astype(np.float32) - np.float32(self.info.trellis_offset)

    @cached_property
    def rms(self) -> np.float32:
        return np.float32(np.sqrt((self.values.astype(np.float64) ** 2).sum() / self.values.size))

    def decode(self, states: np.ndarray) -> np.ndarray:
        """Return the values by weight, float32 (rows, steps*V), of states (rows, steps)."""
        return _by_weight(self.values[:, states])

    def start_states(self, start: np.ndarray) -> np.ndarray:
        """Return the states before step 0, c[-1] | c[-2] << K ..., from the start bytes."""
        s = start.astype(np.int64)
        if self.k == 4:
            return s >> 4 | (s & 15) << 4
        c1, c2, c3, c4 = s >> 6, s >> 4 & 3, s >> 2 & 3, s & 3
        if self.k == 2:
            return c1 | c2 << 2 | c3 << 4 | c4 << 6
        return c1 | (s >> 1 & 1) << 2 | (c2 | (s & 1) << 2) << 3 | c3 << 6

    def symbols(self, blocks: np.ndarray) -> np.ndarray:
        """Return the symbols by step, uint8 (n_blocks, n/V)."""
        if self.v == 2:
            bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
            low = bits[:, 0 : self.n : 2] | bits[:, 1 : self.n : 2] << 1
            return low | bits[:, self.n :] << 2 if self.k == 3 else low
        if self.k == 4:
            planes = blocks[:, 2:].reshape(len(blocks), 4, 1, self.n // 8)
            return (planes >> NIBBLES & 15).reshape(len(blocks), self.n)[:, self.positions]
        end = 2 + self.n // 4
        qh = blocks[:, end:] if self.k == 3 else np.zeros((len(blocks), self.n // 8), np.uint8)
        return unpack_bits3(blocks[:, 2:end], qh)[:, self.positions]

    def states(self, blocks: np.ndarray) -> np.ndarray:
        """Return the states by step, int64 (n_blocks, n/V)."""
        symbols, state = self.symbols(blocks), self.start_states(blocks[:, 1])
        states = np.empty(symbols.shape, np.int64)
        for t in range(self.n_steps):
            state = (state << self.k | symbols[:, t]) & N_STATES - 1
            states[:, t] = state
        return states

    def unpack(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Unpack blocks, uint8 (n_blocks, block_bytes), to codes, scales and offsets.

        Returns:
            q int8 (n_blocks, n) in 0..127, d and offset float32 (n_blocks,); a rotated weight is d * (q - offset). Scale bytes above
            LAST_SCALE_BYTE are Inf or NaN; all other bits are valid.

        Raises:
            ValueError: another shape or dtype.
        """
        blocks = as_blocks(blocks, np.uint8, self.info.block_bytes)
        q = np.empty((len(blocks), self.n), np.int8)
        q[:, self.positions] = _by_weight(self.codes[:, self.states(blocks)])
        offset = np.full(len(blocks), self.info.trellis_offset, np.float32)
        return q, e5m3_to_float32(blocks[:, 0]), offset

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """Dequantize blocks, uint8 (n_blocks, block_bytes), to weights, float32 (n_blocks, n), rotated back."""
        q, d, offset = self.unpack(blocks)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf scales give NaN weights, as in C
            return rotate_back(d[:, None] * (q.astype(np.float32) - offset[:, None]))

    def pack(self, states: np.ndarray, scale_bytes: np.ndarray) -> np.ndarray:
        """Pack the states by step, int64 (n_blocks, n/V), and the scale bytes, uint8 (n_blocks,).

        A start byte must be able to encode the state before step 0.
        """
        order = np.argsort(self.start_states(np.arange(N_STARTS)))
        start = order[states[:, 0] >> self.k].astype(np.uint8)
        return np.concatenate([scale_bytes[:, None], start[:, None], *self._pack_symbols(states & (1 << self.k) - 1)], axis=1)

    def _pack_symbols(self, c: np.ndarray) -> list[np.ndarray]:
        """Return the bytes of the symbols by step, (n_blocks, n/V), in parts that follow one another."""
        if self.v == 2:
            low = np.stack([c & 1, c >> 1 & 1], axis=2).reshape(len(c), self.n)
            bits = np.concatenate([low, c >> 2], axis=1) if self.k == 3 else low
            return [np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")]
        symbols = np.empty(c.shape, np.uint8)
        symbols[:, self.positions] = c
        if self.k == 4:
            nibbles = symbols.reshape(len(symbols), 4, 2, self.n // 8) << NIBBLES
            return [np.bitwise_or.reduce(nibbles, axis=2).reshape(len(symbols), self.n // 2)]
        return list(pack_bits3(symbols)[: self.k - 1])  # K = 2 has no high bits

    def quantize_blocks(
        self, weights: np.ndarray, importance: np.ndarray | None = None, passes: int = 0, metric: Metric | None = None
    ) -> np.ndarray:
        """Encode weights to the bytes that the C encoder writes.

        Args:
            weights: float32 (n_blocks, n). A block with NaN or Inf gets an invalid scale byte, which row validation refuses.
            importance: diagonal of the Hessian, float32 (row_blocks, n), for every row. A block of zeros counts as ones.
            passes: scale candidates per block; 0: the default.
            metric: factorized Hessian of full rows; replaces importance.

        Returns:
            uint8 (n_blocks, block_bytes).
        """
        with np.errstate(all="ignore"):
            rotated, finite = load_rotated(weights, self.n)
            rotated[~finite] = 0
            x = np.ascontiguousarray(rotated[:, self.positions])
            if importance is not None and metric is None:
                metric = Metric.from_importance(as_blocks(importance, np.float32, self.n).ravel(), self.n)
            is_diagonal = metric is not None and metric.windows is None
            passes = passes or (MAX_SCALES if is_diagonal else 2 if self.n == 256 else 3)
            states, scale_bytes = np.zeros((len(x), self.n_steps), np.int64), np.zeros(len(x), np.uint8)

            def encode(block_rows: slice, first: int, x: np.ndarray, goal: np.ndarray) -> np.ndarray:
                good = finite[block_rows]
                search = ScaleSearch(self, Block(metric, first, x, goal).rows(good))
                search.run(passes)
                rows = np.arange(len(finite))[block_rows][good]
                states[rows], scale_bytes[rows] = search.states, search.scale_bytes
                d = np.where(scale_bytes[block_rows] > 0, e5m3_to_float32(scale_bytes[block_rows]), np.float32(0))
                return d[:, None] * self.decode(states[block_rows])

            encode_rows(metric, x, encode)
        scale_bytes[~finite] = 0xFF
        return self.pack(states, scale_bytes)

    def search(self, x: np.ndarray, before: np.ndarray | None = None, after: np.ndarray | None = None) -> np.ndarray:
        """Find the path of least squared error (Viterbi), as trellis_search() of encode/trellis-search.h does.

        Args:
            x: targets by weight in units of d, float32 (n, steps*V).
            before: states before the first step, int64 (n,); None: any that a start byte can encode.
            after: last states without their oldest symbol, int64 (n,); None: any.

        Returns:
            States, int64 (n, steps).
        """
        n, steps = len(x), x.shape[1] // self.v
        symbols, groups = 1 << self.k, self.n_groups
        unit = np.float32(self.info.trellis_unit)
        fixed = (self.values * unit).astype(np.int32)
        planes = np.ascontiguousarray(fixed.reshape(self.v, groups, symbols).swapaxes(1, 2))  # by newest symbol and group
        rows = np.arange(n)
        x = np.where(x > MAX_UNITS, MAX_UNITS, np.where(x > -MAX_UNITS, x, -MAX_UNITS))
        x = ((x * unit + np.float32(32768.5)).astype(np.int32) - 32768).reshape(n, steps, self.v)
        # least[t][:, g]: cost of the best path before step t to group g, which is the state of step t without its newest symbol,
        # or that of step t-1 without its oldest
        least = np.full((steps + 1, n, groups), NO_PATH, np.int32)
        if before is None:
            least[0, :, :N_STARTS] = 0
        else:
            least[0, rows, before & groups - 1] = 0
        for t in range(steps):
            cost = _squared_error(x[:, t, :, None, None], planes)
            cost += least[t][:, None]
            cost = cost.reshape(n, symbols, symbols, groups // symbols).min(axis=2)
            least[t + 1] = cost.transpose(0, 2, 1).reshape(n, groups)
        states = np.empty((n, steps), np.int64)
        after = least[steps].argmin(axis=1) if after is None else after
        for t in range(steps - 1, -1, -1):
            candidates = after[:, None] + np.arange(symbols) * groups
            cost = least[t][rows[:, None], candidates >> self.k] + _squared_error(x[:, t, :, None], fixed[:, candidates])
            states[:, t] = candidates[rows, cost.argmin(axis=1)]
            after = states[:, t] >> self.k
        return states

    def search_feedback(self, block: Block, d: np.ndarray) -> np.ndarray:
        """Search the states of a block of each row with error feedback, under scales d (rows,), as trellis_search_feedback() in C does."""
        metric, states, goal = block.known_metric, np.empty((len(block.x), self.n_steps), np.int64), block.goal.copy()
        S, inverse = metric.segment, (np.float32(1) / d)[:, None]
        ahead = 24 if S < 16 else 16 if metric.windows else S
        for s in range(0, self.n, S):
            t, z = s // self.v, goal[:, s : s + S + ahead] * inverse
            segment = self.search(z, states[:, t - 1] if t else None)[:, : S // self.v]
            states[:, t : t + S // self.v] = segment
            errors = block.x[:, s : s + S] - d[:, None] * self.decode(segment)
            metric.feed_later(block.first_step, s, errors, goal)
        return states

    def excess(self, block: Block, d: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Return the squared error minus GAUSSIAN_LIMIT_FEEDBACK times the expected error of Gaussian weights, float32 (rows,); trellis_excess()."""
        value = d[:, None] * self.decode(states)
        r = block.goal - value
        block.known_metric.feed_block(block.first_step, block.x - value, r)
        z = value + r
        return sum_lanes(r * r) - GAUSSIAN_LIMIT_FEEDBACK[self.n] * np.float32(self.info.usual_rel_mse) * sum_lanes(z * z)

    def improve(self, block: Block, d: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Search the states of the rows again in windows, under scales d (rows,), as trellis_improve() in C does."""
        if not len(d):
            return states
        metric, states, d = block.known_metric, states.copy(), d[:, None]
        inverse = np.float32(1) / d
        assert metric.windows is not None
        B, windows = metric.schur[block.first_step // self.n], metric.windows[block.first_step // self.n]
        g = multiply(B, metric.find_optimum(block.first_step, block.x, block.goal) - d * self.decode(states))
        for i, s in enumerate(range(0, self.n - WINDOW // 2, WINDOW // 2)):
            columns, first, end = slice(s, s + WINDOW), s // self.v, (s + WINDOW) // self.v
            old = self.decode(states[:, first:end])
            z = old + multiply(windows[i], g[:, columns]) * inverse
            window = self.search(
                z, states[:, first - 1] if s else None, states[:, end - 1] & self.n_groups - 1 if end < self.n_steps else None
            )
            change = d * (self.decode(window) - old)
            terms = change * (np.float32(0.5) * multiply(B[columns, columns], change) - g[:, columns])
            cost = np.zeros(len(d), np.float32)
            for j in range(WINDOW):
                cost += terms[:, j]
            better = np.flatnonzero(cost < 0)
            for j in range(WINDOW):
                g[better] -= B[s + j] * change[better, j, None]
            states[better, first:end] = window[better]
        return states


@dataclass(frozen=True)
class Block:
    """One block of many rows: struct trellis_block of encode/trellis.c."""

    metric: Metric | None
    first_step: int  # of the block, in its row
    x: np.ndarray  # float32 (n_rows, n), rotated, by step
    goal: np.ndarray  # x corrected for the errors of the row's earlier blocks

    @property
    def known_metric(self) -> Metric:
        """The metric, where error feedback needs one."""
        assert self.metric is not None
        return self.metric

    def rows(self, which: np.ndarray) -> Block:
        return Block(self.metric, self.first_step, self.x[which], self.goal[which])

    def cost(self, v: np.ndarray | None = None, d: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the cost of the values d*v, or of zeros, and the best change of d, as trellis_cost() does."""
        d_change, e, r = None, self.x, self.goal
        if v is not None and d is not None:
            e, r = e - d[:, None] * v, r - d[:, None] * v
        r = r.copy()
        if self.metric is not None:
            self.metric.feed_block(self.first_step, e, r)
        if v is not None and d is not None:
            b = weighted = v
            if self.metric is not None:
                b = v.copy()
                self.metric.feed_block(self.first_step, v, b)
                weighted = self.metric.apply_D(self.first_step, b)
            vv = sum_lanes(b * weighted)
            d_change = np.where(vv > 0, sum_lanes(r * weighted) / vv, -d)
        return sum_lanes(r * (r if self.metric is None else self.metric.apply_D(self.first_step, r))), d_change


class ScaleSearch:
    """The search for the scale and the states of one block of each row: trellis_encode() of encode/trellis.c.

    Attributes:
        scale_bytes: the best scales so far, uint8 (n_rows,); 0: all values are zero.
        states: their states, int64 (n_rows, n/V); zero where the scale byte is 0.
    """

    def __init__(self, trellis: Trellis, block: Block):
        n_rows = len(block.x)
        self.trellis, self.block = trellis, block
        self.scale_bytes, self.states = np.zeros(n_rows, np.uint8), np.zeros((n_rows, trellis.n_steps), np.int64)
        self._error, _ = block.cost()  # of the best states
        self._tried = np.zeros((n_rows, 256), bool)  # by scale byte
        self._has_correlations = block.metric is not None and block.metric.windows is not None  # block-diagonal or full Hessian

    def run(self, n_scales: int) -> None:
        """Search under n_scales scales and, in blocks that are not Gaussian, under extra ones."""
        t, block, n_rows = self.trellis, self.block, len(self.scale_bytes)
        energy = sum_lanes(block.goal * block.goal)
        error_limit, gaussian_scale = t.gaussian_nmse_limit * energy, np.sqrt(energy * np.float32(1 / t.n)) / t.rms
        gain = t.info.trellis_feedback_gain if self._has_correlations else t.info.trellis_gain
        targets, non_gaussian = gaussian_scale * np.float32(gain), np.zeros(n_rows, bool)
        if block.metric is not None and not self._has_correlations:
            rows, scale_bytes = self._choose_scales(np.arange(n_rows), targets)
            if len(rows):
                targets[rows], squared_errors = self._try_scales(rows, scale_bytes, False)
                non_gaussian[rows] = squared_errors > error_limit[rows]
        self._search_near(targets, n_scales)
        if self._has_correlations:
            non_gaussian = t.excess(block, e5m3_to_float32(self.scale_bytes), self.states) > 0
        self._try_extra_scales(gaussian_scale, error_limit, non_gaussian)
        if self._has_correlations:
            rows = np.flatnonzero(self.scale_bytes)
            self.states[rows] = t.improve(block.rows(rows), e5m3_to_float32(self.scale_bytes[rows]), self.states[rows])

    def _try_extra_scales(self, gaussian_scale: np.ndarray, error_limit: np.ndarray, non_gaussian: np.ndarray) -> None:
        """Try further scales for the rows in `non_gaussian`; without a metric, for those whose error so far exceeds `error_limit`."""
        block = self.block
        largest = np.abs(block.x).max(axis=1, initial=0) / np.abs(self.trellis.values).max()
        for scales in (*(np.float32(f) * gaussian_scale for f in EXTRA_FACTORS), largest):
            needs_more = self._error > error_limit if block.metric is None else non_gaussian
            rows, scale_bytes = self._choose_scales(np.flatnonzero(needs_more), scales)
            if len(rows):
                self._try_scales(rows, scale_bytes, block.metric is not None)
                self._tried[rows, scale_bytes] = True

    def _search_near(self, targets: np.ndarray, n_scales: int) -> None:
        """Try a scale near the target, then scales next to the optimum of the best states so far, then neighbours of the best scale.

        targets: float32 (n_rows,), overwritten with the optima.
        """
        rows, base_bytes = np.arange(len(targets)), np.zeros(len(targets), np.int64)  # base_bytes: the scales whose neighbours are tried
        for _ in range(n_scales):
            scale_bytes = _next_scale(targets[rows], self._tried[rows])
            neighbours = _neighbour_scale(base_bytes[rows], self._tried[rows])
            scale_bytes = np.where((scale_bytes < 0) & (base_bytes[rows] > 0), neighbours, scale_bytes)
            rows, scale_bytes = rows[scale_bytes > 0], scale_bytes[scale_bytes > 0]
            if not len(rows):
                break
            optima, _ = self._try_scales(rows, scale_bytes, self.block.metric is not None)
            self._tried[rows, scale_bytes] = True
            better = (base_bytes[rows] == 0) | (self.scale_bytes[rows] == scale_bytes)
            base_bytes[rows[better]], targets[rows[better]] = scale_bytes[better], optima[better]

    def _choose_scales(self, rows: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return those of the rows that have an untried scale next to their target, and its byte."""
        scale_bytes = _next_scale(targets[rows], self._tried[rows])
        return rows[scale_bytes > 0], scale_bytes[scale_bytes > 0]

    def _try_scales(self, rows: np.ndarray, scale_bytes: np.ndarray, feed_back: bool) -> tuple[np.ndarray, np.ndarray]:
        """Encode some rows under a scale each and keep what is better. Return the best scales for the states, and the squared errors."""
        d, block = e5m3_to_float32(scale_bytes.astype(np.uint8)), self.block.rows(rows)
        if feed_back:
            states = self.trellis.search_feedback(block, d)
        else:
            states = self.trellis.search(block.goal * (np.float32(1) / d)[:, None])
        v = self.trellis.decode(states)
        e = block.goal - d[:, None] * v
        cost, d_change = block.cost(v, d)
        better = cost < self._error[rows]
        self._error[rows[better]], self.scale_bytes[rows[better]] = cost[better], scale_bytes[better]
        self.states[rows[better]] = states[better]
        return d + d_change, sum_lanes(e * e)


def _next_scale(target: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Choose the scale byte to try next, int64 (n,), or -1, as trellis_next_scale() does."""
    values = e5m3_to_float32(np.arange(LAST_SCALE_BYTE + 1, dtype=np.uint8))
    below = np.maximum(np.searchsorted(values, target, side="right") - 1, 0)
    lo = np.where(target < values[-1], below, LAST_SCALE_BYTE)
    up = np.minimum(lo + 1, LAST_SCALE_BYTE)
    up_first = values[up] - target < target - values[lo]
    choice = np.full(len(target), -1)
    for scale_bytes in np.where(up_first, lo, up), np.where(up_first, up, lo):  # the nearer one last: it wins
        free = (scale_bytes > 0) & ~tried[np.arange(len(target)), scale_bytes]
        choice[free] = scale_bytes[free]
    return choice


def _neighbour_scale(scale_bytes: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Choose an untried neighbour of each scale byte, int64 (n,), or -1, as trellis_neighbour_scale() does."""
    choice = np.full(len(scale_bytes), -1)
    below, above = (scale_bytes - 1, scale_bytes > 1), (scale_bytes + 1, scale_bytes < LAST_SCALE_BYTE)
    for neighbours, is_valid in (below, above):  # the larger one last: it wins
        free = is_valid & ~tried[np.arange(len(scale_bytes)), neighbours]
        choice[free] = neighbours[free]
    return choice


REFERENCES = {name: Trellis(info) for name, info in WEIGHT_TYPES.items() if info.trellis_values}
