"""Streams the tensors: row chunks through worker threads, in order, into the output (output.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType

from .._base.console import Bar, Console
from .._base.threads import map_in_order
from .._encode.accuracy import Accuracy
from .._encode.codec import Guide
from .._formats.chunks import row_chunks
from .._formats.gguf_file import Tensor
from .conversion import Conversion
from .output import Output


def write_tensors(
    output: Output, conversion: Conversion, console: Console, title: str, begun: Callable[[int], None], ended: Callable[[int], None]
) -> list[Accuracy]:
    """Writes the data of the tensors that the output lacks, under a progress bar that begins where an earlier run stopped. Calls
    begun(index) before and ended(index) after each.

    A tensor whose error is too large is written again in its type's fallback, which is then in the plan. Returns how far each tensor
    is from its original. UserError if a tensor holds what cannot be stored.
    """
    plan, importance, limit = conversion.plan, conversion.importance, conversion.fallback_above
    n_done = sum(t.n_elements for t in plan.tensors[: len(output.finished)])
    for done in output.finished:  # by an earlier run
        if done.type != plan.types[done.tensor].name:
            plan.replace_inaccurate(done.tensor)
        importance.warnings += done.warnings
    pool = ThreadPoolExecutor(conversion.n_threads)
    propagation = conversion.propagation if len(output.finished) < len(plan.tensors) else None
    if propagation:
        propagation.open()
    with console.bar(title, plan.n_elements(), "w", is_scaled=True, done=n_done) as bar:
        writer = _Writer(output, conversion, pool, bar)
        try:
            if propagation:
                propagation.start(output.data_of, bar)
            for i in range(len(output.finished), len(plan.tensors)):
                began, n_warnings = time.monotonic(), len(importance.warnings)
                tensor, target = plan.tensors[i], plan.types[i]
                begun(i)
                output.start(i)
                accuracy = writer.write(i)
                if limit is not None and target != tensor.type and accuracy.exceeds_usual(target, limit):
                    plan.replace_inaccurate(i)
                    bar.update(-tensor.n_elements)
                    output.start(i)  # the fallback is the longer type
                    accuracy = writer.write(i)
                output.finish(plan.types[i].name, accuracy, time.monotonic() - began, importance.warnings[n_warnings:])
                ended(i)
        finally:
            pool.shutdown(cancel_futures=True)
    return [done.accuracy for done in output.finished]


@dataclass(frozen=True)
class _Writer:
    """Tensors on their way into the output."""

    output: Output
    of: Conversion
    pool: ThreadPoolExecutor
    bar: Bar

    def write(self, i: int) -> Accuracy:
        """All rows of a tensor in its type of the plan."""
        if self.of.propagation and self.of.propagation.covers(i):
            encoded = self.of.propagation.take(i)
            self.output.write(encoded.data)
            return encoded.accuracy
        return self._convert(self.of.plan.tensors[i], self.of.plan.types[i])

    def _convert(self, tensor: Tensor, target: GGMLQuantizationType) -> Accuracy:
        file, codec, importance = self.of.file, self.of.codec, self.of.importance
        guide = importance.guide(tensor) if tensor.name in self.of.plan.importance else Guide()
        guide = importance.with_metrics(guide, tensor, target, codec)
        if codec.needs_codebook(tensor, target):
            guide = replace(guide, codebook=self._find_codebook(tensor, target, guide))

        def convert(chunk: tuple[int, int]):
            return chunk, codec.convert(file.rows(tensor, *chunk), tensor, chunk[0], target, guide)

        n_bytes, accuracy = 0, Accuracy()
        for (first, n_rows), (data, of_chunk) in map_in_order(self.pool, convert, row_chunks(tensor), 2 * self.of.n_threads):
            self.output.write(data)
            n_bytes += data.nbytes
            accuracy += of_chunk
            guide.written(tensor, first + n_rows)
            self.bar.update(n_rows * tensor.ne[0])
        assert n_bytes == tensor.bytes_as(target), tensor.name
        return accuracy

    def _find_codebook(self, tensor: Tensor, target: GGMLQuantizationType, guide: Guide) -> np.ndarray:
        """A first pass over all rows of a tensor, added up in their order."""
        file, codec = self.of.file, self.of.codec

        def weights(chunk: tuple[int, int]):
            return chunk[0], codec.weights(file.rows(tensor, *chunk), tensor, chunk[0], target)

        return codec.codebook(map_in_order(self.pool, weights, row_chunks(tensor), 2 * self.of.n_threads), tensor, guide)
