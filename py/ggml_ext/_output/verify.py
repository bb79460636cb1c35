"""Verify the output before it is renamed (--verify): read it back from the disk, and run one token with llama.cpp."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.threads import map_in_order
from .._encode.accuracy import Accuracy
from .._encode.compare import FileTensor, compare_tensors
from .._encode.encode_tensor import Mapper
from .._encode.tensor_calibration import TensorCalibration
from .._formats.chunks import row_chunks
from .._formats.gguf_file import GGUFFile, Tensor
from .._native.graph import find_run_error
from .conversion import Conversion
from .output import Output

# Relative rounding error of a sum of 2**19 squares that is split differently: below 2**19 * 2**-53.
SUMS_DIFFER = 2.0**-33


def verify(output: Output, headers: Sequence[bytes], conversion: Conversion, console: Console) -> None:
    """Compare the file with the checksums, and the errors of the decoded weights with those measured during encoding.

    Raises:
        UserError: a tensor differs; the message names the first.
    """
    pool = ThreadPoolExecutor(conversion.n_threads)
    map_items = partial(map_in_order, pool, n_ahead=2 * conversion.n_threads)
    try:
        with console.bar("verify", conversion.plan.n_elements(), "w", is_scaled=True) as bar:
            for part, header in zip(output.parts, headers, strict=True):
                drop_from_cache(part.partial)
                with open(part.partial, "rb") as f:
                    if f.read(len(header)) != header:
                        raise _make_error(output, "the header")
                file = GGUFFile(part.partial)
                for i, tensor in enumerate(file.tensors, part.first):
                    _verify_tensor(output, conversion, FileTensor(file, tensor), i, map_items)
                    bar.update(tensor.n_elements)
    finally:
        pool.shutdown(cancel_futures=True)


def _verify_tensor(output: Output, conversion: Conversion, stored: FileTensor, i: int, map_items: Mapper) -> None:
    """Verify tensor i of the plan."""
    planned, finished = conversion.plan.tensors[i], output.finished[i]
    expected = planned.name, planned.tensor.ne, planned.type
    if (stored.tensor.name, stored.tensor.ne, stored.tensor.type) != expected or hash_data(stored.file, stored.tensor) != finished.sha256:
        raise _make_error(output, f"tensor {planned.name}")
    accuracy = compare_tensors(stored, FileTensor(conversion.file, planned.tensor), conversion.codec, TensorCalibration(), map_items)
    if not is_same(accuracy, finished.accuracy):
        raise _make_error(output, f"the decoded tensor {planned.name}")


def _make_error(output: Output, part: str) -> UserError:
    return UserError(
        f"--verify: {part} differs from what was written, so disk or memory is faulty; {output.path} was not written. "
        "Check the hardware and run it again"
    )


def is_same(a: Accuracy, b: Accuracy) -> bool:
    return a.max_abs == b.max_abs and math.isclose(a.error, b.error, rel_tol=SUMS_DIFFER)


def hash_data(file: GGUFFile, tensor: Tensor) -> str:
    """Return the SHA-256 of the data of a tensor."""
    digest = hashlib.sha256()
    for first, n_rows in row_chunks(tensor):
        digest.update(file.rows(tensor, first, n_rows).data)
    return digest.hexdigest()


def drop_from_cache(path: Path) -> None:
    """Drop a file from the page cache, so that it is read from the disk."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_once(output: Output, source: GGUFFile, console: Console) -> bool:
    """Run one token. Return False if the source does not run either; UserError if the output alone fails."""
    reason = find_run_error([part.partial for part in output.parts])
    if reason is None:
        return True
    source.complete("ggml-ext-graph")
    if find_run_error([part.path for part in source.parts]) is None:
        raise UserError(
            f"--verify: {output.path} does not run where {source.path} does, and was not written: {reason}; drop --tensor-type, or "
            "report this"
        )
    console.note(f"--verify: cannot run a token: {source.path} does not run either: {reason}")
    return False
