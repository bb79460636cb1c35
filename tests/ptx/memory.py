"""Global and shared memory of a launch, with everything that can be wrong with an access.

An access that is outside of all buffers or misaligned raises Fault. What gives right results by luck is noted in `problems`, each kind with
the first instruction: bytes that nobody wrote, races, ld.global.nc of what the launch itself wrote, memory touched before
griddepcontrol.wait. Memory that nobody wrote holds noise, so that a result that depends on it is another one with another noise.
"""

from __future__ import annotations

import numpy as np

WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHARED, LOCAL = 1 << 62, 1 << 61  # where generic addresses of those spaces begin
ALIGNMENT = 256  # of cudaMalloc()
NOBODY, MANY = -1, -2  # no thread or warp, several of them


class Fault(Exception):
    """What a GPU would stop at."""


def wide(array: np.ndarray, size: int) -> np.ndarray:
    """Bytes as words of 1, 2, 4 or 8 bytes, or as rows of 8 for 16 and 32; indexed by an address over the size."""
    return array.view(WORD[size]) if size <= 8 else array.view(np.uint64).reshape(-1, size // 8)


def all_ones(size: int) -> int:
    """A word of bytes that are 1, as `wide` gives them where all flags of an access are set."""
    return int.from_bytes(b"\1" * min(size, 8), "little")


def noise(size: int, seed: int) -> np.ndarray:
    return np.resize(np.random.default_rng(seed).integers(0, 256, 8191, dtype=np.uint8), size)


class GlobalMemory:
    """Buffers at multiples of 256 with nothing between them. Addresses are those of host memory, so host code can write there too."""

    def __init__(self, size: int = 1 << 23, seed: int = 0):
        room = noise(size + ALIGNMENT, seed)
        first = -room.ctypes.data % ALIGNMENT
        self.bytes = room[first:first + size]
        self.base = self.bytes.ctypes.data
        self.live, self.written = np.zeros(size, bool), np.zeros(size, bool)
        self.writer = np.full(size, NOBODY, np.int32)  # thread of the launch
        self.top = ALIGNMENT
        self.begin_launch()

    def begin_launch(self) -> None:
        self.first, self.last = len(self.bytes), 0  # what the launch has written lies between them
        self.writer[:self.top] = NOBODY

    def alloc(self, size: int, data: np.ndarray | bytes | None = None) -> int:
        """The address of a buffer of that many bytes, a multiple of 256."""
        at = self.top
        self.top = (at + size + 2 * ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if self.top > len(self.bytes):
            raise MemoryError(f"{size} bytes")
        self.live[at:at + size] = True
        if data is not None:
            raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            self.bytes[at:at + len(raw)] = raw
            self.written[at:at + len(raw)] = True
        return self.base + at

    def read(self, address: int, dtype, shape) -> np.ndarray:
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[address - self.base:][:n].view(dtype).reshape(shape).copy()

    def wrote(self, address: int, size: int) -> None:
        self.written[address - self.base:][:size] = True

    def locate(self, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the addresses, and which of them are not inside of a buffer."""
        at = address - self.base
        inside = (at >= 0) & (at + size <= len(self.bytes))
        safe = np.where(inside, at, 0)
        return at, ~(inside & self.live[safe] & self.live[np.minimum(safe + size - 1, len(self.live) - 1)])

    def load(self, at: np.ndarray, size: int, threads: np.ndarray, block_size: int, no_coherence: bool, problems: dict[str, str], text: str) -> np.ndarray:
        if not (wide(self.written.view(np.uint8), size)[at // size] == all_ones(size)).all():
            problems.setdefault("reads bytes that nobody wrote", text)
        if self.first < self.last and ((at + size > self.first) & (at < self.last)).any():
            w = self.writer[at]
            if ((w >= 0) & (w // block_size != threads // block_size)).any():
                problems.setdefault("reads what another block wrote", text)
            if no_coherence and (w >= 0).any():
                problems.setdefault("ld.global.nc of what this launch wrote", text)
        return wide(self.bytes, size)[at // size]

    def store(self, at: np.ndarray, size: int, threads: np.ndarray, raw: np.ndarray, problems: dict[str, str], text: str) -> None:
        """raw: uint8 (threads, size)."""
        span = at[:, None] + np.arange(size)
        w = self.writer[span]
        if ((w >= 0) & (w != threads[:, None])).any() or len(np.unique(at)) != len(at):
            problems.setdefault("two threads write one place", text)
        self.bytes[span], self.written[span], self.writer[span] = raw, True, threads[:, None]
        self.first, self.last = min(self.first, int(at.min())), max(self.last, int(at.max()) + size)


class SharedMemory:
    """That of all blocks of a launch, one after the other. Races are found between words of four bytes: an access conflicts with an
    earlier one by another thread if no bar.sync lies between them, nor bar.warp.sync where both threads are of one warp."""

    def __init__(self, size: int, n_blocks: int, n_threads: int, seed: int):
        self.size = (size + 15) // 16 * 16
        total = max(self.size * n_blocks, 16)
        self.bytes, self.written = noise(total, seed), np.zeros(total, bool)
        words = total // 4
        self.epoch = np.zeros(n_threads, np.int32)       # of each thread's block: how often it met at a barrier
        self.warp_epoch = np.zeros(n_threads, np.int32)  # how often its warp did
        make = lambda value: np.full(words, value, np.int32)  # noqa: E731
        self.w_thread, self.w_epoch, self.w_warp_epoch = make(NOBODY), make(NOBODY), make(NOBODY)
        self.r_thread, self.r_warp, self.r_epoch, self.r_warp_epoch = make(NOBODY), make(NOBODY), make(NOBODY), make(NOBODY)

    def ordered(self, warp: np.ndarray, epoch: np.ndarray, warp_epoch: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Whether a barrier lies between accesses of those warps at those times and the threads' now; (threads, words) of all."""
        same_warp = warp == (threads // 32)[:, None]
        return (epoch < self.epoch[threads][:, None]) | (same_warp & (warp_epoch < self.warp_epoch[threads][:, None]))

    def after_write(self, words: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Whether another thread has written there with no barrier since."""
        writer = self.w_thread[words]
        return (writer >= 0) & (writer != threads[:, None]) & ~self.ordered(writer // 32, self.w_epoch[words], self.w_warp_epoch[words], threads)

    def after_read(self, words: np.ndarray, threads: np.ndarray) -> np.ndarray:
        reader = self.r_thread[words]
        return (reader != NOBODY) & (reader != threads[:, None]) & ~self.ordered(self.r_warp[words], self.r_epoch[words], self.r_warp_epoch[words],
                                                                                 threads)

    def words(self, at: np.ndarray, size: int, text: str) -> np.ndarray:
        if size < 4:
            raise NotImplementedError(f"shared memory in parts of words: {text}")
        return at[:, None] // 4 + np.arange(size // 4)

    def load(self, at: np.ndarray, size: int, threads: np.ndarray, problems: dict[str, str], text: str) -> np.ndarray:
        words = self.words(at, size, text)
        if self.after_write(words, threads).any():
            problems.setdefault("race, read after write", text)
        if not (wide(self.written.view(np.uint8), 4)[words] == 0x01010101).all():
            problems.setdefault("reads bytes that nobody wrote", text)
        self.record_read(words, threads)
        return wide(self.bytes, size)[at // size]

    def record_read(self, words: np.ndarray, threads: np.ndarray) -> None:
        """Who has read since the last barrier: a thread, or several, and those of one warp, or of several."""
        epoch, warp, me = self.epoch[threads][:, None], (threads // 32)[:, None], threads[:, None]
        for record, mine in ((self.r_thread, me), (self.r_warp, warp)):
            others = (self.r_epoch[words] == epoch) & (record[words] != mine)
            record[words] = new = np.where(others, MANY, mine)
            # where several of these threads read one word, the last one's entry is there
            record[words] = np.where(record[words] != new, MANY, record[words])
        self.r_epoch[words] = epoch
        self.r_warp_epoch[words] = self.warp_epoch[threads][:, None]

    def store(self, at: np.ndarray, size: int, threads: np.ndarray, raw: np.ndarray, problems: dict[str, str], text: str) -> None:
        words = self.words(at, size, text)
        new = np.ascontiguousarray(raw).view(np.uint32).reshape(len(at), -1)
        memory = wide(self.bytes, 4)
        if (self.after_write(words, threads) & (memory[words] != new)).any():
            problems.setdefault("race, two writes", text)
        if self.after_read(words, threads).any():
            problems.setdefault("race, write after read", text)
        memory[words] = new
        if (memory[words] != new).any():
            problems.setdefault("two threads write one place of shared memory", text)
        wide(self.written.view(np.uint8), 4)[words] = 0x01010101
        self.w_thread[words], self.w_epoch[words] = threads[:, None], self.epoch[threads][:, None]
        self.w_warp_epoch[words] = self.warp_epoch[threads][:, None]
