"""Column scales: a file holds W diag(s) in place of W, and the tensors that compute the inputs of W are divided by s. The model's function
stays the same.

A rotated type spreads the error of a block evenly over its columns. The scales move error away from columns with large inputs. A scale is
2^(e/8) with an integer exponent e.

KEY holds the exponents as text. Each line is NAME AXIS CODES, such as "blk.0.attn_q.weight columns OPQ...". On the axis "columns" the weights are
multiplied by s, on the axis "rows" divided by s; the rows of a vector are its elements. CODES has one character per column or row, chr(79 + e).

LoRA adapters of the unscaled model need the same scales: ggml_ext/hooks/ggml-ext-column-scales.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType

from .._base.errors import UserError
from ..quants import HALF_MAX
from .gguf_file import GGUFFile, KeyValue, Tensor, string_value
from .tensor_types import FLOAT_TYPES

KEY = "ggml_ext.column_scales"
STEPS = 8  # exponents per factor of 2
LARGEST = 46  # exponent; 2^(46/8) is 54
ZERO = ord("O")  # the code of exponent 0; with it all codes are printable
COLUMNS, ROWS = "columns", "rows"


def to_factors(exponents: np.ndarray) -> np.ndarray:
    """Return the scales 2^(exponents/8), float32, of exponents, int8."""
    return np.exp2(exponents / STEPS).astype(np.float32)


@dataclass(frozen=True)
class ColumnScales:
    """The scales of a file: exponents by tensor, int8 (n_columns,) and int8 (n_rows,)."""

    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.columns)

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.rows

    def column_factors(self, name: str) -> np.ndarray | None:
        """Return the factors of a matrix's columns, float32 (n_columns,); None if they are not scaled."""
        return to_factors(self.columns[name]) if name in self.columns else None

    def row_divisors(self, name: str) -> np.ndarray | None:
        """Return the divisors of a matrix's rows, or of a vector's elements, float32 (n_rows,); None if they are not scaled."""
        return to_factors(self.rows[name]) if name in self.rows else None

    def metadata(self) -> list[KeyValue]:
        """Make the entry of the file; none without scales."""
        axes = ((COLUMNS, self.columns), (ROWS, self.rows))
        lines = [f"{name} {axis} {_to_text(exponents)}" for axis, by_name in axes for name, exponents in by_name.items()]
        return [string_value(KEY, "\n".join(lines))] if lines else []

    @classmethod
    def read(cls, file: GGUFFile) -> ColumnScales:
        """Read the scales of a file. UserError if the entry is damaged."""
        axes: dict[str, dict[str, np.ndarray]] = {COLUMNS: {}, ROWS: {}}
        sizes = {t.name: {COLUMNS: t.ne[0], ROWS: t.n_elements // t.ne[0] if t.n_dims > 1 else t.ne[0]} for t in file.tensors}
        for line in (file.value(KEY) or "").splitlines():
            name, axis, text = (*line.split(" "), "", "")[:3]
            exponents = np.frombuffer(text.encode(), np.uint8).astype(np.int16) - ZERO
            if name not in sizes or axis not in axes or len(exponents) != sizes[name][axis] or np.abs(exponents).max(initial=0) > LARGEST:
                raise UserError(f"{file.path}: {KEY} does not fit tensor {name}: the file is damaged; quantize the model again")
            axes[axis][name] = exponents.astype(np.int8)
        return cls(axes[COLUMNS], axes[ROWS])


def _to_text(exponents: np.ndarray) -> str:
    return (exponents + ZERO).astype(np.uint8).tobytes().decode()


class ScaledFile(GGUFFile):
    """A model with column scales: rows() returns the scaled weights, in the type of the file."""

    def __init__(self, file: GGUFFile, scales: ColumnScales):
        vars(self).update(vars(file))
        self._unscaled, self.scales = file, scales

    @property
    def parts(self) -> list[GGUFFile]:
        return self._unscaled.parts

    @property
    def stem(self) -> str:
        return self._unscaled.stem

    def rows(self, tensor: Tensor, first: int, count: int) -> np.ndarray:
        data = self._unscaled.rows(tensor, first, count)
        if tensor.name not in self.scales:
            return data
        if tensor.type not in FLOAT_TYPES:
            raise UserError(
                f"tensor {tensor.name} of {self.path} is {tensor.type.name.lower()}, column scales need f32, f16 or bf16: pass the model that was quantized"
            )
        weights = gguf.quants.dequantize(data, tensor.type).astype(np.float32, copy=True)
        if (factors := self.scales.column_factors(tensor.name)) is not None:
            weights *= factors
        if (divisors := self.scales.row_divisors(tensor.name)) is not None:
            weights /= divisors if tensor.n_dims == 1 else divisors[first : first + count, None]
        if tensor.type == GGMLQuantizationType.F16 and np.abs(weights).max(initial=0) > HALF_MAX:
            raise UserError(f"tensor {tensor.name} of {self.path}: its scaled weights exceed {HALF_MAX:g}: pass --no-column-scales")
        return np.ascontiguousarray(gguf.quants.quantize(weights, tensor.type)).view(np.uint8)

    def pieces(self, tensor: Tensor, size: int, first: int, count: int) -> np.ndarray:
        return self._unscaled.pieces(tensor, size, first, count)

    def is_hole(self, tensor: Tensor) -> bool:
        return self._unscaled.is_hole(tensor)

    def complete(self, reader: str) -> None:
        self._unscaled.complete(reader)

    def check_unchanged(self) -> None:
        self._unscaled.check_unchanged()
