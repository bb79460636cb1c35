"""What the programs share that make one model of another, quantize and export: checks of encoders and rows before they write, what
their bytes depend on, the progress bar, files beside OUT."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from gguf import GGMLQuantizationType
from tqdm import tqdm

from . import __version__
from ._accuracy import Accuracy
from ._calibration import fingerprint, header_bytes
from ._encode import UNWEIGHTED_IN_NUMPY, Codec
from ._errors import UserError
from ._gguf_file import GGUFFile, Tensor
from ._importance import Importance
from ._output import Output, open_file, written_beside
from ._plan import Plan, may_be_replaced, replacement_type
from ._report import refused_fallback
from ._writer import write_tensors

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
IMPORTANCE_KEYS = (
    *(f"quantize.imatrix.{key}" for key in ("file", "dataset", "entries_count", "chunks_count")),
    "ggml_ext.importance",
    "ggml_ext.calibration",
)
TYPE_FLAGS = {"output.weight": "--output-tensor-type", "token_embd.weight": "--token-embedding-type"}  # of the quantizer
WAY_OUT = "pass --quiet if nobody reads it"


def check_encoders(args: argparse.Namespace, codec: Codec, plan: Plan) -> None:
    """UserError if it cannot make a type of the plan."""
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if codec.lib is None and args.fallback_above is not None and may_be_replaced(tensor, target):
            fallback = replacement_type(tensor, target)
            if not codec.can_encode(fallback):
                raise UserError(
                    f"--fallback-above: {fallback.name.lower()} has no numpy encoder and the built library is not in use: build it, "
                    "or leave the option out"
                )
    check_known_encoders(codec, plan, TYPE_FLAGS)


def check_known_encoders(codec: Codec, plan: Plan, flags: Mapping[str, str]) -> None:
    """UserError where neither the library nor numpy makes a type. flags: those for the types of single tensors, by tensor."""
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if target != tensor.type and not codec.can_encode(target):
            raise no_numpy_encoder(tensor, target, flags)


def check_fallbacks(args: argparse.Namespace, plan: Plan) -> None:
    """UserError for what --no-fallback refuses."""
    if args.no_fallback and (refused := refused_fallback(plan)):
        raise UserError(f"--no-fallback: {refused}; choose another type with --tensor-type REGEX=TYPE, or leave out --no-fallback")


def no_numpy_encoder(tensor: Tensor, target: GGMLQuantizationType, flags: Mapping[str, str], what: str = "") -> UserError:
    flag = f"{flags[tensor.name]} q8_0" if tensor.name in flags else f"--tensor-type '{re.escape(tensor.name)}=q8_0'"
    return UserError(
        f"tensor {tensor.name}: {target.name.lower()} has no numpy encoder{what} and the built library is not in use: build it, or pass {flag}"
    )


def check_numpy_encoders(codec: Codec, plan: Plan, flags: Mapping[str, str]) -> None:
    """UserError if a tensor has importances that its encoder cannot take. flags: as in check_known_encoders()."""
    if codec.lib is not None:
        return
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if target != tensor.type and tensor.name in plan.importance and target in UNWEIGHTED_IN_NUMPY:
            raise no_numpy_encoder(tensor, target, flags, " with importances")


def made_from(file: GGUFFile, codec: Codec, importance: Importance, **more) -> dict:
    """What the bytes of an output depend on, by name, for Output.begin(). more: what the program's options add."""

    def identity(path: Path, n_header: int = 0) -> dict:
        return {**fingerprint(path, n_header), "modified": path.stat().st_mtime_ns}

    return {
        "version": [__version__, "numpy" if codec.lib is None else fingerprint(codec.lib.path)],
        "input": [identity(part.path, header_bytes(part)) for part in file.parts],
        "importance": [importance.kind, [identity(p) for p in importance.paths()]],
        **more,
    }


def write_with_bar(
    output: Output, file: GGUFFile, plan: Plan, codec: Codec, importance: Importance, n_threads: int, title: str, show_bar: bool,
    begun: Callable[[int], None], ended: Callable[[int], None], fallback_above: float | None = None,
) -> list[Accuracy]:
    """write_tensors() under a progress bar that begins where an earlier run stopped. begun, ended: called with a tensor's index."""
    n_done = sum(t.n_elements for t in plan.tensors[: len(output.finished)])
    with tqdm(total=plan.n_elements(), unit="w", unit_scale=True, desc=title, disable=not show_bar, initial=n_done) as bar:
        return write_tensors(output, file, plan, codec, importance, n_threads, begun, bar.update, ended, fallback_above)


def write_beside(flag: str, path: Path, data: bytes, output: Path, force: bool) -> None:
    """UserError naming the flag if it cannot be written, or, without force, exists by now, which says that OUT is written."""
    path = Path(os.path.realpath(path))
    try:
        with written_beside(path, force) as part, open_file(part) as f:
            f.write(data)
    except FileExistsError as e:
        raise UserError(f"{flag}: {path} appeared meanwhile, and was left as it is; {output} is written") from e
    except OSError as e:
        raise UserError(f"{flag}: cannot write {path}: {e.strerror}; {output} is written") from e
