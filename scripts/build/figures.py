#!/usr/bin/env python3
"""Writes what the documents show of docs/measured.json: the tables between the "measured" markers of README.md and
docs/measurements.md, and the picture docs/types.svg.

    figures.py            write them
    figures.py --check    write nothing; exit 1 if a table is stale

docs/measured.json is what `demo.py --full --json docs/measured.json` measured. Needs matplotlib.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ggml_ext import WEIGHT_TYPES
from ggml_ext._cli import run_script

ROOT = Path(__file__).resolve().parents[2]
MEASURED, PICTURE = ROOT / "docs" / "measured.json", ROOT / "docs" / "types.svg"
MARKERS = ("<!-- measured:begin -->", "<!-- measured:end -->")
OUR_COLOUR, STOCK_COLOUR = "#c2410c", "#64748b"


class Type:
    """What was measured of one type, from the rows of its default encoder with an importance matrix and without."""

    def __init__(self, name: str, rows: dict[str, dict]):
        plain, weighted = rows.get(name.upper()), rows.get(f"{name.upper()}, with imatrix")
        row = plain or weighted
        f16 = rows["F16"]["perplexity"]
        self.name, self.bpw, self.is_ours = name, row["bpw"], name in WEIGHT_TYPES
        self.decode, self.prefill = row["decode/q3_k"], row["prefill/q3_k"]
        # perplexity over F16's, as a fraction
        self.plain, self.weighted = (r and r["perplexity"] / f16 - 1 for r in (plain, weighted))

    @property
    def best(self) -> float:
        """With an importance matrix where that was measured."""
        return self.plain if self.weighted is None else self.weighted


def read_types(measured: dict) -> list[Type]:
    names = dict.fromkeys(row["type"] for row in measured["rows"].values() if row["type"] != "f16")
    return sorted((Type(name, measured["rows"]) for name in names), key=lambda t: (t.bpw, t.name), reverse=True)


def render_types(types: list[Type]) -> str:
    """One line a type."""
    lines = ["| type | bits a weight | perplexity over F16 | with imatrix | decode, x Q3_K | prefill, x Q3_K |", "|" + " --- |" * 6]
    for t in types:
        name = f"**{t.name.upper()}**" if t.is_ours else t.name.upper()
        plain, weighted = ("" if value is None else f"{100 * value:.1f} %" for value in (t.plain, t.weighted))
        lines.append(f"| {name} | {t.bpw:g} | {plain} | {weighted} | {t.decode:.2f} | {t.prefill:.2f} |")
    return "\n".join(lines)


def render_rows(rows: dict[str, dict]) -> str:
    """Every row as the demo measured it; cells of what failed are empty."""
    lines = ["| type | bpw of the blocks | perplexity | over F16 | decode t/s | x Q3_K | prefill t/s | x Q3_K |", "|" + " --- |" * 8]
    for name, row in rows.items():
        over = f"{100 * (row['perplexity'] / rows['F16']['perplexity'] - 1):.1f} %" if "F16" in rows else ""
        forms = {"decode": ".1f", "decode/q3_k": ".2f", "prefill": ".0f", "prefill/q3_k": ".2f"}
        cells = [f"{row[key]:{form}}" if key in row else "" for key, form in forms.items()]
        lines.append(f"| {name} | {row['bpw']:.4g} | {row['perplexity']:.3f} | {over} | {' | '.join(cells)} |")
    return "\n".join(lines)


def replace_table(path: Path, table: str) -> str:
    """The text of a document with the lines between its markers replaced; RuntimeError if there is not one pair of them."""
    text = path.read_text()
    begin, end = MARKERS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise RuntimeError(f"{path}: needs one {begin} and, after it, one {end}")
    return f"{text.split(begin)[0]}{begin}\n{table}\n{end}{text.split(end)[1]}"


def place_labels(axes, points: list[tuple[float, float, str, str]]) -> None:
    """A label (x, y, text, colour) beside each point, on the side where it covers least of the points and the other labels."""
    from matplotlib.transforms import Bbox

    renderer = axes.figure.canvas.get_renderer()
    taken = [Bbox.from_bounds(*(axes.transData.transform((x, y)) - 5), 10, 10) for x, y, *_ in points]
    for x, y, text, colour in points:
        tries = []
        for dx, dy, align in ((8, -3.5, "left"), (-8, -3.5, "right"), (0, 7, "center"), (0, -14, "center")):
            label = axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", ha=align, color=colour, fontsize=9)
            box = label.get_window_extent(renderer)
            tries.append((sum(box.overlaps(other) for other in taken), len(tries), label, box))
        *_, best, box = min(tries, key=lambda found: found[:2])
        for *_, label, _ in tries:
            if label is not best:
                label.remove()
        taken.append(box)


def draw(types: list[Type], path: Path) -> None:
    """The picture, as the format that the path's ending names."""
    import matplotlib  # here, since the demo has the tables without it

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator, PercentFormatter

    # text as text, and the same bytes for the same figures
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ggml-ext", "font.family": "sans-serif", "font.size": 10})
    figure, (by_size, by_speed) = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True)
    by_size.set(xlabel="bits a weight", ylabel="perplexity over F16 (lower is better)", title="Quality against size")
    by_speed.set(xlabel="decode speed on a CPU, x Q3_K", title="Quality against speed")
    by_size.set_yscale("log")
    by_size.set_yticks([0.02, 0.03, 0.05, 0.1, 0.2, 0.3], minor=False)
    by_size.yaxis.set_minor_locator(NullLocator())
    by_size.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes, key in (by_size, "bpw"), (by_speed, "decode"):
        points = [(getattr(t, key), t.best, t.name.upper(), OUR_COLOUR if t.is_ours else STOCK_COLOUR) for t in types]
        axes.scatter([p[0] for p in points], [p[1] for p in points], s=36, c=[p[3] for p in points], zorder=3)
        axes.grid(color="#e2e8f0", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(0.16)
        figure.tight_layout()
        place_labels(axes, points)
    beside = path.with_name(path.name + ".part")
    figure.savefig(beside, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
    os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a table is stale")
    args = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    types = read_types(measured)
    for name, table in ("README.md", render_types(types)), ("docs/measurements.md", render_rows(measured["rows"])):
        path = ROOT / name
        new = replace_table(path, table)
        if args.check and new != path.read_text():
            raise RuntimeError(f"{name}: its table is stale: run scripts/build/figures.py")
        if not args.check:
            path.write_text(new)
    if not args.check:
        draw(types, PICTURE)


if __name__ == "__main__":
    sys.exit(run_script(main))
