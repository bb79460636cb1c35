"""The errors of the residual stream by layer, in the metadata of the output."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .._base.errors import UserError
from .._encode.accuracy import MeasuredTensor
from .._formats.gguf_file import GGUFFile, KeyValue, floats_value
from .._formats.names import layer_number

# NMSE of the residual stream after each layer, float32; 0 if unknown.
KEY = "ggml_ext.propagation.errors"


def stream_metadata(tensors: Iterable[MeasuredTensor]) -> list[KeyValue]:
    """Make the metadata, none without layers. Its size does not depend on the errors."""
    errors: dict[int, float] = {}
    for t in tensors:
        if (layer := layer_number(t.planned.name)) is not None:
            errors[layer] = max(errors.get(layer, 0.0), t.accuracy.stream_error)
    if not errors:
        return []
    return [floats_value(KEY, np.array([errors.get(layer, 0.0) for layer in range(max(errors) + 1)], np.float32))]


def read_stream_errors(file: GGUFFile) -> list[float]:
    """Read the errors by layer, none if there is no key. Raise UserError if it is not as stream_metadata() makes it."""
    if KEY not in file.metadata:
        return []
    errors = file.floats(KEY)
    if errors is None or not np.isfinite(errors).all() or (errors < 0).any():
        raise UserError(f"{file.path}: {KEY} must be an array of float32, finite and not negative: quantize the model again")
    return errors.tolist()
