"""The result of evaluate: tables, JSON and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._base.encoding import to_utf8
from .._base.package import __version__
from .._base.text import format_table
from .._base.units import MIB
from .._evaluation.figures import KLD, PPL, SAME_TOP, Figure, compare_paired, mean_over_samples
from .._evaluation.needle import N_DEPTHS, NeedleScores
from .._evaluation.samples import Samples
from .picture import quiet_matplotlib, save_picture

WIDEST = 70  # columns of a table besides the model's name


@dataclass(frozen=True)
class Quality:
    """The figures of one file.

    Attributes:
        types: bytes by tensor type.
        statistics: by llama-perplexity's names; without a base only the perplexity, with tasks alone nothing.
        scores: percentage of right answers by kind of task.
        positions: KL divergence in each range of positions; none without --positions.
        needles: scores of the needles; None without --needle.
    """

    path: Path
    label: str
    n_bytes: int
    bpw: float
    types: dict[str, int]
    statistics: dict[str, Figure] = field(default_factory=dict)
    scores: dict[str, Figure] = field(default_factory=dict)
    positions: Sequence[Figure] = ()
    needles: NeedleScores | None = None

    def record(self) -> dict:
        return {
            "file": str(self.path), "label": self.label, "bytes": self.n_bytes, "bpw": self.bpw, "types": self.types,
            "statistics": {name: list(figure) for name, figure in self.statistics.items()},
            "scores": {kind: list(figure) for kind, figure in self.scores.items()},
            **({"positions": list(map(list, self.positions))} if self.positions else {}),
            **({"needles": self.needles.record()} if self.needles else {}),
        }


@dataclass(frozen=True)
class Pair:
    """The paired differences of two models on the same chunks, tasks and texts. Fields are None or empty where there is nothing to compare.

    Attributes:
        ln_ratio: ln(PPL first / PPL second).
        kld, top: difference of the KL divergence, and of the top-1 agreement in percentage points.
        positions: difference of the KL divergence in each range of positions.
        scores: difference of right answers by kind of task, in percentage points.
        needles: difference of the scores of each needle.
    """

    first: str
    second: str
    ln_ratio: Figure | None
    kld: Figure | None
    top: Figure | None
    positions: Sequence[Figure]
    scores: Mapping[str, Figure]
    needles: NeedleScores | None

    @classmethod
    def compare(cls, first: str, second: str, samples: Mapping[str, Samples]) -> Pair:
        """Compare two models by their labels."""
        a, b = samples[first], samples[second]
        difference = a.minus(b)
        return cls(
            first, second, compare_paired(a.ppl_sums, b.ppl_sums), compare_paired(a.kld_sums, b.kld_sums), compare_paired(a.top_sums, b.top_sums),
            mean_over_samples(difference.positions), difference.scores(), difference.needles,
        )

    @property
    def name(self) -> str:
        return f"{self.first} against {self.second}"

    def lines(self) -> list[str]:
        """Return a line for each figure that was measured."""
        answers = "fewer right answers", "more right answers"
        right, log_p = self.needles.totals() if self.needles else (None, None)
        named: list[tuple[str, Figure | None, int, tuple[str, str]]] = [
            ("ln(PPL ratio)", self.ln_ratio, 5, ("lower perplexity", "higher perplexity")),
            ("KL divergence", self.kld, 5, ("lower KL divergence", "higher KL divergence")),
            ("top-1 agreement, %", self.top, 2, ("lower agreement", "higher agreement")),
            *((f"{kind}, %", figure, 2, answers) for kind, figure in self.scores.items()),
            ("needles, %", right, 2, answers),
            ("needles, ln p(answer)", log_p, 4, ("less probable answers", "more probable answers")),
        ]
        return [f"{self.name}: {title} {_difference(figure, digits, verdicts)}" for title, figure, digits, verdicts in named if figure]

    def record(self) -> dict:
        figures = {"ln_ratio": self.ln_ratio, "kl_divergence": self.kld, "top_1": self.top}
        return {
            "first": self.first, "second": self.second, **{name: list(figure) for name, figure in figures.items() if figure},
            **({"positions": list(map(list, self.positions))} if self.positions else {}),
            **({"scores": {kind: list(figure) for kind, figure in self.scores.items()}} if self.scores else {}),
            **({"needles": self.needles.record()} if self.needles else {}),
        }


def _difference(figure: Figure, digits: int, verdicts: tuple[str, str]) -> str:
    """Format a difference with its verdict. verdicts: for significantly smaller and larger values."""
    value, error = figure.value, figure.error or 0.0
    in_errors = f", {abs(value) / error:.1f} standard errors" if error else ""
    verdict = "equal" if not value else "not significant" if abs(value) < 2 * error else verdicts[value > 0]
    return f"{value:+.{digits}f} +- {error:.{digits}f}{in_errors}: {verdict}"


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. text: describes the scored text; base: the model of --against, or None; ranges: of --positions, first and end."""

    text: dict
    n_ctx: int
    n_chunks: int
    base: Quality | None
    models: list[Quality]
    pairs: list[Pair]
    ranges: Sequence[tuple[int, int]] = ()

    @property
    def has_kld(self) -> bool:
        """Whether the models were compared with a base or its logits."""
        return any(KLD in model.statistics for model in self.models)

    def lines(self, width: int) -> list[str]:
        """Format the tables, at least `width` columns wide; names of files are not shortened."""
        rows = [*([self.base] if self.base else []), *self.models]
        lines, width = [], max(width, max(len(row.label) for row in rows) + WIDEST)
        if any(row.statistics for row in rows):
            lines += format_table("model", _heading(self.has_kld), [(r.label, _columns(r, self.has_kld)) for r in rows], width)
        if kinds := list(dict.fromkeys(kind for row in rows for kind in row.scores)):
            heading = " ".join(f"{kind + ', %':>18}" for kind in kinds)
            lines += format_table("model", heading, [(r.label, " ".join(_score(r.scores.get(kind)) for kind in kinds)) for r in rows], width)
        if self.ranges:
            lines += self._position_table(width)
        if any(row.needles for row in rows):
            lines += self._needle_tables(rows)
        return [*lines, *([""] if self.pairs else []), *(line for pair in self.pairs for line in pair.lines())]

    def _position_table(self, width: int) -> list[str]:
        """Tabulate the KL divergence by position, and its differences from the first model's: a line per range, or names would not fit."""
        named = [(row.label, row.positions) for row in self.models] + [(p.name, p.positions) for p in self.pairs if p.positions]
        lines = []
        for label, figures in named:
            rows = [(f"{start}-{end - 1}", _figure(figure, 22, 5)) for (start, end), figure in zip(self.ranges, figures, strict=True)]
            lines += format_table(f"positions, {label}", f"{'KL divergence':>22}", rows, width)
        return lines

    def _needle_tables(self, rows: Sequence[Quality]) -> list[str]:
        """Tabulate the needles by depth, and their differences."""
        named = [(r.label, r.needles) for r in rows if r.needles] + [(p.name, p.needles) for p in self.pairs if p.needles]
        depths = [f"{100 * i // N_DEPTHS}-{100 * (i + 1) // N_DEPTHS} % deep" for i in range(N_DEPTHS)]
        heading = " ".join(f"{word:>15}" for word in ("all", *depths))
        lines = []
        for k, (title, digits) in enumerate((("needles: right answers, %", 1), ("needles: ln p(answer)", 3))):
            table = [(name, " ".join(_figure(f, 15, digits) for f in (needles.totals()[k], *needles.by_depth()[k]))) for name, needles in named]
            lines += format_table(title, heading, table, max(len(name) for name, _ in [(title, ""), *table]) + 2 + len(heading))
        return lines

    def record(self) -> dict:
        """Return what `ggml-ext evaluate --json` prints. A figure is [value, standard error]."""
        return {
            "ggml_ext": __version__, "text": self.text, "ctx_size": self.n_ctx, "chunks": self.n_chunks,
            "base": self.base and self.base.record(),
            "models": [model.record() for model in self.models],
            **({"ranges": list(map(list, self.ranges))} if self.ranges else {}),
            "paired": [pair.record() for pair in self.pairs],
        }


def _heading(with_kld: bool) -> str:
    return f"{'MiB':>9} {'bpw':>5} {'perplexity':>17}" + (f" {'KL divergence':>18} {'top-1':>8}" if with_kld else "")


def _columns(row: Quality, with_kld: bool) -> str:
    ppl, kld, top = (row.statistics.get(name) for name in (PPL, KLD, SAME_TOP))
    shown = f"{row.n_bytes / MIB:9,.1f} {row.bpw:5.2f} {_figure(ppl, 17, 3)}"
    if with_kld:
        shown += f" {_figure(kld, 18, 5)} " + (f"{top.value:6.2f} %" if top else " " * 8)
    return shown.rstrip()


def _figure(figure: Figure | None, width: int, digits: int) -> str:
    return f"{f'{figure.value:.{digits}f} +- {figure.error:.{digits}f}' if figure else '':>{width}}"


def _score(figure: Figure | None) -> str:
    return _figure(figure, 18, 2)


def draw_quality(evaluation: Evaluation, path: Path, force: bool) -> bool:
    """Draw KL divergence, or perplexity without a base, over the size of the models. Errors and result: see picture.draw()."""
    name, title = (KLD, "KL divergence") if evaluation.has_kld else (PPL, "perplexity")
    points = [(m.label, m.n_bytes / MIB, m.statistics[name]) for m in evaluation.models if name in m.statistics]
    with quiet_matplotlib() as caught:
        _draw(points, title, path, force)
    return path.suffix.lower() == ".svg" or not any("missing from font" in str(w.message) for w in caught)


def _draw(points: Sequence[tuple[str, float, Figure]], title: str, path: Path, force: bool) -> None:
    import matplotlib
    from matplotlib.figure import Figure as Picture

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "ggml-ext", "font.size": 9, "text.parse_math": False}
    with matplotlib.rc_context(style):
        picture = Picture(figsize=(6, 4), layout="constrained")
        axes = picture.subplots()
        for label, size, figure in points:
            axes.errorbar(size, figure.value, yerr=figure.error or 0, marker="o", color="tab:blue")
            axes.annotate(to_utf8(label), (size, figure.value), xytext=(5, 5), textcoords="offset points")
        axes.set(xlabel="size of the file, MiB", ylabel=title, ylim=(0, None) if title == "KL divergence" else None)
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        save_picture(picture, path, force)
