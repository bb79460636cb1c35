"""Global and shared memory of a launch, with checks of every access.

An access outside all buffers or a misaligned one raises Fault. `problems` collects what may give the right result by luck, with the first
instruction of each kind: uninitialized reads, races, ld.global.nc of data that the launch writes, and access before griddepcontrol.wait.
Uninitialized memory holds noise, so a result that depends on it changes with the seed.
    """

from __future__ import annotations

import numpy as np

WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHARED, LOCAL = 1 << 62, 1 << 61  # start of the generic addresses of these spaces
ALIGNMENT = 256  # alignment of cudaMalloc()
NOBODY, MANY = -1, -2  # in place of a thread or warp


class Fault(Exception):
    """An error at which a GPU would stop."""


def as_words(array: np.ndarray, size: int) -> np.ndarray:
    """View bytes as words of 1, 2, 4 or 8 bytes, or as rows of 8-byte words for 16 and 32; index the result by address / size."""
    return array.view(WORD[size]) if size <= 8 else array.view(np.uint64).reshape(-1, size // 8)


def all_ones(size: int) -> int:
    """Return the word that as_words gives where all flags of an access are set."""
    return int.from_bytes(b"\1" * min(size, 8), "little")


def noise(size: int, seed: int) -> np.ndarray:
    return np.resize(np.random.default_rng(seed).integers(0, 256, 8191, dtype=np.uint8), size)


class GlobalMemory:
    """Buffers at multiples of 256 bytes. Addresses are those of host memory, so that host code can write there too."""

    def __init__(self, size: int = 1 << 23, seed: int = 0):
        storage = noise(size + ALIGNMENT, seed)
        first = -storage.ctypes.data % ALIGNMENT
        self.bytes = storage[first:first + size]
        self.base = self.bytes.ctypes.data
        self.live, self.written = np.zeros(size, bool), np.zeros(size, bool)
        self.writer = np.full(size, NOBODY, np.int32)  # thread of the launch
        self.top = ALIGNMENT
        self.begin_launch()

    def begin_launch(self) -> None:
        self.first, self.last = len(self.bytes), 0  # bounds of what the launch has written
        self.writer[:self.top] = NOBODY

    def alloc(self, size: int, data: np.ndarray | bytes | None = None) -> int:
        """Allocate a buffer and return its address, a multiple of 256."""
        index = self.top
        self.top = (index + size + 2 * ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if self.top > len(self.bytes):
            raise MemoryError(f"{size} bytes")
        self.live[index:index + size] = True
        if data is not None:
            raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            self.bytes[index:index + len(raw)] = raw
            self.written[index:index + len(raw)] = True
        return self.base + index

    def read(self, address: int, dtype, shape) -> np.ndarray:
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[address - self.base:][:n].view(dtype).reshape(shape).copy()

    def mark_written(self, address: int, size: int) -> None:
        self.written[address - self.base:][:size] = True

    def locate(self, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of addresses and which of them are outside all buffers."""
        index = address - self.base
        inside = (index >= 0) & (index + size <= len(self.bytes))
        safe = np.where(inside, index, 0)
        return index, ~(inside & self.live[safe] & self.live[np.minimum(safe + size - 1, len(self.live) - 1)])

    def load(self, index: np.ndarray, size: int, threads: np.ndarray, block_size: int, no_coherence: bool, problems: dict[str, str], text: str) -> np.ndarray:
        if not (as_words(self.written.view(np.uint8), size)[index // size] == all_ones(size)).all():
            problems.setdefault("reads bytes that nobody wrote", text)
        if self.first < self.last and ((index + size > self.first) & (index < self.last)).any():
            writers = self.writer[index]
            if ((writers >= 0) & (writers // block_size != threads // block_size)).any():
                problems.setdefault("reads what another block wrote", text)
            if no_coherence and (writers >= 0).any():
                problems.setdefault("ld.global.nc of what this launch wrote", text)
        return as_words(self.bytes, size)[index // size]

    def store(self, index: np.ndarray, size: int, threads: np.ndarray, raw: np.ndarray, problems: dict[str, str], text: str) -> None:
        """Write raw, uint8 (threads, size)."""
        span = index[:, None] + np.arange(size)
        writers = self.writer[span]
        if ((writers >= 0) & (writers != threads[:, None])).any() or len(np.unique(index)) != len(index):
            problems.setdefault("two threads write one place", text)
        self.bytes[span], self.written[span], self.writer[span] = raw, True, threads[:, None]
        self.first, self.last = min(self.first, int(index.min())), max(self.last, int(index.max()) + size)


class SharedMemory:
    """The shared memory of all blocks of a launch, one after the other.

    Races are detected per word of four bytes. Two accesses of different threads conflict unless a bar.sync lies between them, or a
    bar.warp.sync if both threads are in one warp.
    """

    def __init__(self, size: int, n_blocks: int, n_threads: int, seed: int):
        self.size = (size + 15) // 16 * 16
        total = max(self.size * n_blocks, 16)
        self.bytes, self.written = noise(total, seed), np.zeros(total, bool)
        words = total // 4
        self.epoch = np.zeros(n_threads, np.int32)       # barriers that each thread has passed
        self.warp_epoch = np.zeros(n_threads, np.int32)  # warp barriers that each thread has passed
        filled = lambda value: np.full(words, value, np.int32)  # noqa: E731
        self.w_thread, self.w_epoch, self.w_warp_epoch = filled(NOBODY), filled(NOBODY), filled(NOBODY)
        self.r_thread, self.r_warp, self.r_epoch, self.r_warp_epoch = filled(NOBODY), filled(NOBODY), filled(NOBODY), filled(NOBODY)

    def ordered(self, warp: np.ndarray, epoch: np.ndarray, warp_epoch: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Return bool (threads, words): whether a barrier lies between the recorded accesses and those of the threads now."""
        same_warp = warp == (threads // 32)[:, None]
        return (epoch < self.epoch[threads][:, None]) | (same_warp & (warp_epoch < self.warp_epoch[threads][:, None]))

    def conflicts_with_write(self, words: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Return whether another thread has written there since the last barrier."""
        writer = self.w_thread[words]
        return (writer >= 0) & (writer != threads[:, None]) & ~self.ordered(writer // 32, self.w_epoch[words], self.w_warp_epoch[words], threads)

    def conflicts_with_read(self, words: np.ndarray, threads: np.ndarray) -> np.ndarray:
        reader = self.r_thread[words]
        return (reader != NOBODY) & (reader != threads[:, None]) & ~self.ordered(self.r_warp[words], self.r_epoch[words], self.r_warp_epoch[words],
                                                                                 threads)

    def word_indices(self, index: np.ndarray, size: int, text: str) -> np.ndarray:
        if size < 4:
            raise NotImplementedError(f"shared memory access of less than a word: {text}")
        return index[:, None] // 4 + np.arange(size // 4)

    def load(self, index: np.ndarray, size: int, threads: np.ndarray, problems: dict[str, str], text: str) -> np.ndarray:
        words = self.word_indices(index, size, text)
        if self.conflicts_with_write(words, threads).any():
            problems.setdefault("race, read after write", text)
        if not (as_words(self.written.view(np.uint8), 4)[words] == 0x01010101).all():
            problems.setdefault("reads bytes that nobody wrote", text)
        self.record_read(words, threads)
        return as_words(self.bytes, size)[index // size]

    def record_read(self, words: np.ndarray, threads: np.ndarray) -> None:
        """Record the readers since the last barrier: one thread or several, of one warp or several."""
        epoch, warp, thread = self.epoch[threads][:, None], (threads // 32)[:, None], threads[:, None]
        for record, own in ((self.r_thread, thread), (self.r_warp, warp)):
            others = (self.r_epoch[words] == epoch) & (record[words] != own)
            record[words] = new = np.where(others, MANY, own)
            # if several of these threads read one word, only the last one's entry was stored
            record[words] = np.where(record[words] != new, MANY, record[words])
        self.r_epoch[words] = epoch
        self.r_warp_epoch[words] = self.warp_epoch[threads][:, None]

    def store(self, index: np.ndarray, size: int, threads: np.ndarray, raw: np.ndarray, problems: dict[str, str], text: str) -> None:
        words = self.word_indices(index, size, text)
        new = np.ascontiguousarray(raw).view(np.uint32).reshape(len(index), -1)
        memory = as_words(self.bytes, 4)
        if (self.conflicts_with_write(words, threads) & (memory[words] != new)).any():
            problems.setdefault("race, two writes", text)
        if self.conflicts_with_read(words, threads).any():
            problems.setdefault("race, write after read", text)
        memory[words] = new
        if (memory[words] != new).any():
            problems.setdefault("two threads write one place of shared memory", text)
        as_words(self.written.view(np.uint8), 4)[words] = 0x01010101
        self.w_thread[words], self.w_epoch[words] = threads[:, None], self.epoch[threads][:, None]
        self.w_warp_epoch[words] = self.warp_epoch[threads][:, None]
