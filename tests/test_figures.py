"""README's table and picture follow from docs/measured.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import figures
import pytest
from conftest import ROOT

from ggml_ext import WEIGHT_TYPES

TYPES = figures.read_types(json.loads(figures.MEASURED.read_text()))


def test_checked_in_tables_are_fresh():
    done = subprocess.run([sys.executable, figures.__file__, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_type_is_measured_and_drawn():
    assert set(WEIGHT_TYPES) <= {t.name for t in TYPES}
    picture = figures.PICTURE.read_text()
    assert all(picture.count(f">{t.name.upper()}<") == 2 for t in TYPES)


def test_the_same_figures_make_the_same_picture(tmp_path):
    for name in ("a.svg", "b.svg"):
        figures.draw(TYPES, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_row_that_failed_has_empty_cells():
    rows = {"Q3_K": {"type": "q3_k", "bpw": 3.4375, "perplexity": 11.5}}
    assert figures.render_rows(rows).splitlines()[-1] == "| Q3_K | 3.438 | 11.500 |  |  |  |  |  |"


@pytest.mark.parametrize("text", ["no markers", "\n".join(reversed(figures.MARKERS)), "\n".join(figures.MARKERS * 2)])
def test_a_document_without_markers_is_named(tmp_path, text):
    (tmp_path / "x.md").write_text(text)
    with pytest.raises(RuntimeError, match="x.md: needs one"):
        figures.replace_table(tmp_path / "x.md", "table")


def test_every_script_is_in_its_room():
    text = (ROOT / "scripts" / "README.md").read_text()
    named = set(re.findall(r"`(\w+\.py)`", text))
    shared = {"perplexity_run.py", "ggml_graph.py", "gemv.py"}  # parts of others
    assert {p.name for p in (ROOT / "scripts").glob("*/*.py")} - shared == named


def test_documents_name_files_that_exist():
    """Every path of the repository that README and the documents put into back quotes or link to."""
    missing = []
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = document.read_text()
        paths = re.findall(r"`((?:ggml_ext|cuda|py|tests|scripts|docs|data)/[\w./-]+)`", text) + re.findall(r"(?<![\w/])(docs/[\w-]+\.md)", text)
        paths += re.findall(r"(scripts/\w+/\w+\.py)", text)
        missing += [f"{document.name}: {path}" for path in paths if not (ROOT / path).exists()]
        links = re.findall(r"\]\((?!http)([^)#]+)", text)
        missing += [f"{document.name}: {path}" for path in links if not (document.parent / path).exists()]
    assert not missing
