#!/usr/bin/env python3
"""Generate docs/types.svg and the tables between markers in README.md and docs/results from docs/measured.json.

    figures.py            write them
    figures.py --check    write nothing; exit 1 if a table is stale

`demo.py --full --json docs/measured.json` writes the rows of docs/measured.json. Its other sections have figures of other CPUs and models.
Requires matplotlib.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ggml_ext import WEIGHT_TYPES
from ggml_ext._console.cli import run_script

ROOT = Path(__file__).resolve().parents[2]
MEASURED, PICTURE = ROOT / "docs" / "measured.json", ROOT / "docs" / "types.svg"
EXT_COLOUR, UPSTREAM_COLOUR = "#c2410c", "#64748b"


def measured_text(measured: dict) -> str:
    """Format docs/measured.json with one row per line."""
    def section(value: object) -> str:
        if not isinstance(value, dict):
            return json.dumps(value)
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items()) + "\n }"

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {section(value)}" for key, value in measured.items()) + "\n}\n"


class Type:
    """Figures of a type without calibration, with an imatrix and with a block-diagonal Hessian."""

    def __init__(self, name: str, rows: dict[str, dict]):
        variants = [rows.get(name.upper() + suffix) for suffix in ("", ", with imatrix", ", with block-diagonal Hessians")]
        row = next(filter(None, variants))
        f16 = rows["F16"]["perplexity"]
        self.name, self.bpw, self.is_ext = name, row["bpw"], name in WEIGHT_TYPES
        self.decode, self.prefill = row.get("decode/q3_k"), row.get("prefill/q3_k")  # None: not measured
        self.increases = [r and r["perplexity"] / f16 - 1 for r in variants]  # of perplexity relative to F16


def read_types(measured: dict) -> list[Type]:
    names = dict.fromkeys(row["type"] for row in measured["rows"].values() if row["type"] != "f16")
    return sorted((Type(name, measured["rows"]) for name in names), key=lambda t: (t.bpw, t.name), reverse=True)


def ratio_cell(value: float | None) -> str:
    """Format a ratio; an empty cell if it was not measured."""
    return "" if value is None else f"{value:.2f}"


def render_types(types: list[Type]) -> str:
    """Render one line per type."""
    lines = ["| type | bits per weight | perplexity over F16 | imatrix | block-diagonal Hessian | decode, x Q3_K | prefill, x Q3_K |", "|" + " --- |" * 7]
    for t in types:
        name = f"**{t.name.upper()}**" if t.is_ext else t.name.upper()
        increases = " | ".join("" if value is None else f"{100 * value:.1f} %" for value in t.increases)
        speed = " | ".join(ratio_cell(value) for value in (t.decode, t.prefill))
        lines.append(f"| {name} | {t.bpw:g} | {increases} | {speed} |")
    return "\n".join(lines)


def render_rows(rows: dict[str, dict]) -> str:
    """Render all rows of the demo; cells are empty if their measurement failed."""
    lines = ["| type | bpw of the layers | perplexity | over F16 | decode t/s | x Q3_K | prefill t/s | x Q3_K |", "|" + " --- |" * 8]
    for name, row in rows.items():
        increase = f"{100 * (row['perplexity'] / rows['F16']['perplexity'] - 1):.1f} %" if "F16" in rows else ""
        forms = {"decode": ".1f", "decode/q3_k": ".2f", "prefill": ".0f", "prefill/q3_k": ".2f"}
        cells = [f"{row[key]:{form}}" if key in row else "" for key, form in forms.items()]
        lines.append(f"| {name} | {row['bpw']:.4g} | {row['perplexity']:.3f} | {increase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def quality(measured: dict) -> dict[str, dict]:
    """Collect bits per weight and KL divergences (as text) by type, most bits first.

    Keys of the reference model: `upstream` (llama-quantize with an imatrix), `hessian` (ggml-ext with full Hessians and
    --no-propagate), `sequential` (sequential quantization, the default). `smollm2` is the SmolLM2 model. Keys are missing if the file was not measured.
    """
    bpw = {row["type"].upper(): row["bpw"] for row in measured["rows"].values()}
    full, propagated = measured["stock_moments"], measured["propagate"]["reference"]
    rows: dict[str, dict] = {name: {} for name in (*full["rows"], *full["ext_types"], *propagated)}
    for name, (upstream, hessian) in full["rows"].items():
        rows[name] |= {"upstream": upstream, "hessian": hessian}
    for name, hessian in full["ext_types"].items():
        rows[name] |= {"hessian": hessian}
    for name, (hessian, sequential) in propagated.items():
        rows[name] = {"hessian": hessian} | rows[name] | {"sequential": sequential}
    for name, (_, _, kld) in measured["smollm2"]["rows"].items():
        rows[name.upper()]["smollm2"] = kld
    order = sorted(rows, key=lambda name: (-bpw[name], name))
    return {name: {"bpw": bpw[name], **rows[name]} for name in order}


QUALITY = ("DITTO5", "Q5_K", "Q4_K", "ITQ4_T", "Q3_K", "IQ3_S", "ITQ3_T", "Q2_K", "ITQ2_T")  # types in README


def render_quality(measured: dict) -> str:
    """Render the KL divergence by type and method, and that of llama-quantize's mixes."""
    columns = {"upstream": "llama-quantize", "hessian": "ggml-ext, `--no-propagate`", "sequential": "ggml-ext, sequential", "smollm2": "SmolLM2-135M"}
    lines = [f"| type | bits per weight | {' | '.join(columns.values())} |", "|" + " --- |" * (2 + len(columns))]
    for name, row in quality(measured).items():
        if name in QUALITY:
            cells = " | ".join(str(row.get(key, "")) for key in columns)
            lines.append(f"| {f'**{name}**' if name.lower() in WEIGHT_TYPES else name} | {row['bpw']:g} | {cells} |")
    mixes = "; ".join(f"{name} {', '.join(figures)}" for name, figures in measured["mixes"]["rows"].items())
    return "\n".join([
        *lines, "",
        f"[Mixes](docs/results/measurements.md#standard-types) on the reference model, by llama-quantize, by ggml-ext with `--no-propagate` and by default: {mixes}. [All measurements](docs/results/measurements.md).",
    ])


def render_gains(measured: dict) -> str:
    """Render the claims at the top of README."""
    q, smollm2 = quality(measured), measured["propagate"]["smollm2"]["the built-in text"]
    itq3_t, q3_k = q["ITQ3_T"], q["Q3_K"]
    mix, avx512 = measured["mixes"]["rows"]["Q4_K_M"], measured["avx512"]
    return "\n".join([
        "- **Standard GGUF files with 40 % of the error.** `--type q4_k_m` writes a file that every llama.cpp, Ollama and LM Studio loads. On the [reference",
        f"  model](#how-good-is-it) its KL divergence from F16 is {mix[2]}. llama-quantize's Q4_K_M, calibrated with the same text, has the same size and {mix[0]}. "
        "KL divergence measures how far a model's predictions are from the original's; lower is better.",
        f"- **Smaller types that are more accurate.** ITQ3_T has {itq3_t['bpw']:.2f} bits per weight and a KL divergence of "
        f"{itq3_t['sequential']}. Q3_K in all layers has {q3_k['bpw']:.2f} bits;",
        f"  its KL divergence is {q3_k['upstream']} if made by llama-quantize and {q3_k['sequential']} if made by ggml-ext. "
        f"ITQ3_T needs the llama.cpp of this package. There it generates {avx512['decode/q3_k']['itq3_t']:.2f} times as fast as Q3_K "
        f"on a Xeon (Sapphire Rapids), {measured['zen4']['decode/q3_k']['itq3_t']:.2f} times on a Zen 4 EPYC with AVX-512, and "
        f"{measured['avx2']['decode/q3_k']['itq3_t']:.2f} times with AVX2.",
        "- **Sequential quantization**, the default. Each layer corrects the errors of the layers before it (GPTAQ, QEP, YAQA). On SmolLM2-135M, calibrated",
        f"  with the built-in text, that lowers the KL divergence of ITQ3_T from {smollm2['ITQ3_T'][0]} to {smollm2['ITQ3_T'][1]}, and of ITQ2_T from {smollm2['ITQ2_T'][0]} to {smollm2['ITQ2_T'][1]}.",
    ])


SPEEDS = ("itq4_t", "itq3_t", "itq2_t", "itq3_s", "ditto3", "ccq2", "q4_k")  # types in README's table of speeds


def speed_table(measured: dict) -> list[str]:
    """Render decode and prefill speed relative to Q3_K, and the speed of ITQ3_T without AVX2."""
    names, avx512 = SPEEDS, measured["avx512"]
    slowdowns = sorted(speeds["q3_k"] / speeds["itq3_t"] for speeds in measured["without_avx2"]["decode"].values())
    lines = [f"| speed relative to Q3_K, {avx512['processor']} | {' | '.join(map(str.upper, names))} |", "|" + " --- |" * (1 + len(names))]
    for ratio in ("decode/q3_k", "prefill/q3_k"):
        lines.append(f"| {ratio.partition('/')[0]} | {' | '.join(format(avx512[ratio][name], '.2f') for name in names)} |")
    return [
        *lines, "",
        "Measured on eight layers of Llama-3.2-1B's shape ([all speeds](docs/results/speed.md)). On CPUs without AVX2, ITQ3_T decodes at "
        f"1/{slowdowns[0]:.0f} to 1/{slowdowns[-1]:.0f} of Q3_K's speed ([variants x64 to sandybridge](docs/using/install.md#which-cpu-code-does-it-run), "
        "four layers, Zen 5 EPYC, earlier kernels).",
    ]


# (what a user may want, --type, bits per weight if they depend on the model)
CHOICES = (
    ("a file for every llama.cpp, Ollama and LM Studio", "q4_k_m", "about 4.8"),
    ("almost no loss", "ditto5", None),
    ("four bits, smaller than Q4_K and IQ4_XS and more accurate", "itq4_t", None),
    ("three bits, smaller than Q3_K ({q3_k:.2f}) and more accurate", "itq3_t", None),
    ("three bits, fastest generation", "itq3_s", None),
    ("a very small file (2 bits, attention in better types)", "itq2_t_m", "about 2.5"),
    ("below two bits, where no other type fits into memory", "itq1h_t", None),
)


def render_choice(measured: dict) -> str:
    """Render the recommended types with the size of a model of 7 billion weights."""
    sizes, q3_k = measured["seven_b"]["gib"], measured["rows"]["Q3_K"]["bpw"]
    lines = ["| you want | option | bits per weight | size of Llama-2-7B |", "| --- | --- | --- | --- |"]
    for want, name, bits in CHOICES:
        shown = bits or f"{WEIGHT_TYPES[name].bpw:.2f}"
        lines.append(f"| {want.format(q3_k=q3_k)} | `--type {name}` | {shown} | {sizes[name]:.1f} GiB |")
    lines.append("| the best file of a given size | `--target-size 3GiB` | as fits | 3 GiB |")
    return "\n".join(lines)


def render_cost(measured: dict) -> str:
    """Render time and memory for large models."""
    run = measured["seven_b"]
    calibration, encoding, added = run["calibration"], run["encoding"], run["vocabulary_adds"]
    return (
        f"**Time and memory** for the layers of Llama-3.1-8B's shape ({run['billions']:.1f} billion random weights; a full vocabulary adds {added['billions']:.1f} billion), {run['processor']}. The default in ITQ2_T takes\n"
        f"[an estimated 3.8 hours](docs/results/cost.md#sequential-quantization). With `--no-propagate`, calibration takes an estimated {calibration['all_minutes']} minutes and {calibration['gib']} GiB with block-diagonal Hessians, and encoding\n"
        f"in ITQ3_T {encoding['took_minutes']} minutes. Full Hessians take 16 GB more, or [3.2 GB](docs/reference/hessians.md#which-hessian-is-used) if only inputs of up to 4,096 columns have them. If memory is short, calibration runs layer by layer."
    )


def marker(name: str, end: str) -> str:
    return f"<!-- {name}:{end} -->"


def replace_table(path: Path, text: str, table: str, name: str = "measured") -> str:
    """Replace the lines between the markers of this name in a document's text; RuntimeError unless it has one pair of markers."""
    begin, end = marker(name, "begin"), marker(name, "end")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise RuntimeError(f"{path}: needs one {begin} and one {end} after it")
    return f"{text.split(begin)[0]}{begin}\n{table}\n{end}{text.split(end)[1]}"


def place_labels(axes, points: list[tuple[float, float, str, str]], others: list[tuple[float, float]] = ()) -> None:
    """Label each point (x, y, text, colour) on the side where the label covers the fewest points and labels."""
    from matplotlib.transforms import Bbox

    renderer = axes.figure.canvas.get_renderer()
    occupied = [Bbox.from_bounds(*(axes.transData.transform((x, y)) - 5), 10, 10) for x, y, *_ in [*points, *others]]
    for x, y, text, colour in points:
        candidates = []
        for dx, dy, align in ((8, -3.5, "left"), (-8, -3.5, "right"), (0, 7, "center"), (0, -14, "center")):
            label = axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", ha=align, color=colour, fontsize=9)
            box = label.get_window_extent(renderer)
            candidates.append((sum(box.overlaps(other) for other in occupied), len(candidates), label, box))
        *_, best, box = min(candidates, key=lambda candidate: candidate[:2])
        for *_, label, _ in candidates:
            if label is not best:
                label.remove()
        occupied.append(box)


def start_drawing() -> ModuleType:
    """Set up pyplot: text stays text, and equal figures give equal bytes."""
    import matplotlib  # imported here, because the demo works without it

    matplotlib.use("agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ggml-ext", "font.family": "sans-serif", "font.size": 10})
    return pyplot


def save(figure: object, path: Path) -> None:
    """Save a matplotlib figure in the format of the path's suffix."""
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
    os.replace(part, path)


SERIES = {  # key of quality() -> types (True: ggml-ext, False: upstream, None: all), label, marker, colour
    "upstream": (False, "standard types by llama-quantize, imatrix", "o", UPSTREAM_COLOUR),
    "hessian": (False, "standard types by ggml-ext", "s", "#2563eb"),
    "own": (True, "types of ggml-ext", "D", EXT_COLOUR),
    "sequential": (None, "quantized sequentially", "v", "#16a34a"),
}


def panels(measured: dict) -> dict[str, dict[str, dict]]:
    """Collect what the picture shows: by title of a model, rows as quality() has them."""
    bpw = {row["type"].upper(): row["bpw"] for row in measured["rows"].values()}
    dithered = {name: {"bpw": bpw[name], **row} for name, row in measured["smollm2_dithered"]["rows"].items()}
    return {"reference model (7.3 million weights, code)": quality(measured), "SmolLM2-135M-Instruct (English)": dithered}


def draw(models: dict[str, dict[str, dict]], path: Path) -> None:
    """Draw the result of panels() in the format of the path's suffix."""
    pyplot = start_drawing()
    figure, all_axes = pyplot.subplots(1, len(models), figsize=(12, 5))
    labels = [draw_model(axes, title, rows) for axes, (title, rows) in zip(all_axes, models.items(), strict=True)]
    all_axes[0].set_ylabel("KL divergence from F16 (lower is better)")
    all_axes[0].legend(frameon=False)
    figure.tight_layout()
    for axes, (named, others) in zip(all_axes, labels, strict=True):
        place_labels(axes, named, others)
    save(figure, path)


def draw_model(axes: Any, title: str, rows: dict[str, dict]) -> tuple[list[tuple], list[tuple]]:
    """Draw the rows of a model. Return the points to label, as place_labels() takes them, and the others."""
    from matplotlib.ticker import NullLocator

    axes.set(xlabel="bits per weight", title=title, yscale="log")
    labels, others, values = [], [], []
    for key, (is_ext, label, marker, colour) in SERIES.items():
        column = "hessian" if key == "own" else key
        points = [(row["bpw"], float(row[column]), name) for name, row in rows.items()
                  if column in row and is_ext in (None, name.lower() in WEIGHT_TYPES)]
        axes.scatter([p[0] for p in points], [p[1] for p in points], s=36, marker=marker, c=colour, zorder=3, label=label)
        values += [p[1] for p in points]
        named = key in ("upstream", "own")
        (labels if named else others).extend((*p[:2], p[2], colour) if named else p[:2] for p in points)
    axes.set_yticks([m * 10.0 ** e for e in range(-4, 1) for m in (1, 2, 5) if min(values) <= m * 10.0 ** e <= max(values)], minor=False)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.grid(color="#e2e8f0", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.15, 0.1)
    return labels, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is stale")
    args = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    types = read_types(measured)
    tables = {
        "README.md": {"gains": render_gains(measured), "choice": f"{render_choice(measured)}\n\n{render_cost(measured)}",
                      "quality": render_quality(measured), "speed": "\n".join(speed_table(measured))},
        "docs/results/measurements.md": {"types": render_types(types)},
    }
    for name, parts in tables.items():
        path = ROOT / name
        new = path.read_text()
        for title, table in parts.items():
            new = replace_table(path, new, table, title)
        if args.check and new != path.read_text():
            raise RuntimeError(f"{name}: a table is stale; run scripts/build/figures.py")
        if not args.check:
            path.write_text(new)
    if not args.check:
        draw(panels(measured), PICTURE)


if __name__ == "__main__":
    sys.exit(run_script(main))
