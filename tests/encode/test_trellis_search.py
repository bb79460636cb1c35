"""scripts/studies/trellis_search.py on samples far too small to find anything: that it climbs, and what it prints."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import trellis_search
from helpers.models import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ggml_ext.quants import reference

EACH = pytest.mark.parametrize("k", [3, 2])
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@needs_compiler
@EACH
def test_search(monkeypatch, capsys, k):
    monkeypatch.setattr(trellis_search, "TEST_BLOCKS", 16)
    assert trellis_search.main(["--bits", str(k), "--seeds", "2", "--steps", "40,20", "--blocks", "12,24"]) == 0
    out = capsys.readouterr().out
    climbs = re.findall(r"(0\.\d+) -> (0\.\d+)", out)
    assert len(climbs) == 4
    assert all(float(after) < float(before) for before, after in climbs), out

    found = tomllib.loads(out[out.index("\n#"):])
    mix, values = np.array(found["trellis_mix"]), np.array(found["trellis_values"])
    assert mix.shape == values.shape == (2, 16)
    assert mix.dtype == values.dtype == int
    assert mix.min() >= 0 and mix.max() <= 15
    assert (values.min(1) == 0).all()
    assert values.max(1).sum() <= 127
    assert type(found["trellis_offset"]) is float and found["trellis_offset"] * 2 % 1 == 0


@EACH
def test_code_of_the_types(k):
    """The states' code is the one that the types decode."""
    code = trellis_search.shipped(k)
    codes = reference(f"itq{k}_t").TRELLIS.codes
    np.testing.assert_array_equal(code - code.min(), codes - float(codes.min()))


@needs_compiler
@EACH
def test_errors_of_the_types(k):
    encoder, x, code = trellis_search.Encoder(k), trellis_search.sample(501, 64, scaled=True), trellis_search.shipped(k)
    errors = encoder.errors(x, code)
    assert errors["free start"] < errors["start byte"] < errors["zero start"]
    assert errors[trellis_search.FORMAT] <= errors["2 tries"] <= errors["E5M3, 1 try"]
    assert errors[trellis_search.FORMAT] < errors["circle"]
    assert errors[trellis_search.FORMAT] < {3: 0.0187, 2: 0.069}[k] * 1.03
    # neighbours along a path share all bits but K; in a circle the last state and the first do too
    states = encoder.paths(x, code * 0.05, trellis_search.STATES).astype(int)
    np.testing.assert_array_equal(states[:, 1:] >> k, states[:, :-1] & (4096 >> k) - 1)
    states = encoder.encode(x, code, "circle")[1].astype(int)
    np.testing.assert_array_equal(states >> k, np.roll(states, 1, 1) & (4096 >> k) - 1)


@needs_compiler
def test_compare(monkeypatch, capsys):
    monkeypatch.setattr(trellis_search, "TEST_BLOCKS", 8)
    assert trellis_search.main(["--compare"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [len(row) for row in rows] == [1 + len(trellis_search.COLUMNS)] * 6
    assert [row[0].split(",")[0].strip() for row in rows[2:]] == ["ITQ3_T", "K = 3", "ITQ2_T", "K = 2"]
    assert all(0.01 < float(cell) < 0.1 for row in rows[2:] for cell in row[1:])


def test_without_a_compiler(tmp_path):
    result = subprocess.run([sys.executable, str(ROOT / "scripts" / "studies" / "trellis_search.py"), "--compare"], capture_output=True,
                            text=True, env={"PATH": str(tmp_path)})
    assert result.returncode == 1
    assert result.stderr.startswith("trellis_search.py: cannot run the C compiler")
    assert result.stderr.count("\n") == 1
