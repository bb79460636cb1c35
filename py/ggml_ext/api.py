"""The commands as functions: quantize_model(), evaluate_models(), export_model(), inspect_model(). Import them from ggml_ext.

They may be called in any thread, and in several at once on different outputs. They print nothing, set no signal handlers and raise
UserError with the one line that the command would end with; `log` and `progress` hear what the command would show. An exception from one
of these two functions stops the run, and the same call goes on where it was.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar, Union

from ._base.console import Callbacks
from ._base.errors import UserError
from ._commands.evaluating import EvaluateOptions, evaluate
from ._commands.exporting import ExportOptions, ExportSettings, export
from ._commands.inspecting import InspectOptions, draw_picture, inspect
from ._commands.quantizing import quantize
from ._commands.result import Result, TensorResult
from ._commands.settings import QuantizeOptions, Settings
from ._report.findings import Finding, Inspection
from ._report.quality import Evaluation

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Evaluation", "Finding", "Inspection", "Result", "TensorResult", "UserError", "evaluate_models", "export_model", "inspect_model", "quantize_model",
]

AnyPath = Union[str, "os.PathLike[str]"]
Log = Callable[[str, str], None]
Progress = Callable[[str, float, "float | None"], None]
Options = TypeVar("Options")
Function = TypeVar("Function", bound="Callable | None")


class QuantizeKeywords(TypedDict, total=False):
    """The flags of ggml-ext quantize as keywords, with _ for -."""

    type: str
    target_size: str
    target_bpw: str | float
    target_kld: str | float
    target_types: str
    stock: bool
    sensitivity: str
    pure: bool
    tensor_type: str | Sequence[str]
    token_embedding_type: str
    output_tensor_type: str
    fallback_above: float
    no_fallback: bool
    leave_output_tensor: bool
    allow_requantize: bool
    hf_repo: str
    hf_file: str
    revision: str
    hf_token: str
    keep_gguf: AnyPath
    imatrix: AnyPath
    imatrix_from: AnyPath
    importance: str
    include_weights: str | Sequence[str]
    exclude_weights: str | Sequence[str]
    no_calibration: bool
    calibration_chunks: int
    memory: float
    calibrate_with: str
    n_gpu_layers: str | int
    device: str
    rpc: str
    propagate: bool | None
    itq3_levels: int
    ditto_codebook: str
    effort: str
    threads: int
    encoder: str
    dry_run: bool
    split_max_size: str
    verify: bool
    report: AnyPath
    model_card: AnyPath
    upload: str
    force: bool


class ExportKeywords(TypedDict, total=False):
    """The flags of ggml-ext export as keywords, with _ for -."""

    type: str
    pure: bool
    tensor_type: str | Sequence[str]
    imatrix: AnyPath
    no_fallback: bool
    threads: int
    dry_run: bool
    model_card: AnyPath
    force: bool


class EvaluateKeywords(TypedDict, total=False):
    """The flags of `ggml-ext evaluate` as keywords, with _ for -."""

    file: AnyPath
    ctx_size: int
    chunks: int
    batch_size: int
    threads: int
    n_gpu_layers: str | int
    device: str
    rpc: str
    base_logits: AnyPath
    hellaswag: AnyPath
    winogrande: AnyPath
    multiple_choice: AnyPath
    tasks: int
    picture: AnyPath
    force: bool


class InspectKeywords(TypedDict, total=False):
    """The flags of ggml-ext inspect as keywords, with _ for -."""

    imatrix: AnyPath
    importance: str
    tensor: str
    histograms: bool
    picture: AnyPath
    force: bool
    threads: int


# by the annotation of an option: what a value may be, what makes it what the commands have of its word, and what to call it
_KINDS = {
    "bool": (bool, bool, "True or False"),
    "int": (Integral, int, "an integer"),
    "float": (Real, float, "a number"),
    "str": ((str, Real), str, "a text"),
    "Path": ((str, os.PathLike), Path, "a path"),
}


def _options(kind: type[Options], keywords: dict) -> Options:
    """Options of keywords. TypeError for a keyword that is no flag, or a value of another type than the flag's."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if unknown := [name for name in keywords if name not in fields]:
        raise TypeError(f"{unknown[0]!r} is no option: known are {', '.join(fields)}")
    return kind(**{name: _value(name, value, fields[name]) for name, value in keywords.items()})


def _value(name: str, value, annotation: str):
    """The value of an option, one in place of a list of one. TypeError naming the option."""
    kind, _, optional = annotation.partition(" | ")
    if value is None and optional:
        return None
    if kind.startswith("Sequence["):
        is_one = isinstance(value, (str, os.PathLike)) or not isinstance(value, Iterable)
        return [_value(name, one, kind[len("Sequence["):-1]) for one in ([value] if is_one else value)]
    allowed, make, what = _KINDS[kind]
    if not isinstance(value, allowed) or isinstance(value, bool) != (kind == "bool"):
        raise TypeError(f"{name}: got {value!r}, must be {what}{' or None' if optional else ''}")
    return make(value)


def _function(name: str, value: Function) -> Function:
    """The value; TypeError if it is no function."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: got {value!r}, must be a function or None")
    return value


def _callbacks(log: Log | None, progress: Progress | None) -> Callbacks:
    return Callbacks(_function("log", log), _function("progress", progress))


def quantize_model(
    input: AnyPath | None, output: AnyPath | None = None, *, log: Log | None = None, progress: Progress | None = None,
    **options: Unpack[QuantizeKeywords],
) -> Result:
    """Quantizes a model, as `ggml-ext quantize input output --type ...` does, to the same bytes.

    input: a GGUF file in F32, F16, BF16 or Q8_0, of a split one any part, or the folder of a checkpoint; None with hf_repo.
    output: the file to write; not needed with dry_run. options: the command's flags with _ for -, such as type="itq3_t" or
    target_size="3GiB"; tensor_type is a list. log: called with "note" or "warning" and a line. progress: called with the name of a phase,
    what is done of it and its total: weights while writing, chunks while calibrating.

    Raises UserError for everything that the caller can change, TypeError for a keyword that is no flag and for a value of
    another type than the flag's.
    """
    options = dict(options)
    if options.get("hf_repo") is not None and input is None:
        input, output = output, None  # as on the command line, where OUT is the one file
    settings = Settings.parse(_options(QuantizeOptions, {"input": input, "output": output, **options}))
    return quantize(settings, _callbacks(log, progress))


def evaluate_models(
    models: AnyPath | Sequence[AnyPath], against: AnyPath | None = None, *, log: Log | None = None, progress: Progress | None = None,
    **options: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Perplexity of models, or of one, on a text and, with `against`, KL divergence from it, as `ggml-ext evaluate` measures them.

    The record() of the result is what `ggml-ext evaluate --json` prints. The other arguments and errors: see quantize_model(); progress
    counts chunks.
    """
    asked = _options(EvaluateOptions, {"models": models, "against": against, **options})
    return evaluate(asked, _callbacks(log, progress))


def export_model(
    input: AnyPath, output: AnyPath | None = None, *, type: str, log: Log | None = None, progress: Progress | None = None,
    **options: Unpack[ExportKeywords],
) -> Result:
    """Writes a model that has types of ggml-ext with llama.cpp's own types, as `ggml-ext export` does, to the same bytes.

    type: llama.cpp's type in place of ours, such as "q4_k". The other arguments and errors: see quantize_model(). The errors in the
    result are those against `input`, which had lost something before.
    """
    asked = _options(ExportOptions, {"input": input, "output": output, "type": type, **options})
    return export(ExportSettings.parse(asked), _callbacks(log, progress))


def inspect_model(
    file: AnyPath, against: AnyPath | None = None, *, found: Callable[[Finding], None] | None = None,
    **options: Unpack[InspectKeywords],
) -> Inspection:
    """Lists the tensors of a GGUF file, and compares them with those of `against`, which it was made from.

    found: called with each tensor's finding as it is made. The record() of the result is what `ggml-ext inspect --json` prints. A
    DITTO3 tensor with an error above its recorded epsilon has a finding whose `fits` is False; the command ends with an error there.

    Raises UserError for everything that the caller can change, TypeError for a keyword that is no flag.
    """
    asked = _options(InspectOptions, {"file": file, "against": against, **options})
    inspection = inspect(asked, lambda *_: None, _function("found", found) or (lambda _: None))
    if asked.picture is not None:
        draw_picture(asked, inspection)
    return inspection
