"""Generated from the options of the commands by scripts/build/options_doc.py; do not edit.

The keywords of the Python API, for editors and type checkers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict, Union

AnyPath = Union[str, "os.PathLike[str]"]


class QuantizeKeywords(TypedDict, total=False):
    """Keywords of quantize_model()."""

    type: str | None
    target_size: str | None
    target_bpw: str | float | None
    target_kld: str | float | None
    target_types: str | None
    stock: bool
    sensitivity: str
    no_target_check: bool
    pure: bool
    tensor_type: str | Sequence[str]
    token_embedding_type: str | None
    output_tensor_type: str | None
    fallback_above: float | None
    no_fallback: bool
    leave_output_tensor: bool
    allow_requantize: bool
    hf_repo: str | None
    hf_file: str | None
    revision: str | None
    hf_token: str | None
    keep_gguf: AnyPath | None
    imatrix: AnyPath | None
    include_weights: str | Sequence[str]
    exclude_weights: str | Sequence[str]
    imatrix_from: AnyPath | None
    importance: str | None
    no_calibration: bool
    calibration_chunks: int | None
    memory: float | None
    calibrate_with: str | None
    propagate: bool | None
    column_scales: bool | None
    n_gpu_layers: str | float | None
    device: str | None
    rpc: str | None
    itq3_levels: int
    ditto_codebook: str
    effort: str
    encoder: str
    threads: int | None
    dry_run: bool
    split_max_size: str | None
    part: str | None
    verify: bool
    evaluate: bool
    evaluation_chunks: int | None
    report: AnyPath | None
    upload: str | None
    model_card: AnyPath | None
    force: bool


class ExportKeywords(TypedDict, total=False):
    """Keywords of export_model()."""

    pure: bool
    tensor_type: str | Sequence[str]
    imatrix: AnyPath | None
    no_fallback: bool
    threads: int | None
    dry_run: bool
    model_card: AnyPath | None
    force: bool


class EvaluateKeywords(TypedDict, total=False):
    """Keywords of evaluate_models()."""

    file: AnyPath | None
    ctx_size: int | None
    chunks: int | None
    batch_size: int | None
    base_logits: AnyPath | None
    hellaswag: AnyPath | None
    winogrande: AnyPath | None
    multiple_choice: AnyPath | None
    tasks: int | None
    positions: int | None
    needle: int | None
    write: bool
    picture: AnyPath | None
    force: bool
    threads: int | None
    n_gpu_layers: str | float | None
    device: str | None
    rpc: str | None


class InspectKeywords(TypedDict, total=False):
    """Keywords of inspect_model()."""

    imatrix: AnyPath | None
    importance: str | None
    tensor: str | None
    histograms: bool
    picture: AnyPath | None
    force: bool
    threads: int | None
