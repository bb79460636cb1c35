"""The metadata of quantize's output."""

from __future__ import annotations

from collections.abc import Sequence

from .._base.package import __version__
from .._calibration.importance import Importance
from .._encode.accuracy import NAMES_KEY, VALUES_KEY, MeasuredTensor, epsilon_metadata, read_epsilons
from .._formats.gguf_file import GGUFFile, KeyValue, string_value, uint32_value
from .._formats.header_room import PREFIX as QUALITY
from .._formats.header_room import room_value
from .._formats.split import SPLIT_KEYS
from .._formats.tensor_types import DITTO3
from .._plan.plan import Choices
from .._sequential.errors import KEY as STREAM_KEY
from .._sequential.errors import stream_metadata
from .conversion import IMPORTANCE_KEYS, QUANTIZATION_VERSION, upstream_metadata


def output_metadata(
    file: GGUFFile, choices: Choices, options: str, importance: Importance, errors: list[KeyValue], *, is_evaluated: bool
) -> dict[str, KeyValue]:
    """Make the metadata: the keys of the input in their order, those of llama-quantize and, except in upstream file types, ggml-ext's.

    The first key is the room for quality figures, in upstream file types only with --evaluate.

    Args:
        file: the input.
        choices: with the file type.
        options: those that determine the bytes.
        importance: the calibration statistics.
        errors: from error_metadata().
        is_evaluated: --evaluate is given.
    """
    is_upstream = choices.file_type.is_upstream
    room = [] if is_upstream and not is_evaluated else [room_value()]
    first = {kv.key: kv for kv in room}
    if is_upstream:
        return first | upstream_metadata(file, choices.file_type.id, importance)
    ext_metadata = [
        *importance.metadata(),
        uint32_value("general.file_type", choices.file_type.id),
        uint32_value("general.quantization_version", QUANTIZATION_VERSION),
        string_value("ggml_ext.version", __version__),
        string_value("ggml_ext.type", choices.name),
        string_value("ggml_ext.options", options),
        *errors,
    ]
    dropped = (NAMES_KEY, VALUES_KEY, STREAM_KEY, *IMPORTANCE_KEYS, *SPLIT_KEYS)
    old = {key: kv for key, kv in file.metadata.items() if key not in dropped and not key.startswith(QUALITY)}
    return first | old | {kv.key: kv for kv in ext_metadata}


def error_metadata(file: GGUFFile, tensors: Sequence[MeasuredTensor], propagates: bool) -> list[KeyValue]:
    """Make the metadata of epsilons and, with --propagate, of the residual stream's errors."""
    return epsilon_metadata(list_epsilons(file, tensors)) + (stream_metadata(tensors) if propagates else [])


def list_epsilons(file: GGUFFile, tensors: Sequence[MeasuredTensor]) -> dict[str, float]:
    """List the epsilons of the DITTO3 tensors of the output.

    Tensors that are DITTO3 in the input are copied with their recorded epsilon. Tensors that --fallback-above replaced stay in the list,
    so that the header's size does not change.
    """
    epsilons, recorded = {}, read_epsilons(file)
    for t in tensors:
        if t.planned.planned_type != DITTO3:
            continue
        if t.planned.tensor.type != DITTO3:
            epsilons[t.planned.name] = float(t.accuracy.epsilon)
        elif t.planned.name in recorded:
            epsilons[t.planned.name] = recorded[t.planned.name]
    return epsilons
