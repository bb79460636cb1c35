"""Streams the tensors: row chunks through worker threads, in order, into the output (output.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType
from tqdm import tqdm

from .._base.threads import map_in_order
from .._encode.accuracy import Accuracy
from .._encode.codec import Codec, Guide
from .._formats.chunks import row_chunks
from .._formats.gguf_file import GGUFFile, Tensor, row_bytes
from .._importance.importance import Importance
from .._plan.plan import Plan

if TYPE_CHECKING:
    from .output import Output


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


def write_with_bar(
    output: Output, file: GGUFFile, plan: Plan, codec: Codec, importance: Importance, n_threads: int, title: str, show_bar: bool,
    begun: Callable[[int], None], ended: Callable[[int], None], fallback_above: float | None = None,
) -> list[Accuracy]:
    """write_tensors() under a progress bar that begins where an earlier run stopped. begun, ended: called with a tensor's index."""
    n_done = sum(t.n_elements for t in plan.tensors[: len(output.finished)])
    with tqdm(total=plan.n_elements(), unit="w", unit_scale=True, desc=title, disable=not show_bar, initial=n_done) as bar:
        return write_tensors(output, file, plan, codec, importance, n_threads, begun, bar.update, ended, fallback_above)
