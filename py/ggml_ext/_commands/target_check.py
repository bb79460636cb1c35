"""Compare the types chosen for a size with the best fixed type that fits, by measured KL divergence.

The prediction that chooses types is linear in the errors, and sensitivities are measured on one text. Both can mislead, so both files are measured,
and the better one stays. This costs one more encoding of the model (two with --propagate) and three short runs of llama-perplexity.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from .._allocation.allocation import Allocation
from .._allocation.fixed_types import FixedType
from .._allocation.sensitivity import cut_text
from .._base.console import Console
from .._base.errors import UserError
from .._base.files import check_free_space, temporary_directory
from .._base.signals import stop_after_writing
from .._base.units import MIB
from .._evaluation.figures import KLD, Figure, compare_paired, kld_sums
from .._evaluation.logits import BaseLogits
from .._evaluation.perplexity import PerplexityRunner
from .._formats.context import N_CONTEXT, context_length
from .._formats.gguf_file import GGUFFile
from .._formats.language_model import describe_other_model
from .._formats.tensor_types import FLOAT_TYPES
from .._native.programs import find_tool
from .._native.text_file import read_end
from .._plan.file_types import FILE_TYPES, UPSTREAM_FILES
from .._plan.planning import make_plan
from .._plan.uses import GraphUses
from .evaluating import TEXT, TOKENS
from .settings import Settings, parse_choices

CHUNKS = 16  # of N_CONTEXT tokens: the mean KL divergence of 4,080 scored tokens has a standard error of about 2 %
TEXT_BYTES = CHUNKS * N_CONTEXT * 8  # as for the sensitivity
TEMPORARY = ".target-check-"

Written = TypeVar("Written")


@dataclass(frozen=True)
class CheckedFile:
    """A file for the target, with its types' predicted and its measured KL divergence."""

    name: str  # of --type; auto for the chosen types
    n_bytes: int
    predicted: float
    measured: Figure

    def record(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {"type": self.name, "bytes": self.n_bytes, "predicted_kl_divergence": self.predicted, "kl_divergence": list(self.measured)}

    def describe(self) -> str:
        return f"{self.measured.value:.4g} +- {self.measured.error or 0:.2g} (predicted {self.predicted:.4g})"


def list_fixed_types(settings: Settings, file: GGUFFile, uses: GraphUses) -> list[FixedType]:
    """List the types that the check may compare with; none if it does not run. With --target-types they consist of the listed types."""
    target = settings.target
    if target is None or target.kind == "kld" or settings.types.no_target_check or settings.output.is_dry or settings.output.is_split:
        return []
    if not settings.calibration.runs_model or find_tool("llama-perplexity") is None:
        return []
    if describe_other_model(file) or not file.strings(TOKENS):
        return []
    fixed, allowed = [], {qtype.name for qtype in target.types}
    for name, file_type in FILE_TYPES.items():
        is_alias = file_type.name != name
        if is_alias or file_type.type in FLOAT_TYPES or (target.upstream_only and not file_type.is_upstream):
            continue
        try:
            plan = make_plan(file, fixed_settings(settings, name).choices, True, uses)
        except UserError:  # a tensor fits none of its types
            continue
        if not target.types_are_listed or all(t.type.name in allowed for t in plan.changed):
            fixed.append(FixedType(name, {t.name: t.type for t in plan.tensors}, name in UPSTREAM_FILES))
    return fixed


def fixed_settings(settings: Settings, name: str, path: Path | None = None) -> Settings:
    """Return the settings of a run that writes a fixed type to a temporary file, with the caches of OUT. name: of --type."""
    types = replace(
        settings.types, type=name, target_size=None, target_bpw=None, target_kld=None, target_types=None, stock=False, no_target_check=False
    )
    output = replace(settings.output, path=path, report=None, model_card=None, upload=None)
    assert settings.output.path is not None
    return replace(
        settings, types=types, choices=parse_choices(types, FILE_TYPES[name], None), target=None, output=output,
        cache_path=Path(os.path.realpath(settings.output.path)).parent,
        n_compared_metrics=settings.target.n_metrics if settings.target else settings.n_compared_metrics,
    )


def check_target(
    settings: Settings, file: GGUFFile, allocation: Allocation, path: Path, write: Callable[[Settings], Written], console: Console, *,
    state: str | None,
) -> tuple[Allocation, Written | None]:
    """Write the best fixed type too, measure both, and keep the better file.

    Args:
        settings: of the run.
        file: the source.
        allocation: the chosen types, with their rival.
        path: the file with the chosen types.
        write: writes the file of other settings.
        console: for notes and the progress bars.
        state: of OUT, for the message if a signal ends the run; None if the files are not OUT, but the same without sequential quantization.

    Returns:
        The types of the file with the comparison in their notes, and what write() returned if these are the fixed type's.
    """
    if allocation.rival is None:
        return allocation, None
    name, fixed = allocation.rival
    console.note(
        f"comparing with {name}, the best fixed type for this size: encoding it and three runs of {CHUNKS} chunks; --no-target-check skips this"
    )
    try:
        with temporary_directory(path.parent, TEMPORARY, console.note) as directory:
            rival_path = directory / path.name
            check_free_space(path.parent, path.stat().st_size, "the file to compare with", "", "pass --no-target-check")
            with stop_after_writing(state):
                written = write(fixed_settings(settings, name, rival_path))
            with stop_after_writing(state):  # writing ended by ignoring signals
                statistics, logs = _measure(settings, file, [path, rival_path], directory, console)
            names, allocations = ("auto", name), (allocation, fixed)
            checked = [
                CheckedFile(n, p.stat().st_size, a.predicted, figure)
                for n, p, a, figure in zip(names, (path, rival_path), allocations, statistics, strict=True)
            ]
            difference = compare_paired(*map(kld_sums, logs))
            is_better = checked[1].measured.value < checked[0].measured.value
            if is_better:
                with contextlib.suppress(OSError):
                    shutil.copymode(path, rival_path)
                os.replace(rival_path, path)
    except UserError as e:
        console.warn(f"the chosen types were not compared with {name}: {e}")
        return allocation, None
    kept = allocations[is_better]
    record = {"written": names[is_better], "files": [c.record() for c in checked], "paired": difference and list(difference)}
    return replace(kept, notes=[*kept.notes, *_describe(checked, difference, is_better, is_final=state is not None)], check=record), written if is_better else None


def _measure(
    settings: Settings, file: GGUFFile, paths: list[Path], directory: Path, console: Console
) -> tuple[list[Figure], list[str]]:
    """Measure the KL divergence of files from the source. Return the figures and the logs."""
    program, n_ctx = find_tool("llama-perplexity"), context_length(file)
    assert program is not None
    runner = PerplexityRunner(
        program=program, n_ctx=n_ctx, n_batch=n_ctx, n_threads=settings.n_threads, options=settings.calibration.devices.arguments(),
        console=console, on_estimate=lambda _: None,
    )
    text, logits = directory / "text.txt", directory / "logits.bin"
    text.write_bytes(cut_text(read_end(settings.calibration.text or TEXT, TEXT_BYTES + 1), TEXT_BYTES))
    n_chunks = CHUNKS * N_CONTEXT // n_ctx
    needed = BaseLogits(logits, n_ctx, len(file.strings(TOKENS) or []), n_chunks).n_bytes()
    check_free_space(directory, needed, "the original's logits", "", "pass --no-target-check")
    file.complete("llama-perplexity")
    runner.save_logits(file.path, text, n_chunks, logits)
    results = [runner.compare(path, BaseLogits.read(logits)) for path in paths]
    return [statistics[KLD] for statistics, _ in results], [log for _, log in results]


def _describe(checked: list[CheckedFile], difference: Figure | None, is_fixed: bool, *, is_final: bool) -> list[str]:
    """Describe the comparison for the summary."""
    kept, other = checked[is_fixed], checked[not is_fixed]
    fixed = checked[1].name
    named, title = ("the chosen types", "the chosen types") if is_fixed else (fixed, f"{fixed}, the best fixed type for this size")
    gain = 1 - kept.measured.value / other.measured.value if other.measured.value > 0 else 0.0
    paired = "" if difference is None else f", difference {abs(difference.value):.2g} +- {difference.error or 0:.2g}"
    return [
        f"measured KL divergence {'' if is_final else 'without sequential quantization '}{kept.describe()}: {gain:.1%} less than that of {named}{paired}",
        f"{title}, {other.n_bytes / MIB:,.2f} MiB: {other.describe()}",
        *([f"{fixed} was written in place of the chosen types, which measured worse"] if is_fixed else []),
    ]
