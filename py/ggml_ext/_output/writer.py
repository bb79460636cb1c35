"""Write the tensors: encode them with worker threads and stream their rows, in order, into the output (output.py)."""

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
    """Write the data of the tensors that the output lacks; their errors are in output.finished.

    A tensor whose error is too large is written again in its type's fallback, which the plan holds then.

    Args:
        output: holds what an earlier run finished.
        conversion: the model and its plan.
        console: gets the progress bar, which starts where an earlier run stopped.
        title: of the bar.
        before: called with the index of each tensor before it is written.
        after: called with it when the tensor is finished.

    Raises:
        UserError: a tensor holds weights that cannot be stored.
    """
    tensors, importance = conversion.plan.tensors, conversion.importance
    n_finished = len(output.finished)
    for finished in output.finished:  # by an earlier run
        if finished.type != tensors[finished.tensor].type.name:
            tensors[finished.tensor].replace_inaccurate()
        importance.warnings += finished.warnings
    n_done = sum(t.tensor.n_elements for t in tensors[:n_finished])
    pool = ThreadPoolExecutor(conversion.n_threads)
    propagation = conversion.propagation if n_finished < len(tensors) else None
    if propagation:
        propagation.open()
    with console.bar(title, conversion.plan.n_elements(), "w", is_scaled=True, done=n_done) as bar:
        writer = _Writer(output, conversion, pool, bar)
        try:
            if propagation:
                positions = {t.name: i for i, t in enumerate(tensors)}
                propagation.start(lambda name: output.data_of(positions[name]), bar)
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
        """Write a tensor in its planned type or, if its error is too large, in the fallback."""
        self.output.start(i)
        accuracy, limit = self._encode(planned), self.conversion.fallback_above
        if limit is not None and planned.is_changed and accuracy.exceeds_usual(planned.type, limit):
            planned.replace_inaccurate()
            self.bar.update(-planned.tensor.n_elements)
            self.output.start(i)  # the fallback has more bytes
            accuracy = self._encode(planned)
        return accuracy

    def _encode(self, planned: PlannedTensor) -> Accuracy:
        conversion, tensor = self.conversion, planned.tensor
        if conversion.propagation and conversion.propagation.covers(planned):
            encoded = conversion.propagation.take(planned)
            self.output.write(encoded.data)
            return encoded.accuracy

        def store(first_row: int, data: np.ndarray) -> None:
            self.output.write(data)
            self.bar.update(len(data) * tensor.ne[0])

        return encode_tensor(
            SourceTensor(conversion.file, tensor, conversion.codec),
            planned.type,
            conversion.importance.calibrate(planned, planned.type, conversion.codec, self.cache),
            run=partial(map_in_order, self.pool, n_ahead=2 * conversion.n_threads),
            store=store,
        )
