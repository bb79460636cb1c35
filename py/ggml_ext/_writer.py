"""Streams the tensors: row chunks through worker threads, in order, into the output (_output.py)."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from ._accuracy import Accuracy
from ._encode import Codec, Guide
from ._gguf_file import GGUFFile, Tensor, row_bytes
from ._importance import Importance
from ._plan import Plan, may_be_replaced, replacement_type

if TYPE_CHECKING:
    from ._output import Output

MIB = 1024 * 1024
# Weights a chunk. Each of the 2*threads chunks in flight takes 4 bytes a weight (the numpy encoder some 15 times that):
# large enough that Python's share stays below a percent, small enough for many threads.
CHUNK_WEIGHTS = 1 << 19
# Smaller tensors fall into up to MAX_PARTS equal parts of at most about PART_WEIGHTS, a power of two of them, so that no thread waits
# for the last chunk of a few. Share of the time in which two threads both have one: SmolLM2-135M 75 % with chunks of CHUNK_WEIGHTS
# and 100 % so, the demo's model 50 and 92 %. The parts do not depend on the number of threads, nor do sums over them.
PART_WEIGHTS, MAX_PARTS = 1 << 16, 16
ROWS_TOGETHER = 16  # EXT_ROWS of encode/rows.h


class Stopped(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def takes_signals() -> bool:
    """False in all threads but the main one: Python lets that one alone set handlers, and they are the business of the program
    whose thread it is."""
    return threading.current_thread() is threading.main_thread()


def ignore_signals() -> None:
    """Until stop_on_signals() ends."""
    for n in SIGNALS if takes_signals() else []:
        signal.signal(n, signal.SIG_IGN)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within it SIGINT, SIGTERM and SIGHUP raise Stopped in the main thread; once is enough. In another thread they stay as they
    are."""

    def stop(number: int, _frame) -> None:
        ignore_signals()  # cleaning up takes a moment and must not be cut short
        raise Stopped(number)

    # None: a handler that is not Python's, which could not be set again
    wanted = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)] if takes_signals() else []
    previous = {n: signal.signal(n, stop) for n in wanted}
    try:
        yield
    finally:
        for n, handler in previous.items():
            signal.signal(n, handler)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Within it the signals of stop_on_signals() wait for its end. In another thread they stay as they are."""
    came: list[int] = []
    handlers = {n: h for n in SIGNALS if takes_signals() and callable(h := signal.getsignal(n))}
    for n in handlers:
        signal.signal(n, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)
        if came:
            signal.raise_signal(came[0])


def map_in_order(pool: ThreadPoolExecutor, function: Callable, items: Iterable, n_ahead: int) -> Iterator:
    """Results of function(item) in the order of items, with at most n_ahead of them computed and not yet taken."""
    pending = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= n_ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def row_chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of chunks of up to CHUNK_WEIGHTS weights, at least a row each."""
    parts = min(MAX_PARTS, 1 << (tensor.n_elements // PART_WEIGHTS).bit_length())
    rows = math.ceil(tensor.n_rows / (parts * ROWS_TOGETHER)) * ROWS_TOGETHER
    step = max(1, min(CHUNK_WEIGHTS // tensor.ne[0], rows))
    for first in range(0, tensor.n_rows, step):
        yield first, min(step, tensor.n_rows - first)


def write_tensors(
    output: Output,
    file: GGUFFile,
    plan: Plan,
    codec: Codec,
    importance: Importance,
    n_threads: int,
    started: Callable[[int], None],
    advanced: Callable[[int], None],
    finished: Callable[[int], None],
    fallback_above: float | None = None,
) -> list[Accuracy]:
    """Writes the data of the tensors that the output lacks. Calls started(index) before and finished(index) after
    a tensor, and advanced(weights) after a chunk.

    fallback_above: a tensor whose error is more than this many times its type's usual one is written again in the type's
    fallback, which is then in the plan. Returns how far each tensor is from its original. UserError if a tensor holds what
    cannot be stored.
    """
    pool = ThreadPoolExecutor(n_threads)

    def write(tensor: Tensor, target: GGMLQuantizationType) -> Accuracy:
        guide = importance.guide(tensor) if tensor.name in plan.importance else Guide()
        guide = importance.with_metrics(guide, tensor, target, codec)
        if codec.needs_codebook(tensor, target):
            guide = replace(guide, codebook=_find_codebook(pool, file, tensor, target, codec, guide, 2 * n_threads))

        def convert(chunk: tuple[int, int]):
            return chunk, codec.convert(file.rows(tensor, *chunk), tensor, chunk[0], target, guide)

        n_bytes, accuracy = 0, Accuracy()
        for (first, n_rows), (data, of_chunk) in map_in_order(pool, convert, row_chunks(tensor), 2 * n_threads):
            output.write(data)
            n_bytes += data.nbytes
            accuracy += of_chunk
            file.release(tensor, first + n_rows)
            guide.written(tensor, first + n_rows)
            advanced(n_rows * tensor.ne[0])
        assert n_bytes == row_bytes(target, tensor.ne[0]) * tensor.n_rows, tensor.name
        importance.release(tensor)
        return accuracy

    for done in output.finished:  # by an earlier run
        if done.type != plan.types[done.tensor].name:
            plan.replace_inaccurate(done.tensor)
        importance.warnings += done.warnings
    try:
        for i in range(len(output.finished), len(plan.tensors)):
            began, n_warnings = time.monotonic(), len(importance.warnings)
            tensor, target = plan.tensors[i], plan.types[i]
            started(i)
            output.start(i)
            accuracy = write(tensor, target)
            if fallback_above is not None and target != tensor.type and accuracy.exceeds_usual(target, fallback_above):
                plan.replace_inaccurate(i)
                advanced(-tensor.n_elements)
                output.start(i)  # the fallback is the longer type
                accuracy = write(tensor, plan.types[i])
            output.finish(plan.types[i].name, accuracy, time.monotonic() - began, importance.warnings[n_warnings:])
            finished(i)
    finally:
        pool.shutdown(cancel_futures=True)
    return [done.accuracy for done in output.finished]


def _find_codebook(
    pool: ThreadPoolExecutor,
    file: GGUFFile,
    tensor: Tensor,
    target: GGMLQuantizationType,
    codec: Codec,
    guide: Guide,
    n_ahead: int,
) -> np.ndarray:
    """A first pass over all rows of a tensor, added up in their order."""

    def weights(chunk: tuple[int, int]):
        return chunk, codec.weights(file.rows(tensor, *chunk), tensor, chunk[0], target)

    def chunks():
        for (first, n_rows), rows in map_in_order(pool, weights, row_chunks(tensor), n_ahead):
            yield first, rows
            file.release(tensor, first + n_rows)

    return codec.codebook(chunks(), tensor, guide)


def possible_sizes(plan: Plan, fallback_above: float | None) -> list[dict[str, int]]:
    """Of each tensor the types that it may get, the planned one first, and the bytes of its data in them."""
    out = []
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        is_sure = fallback_above is None or not may_be_replaced(tensor, target)
        types = [target] if is_sure else [target, replacement_type(tensor, target)]
        out.append({q.name: row_bytes(q, tensor.ne[0]) * tensor.n_rows for q in types})
    return out


def tensor_sizes(plan: Plan) -> list[int]:
    """Bytes of the data of each tensor in the types planned."""
    return [row_bytes(q, t.ne[0]) * t.n_rows for t, q in zip(plan.tensors, plan.types, strict=True)]
