"""Tables and pictures of the documents, which figures.py makes from docs/measured.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

import figures
from ggml_ext import WEIGHT_TYPES
from helpers.models import ROOT

MEASURED = json.loads(figures.MEASURED.read_text())
TYPES = figures.read_types(MEASURED)


def test_committed_tables_are_up_to_date():
    done = subprocess.run([sys.executable, figures.__file__, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_type_is_measured_and_drawn():
    assert set(WEIGHT_TYPES) <= {t.name for t in TYPES}
    picture, n_panels = figures.PICTURE.read_text(), Counter()
    for rows in figures.panels(MEASURED).values():
        drawn = [name for name, row in rows.items() if "hessian" in row and (name.lower() in WEIGHT_TYPES or "upstream" in row)]
        series = {key for key in ("upstream", "hessian", "sequential") if any(key in row for row in rows.values())}
        assert len(drawn) >= 10 and len(series) == 3 and set(drawn) & {name.upper() for name in WEIGHT_TYPES}
        n_panels.update(drawn)
    assert {name: picture.count(f">{name}<") for name in n_panels} == n_panels
    assert all(f">{label}<" in picture for _, label, *_ in figures.SERIES.values())


def test_picture_is_reproducible(tmp_path):
    for name in ("a.svg", "b.svg"):
        figures.draw(figures.panels(MEASURED), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_failed_row_has_empty_cells():
    rows = {"Q3_K": {"type": "q3_k", "bpw": 3.4375, "perplexity": 11.5}}
    assert figures.render_rows(rows).splitlines()[-1] == "| Q3_K | 3.438 | 11.500 |  |  |  |  |  |"


RESULTS = ROOT / "docs" / "results"
MARKERS = [figures.marker("measured", end) for end in ("begin", "end")]


@pytest.mark.parametrize("text", ["no markers", "\n".join(reversed(MARKERS)), "\n".join(MARKERS * 2)])
def test_document_without_markers_is_named(tmp_path, text):
    with pytest.raises(RuntimeError, match="x.md: needs one"):
        figures.replace_table(tmp_path / "x.md", text, "table")


# Numbers in README that are no measurements: versions, licences, names, sizes.
PLAIN = re.compile(r"Apache 2\.0|Python 3\.\d+|pip 23\.1|glibc 2\.35|nvcc \d+|Qwen2\.5-0\.5B|SmolLM2-135M|Llama-3\.2-1B|F16|F32|BF16|Q8_0|MiniLM-L6-v2"
                   r"|multiple of (?:64|256)|below four bits fall back to 4\.5\s+bits|64-bit|x86-64|AVX-512|AVX2")


def claims_outside(text: str) -> list[str]:
    """List README's numbers with a decimal point, a per cent sign or "times" that do not come from docs/measured.json."""
    for name in ("gains", "choice", "quality", "speed"):
        begin, end = (figures.marker(name, where) for where in ("begin", "end"))
        text = text.split(begin)[0] + text.split(end)[1]
    measured = json.loads(figures.MEASURED.read_text())
    for claim in (measured["model"].removeprefix("a code model of "), f"F16 {measured['rows']['F16']['perplexity']:.2f}",
                 f"F16 {measured['smollm2']['f16']:g}"):
        assert claim in text
        text = text.replace(claim, "")
    text = re.sub(r"^    .*$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.M)  # code, names, links
    return re.findall(r"\d+\.\d+|\d+ ?%|\d+ times", PLAIN.sub("", text))


def test_figures_of_readme_are_measured():
    """PLAIN names the exceptions."""
    assert not claims_outside((ROOT / "README.md").read_text())


@pytest.mark.parametrize("claim", ["decodes 1.3 times as fast", "is 30 % smaller", "2 times everywhere"])
def test_claim_without_a_measurement_is_found(claim):
    assert claims_outside((ROOT / "README.md").read_text() + f"\nIt {claim}.\n")


def test_documents_quote_the_figures_of_readme():
    """Covers docs/results and docs/using/install.md."""
    measured, text = json.loads(figures.MEASURED.read_text()), (RESULTS / "measurements.md").read_text()
    for name, (bpw, perplexity, kld) in measured["smollm2"]["rows"].items():
        row = rf"\| \**{name.upper()}\**(?:, full Hessian)? \| {bpw} \| {perplexity:.2f} / {kld:.3f} \|"
        assert re.search(row, text), row
    for name, (theirs, own) in measured["stock_moments"]["rows"].items():
        assert re.search(rf"\| {name} \| [\d.]+ \| {theirs} \|.*\| {own} \| \d+ % \|", text), name
    for name, own in measured["stock_moments"]["ext_types"].items():
        assert re.search(rf"\| \*\*{name}\*\* \| [\d.]+ \|  \|  \| {own} \|", text), name
    for ratios in (measured["avx512"]["decode/q3_k"], measured["avx512"]["prefill/q3_k"]):
        for name, ratio in ratios.items():
            assert re.search(rf"\| \**{name.upper()}\** \|.*\b{ratio:.2f}\b", (RESULTS / "speed.md").read_text()), name
    table = (ROOT / "docs" / "using" / "install.md").read_text()
    for variant, slow in measured["without_avx2"]["decode"].items():
        assert f"| {variant} | {slow['itq3_s']} | {slow['ccq2']} | {slow['itq3_t']} | {slow['q3_k']} |" in table
    for name, values in measured["mixes"]["rows"].items():
        assert f"{name} {', '.join(values)}" in " ".join(text.split()), name


def test_every_script_is_listed():
    text = (ROOT / "scripts" / "README.md").read_text()
    named = set(re.findall(r"`(\w+\.py)`", text))
    shared = {"perplexity_run.py", "ggml_graph.py"}  # imported by others, as check_*.py are by gpu_check.py
    assert {p.name for p in (ROOT / "scripts").glob("*/*.py") if not p.name.startswith("check_")} - shared == named


