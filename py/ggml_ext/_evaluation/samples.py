"""What a run measures on each chunk, task and text: the samples of paired differences between models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .figures import Figure, mean_over_samples
from .needle import NeedleScores


@dataclass(frozen=True)
class Samples:
    """The samples of one model; fields are empty where it was not measured.

    Attributes:
        ppl_sums, kld_sums, top_sums: cumulative sums over chunks, as figures.py reads them from a log.
        positions: KL divergence in ranges of positions, (n_chunks, n_ranges).
        answers: by kind of task, 100 for each right answer and 0 for each wrong one, (n_tasks, 1).
        needles: scores of the needles in texts.
    """

    ppl_sums: Sequence[float] = ()
    kld_sums: Sequence[float] = ()
    top_sums: Sequence[float] = ()
    positions: np.ndarray = field(default_factory=lambda: np.empty((2, 0)))
    answers: Mapping[str, np.ndarray] = field(default_factory=dict)
    needles: NeedleScores | None = None

    def scores(self) -> dict[str, Figure]:
        """Return the percentage of right answers by kind of task."""
        return {kind: mean_over_samples(answers)[0] for kind, answers in self.answers.items()}

    def minus(self, other: Samples) -> Samples:
        """Return the differences of answers and needles, which are of the same tasks and texts, and of positions if both have them."""
        shared = {kind: values for kind, values in self.answers.items() if values.shape == other.answers[kind].shape}
        return Samples(
            positions=self.positions - other.positions if self.positions.shape == other.positions.shape else np.empty((2, 0)),
            answers={kind: values - other.answers[kind] for kind, values in shared.items()},
            needles=self.needles - other.needles if self.needles and other.needles else None,
        )
