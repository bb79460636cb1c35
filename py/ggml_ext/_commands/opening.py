"""Open the model to quantize, and reserve and lock the files of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._formats.gguf_file import GGUFFile, header_bytes
from .._formats.reserved_paths import ReservedPaths, reserve_file, reserve_output
from .._output.output import Output
from .._plan.partition import select_part
from .._plan.plan import QuantizationPlan
from .._plan.planning import check_model
from .._source.source import list_input_files, open_source, reserve_kept_gguf
from .settings import Settings


@dataclass(frozen=True)
class OpenedModel:
    """The model, and the locked output."""

    file: GGUFFile
    paths: ReservedPaths
    output: Output | None  # None in a dry run
    checkpoint: dict[str, Any] | None = None  # as in OpenedSource

    def plan_parts(self, plan: QuantizationPlan, settings: Settings, candidates: Mapping[str, Sequence[GGMLQuantizationType]]) -> None:
        """Assign tensors to the parts of OUT, and check the free space.

        Args:
            plan: the tensors and their types.
            settings: of the run.
            candidates: by tensor, the types that allocation may choose; the smallest counts.
        """
        if self.output is None:
            return
        plan = plan_of_part(plan, settings)
        sizes = [min(t.tensor.bytes_as(q) for q in candidates.get(t.name, [t.type])) for t in plan.tensors]
        above = settings.choices.fallback_above
        self.output.plan_parts(
            sizes,
            n_header=header_bytes(self.file),
            alignment=self.file.alignment,
            max_bytes=settings.output.max_bytes,
            describe_input=self.paths.describe_input,
            largest=None if above is None else [max(possible.values()) for possible in plan.possible_sizes(above)],
        )


def plan_of_part(plan: QuantizationPlan, settings: Settings) -> QuantizationPlan:
    """Return the plan of what the run writes: the complete plan, or that of its part."""
    part = settings.output.part_number
    return plan if part is None else select_part(plan, part.number, part.count).plan


def reserve_paths(settings: Settings, inputs: Mapping[Path, str], stem: str, is_again: bool = False) -> ReservedPaths:
    """Reserve the files that are read and written. UserError if an output may not be written.

    Args:
        settings: of the run.
        inputs: of ReservedPaths.
        stem: of the model.
        is_again: the model is open by now, and the file of --keep-gguf exists.
    """
    output = settings.output
    paths = ReservedPaths(inputs, stem, output.is_split)
    if not output.is_dry:
        paths = reserve_output(paths, output.path, output.force)
    if not is_again:
        paths = reserve_kept_gguf(settings.source.keep_gguf, paths)
    for flag, path in (("--report", output.report), ("--model-card", output.model_card)):
        paths = paths if path is None else reserve_file(flag, path, paths, output.force)
    return paths


def open_model(settings: Settings, console: Console, stack: contextlib.ExitStack) -> OpenedModel:
    """Open the model and lock OUT until the stack is closed."""
    source, options = settings.source, settings.calibration
    inputs = list_input_files(source.path, {"--imatrix": options.imatrix, "--imatrix-from": options.text})
    paths = reserve_paths(settings, inputs, source.expected_stem)
    out = paths.out
    part = settings.output.part_number
    output = None
    if out is not None:
        path = out if part is None else part.path(out)
        output = stack.enter_context(Output(path, settings.output.force, settings.output.split_max_size is not None))
    opened = stack.enter_context(open_source(source, out, console))
    file = opened.file
    inputs = {**paths.inputs, **{part.path: "IN" for part in file.parts}}
    paths = reserve_paths(settings, inputs, file.stem, is_again=True)
    check_model(file)
    return OpenedModel(file, paths, output, opened.checkpoint)
