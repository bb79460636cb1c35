"""quantize --evaluate: measure the finished file against its source, and record the figures in it."""

from __future__ import annotations

import os
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.signals import stop_after_writing
from .._formats.cache_names import logits_cache_name
from .._formats.gguf_file import GGUFFile
from .._formats.quality import RecordedQuality, read_quality
from .._formats.split import open_model
from .._native.programs import require_tool
from .evaluating import EvaluateOptions, check_language_models, check_vocabularies, evaluate
from .settings import Settings


def check_evaluation(settings: Settings, file: GGUFFile) -> None:
    """Raise UserError before the long work if the model cannot be evaluated."""
    if settings.output.evaluate:
        require_tool("llama-perplexity")
        check_language_models([file])
        check_vocabularies([file])


def evaluate_output(settings: Settings, file: GGUFFile, paths: list[Path], console: Console) -> RecordedQuality | None:
    """Evaluate the written file and record its figures in it; None without --evaluate. The source's logits are cached next to OUT.

    Args:
        settings: of the run.
        file: the source.
        paths: the parts of the written file.
        console: for notes and the progress bar.

    Raises:
        UserError: the evaluation failed; the file is complete.
    """
    output = settings.output
    if not output.evaluate:
        return None
    options = EvaluateOptions(
        models=[paths[0]], against=file.path, chunks=output.evaluation_chunks, write=True, threads=settings.n_threads,
        base_logits=Path(os.path.realpath(paths[0])).with_name(logits_cache_name(file.stem)), devices=settings.calibration.devices,
    )
    try:
        with stop_after_writing(f"{paths[0]} is complete, without its quality"):
            file.complete("llama-perplexity")
            evaluate(options, console)
    except UserError as e:
        raise UserError(f"--evaluate: {e}; {paths[0]} is complete, without its quality: ggml-ext evaluate --write adds it") from e
    return read_quality(open_model(paths[0]))[0]
