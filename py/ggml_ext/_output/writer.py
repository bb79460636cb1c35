"""Encode tensors with worker threads and stream their rows, in order, to the output."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from .._base.console import Bar, Console
from .._base.threads import map_in_order
from .._encode.accuracy import Accuracy
from .._encode.encode_tensor import SourceTensor, encode_tensor
from .._encode.tensor_calibration import MetricCache
from .._plan.plan import PlannedTensor
from .conversion import Conversion
from .output import Output


def write_tensors(
    output: Output, conversion: Conversion, console: Console, *, title: str, before: Callable[[int], None], after: Callable[[int], None]
) -> None:
    """Write the tensors that are not finished; output.finished gets their errors.

    With --fallback-above, a tensor with too large an error is written again in an accurate type, and the plan updated.

    Args:
        output: with the tensors that an interrupted run finished.
        conversion: the model and its plan.
        console: for the progress bar.
        title: of the bar.
        before: called with the index of each tensor before it is written.
        after: called with the index of each tensor when it is finished.

    Raises:
        UserError: a tensor has weights that cannot be stored.
    """
    tensors, importance = conversion.plan.tensors, conversion.importance
    n_finished = len(output.finished)
    for finished in output.finished:
        if finished.type != tensors[finished.tensor].type.name:
            tensors[finished.tensor].replace_inaccurate_type()
        importance.warnings += finished.warnings
    n_done = sum(t.tensor.n_elements for t in tensors[:n_finished])
    pool = ThreadPoolExecutor(conversion.n_threads)
    quantizer = conversion.sequential_quantizer if n_finished < len(tensors) else None
    if quantizer:
        quantizer.open()
    with console.bar(title, conversion.plan.n_elements(), "w", is_scaled=True, done=n_done) as bar:
        writer = _Writer(output, conversion, pool, bar)
        try:
            if quantizer:
                positions = {t.name: i for i, t in enumerate(tensors)}
                quantizer.start(lambda name: output.read_data(positions[name]), bar)
            for i in range(n_finished, len(tensors)):
                started, n_warnings = time.monotonic(), len(importance.warnings)
                before(i)
                accuracy = writer.write(i, tensors[i])
                output.finish(tensors[i].type.name, accuracy, time.monotonic() - started, importance.warnings[n_warnings:])
                after(i)
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Writer:
    """Writes one tensor at a time."""

    output: Output
    conversion: Conversion
    pool: ThreadPoolExecutor
    bar: Bar
    cache: MetricCache = field(default_factory=MetricCache)

    def write(self, i: int, planned: PlannedTensor) -> Accuracy:
        """Write a tensor in its planned type, or in the accurate type if its error is too large."""
        self.output.start(i)
        accuracy, limit = self._encode(planned), self.conversion.fallback_above
        if limit is not None and planned.is_changed and accuracy.exceeds_usual(planned.type, limit):
            planned.replace_inaccurate_type()
            self.bar.update(-planned.tensor.n_elements)
            self.output.start(i)
            accuracy = self._encode(planned)
        return accuracy

    def _encode(self, planned: PlannedTensor) -> Accuracy:
        conversion, tensor = self.conversion, planned.tensor
        if (quantizer := conversion.sequential_quantizer) and quantizer.covers(planned):
            encoded = quantizer.take(planned)
            self.output.write(encoded.data)
            return encoded.accuracy

        def store(first_row: int, data: np.ndarray) -> None:
            self.output.write(data)
            self.bar.update(len(data) * tensor.ne[0])

        return encode_tensor(
            SourceTensor(conversion.file, tensor, conversion.codec),
            planned.type,
            conversion.importance.calibrate(planned, planned.type, conversion.codec, self.cache),
            map_items=partial(map_in_order, self.pool, n_ahead=2 * conversion.n_threads),
            store=store,
        )
