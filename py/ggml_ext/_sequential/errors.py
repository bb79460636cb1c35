"""Errors of the residual stream by layer, as a file records them and as programs read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .._base.errors import UserError
from .._encode.accuracy import Accuracy
from .._formats.gguf_file import GGUFFile, KeyValue, Tensor, floats_value

# By layer, float32: energy of the difference of the streams behind it, as a part of that of the original model's; 0 where nothing is known.
KEY = "ggml_ext.propagation.errors"


def layer_of(tensor: Tensor) -> int | None:
    found = re.match(r"blk\.(\d+)\.", tensor.name)
    return None if found is None else int(found[1])


def stream_metadata(tensors: Sequence[Tensor], accuracies: Sequence[Accuracy] | None) -> list[KeyValue]:
    """The key for the errors; none without layers. accuracies: None before they are known; the size does not depend on them."""
    errors: dict[int, float] = {}
    for tensor, accuracy in zip(tensors, accuracies or [Accuracy()] * len(tensors), strict=True):
        if (layer := layer_of(tensor)) is not None:
            errors[layer] = max(errors.get(layer, 0.0), accuracy.stream_error)
    if not errors:
        return []
    return [floats_value(KEY, np.array([errors.get(layer, 0.0) for layer in range(max(errors) + 1)], np.float32))]


def read_stream_errors(file: GGUFFile) -> list[float]:
    """By layer; empty if nothing is recorded. UserError if the key is not what stream_metadata() makes."""
    if KEY not in file.metadata:
        return []
    errors = file.floats(KEY)
    if errors is None or not np.isfinite(errors).all() or (errors < 0).any():
        raise UserError(f"{file.path}: {KEY} must be an array of float32, finite and not negative: quantize the model again")
    return errors.tolist()
