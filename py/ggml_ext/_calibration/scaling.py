"""Choose column scales (_formats/column_scales.py) from the energies of inputs and weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import gguf.quants
import numpy as np

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import temporary_directory
from .._formats.chunks import row_chunks
from .._formats.column_scales import KEY, LARGEST, STEPS, ColumnScales
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.imatrix import ImportanceMatrix
from .._formats.names import layer_number, list_tensors
from .._formats.tensor_types import FLOAT_TYPES
from .._native.devices import DeviceOptions
from .._native.graph import ScaleGroup, read_scale_groups
from .._native.programs import find_tool
from .._plan.plan import QuantizationPlan
from .calibration import PROGRAM, TEMPORARY, CalibrationRun, configure_calibration, run_pass
from .options import CalibrationOptions

# s = m^INPUT_POWER / c^WEIGHT_POWER for the mean squares m of a column's inputs and c of its weights. Without error feedback the loss,
# AM(m / s^2) AM(s^2 c), is least for s^4 = m / c; if feedback moves all of a column's error to others, GM(m / s^2) AM(s^2 c) is least for
# s^2 = 1 / c. These powers lie between, and are the best of those measured (docs/results/column-scales.md).
INPUT_POWER, WEIGHT_POWER = 1 / 8, 3 / 8
# chunks that suffice for the mean squares of the inputs, of which only the eighth root matters
N_CHUNKS = 8


def provide_column_scales(
    options: CalibrationOptions, file: GGUFFile, plan: QuantizationPlan, matrix: ImportanceMatrix | None, *, directory: Path, n_threads: int,
    console: Console,
) -> ColumnScales:
    """Choose column scales, after measuring the inputs if there is no imatrix. A note says if --column-scales has no effect."""
    scales = ColumnScales()
    if can_have_scales(file, plan) and (matrix := matrix or measure_inputs(options, file, directory, n_threads, console)) is not None:
        scales = choose_column_scales(file, plan, matrix, n_threads, console)
    if options.column_scales and not scales:
        console.note("no effect: --column-scales, because no matrix can have them")
    return scales


def can_have_scales(file: GGUFFile, plan: QuantizationPlan) -> bool:
    """Whether a matrix of the model can get scales. The output keeps those that the model has."""
    return KEY not in file.metadata and any(t.tensor.type in FLOAT_TYPES and layer_number(t.name) is not None for t in plan.changed)


def choose_column_scales(
    file: GGUFFile, plan: QuantizationPlan, matrix: ImportanceMatrix, n_threads: int, console: Console
) -> ColumnScales:
    """Choose the scales of all groups of matrices that the plan quantizes. Empty if the model allows none, or llama.cpp cannot run it.

    Args:
        file: the model.
        plan: the types of its tensors.
        matrix: mean squares of the inputs.
        n_threads: that read weights.
        console: gets notes and the progress bar.
    """
    file.complete("ggml-ext-graph")
    groups = read_scale_groups([part.path for part in file.parts])
    if inexact := [g.consumers[0] for g in groups if not g.is_exact]:
        console.note(f"no column scales for {list_tensors(inexact)}: the model's results change with them")
    chooser = _Chooser(file, {t.name: t for t in file.tensors}, {t.name for t in plan.changed}, matrix)
    usable = [g for g in groups if g.is_exact and chooser.is_usable(g)]
    columns: dict[str, np.ndarray] = {}
    rows: dict[str, np.ndarray] = {}
    with ThreadPoolExecutor(n_threads) as pool, console.bar("column scales", len(usable), "group") as bar:
        for group, exponents in zip(usable, pool.map(chooser.choose, usable), strict=True):
            # consumers repeat the heads of producers
            spread = np.repeat(exponents.reshape(-1, 1, group.block), group.repeat, axis=1).ravel()
            columns |= dict.fromkeys(group.consumers, spread)
            rows |= dict.fromkeys(group.producers, exponents)
            bar.update()
    if columns:
        console.note(f"column scales for {len(columns)} matrices; --no-column-scales leaves them out")
    return ColumnScales(columns, rows)


@dataclass(frozen=True)
class _Chooser:
    """Chooses the scales of one group."""

    file: GGUFFile
    tensors: dict[str, Tensor]
    quantized: set[str]  # names of the tensors that the plan encodes
    matrix: ImportanceMatrix

    def is_usable(self, group: ScaleGroup) -> bool:
        """Whether a matrix of the group is quantized, its inputs are known, and all its tensors are floats of the layers.

        Other graphs, such as those of MTP layers, share the output matrix, but not its norm.
        """
        names = {*group.consumers, *group.producers}
        is_float = all(name in self.tensors and self.tensors[name].type in FLOAT_TYPES for name in names)
        in_layers = all(layer_number(name) is not None for name in names)
        return is_float and in_layers and not self.quantized.isdisjoint(group.consumers) and any(name in self.matrix for name in group.consumers)

    def choose(self, group: ScaleGroup) -> np.ndarray:
        """Return the exponents of the rows of the producers, int8 (n_rows,)."""
        consumers = [self.tensors[name] for name in group.consumers]
        inputs = next(self.matrix.values(t) for t in consumers if t.name in self.matrix).mean(axis=0, dtype=np.float64)
        weights, n_rows = np.zeros(len(inputs)), 0
        for tensor in consumers:
            if tensor.name in self.quantized:
                weights += sum(np.einsum("ij,ij->j", part, part, dtype=np.float64) for part in self._read(tensor))
                n_rows += tensor.n_rows
        m, c = (v.reshape(-1, group.repeat, group.block).mean(axis=1).ravel() for v in (inputs, weights / n_rows))
        alive = (m > 0) & (c > 0)
        logs = np.zeros(len(m))
        logs[alive] = INPUT_POWER * np.log2(m[alive]) - WEIGHT_POWER * np.log2(c[alive])
        logs[alive] -= logs[alive].mean() if alive.any() else 0
        return np.clip(np.rint(STEPS * logs), -LARGEST, LARGEST).astype(np.int8)

    def _read(self, tensor: Tensor) -> Iterator[np.ndarray]:
        for chunk in row_chunks(tensor):
            yield gguf.quants.dequantize(self.file.rows(tensor, *chunk), tensor.type)


def measure_inputs(options: CalibrationOptions, file: GGUFFile, directory: Path, n_threads: int, console: Console) -> ImportanceMatrix | None:
    """Run llama-imatrix on N_CHUNKS chunks, for runs that collect no statistics before encoding. None, with a note, if it fails."""
    try:
        return _measure_inputs(options, file, directory, n_threads, console)
    except UserError as e:
        console.note(f"no column scales: {e}")
        return None


def _measure_inputs(options: CalibrationOptions, file: GGUFFile, directory: Path, n_threads: int, console: Console) -> ImportanceMatrix:
    program = find_tool(PROGRAM)
    if program is None:
        raise UserError(f"{PROGRAM} is not in the package: reinstall ggml-ext")
    options = replace(options, devices=DeviceOptions(), n_chunks=min(N_CHUNKS, options.n_chunks or N_CHUNKS))  # too few to be worth a proxy
    setup = configure_calibration(options, file, directory, n_threads=n_threads, program=program)
    file.complete(PROGRAM)
    with temporary_directory(directory, TEMPORARY, console.note) as temporary:
        run = CalibrationRun(**vars(setup), kind="diagonal")
        return ImportanceMatrix(run_pass(run, file.path.absolute(), None, directory=temporary, title="column scales", console=console))
