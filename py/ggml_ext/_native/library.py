"""The extended libggml-base, and the type rules of libllama, through ctypes. Calls release Python's global lock."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._base.errors import UserError
from .._base.types import MAX_BLOCK_SIZE, WEIGHT_TYPES
from .._base.upstream import GGML_VERSION, LLAMA_CPP_VERSION
from ..quants import ditto3
from .programs import DIR_VARIABLE, library_conflict, native_dir

ABI_VERSION = 9  # GGML_EXT_ABI_VERSION in ggml_ext/ggml-ext.h
MAX_DIMS, MAX_NAME = 4, 64  # GGML_MAX_DIMS, GGML_MAX_NAME
MAX_GROUPS = 4  # GGML_EXT_MAX_GROUPS

_ToFloat = ctypes.CFUNCTYPE(None, c_void_p, POINTER(c_float), c_int64)


class _TypeTraits(ctypes.Structure):
    """The first fields of struct ggml_type_traits of ggml.h."""

    _fields_ = [
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", _ToFloat),
    ]


class _QuantizeParams(ctypes.Structure):
    """struct ggml_ext_quantize_params of ggml-ext.h."""

    _fields_ = [
        ("itq3_levels", c_int32),
        ("trellis_passes", c_int32),
        ("ditto3_codebook", POINTER(c_float)),
        ("metric", c_void_p),
        ("upstream_sweeps", c_int32),
    ]


class _RuleModel(ctypes.Structure):
    """struct ggml_ext_rule_model of ggml-ext-rules.h."""

    _fields_ = [("arch", c_char_p), ("n_layer", c_uint32), ("n_head", c_uint32), ("n_head_kv", c_uint32), ("n_expert", c_uint32)]


class _RuleFile(ctypes.Structure):
    """struct ggml_ext_rule_file of ggml-ext-rules.h."""

    _fields_ = [("ftype", c_int), ("token_embd", c_int), ("output", c_int), ("has_imatrix", c_bool)]


_floats, _doubles = POINTER(c_float), POINTER(c_double)
Signatures = dict[str, tuple[Any, list[Any]]]  # by function name: result and arguments
_SIGNATURES: Signatures = {
    "ggml_ext_abi_version": (c_int, []),
    "ggml_ext_quantize_chunk": (
        c_size_t,
        [c_int, _floats, c_void_p, c_int64, c_int64, c_int64, _floats, POINTER(_QuantizeParams)],
    ),
    "ggml_ext_metric_init": (c_void_p, [c_int, c_int64, _floats, c_bool, c_float, c_int, c_int, POINTER(c_int)]),
    "ggml_ext_metric_free": (None, [c_void_p]),
    "ggml_ext_ditto3_add_rows": (None, [_doubles, _doubles, _floats, c_int64, c_int64, _floats]),
    "ggml_ext_ditto3_codebook": (c_bool, [_doubles, _doubles, _floats]),
    "ggml_ext_unpack_block": (c_bool, [c_int, c_void_p, POINTER(c_int8), POINTER(c_int32), _floats, _floats]),
    "ggml_ext_validate_row": (c_bool, [c_int, c_void_p, c_size_t]),
    "ggml_ext_rotate": (None, [_floats, c_int64, c_int]),
    "ggml_ext_rotate_back": (None, [_floats, c_int64, c_int]),
    "ggml_ext_has_bf16_sums": (c_bool, []),
    "ggml_ext_pack_bf16": (None, [_floats, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_ext_pack_bf16_transposed": (None, [_floats, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_ext_add_bf16": (None, [_floats, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64]),
    "ggml_quantize_chunk": (c_size_t, [c_int, _floats, c_void_p, c_int64, c_int64, c_int64, _floats]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_get_type_traits": (POINTER(_TypeTraits), [c_int]),
}

_RULES_SIGNATURES: Signatures = {
    "ggml_ext_file_rule_types": (
        c_bool,
        [
            POINTER(_RuleModel), POINTER(_RuleFile), c_size_t, c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_bool), c_char_p,
            c_size_t,
        ],
    ),
    "ggml_ext_rule_fallback": (c_int, [c_int, c_int64]),
}


def _declare(dll: ctypes.CDLL, path: Path, signatures: Signatures, project: str) -> None:
    """Declare a library's functions. UserError if one is missing."""
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(dll, name)
        except AttributeError:
            raise UserError(
                f"{path} has no {name}: it is not the {project} of this package; "
                f"{library_conflict() or f'reinstall ggml-ext or unset {DIR_VARIABLE}'}"
            ) from None
        function.restype, function.argtypes = result, arguments


def _pointer(array: np.ndarray, ctype: type[Any]) -> Any:
    return array.ctypes.data_as(POINTER(ctype))


def _check_array(array: np.ndarray, dtype: type[np.generic], what: str) -> None:
    """Raise ValueError unless the array is contiguous and of that dtype."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"{what} is {array.dtype}, contiguous: {array.flags.c_contiguous}; need contiguous {np.dtype(dtype)}"
        )


def _optional_pointer(array: np.ndarray | None, shape: tuple[int, ...], what: str) -> Any:
    """Return a pointer to a float32 array of that shape, or None for None. ValueError for other arrays."""
    if array is None:
        return None
    _check_array(array, np.float32, what)
    if array.shape != shape:
        raise ValueError(f"{what} has shape {array.shape}, need {shape}")
    return _pointer(array, c_float)


class NotPositiveDefinite(ValueError):
    """A Hessian is not positive definite."""


class Metric:
    """A Hessian prepared for an encoder (struct ggml_ext_metric of ggml-ext.h), freed with the object. Library.metric() creates it."""

    def __init__(self, dll: ctypes.CDLL, pointer: int):
        self._free, self.pointer = dll.ggml_ext_metric_free, pointer

    def __del__(self) -> None:
        self._free(self.pointer)


class Library:
    """A loaded libggml-base. Types are ids of enum ggml_type; arrays are C-contiguous."""

    def __init__(self, path: Path):
        """Load the library. UserError if that fails, or if it is an upstream ggml or has another interface version."""
        self.path = path
        try:
            self._dll = ctypes.CDLL(os.fspath(path))
        except OSError as e:
            raise UserError(f"cannot load {path}: {e}; {library_conflict() or 'reinstall ggml-ext or pass --encoder numpy'}") from e
        _declare(self._dll, path, _SIGNATURES, "ggml")
        if (version := self._dll.ggml_ext_abi_version()) != ABI_VERSION:
            raise UserError(
                f"{path} has interface version {version}, this package needs {ABI_VERSION}: reinstall ggml-ext"
            )

    def row_bytes(self, type_id: int, n_per_row: int) -> int:
        """Return the bytes of a row of n_per_row weights, a multiple of the type's block size."""
        return self._dll.ggml_row_size(type_id, n_per_row)

    def quantize(
        self,
        type_id: int,
        rows: np.ndarray,
        itq3_levels: int = 0,
        imatrix: np.ndarray | None = None,
        ditto3_codebook: np.ndarray | None = None,
        trellis_passes: int = 0,
        metric: Metric | None = None,
        upstream_sweeps: int = 0,
    ) -> np.ndarray:
        """Encode rows of complete blocks.

        Args:
            type_id: type to encode to.
            rows: weights W, float32 (n_rows, n_per_row).
            itq3_levels: 8 or 3 levels for ITQ3_S; 0: default.
            imatrix: importances float32 (n_per_row,), which some upstream types require.
            ditto3_codebook: ascending float32 (8,), one codebook for all blocks of DITTO3; None: one per block.
            trellis_passes: 1 to 6 for the trellis types; 0: default.
            metric: Hessian for this type and row size. It replaces imatrix; upstream types use both.
            upstream_sweeps: 1 to 16 sweeps for upstream types with a metric; 0: default.

        Returns:
            uint8 (n_rows, row_bytes).

        Raises:
            ValueError: other shapes, dtypes or options.
        """
        _check_array(rows, np.float32, "rows")
        n_rows, n_per_row = rows.shape
        traits = self._dll.ggml_get_type_traits(type_id).contents
        if n_per_row % traits.blck_size:
            raise ValueError(f"rows of {n_per_row} are no multiple of {traits.blck_size}")
        out = np.empty((n_rows, self.row_bytes(type_id, n_per_row)), np.uint8)
        importance = _optional_pointer(imatrix, (n_per_row,), "imatrix")
        source, target = _pointer(rows, c_float), out.ctypes.data_as(c_void_p)
        if type_id in _EXT_IDS or metric is not None:
            codebook = _optional_pointer(ditto3_codebook, (8,), "ditto3_codebook")
            params = _QuantizeParams(itq3_levels, trellis_passes, codebook, metric.pointer if metric else None, upstream_sweeps)
            n_bytes = self._dll.ggml_ext_quantize_chunk(
                type_id, source, target, 0, n_rows, n_per_row, importance, ctypes.byref(params)
            )
        else:
            n_bytes = self._dll.ggml_quantize_chunk(type_id, source, target, 0, n_rows, n_per_row, importance)
        if n_bytes != out.nbytes:
            raise ValueError(
                f"the encoder of type {type_id} wrote {n_bytes} of {out.nbytes} bytes (itq3_levels {itq3_levels}, "
                f"ditto3_codebook {ditto3_codebook}, trellis_passes {trellis_passes})"
            )
        return out

    def metric(
        self, type_id: int, n_per_row: int, triangles: np.ndarray, is_full: bool, shrinkage: float, segment: int = 32, n_threads: int = 1
    ) -> Metric:
        """Prepare the Hessian of a tensor's inputs for quantize().

        Args:
            type_id: type to encode to.
            n_per_row: row size.
            triangles: packed lower triangles, float32, row by row: one over all columns, or one per block of 256 columns (the last may be smaller).
            is_full: `triangles` is one over all columns.
            shrinkage, segment, n_threads: as in ggml-ext.h.

        Raises:
            NotPositiveDefinite: a triangle is not positive definite or not finite.
            MemoryError: there is not enough memory.
            ValueError: other shapes, dtypes or options.
        """
        columns = n_per_row if is_full else 256
        widths = [min(columns, n_per_row - first) for first in range(0, n_per_row, columns)]
        pointer = _optional_pointer(triangles, (sum(n * (n + 1) // 2 for n in widths),), "triangles")
        status = c_int()
        metric = self._dll.ggml_ext_metric_init(type_id, n_per_row, pointer, is_full, shrinkage, segment, n_threads, ctypes.byref(status))
        if not metric:
            errors: dict[int, type[Exception]] = {2: MemoryError, 3: NotPositiveDefinite}
            raise errors.get(status.value, ValueError)(
                f"no metric of type {type_id} for rows of {n_per_row}, shrinkage {shrinkage:g}, segment {segment}: status {status.value}"
            )
        return Metric(self._dll, metric)

    def ditto3_histogram(self) -> Ditto3Histogram:
        return Ditto3Histogram(self._dll)

    def dequantize(self, type_id: int, data: np.ndarray, n_per_row: int) -> np.ndarray:
        """Decode uint8 (n_rows, row_bytes) to float32 (n_rows, n_per_row). ValueError for other shapes and dtypes."""
        _check_array(data, np.uint8, "data")
        if data.ndim != 2 or data.shape[1] != self.row_bytes(type_id, n_per_row):
            raise ValueError(f"data has shape {data.shape}, need (n_rows, {self.row_bytes(type_id, n_per_row)})")
        out = np.empty((data.shape[0], n_per_row), np.float32)
        to_float = self._dll.ggml_get_type_traits(type_id).contents.to_float
        if not to_float:
            raise ValueError(f"type {type_id} cannot be decoded")
        to_float(data.ctypes.data_as(c_void_p), _pointer(out, c_float), out.size)
        return out

    def unpack_block(self, type_id: int, block: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
        """Unpack a block, uint8 (block_bytes,), to q int8 (block_size,), scale int32 (4,), d and offset.

        ValueError if type_id is no ggml-ext weight type.
        """
        _check_array(block, np.uint8, "block")
        q, scale = np.zeros(MAX_BLOCK_SIZE, np.int8), np.zeros(MAX_GROUPS, np.int32)
        d, offset = c_float(), c_float()
        if not self._dll.ggml_ext_unpack_block(
            type_id,
            block.ctypes.data_as(c_void_p),
            _pointer(q, c_int8),
            _pointer(scale, c_int32),
            ctypes.byref(d),
            ctypes.byref(offset),
        ):
            raise ValueError(f"type {type_id} is not a weight type of ggml_ext")
        return q[: self._dll.ggml_get_type_traits(type_id).contents.blck_size], scale, d.value, offset.value

    def validate(self, type_id: int, data: np.ndarray) -> bool:
        """Return whether all blocks of a ggml-ext type, uint8 (n_blocks, block_bytes), have finite scales."""
        _check_array(data, np.uint8, "data")
        return self._dll.ggml_ext_validate_row(type_id, data.ctypes.data_as(c_void_p), data.shape[0])

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Return R x for x float32 (n_blocks, 256, 64 or 32) as a new array."""
        return self._apply(self._dll.ggml_ext_rotate, x)

    def rotate_back(self, x: np.ndarray) -> np.ndarray:
        """Invert rotate()."""
        return self._apply(self._dll.ggml_ext_rotate_back, x)

    def has_bf16_sums(self) -> bool:
        return self._dll.ggml_ext_has_bf16_sums()

    def pack_bf16(self, x: np.ndarray, is_transposed: bool) -> np.ndarray:
        """Pack the vectors of tokens, float32 (tokens, columns), or (columns, tokens) if they are transposed, for add_bf16(): uint32."""
        if x.dtype != np.float32 or x.strides[1] != x.itemsize or x.strides[0] < 0:
            x = np.ascontiguousarray(x, np.float32)
        n_tokens, columns = x.shape[::-1] if is_transposed else x.shape
        out = np.empty((n_tokens + 1) // 2 * (-columns // 16 * -16), np.uint32)
        pack = self._dll.ggml_ext_pack_bf16_transposed if is_transposed else self._dll.ggml_ext_pack_bf16
        pack(_pointer(x, c_float), x.strides[0] // x.itemsize, *x.shape, out.ctypes.data)
        return out

    def add_bf16(
        self, sums: np.ndarray, left: np.ndarray, right: np.ndarray, n_tokens: int, first_row: int, end_row: int, first_column: int
    ) -> None:
        """Add left^T right to rows of sums, float32 (columns of left, columns of right): ggml_ext_add_bf16() in ggml-ext.h."""
        _check_array(sums, np.float32, "sums")
        self._dll.ggml_ext_add_bf16(
            _pointer(sums, c_float), sums.shape[1], left.ctypes.data, right.ctypes.data, n_tokens, first_row, end_row, first_column
        )

    @staticmethod
    def _apply(function: Callable[..., None], x: np.ndarray) -> np.ndarray:
        _check_array(x, np.float32, "x")
        out = x.copy()
        function(_pointer(out, c_float), *out.shape)
        return out


class Ditto3Histogram:
    """A histogram of all weights of a tensor, for one codebook: quants.ditto3.Histogram in C."""

    def __init__(self, dll: ctypes.CDLL):
        self._dll = dll
        self.sums = np.zeros((2, ditto3.N_BINS))  # sums of importance and of importance * weight

    def _pointers(self) -> list[Any]:
        return [_pointer(s, c_double) for s in self.sums]

    def add_rows(self, rows: np.ndarray, importance: np.ndarray | None = None) -> None:
        """Add rows float32 (n_rows, n_per_row) with importances float32 (n_per_row,). NaN and infinity are skipped."""
        _check_array(rows, np.float32, "rows")
        weights = _optional_pointer(importance, rows.shape[1:], "importance")
        self._dll.ggml_ext_ditto3_add_rows(*self._pointers(), _pointer(rows, c_float), *rows.shape, weights)

    def codebook(self) -> np.ndarray:
        """Return ascending centroids float32 (8,). ValueError if nothing was added."""
        codebook = np.empty(8, np.float32)
        if not self._dll.ggml_ext_ditto3_codebook(*self._pointers(), _pointer(codebook, c_float)):
            raise ValueError("no weights were added")
        return codebook


class RuleModel(NamedTuple):
    """Properties of a model that the rules use. n_head, n_head_kv: of the first layer."""

    arch: str
    n_layer: int = 0
    n_head: int = 0
    n_head_kv: int = 0
    n_expert: int = 0


class RuleFile(NamedTuple):
    """Properties of the output file that the rules use. ftype: of llama.cpp's enum. token_embd, output: requested types."""

    ftype: int
    token_embd: int | None = None
    output: int | None = None
    has_imatrix: bool = False


class Rules:
    """llama-quantize's type rules in libllama (ggml-ext-rules.h). Types are ids of enum ggml_type."""

    def __init__(self, path: Path):
        """Load libllama. OSError if that fails, UserError if it is not this package's."""
        self._dll = ctypes.CDLL(os.fspath(path))
        _declare(self._dll, path, _RULES_SIGNATURES, "llama.cpp")

    def types(
        self, model: RuleModel, file: RuleFile, names: Sequence[str], shapes: Sequence[tuple[int, ...]], named: Sequence[bool]
    ) -> tuple[list[int | None], bool]:
        """Choose the type of each tensor in a file.

        Args:
            model: the model.
            file: the output file.
            names: names of all tensors.
            shapes: their dimensions, fastest first.
            named: whether --tensor-type names a tensor's type; the result then says only whether the tensor changes.

        Returns:
            The type of each tensor, None if it keeps its own; and whether libllama knows the architecture.

        Raises:
            ValueError: llama.cpp's reason for having no answer.
        """
        dims = np.ones((len(shapes), MAX_DIMS), np.int64)
        for row, ne in zip(dims, shapes, strict=True):
            row[: len(ne)] = ne
        encoded = np.array([name.encode() for name in names], f"S{MAX_NAME - 1}").astype(f"S{MAX_NAME}")  # terminated by zero
        is_named = np.array(named, np.bool_)
        types, is_known, error = np.empty(len(names), np.int32), c_bool(), ctypes.create_string_buffer(256)
        token_embd, output = (-1 if t is None else t for t in (file.token_embd, file.output))
        if not self._dll.ggml_ext_file_rule_types(
            ctypes.byref(_RuleModel(model.arch.encode(), *model[1:])),
            ctypes.byref(_RuleFile(file.ftype, token_embd, output, file.has_imatrix)),
            len(names),
            encoded.ctypes.data,
            dims.ctypes.data,
            is_named.ctypes.data,
            types.ctypes.data,
            ctypes.byref(is_known),
            error,
            len(error),
        ):
            raise ValueError(error.value.decode(errors="replace").strip())
        return [None if t < 0 else int(t) for t in types], is_known.value

    def fallback(self, type_id: int, n_per_row: int) -> int | None:
        """Return the type that replaces an upstream type if its block size does not divide the rows; None without a rule."""
        fallback = self._dll.ggml_ext_rule_fallback(type_id, n_per_row)
        return None if fallback < 0 else fallback


_EXT_IDS = {int(info.id) for info in WEIGHT_TYPES.values()}


def _pattern(name: str) -> str:
    """Return a glob pattern for a library. The package has them under their SONAMEs (libggml-base.so.0); a build directory also has links.

    On Windows the prefix lib depends on the compiler.
    """
    return {"darwin": f"lib{name}.*dylib", "win32": f"*{name}.dll"}.get(sys.platform, f"lib{name}.so*")


def _find(name: str) -> list[Path]:
    return sorted(native_dir().glob(_pattern(name)))


@functools.cache
def load() -> Library | None:
    """Load libggml-base from the directory GGML_EXT_LIB_DIR or, if that is unset, from the package.

    None if the package was installed without it. UserError if it cannot be used, or the variable names a directory without it.
    """
    paths = _find("ggml-base")
    if not paths and (directory := os.environ.get(DIR_VARIABLE)):
        raise UserError(
            f"{DIR_VARIABLE} is {directory}, which has no {_pattern('ggml-base')}: point it to the directory of the "
            "extended libraries or unset it"
        )
    return Library(paths[0]) if paths else None


def libllama_path() -> Path | None:
    """Return the path of libllama; None if it is missing."""
    return next(iter(_find("llama")), None)


def libggml_path() -> Path | None:
    """Return the path of libggml, which knows the devices; None if it is missing."""
    return next(iter(_find("ggml")), None)


@functools.cache
def load_rules() -> Rules | None:
    """Load the rules of libllama; None if it is missing. Errors as in Rules()."""
    path = libllama_path()
    return Rules(path) if path else None


def upstream_versions() -> tuple[str, str]:
    """Return the versions of llama.cpp and ggml: those of the built libraries, or the pinned ones."""

    def ask(name: str, function: str, pinned: str) -> str:
        try:
            version = getattr(ctypes.CDLL(os.fspath(_find(name)[0])), function)
        except (IndexError, OSError, AttributeError):
            return pinned
        version.restype = c_char_p
        return version().decode()

    return ask("llama", "llama_version", LLAMA_CPP_VERSION), ask("ggml-base", "ggml_version", GGML_VERSION)
