"""What a target needs to know: the error of each type in each matrix, and what errors cost the model.

The relative squared error is measured on a sample of the rows, weighted with what is known of the inputs; sensitivity.py says what it
costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.files import fingerprint
from .._base.package import __version__
from .._base.signals import StopRequest
from .._base.threads import map_in_order
from .._calibration import calibration
from .._calibration.importance import Importance
from .._encode.accuracy import Accuracy
from .._encode.codec import Codec, Guide
from .._formats.cache_names import choice_cache_name
from .._formats.gguf_file import GGUFFile, Tensor, header_bytes
from .._formats.language_model import describe_other_model
from .._native.programs import find_tool
from .._plan.plan import SOURCE_TYPES, Plan
from . import sensitivity
from .items import Item
from .kept import Keeper, Kept
from .sensitivity import Measured, Probe
from .target import SENSITIVITIES

GROUPS, GROUP_ROWS = 4, 16  # of rows that stand for a tensor, spread over it


@dataclass(frozen=True)
class Inquiry:
    """What is measured, with what.

    plan: with the importances that are used; folder: of OUT with links resolved, None where there is none; is_dry: no model runs and
    nothing is kept; runs_model: False with --no-calibration; text: of --imatrix-from; sensitivity: of SENSITIVITIES.
    """

    file: GGUFFile
    plan: Plan
    importance: Importance
    codec: Codec
    n_threads: int
    console: Console
    folder: Path | None
    is_dry: bool
    runs_model: bool
    text: Path | None
    sensitivity: str

    def measure(self, items: Sequence[Item]) -> tuple[dict[str, dict[str, float]], dict[str, float], bool]:
        """Errors by tensor and type, sensitivities by tensor, and whether these are the model's own."""
        path = None if self.folder is None else self.folder / choice_cache_name(self.file.stem)
        kept = Kept.read(path, self._made_from())
        if self.importance.matrix is None:
            self.console.warn("types are chosen by plain errors: nothing is known of the inputs of the matrices, which costs quality")
        keeper = Keeper(kept, None if self.is_dry else path)
        try:
            self._measure_errors(items, keeper)
        except StopRequest:
            keeper.write()  # what there is by now
            raise
        keeper.write()
        return kept.errors, *self._sensitivities([item.tensor for item in items], keeper)

    def _made_from(self) -> dict:
        return {
            "version": __version__,
            "model": [fingerprint(part.path, header_bytes(part)) for part in self.file.parts],
            "importance": [self.importance.kind, [fingerprint(p) for p in self.importance.paths()], *self._left_out()],
            "encoder": [self.codec.effort, self.codec.itq3_levels],
        }

    def _left_out(self) -> list[list[str]]:
        """Importances that are not used, if there are some."""
        matrix = self.importance.matrix
        return [sorted(matrix.excluded)] if matrix and matrix.excluded else []

    def _sample_error(self, tensor: Tensor, target: GGMLQuantizationType, importance: Importance) -> float:
        """Relative squared error of a sample of a tensor's rows in a type, weighted where something is known of the inputs."""
        if target == tensor.type:
            return 0.0
        guide = importance.guide(tensor) if tensor.name in self.plan.importance else Guide()
        guide = importance.with_metrics(guide, tensor, target, self.codec.with_one_thread())  # the others have tensors of their own
        groups = min(GROUPS, -(-tensor.n_rows // GROUP_ROWS))
        total = Accuracy()
        for i in range(groups):  # of equal parts of the rows, the middle
            first = max(0, (2 * i + 1) * tensor.n_rows // (2 * groups) - GROUP_ROWS // 2)
            n_rows = min(GROUP_ROWS, tensor.n_rows - first)
            total += self.codec.convert(self.file.rows(tensor, first, n_rows), tensor, first, target, guide)[1]
        return float(total.relative if total.weighted is None else total.weighted)

    def _measure_errors(self, items: Sequence[Item], keeper: Keeper) -> None:
        """Fills in the kept errors for all types of all items."""
        errors = keeper.kept.errors
        missing = [
            (item.tensor, lacking)
            for item in items
            if (lacking := [t for t in item.types if t.name.lower() not in errors.get(item.tensor.name, {})])
        ]
        if not missing:
            self.console.note("errors of all types were measured before: used again")
            return
        n_types = len({t for _, types in missing for t in types})
        self.console.note(
            f"errors of {n_types} type{'s' * (n_types > 1)} are measured on up to {GROUPS * GROUP_ROWS} rows of {len(missing)} tensors"
        )

        def measure(job: tuple[Tensor, list[GGMLQuantizationType]]) -> dict[str, float]:
            tensor, types = job
            own = replace(self.importance, _last=(None, None))  # metrics of the last tensor are not shared between threads
            found = {t.name.lower(): self._sample_error(tensor, t, own) for t in types}
            return found

        with ThreadPoolExecutor(self.n_threads) as pool, self.console.bar("errors", len(missing), "tensor") as bar:
            try:
                for (tensor, _), found in zip(missing, map_in_order(pool, measure, missing, 2 * self.n_threads), strict=True):
                    errors.setdefault(tensor.name, {}).update(found)
                    keeper.write_now_and_then()
                    bar.update()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _sensitivities(self, tensors: Sequence[Tensor], keeper: Keeper) -> tuple[dict[str, float], bool]:
        """By tensor, and whether they are this model's."""
        usual = sensitivity.usual([t.name for t in tensors])
        if self.sensitivity == SENSITIVITIES[1]:
            return usual, False
        text, program = self.text or calibration.TEXT, find_tool("llama-perplexity")
        used = {"text": fingerprint(text) if text.is_file() else {}, "chunks": sensitivity.N_CHUNKS}
        before = keeper.kept.measured(used)
        if before.is_whole() and set(before.errors) >= {t.name for t in tensors}:
            self.console.note("what errors cost was measured before: used again")
            return sensitivity.fit(sensitivity.usual(list(before.errors)), before.errors, before.costs), True
        if why := self._why_not(tensors, text, program):
            (self.console.warn if program is None and not self.is_dry else self.console.note)(
                f"what errors cost is taken from another model: {why}"
            )
            return usual, False
        probe = Probe(
            self.file, tensors, self.importance, self.codec, program, text, self.folder, self.n_threads, frozenset(self.plan.importance)
        )
        self.console.note(probe.describe())

        def keep(found: Measured) -> None:
            keeper.kept.set_measured(used, found)
            keeper.write()

        found = probe.run(before, keep, self.console)
        return sensitivity.fit(usual, found.errors, found.costs), True

    def _why_not(self, tensors: Sequence[Tensor], text: Path, program: Path | None) -> str | None:
        """Why the model is not run, if it is not."""
        reasons = (
            (self.is_dry, "--dry-run runs no model"),
            (not self.runs_model, "--no-calibration runs no model"),
            (program is None, "llama-perplexity is not in the package"),
            ((other := describe_other_model(self.file)) is not None, f"this one is {other} and has no KL divergence"),
            (self.codec.lib is None, "the built library is not in use"),
            (any(t.type not in SOURCE_TYPES for t in tensors), "tensors of the model are quantized already"),
            (not text.is_file(), f"{text} is not there"),
        )
        return next((why for is_so, why in reasons if is_so), None)
