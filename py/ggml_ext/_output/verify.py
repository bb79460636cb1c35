"""--verify: what was written is read from the disk again, before it takes the name OUT."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._encode.accuracy import Accuracy
from .._encode.codec import Guide
from .._encode.compare import compare
from .._formats.chunks import row_chunks
from .._formats.gguf_file import GGUFFile, Tensor
from .conversion import Conversion
from .output import Output

# The same sums of at most 2**19 squares, split at other rows: they differ by less than 2**19 * 2**-53 of their size.
SUMS_DIFFER = 2.0**-33


def verify(output: Output, headers: Sequence[bytes], of: Conversion, console: Console) -> None:
    """Compares every byte with what was written, and the errors of the decoded weights with those found while writing. UserError naming
    the tensor if something differs."""
    pool = ThreadPoolExecutor(of.n_threads)
    try:
        with console.bar("verify", of.plan.n_elements(), "w", is_scaled=True) as bar:
            for part, header in zip(output.parts, headers, strict=True):
                forget(part.partial)
                with open(part.partial, "rb") as f:
                    if f.read(len(header)) != header:
                        raise differs(output, "the header")
                written = GGUFFile(part.partial)
                for stored, i in zip(written.tensors, range(part.first, part.last), strict=True):
                    _verify_tensor(output, of, pool, written, stored, i)
                    bar.update(stored.n_elements)
    finally:
        pool.shutdown(cancel_futures=True)


def _verify_tensor(output: Output, of: Conversion, pool: ThreadPoolExecutor, written: GGUFFile, stored: Tensor, i: int) -> None:
    """stored: tensor i of the plan as `written` has it."""
    tensor, done = of.plan.tensors[i], output.finished[i]
    expected = tensor.name, tensor.ne, of.plan.types[i]
    if (stored.name, stored.ne, stored.type) != expected or digest(written, stored) != done.sha256:
        raise differs(output, f"tensor {tensor.name}")
    found = compare(pool, 2 * of.n_threads, of.codec, written, stored, of.file, tensor, Guide())
    if not same(found, done.accuracy):
        raise differs(output, f"tensor {tensor.name} decodes to other weights: it")


def differs(output: Output, what: str) -> UserError:
    return UserError(
        f"--verify: {what} differs from what was written: the disk or the memory is at fault; {output.path} was not written, "
        "check them and run it again"
    )


def same(a: Accuracy, b: Accuracy) -> bool:
    return a.max_abs == b.max_abs and math.isclose(a.error, b.error, rel_tol=SUMS_DIFFER)


def digest(file: GGUFFile, tensor: Tensor) -> str:
    """SHA-256 of the data of a tensor."""
    found = hashlib.sha256()
    for first, n_rows in row_chunks(tensor):
        found.update(file.rows(tensor, first, n_rows))
        file.release(tensor, first + n_rows)
    return found.hexdigest()


def forget(path: Path) -> None:
    """Lets the system drop what it holds of a file that is on the disk, so that reading it asks the disk."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
