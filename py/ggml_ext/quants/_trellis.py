"""numpy references of the trellis types: the format of ggml_ext/types/trellis.h and the encoder of ggml_ext/encode/trellis.c.

State s[t] is the last 12 bits of the stream of symbols: c[t] | c[t-1] << K | c[t-2] << 2K ...
Step t is position n/8*(t%8) + t//8 of the rotated block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .._base.types import WEIGHT_TYPES, TypeInfo
from ._blocks import as_blocks, e5m3_to_float32, load_rotated, pack_bits3, rotate_back, sum_lanes, unpack_bits3
from ._metric import WINDOW, Metric, encode_rows, form_times, positions

N_STATES = 4096
N_STARTS = 256  # states that a start byte can encode
# constants of encode/trellis.c
MAX_PASSES = 6
ODD_ABOVE, ODD_FACTORS = {256: np.float32(1.15), 64: np.float32(1.30)}, (1.3, 1.6, 0.75)
ODD_FED = {256: np.float32(1.4), 64: np.float32(1.6)}
# constants of encode/trellis-search.h
MAX_UNITS, NONE = np.float32(80), 49152
LAST_SCALE = 0xF7
NIBBLES = np.array([0, 4], np.uint8).reshape(2, 1)


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
    def n(self) -> int:
        """Weights per block."""
        return self.info.block_size

    @cached_property
    def positions(self) -> np.ndarray:
        return positions(self.n)

    @property
    def odd(self) -> np.float32:
        """NMSE above which the encoder tries more scales for a block."""
        return ODD_ABOVE[self.n] * np.float32(self.info.usual_rel_mse)

    @property
    def n_groups(self) -> int:
        """Number of states without their newest symbol."""
        return N_STATES >> self.k

    @cached_property
    def codes(self) -> np.ndarray:
        """Codes q of all states, uint8 (4096,)."""
        state = np.arange(N_STATES)
        c = [state >> self.k * i & (1 << self.k) - 1 for i in range(12 // self.k)]
        pair = [(c[i] & 3) << 2 | c[i + 1] & 3 for i in range(len(c) - 1)]
        if self.k == 4:
            i0, i1 = c[0] ^ c[2], c[1]
        elif self.k == 3:
            i0, i1 = pair[0] ^ pair[1] ^ pair[2], pair[0] ^ sum((c[i] >> 2) << (3 - i) for i in range(4))
        else:
            i0, i1 = pair[0] ^ pair[4], pair[2]
        values = np.array(self.info.trellis_values)
        return (values[0][i0] + values[1][i1]).astype(np.uint8)

    @cached_property
    def values(self) -> np.ndarray:
        """q - offset, float32 (4096,)."""
        return self.codes.astype(np.float32) - np.float32(self.info.trellis_offset)

    @cached_property
    def rms(self) -> np.float32:
        return np.float32(np.sqrt((self.values.astype(np.float64) ** 2).sum() / N_STATES))

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
        """Return the symbols by step, uint8 (n_blocks, n)."""
        if self.k == 4:
            planes = blocks[:, 2:].reshape(len(blocks), 4, 1, self.n // 8)
            return (planes >> NIBBLES & 15).reshape(len(blocks), self.n)[:, self.positions]
        end = 2 + self.n // 4
        qh = blocks[:, end:] if self.k == 3 else np.zeros((len(blocks), self.n // 8), np.uint8)
        return unpack_bits3(blocks[:, 2:end], qh)[:, self.positions]

    def states(self, blocks: np.ndarray) -> np.ndarray:
        """Return the states by step, int64 (n_blocks, n)."""
        symbols, state = self.symbols(blocks), self.start_states(blocks[:, 1])
        states = np.empty(symbols.shape, np.int64)
        for t in range(self.n):
            state = (state << self.k | symbols[:, t]) & N_STATES - 1
            states[:, t] = state
        return states

    def unpack(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Unpack blocks, uint8 (n_blocks, block_bytes), to codes, scales and offsets.

        Returns:
            q int8 (n_blocks, n) in 0..127, d and offset float32 (n_blocks,); a rotated weight is d * (q - offset). A d above
            0xf7 is Inf or NaN; all other bits are valid.

        Raises:
            ValueError: another shape or dtype.
        """
        blocks = as_blocks(blocks, np.uint8, self.info.block_bytes)
        q = np.empty((len(blocks), self.n), np.int8)
        q[:, self.positions] = self.codes[self.states(blocks)]
        offset = np.full(len(blocks), self.info.trellis_offset, np.float32)
        return q, e5m3_to_float32(blocks[:, 0]), offset

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """Dequantize blocks, uint8 (n_blocks, block_bytes), to weights, float32 (n_blocks, n), rotated back."""
        q, d, offset = self.unpack(blocks)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf scales give NaN weights, as in C
            return rotate_back(d[:, None] * (q.astype(np.float32) - offset[:, None]))

    def pack(self, states: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Pack the states by step, int64 (n_blocks, n), and the bytes of the scales, uint8 (n_blocks,).

        A start byte must be able to encode the state before step 0.
        """
        symbols = np.empty(states.shape, np.uint8)
        symbols[:, self.positions] = states & (1 << self.k) - 1
        order = np.argsort(self.start_states(np.arange(N_STARTS)))
        start = order[states[:, 0] >> self.k].astype(np.uint8)
        head = [d[:, None], start[:, None]]
        if self.k == 4:
            nibbles = symbols.reshape(len(symbols), 4, 2, self.n // 8) << NIBBLES
            return np.concatenate([*head, np.bitwise_or.reduce(nibbles, axis=2).reshape(len(symbols), self.n // 2)], axis=1)
        return np.concatenate([*head, *pack_bits3(symbols)][: self.k + 1], axis=1)  # K = 2 has no high bits

    def quantize_blocks(
        self, weights: np.ndarray, importance: np.ndarray | None = None, passes: int = 0, metric: Metric | None = None
    ) -> np.ndarray:
        """Encode weights to the bytes that the C encoder writes.

        Args:
            weights: float32 (n_blocks, n). A block with NaN or Inf gets an invalid d, which row validation refuses.
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
                metric = Metric.of_importance(as_blocks(importance, np.float32, self.n).ravel(), self.n)
            is_diagonal = metric is not None and metric.windows is None
            passes = passes or (MAX_PASSES if is_diagonal else 2 if self.n == 256 else 3)
            states, d = np.zeros(x.shape, np.int64), np.zeros(len(x), np.uint8)

            def encode(here: slice, first: int, x: np.ndarray, wish: np.ndarray) -> np.ndarray:
                good = finite[here]
                block = Block(metric, first, x, wish)
                states[here], d[here] = self._encode(block.rows(good), passes, good)
                return np.where(d[here] > 0, e5m3_to_float32(d[here]), np.float32(0))[:, None] * self.values[states[here]]

            encode_rows(metric, x, encode)
        d[~finite] = 0xFF
        return self.pack(states, d)

    def _planes(self, by_state: np.ndarray) -> np.ndarray:
        """Reshape (4096,) to (newest symbol, group)."""
        return np.ascontiguousarray(by_state.reshape(self.n_groups, 1 << self.k).T)

    def search(self, x: np.ndarray, before: np.ndarray | None = None, after: np.ndarray | None = None) -> np.ndarray:
        """Find the path of least squared error (Viterbi), as trellis_search() of encode/trellis-search.h does.

        Args:
            x: targets in units of d, float32 (n, steps).
            before: states before the first step, int64 (n,); None: any that a start byte can encode.
            after: last states without their oldest symbol, int64 (n,); None: any.

        Returns:
            States, int64 (n, steps).
        """
        n, steps = x.shape
        symbols, groups = 1 << self.k, self.n_groups
        unit = np.float32(self.info.trellis_unit)
        fixed = (self.values * unit).astype(np.int32)
        planes, rows = self._planes(fixed), np.arange(n)
        x = np.where(x > MAX_UNITS, MAX_UNITS, np.where(x > -MAX_UNITS, x, -MAX_UNITS))
        x = (x * unit + np.float32(32768.5)).astype(np.int32) - 32768
        least = np.full((steps + 1, n, groups), NONE, np.uint16)
        if before is None:
            least[0, :, :N_STARTS] = 0
        else:
            least[0, rows, before & groups - 1] = 0
        for t in range(steps):
            e = x[:, t, None, None] - planes
            cost = (least[t][:, None] + (e * e >> 16)).reshape(n, symbols, symbols, groups // symbols).min(axis=2)
            if t % 2 or t < 12 // self.k - 1:
                cost = np.minimum(cost - cost.min(axis=(1, 2), keepdims=True), NONE)
            least[t + 1] = cost.transpose(0, 2, 1).reshape(n, groups)
        states = np.empty((n, steps), np.int64)
        after = least[steps].argmin(axis=1) if after is None else after
        for t in range(steps - 1, -1, -1):
            candidates = after[:, None] + np.arange(symbols) * groups
            e = x[:, t, None] - fixed[candidates]
            cost = least[t][rows[:, None], candidates >> self.k] + (e * e >> 16)
            states[:, t] = candidates[rows, cost.argmin(axis=1)]
            after = states[:, t] >> self.k
        return states

    def search_feedback(self, block: Block, d: np.ndarray) -> np.ndarray:
        """Search the states of a block of each row with error feedback, under scales d (rows,), as trellis_search_feedback() in C does."""
        metric, states, wish = block.known_metric, np.empty(block.x.shape, np.int64), block.wish.copy()
        S, inverse = metric.segment, (np.float32(1) / d)[:, None]
        ahead = 24 if S < 16 else 16 if metric.windows else S
        for s in range(0, self.n, S):
            z = wish[:, s : s + S + ahead] * inverse
            segment = self.search(z, states[:, s - 1] if s else None)[:, :S]
            states[:, s : s + S] = segment
            errors = block.x[:, s : s + S] - d[:, None] * self.values[segment]
            metric.feed_later(block.first, s, errors, wish)
        return states

    def _excess(self, block: Block, d: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Return how far the error exceeds ODD_FED, float32 (rows,), as trellis_excess() in C does."""
        value = d[:, None] * self.values[states]
        r = block.wish - value
        block.known_metric.feed_block(block.first, block.x - value, r)
        z = value + r
        return sum_lanes(r * r) - ODD_FED[self.n] * np.float32(self.info.usual_rel_mse) * sum_lanes(z * z)

    def _improve(self, block: Block, d: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Search the states of the rows again in windows, under scales d (rows,), as trellis_improve() in C does."""
        if not len(d):
            return states
        metric, states, scale, inverse = block.known_metric, states.copy(), d[:, None], (np.float32(1) / d)[:, None]
        assert metric.windows is not None
        form, windows = metric.blocks[block.first // self.n], metric.windows[block.first // self.n]
        g = form_times(form, metric.aim(block.first, block.x, block.wish) - scale * self.values[states])
        for i, s in enumerate(range(0, self.n - WINDOW // 2, WINDOW // 2)):
            here, end = slice(s, s + WINDOW), s + WINDOW
            old = self.values[states[:, here]]
            z = old + form_times(windows[i], g[:, here]) * inverse
            window = self.search(
                z, states[:, s - 1] if s else None, states[:, end - 1] & self.n_groups - 1 if end < self.n else None
            )
            change = scale * (self.values[window] - old)
            terms = change * (np.float32(0.5) * form_times(form[here, here], change) - g[:, here])
            cost = np.zeros_like(d)
            for j in range(WINDOW):
                cost += terms[:, j]
            better = np.flatnonzero(cost < 0)
            for j in range(WINDOW):
                g[better] -= form[s + j] * change[better, j, None]
            states[better, here] = window[better]
        return states

    def _encode(self, block: Block, passes: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode a block of each row, as trellis_encode() of encode/trellis.c does.

        Args:
            block: the rows to encode.
            passes: scale candidates.
            rows: bool (n_rows,), True for the rows that block has.

        Returns:
            States (n_rows, n) and bytes of the scales (n_rows,), zero for rows that are not in block.
        """
        n, metric = len(block.x), block.metric
        error, _ = block.cost()
        best_d, best_states = np.zeros(n, np.uint8), np.zeros((n, self.n), np.int64)
        energy = sum_lanes(block.wish * block.wish)
        bell = self.odd * energy
        first = np.sqrt(energy * np.float32(1 / self.n)) / self.rms
        tried = np.zeros((n, 256), bool)

        def try_scale(active: np.ndarray, d: np.ndarray, feed_back: bool) -> tuple[np.ndarray, np.ndarray]:
            """Encode the rows `active` under the scales d. Return the best scales for the resulting states, and the squared errors."""
            scale, here = e5m3_to_float32(d.astype(np.uint8)), block.rows(active)
            if feed_back:
                states = self.search_feedback(here, scale)
            else:
                states = self.search(here.wish * (np.float32(1) / scale)[:, None])
            v = self.values[states]
            e = here.wish - scale[:, None] * v
            cost, step = here.cost(v, scale)
            better = cost < error[active]
            error[active[better]] = cost[better]
            best_d[active[better]] = d[better]
            best_states[active[better]] = states[better]
            return scale + step, sum_lanes(e * e)

        def next_scales(active: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            d = _next_scale(scales[active], tried[active])
            return active[d > 0], d[d > 0]

        aim, excess, active = first * np.float32(self.info.trellis_gain), np.zeros(n, np.float32), np.arange(n)
        base = np.zeros(n, np.int64)  # the best scale so far
        has_hessian = metric is not None and metric.windows is not None
        if metric is not None and not has_hessian:
            searched, d = next_scales(active, aim)
            if len(searched):
                aim[searched], excess[searched] = try_scale(searched, d, False)
        for _ in range(passes):
            d = _next_scale(aim[active], tried[active])
            d = np.where((d < 0) & (base[active] > 0), _scale_beside(base[active], tried[active]), d)
            active, d = active[d > 0], d[d > 0]
            if not len(active):
                break
            best_scales, _ = try_scale(active, d, metric is not None)
            tried[active, d] = True
            better = (base[active] == 0) | (best_d[active] == d)
            base[active[better]], aim[active[better]] = d[better], best_scales[better]
        if has_hessian:
            excess, bell = self._excess(block, e5m3_to_float32(best_d), best_states), np.zeros_like(bell)
        top = np.abs(self.values).max()
        for odd in (*(np.float32(f) * first for f in ODD_FACTORS), np.abs(block.x).max(axis=1, initial=0) / top):
            active, d = next_scales(np.flatnonzero((error if metric is None else excess) > bell), odd)
            if len(active):
                try_scale(active, d, metric is not None)
                tried[active, d] = True
        if has_hessian:
            here = np.flatnonzero(best_d)
            best_states[here] = self._improve(block.rows(here), e5m3_to_float32(best_d[here]), best_states[here])
        all_d, all_states = np.zeros(len(rows), np.uint8), np.zeros((len(rows), self.n), np.int64)
        all_d[rows], all_states[rows] = best_d, best_states
        return all_states, all_d


@dataclass(frozen=True)
class Block:
    """One block of many rows: struct trellis_block of encode/trellis.c."""

    metric: Metric | None
    first: int  # step of the row at which the block begins
    x: np.ndarray  # float32 (n_rows, n), rotated, by step
    wish: np.ndarray  # x corrected for the errors of the row's earlier blocks

    @property
    def known_metric(self) -> Metric:
        """The metric, where error feedback needs one."""
        assert self.metric is not None
        return self.metric

    def rows(self, which: np.ndarray) -> Block:
        return Block(self.metric, self.first, self.x[which], self.wish[which])

    def cost(self, v: np.ndarray | None = None, d: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the cost of the values d*v, or of zeros, and the best change of d, as trellis_cost() does."""
        step, e, r = None, self.x, self.wish
        if v is not None and d is not None:
            e, r = e - d[:, None] * v, r - d[:, None] * v
        r = r.copy()
        if self.metric is not None:
            self.metric.feed_block(self.first, e, r)
        if v is not None and d is not None:
            b = form = v
            if self.metric is not None:
                b = v.copy()
                self.metric.feed_block(self.first, v, b)
                form = self.metric.apply_forms(self.first, b)
            vv = sum_lanes(b * form)
            step = np.where(vv > 0, sum_lanes(r * form) / vv, -d)
        return sum_lanes(r * (r if self.metric is None else self.metric.apply_forms(self.first, r))), step


def _next_scale(aim: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Choose the byte of the scale to try next, int64 (n,), or -1, as trellis_next_scale() does."""
    values = e5m3_to_float32(np.arange(LAST_SCALE + 1, dtype=np.uint8))
    below = np.maximum(np.searchsorted(values, aim, side="right") - 1, 0)
    lo = np.where(aim < values[-1], below, LAST_SCALE)
    up = np.minimum(lo + 1, LAST_SCALE)
    up_first = values[up] - aim < aim - values[lo]
    choice = np.full(len(aim), -1)
    for d in np.where(up_first, lo, up), np.where(up_first, up, lo):  # the nearer one last: it wins
        free = (d > 0) & ~tried[np.arange(len(d)), d]
        choice[free] = d[free]
    return choice


def _scale_beside(scale: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Choose a byte next to that of the scale, int64 (n,), or -1, as trellis_scale_beside() does."""
    choice = np.full(len(scale), -1)
    for d, allowed in (scale - 1, scale > 1), (scale + 1, scale < LAST_SCALE):  # the larger one last: it wins
        free = allowed & ~tried[np.arange(len(d)), d]
        choice[free] = d[free]
    return choice


REFERENCES = {name: Trellis(info) for name, info in WEIGHT_TYPES.items() if info.trellis_values}
