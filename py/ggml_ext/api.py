"""The commands as functions: quantize_model(), evaluate_models(), export_model() and inspect_model(). Import them from ggml_ext.

They may be called from any thread, and concurrently with different outputs. They print nothing, set no signal handlers and raise
UserError with the command's error message. `log` and `progress` get what the command would print; an exception that they raise stops
the run, and the same call resumes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, Union

from ._base.console import Callbacks
from ._base.errors import UserError
from ._base.option import check_keywords
from ._commands.evaluating import EvaluateOptions, evaluate
from ._commands.exporting import ExportOptions, ExportSettings, export
from ._commands.inspecting import InspectOptions, draw_picture, inspect
from ._commands.options import QuantizeOptions
from ._commands.quantizing import quantize
from ._commands.settings import Settings
from ._report.findings import Finding, Inspection
from ._report.quality import Evaluation
from ._report.results import Result, TensorResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._commands.keywords import EvaluateKeywords, ExportKeywords, InspectKeywords, QuantizeKeywords

__all__ = [
    "Evaluation", "Finding", "Inspection", "Result", "TensorResult", "UserError", "evaluate_models", "export_model", "inspect_model", "quantize_model",
]

AnyPath = Union[str, "os.PathLike[str]"]
Log = Callable[[str, str], None]
Progress = Callable[[str, float, "float | None"], None]
Function = TypeVar("Function", bound="Callable | None")


def _check_function(name: str, value: Function) -> Function:
    """Return the value. Raise TypeError unless it is a function or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: got {value!r}, must be a function or None")
    return value


def _callbacks(log: Log | None, progress: Progress | None) -> Callbacks:
    return Callbacks(_check_function("log", log), _check_function("progress", progress))


def quantize_model(
    input: AnyPath | None, output: AnyPath | None = None, *, log: Log | None = None, progress: Progress | None = None,
    **options: Unpack[QuantizeKeywords],
) -> Result:
    """Quantize a model to the same bytes as `ggml-ext quantize input output --type ...`.

    Args:
        input: a GGUF file in F32, F16, BF16 or Q8_0, any part of a split model, or the directory of a checkpoint; None with hf_repo.
        output: the file to write; optional with dry_run.
        log: called with "note" or "warning" and a line.
        progress: called with the name of a phase, the amount done and the total: weights while writing, chunks while calibrating.
        options: the command's flags with _ for -, such as type="itq3_t" or target_size="3GiB"; tensor_type takes a list.

    Raises:
        UserError: the command would fail; the message has the way out.
        TypeError: a keyword is not a flag, or its value has the wrong type.
    """
    if options.get("hf_repo") is not None and input is None:
        input, output = output, None  # as on the command line, where OUT is the only file
    parsed = check_keywords(QuantizeOptions, {"input": input, "output": output, **options})
    return quantize(Settings.parse(parsed), _callbacks(log, progress))


def evaluate_models(
    models: AnyPath | Sequence[AnyPath], against: AnyPath | None = None, *, log: Log | None = None, progress: Progress | None = None,
    **options: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Measure the perplexity of models on a text and, with `against`, their KL divergence from it, as `ggml-ext evaluate` does.

    The record() of the result is what `ggml-ext evaluate --json` prints. Other arguments and errors: see quantize_model(); progress
    counts chunks.
    """
    parsed = check_keywords(EvaluateOptions, {"models": models, "against": against, **options})
    return evaluate(parsed, _callbacks(log, progress))


def export_model(
    input: AnyPath, output: AnyPath | None = None, *, type: str, log: Log | None = None, progress: Progress | None = None,
    **options: Unpack[ExportKeywords],
) -> Result:
    """Convert a model with ggml-ext types to standard types, to the same bytes as `ggml-ext export`.

    type: the type to convert to, such as "q4_k". Other arguments and errors: see quantize_model(). The errors in the result are relative
    to `input`, not to the original model.
    """
    parsed = check_keywords(ExportOptions, {"input": input, "output": output, "type": type, **options})
    return export(ExportSettings.parse(parsed), _callbacks(log, progress))


def inspect_model(
    file: AnyPath, against: AnyPath | None = None, *, on_finding: Callable[[Finding], None] | None = None,
    **options: Unpack[InspectKeywords],
) -> Inspection:
    """List the tensors of a GGUF file, and compare them with those of its original, `against`.

    on_finding: called with the Finding of each tensor as it is measured. The record() of the result is what `ggml-ext inspect --json`
    prints. If the error of a DITTO3 tensor exceeds its recorded epsilon, `fits` of its finding is False; the command would fail. Errors:
    see quantize_model().
    """
    parsed = check_keywords(InspectOptions, {"file": file, "against": against, **options})
    inspection = inspect(parsed, lambda *_: None, _check_function("on_finding", on_finding) or (lambda _: None))
    if parsed.picture is not None:
        draw_picture(parsed, inspection)
    return inspection
