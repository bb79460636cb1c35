"""scripts/studies/trellis_search.py on tiny samples: it improves, and its output has the right form."""

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

EACH = pytest.mark.parametrize("name", trellis_search.SHAPES)
LIMITS = {"itq4_t": 0.0050, "itq3_t": 0.0187, "itq2_t": 0.069, "itq1h_t": 0.139, "itq1_t": 0.268}
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@needs_compiler
@EACH
def test_search_improves_and_prints_toml(monkeypatch, capsys, name):
    monkeypatch.setattr(trellis_search, "TEST_BLOCKS", 16)
    monkeypatch.setattr(trellis_search, "JUDGE_BLOCKS", 24)
    assert trellis_search.main(["--type", name, "--seeds", "2", "--steps", "60,20", "--blocks", "12,12"]) == 0
    out = capsys.readouterr().out
    climbs = re.findall(r"(0\.\d+) -> (0\.\d+) +(0\.\d+)", out)
    assert len(climbs) == 2
    assert all(float(after) < 1.1 * float(before) and float(judged) < 1.3 * float(after) for before, after, judged in climbs), out

    printed = tomllib.loads(out[out.index("\n#"):])
    values = np.array(printed["trellis_values"])
    v = trellis_search.SHAPES[name][1]
    assert values.shape == (2 * v, 16) and values.dtype == int
    assert values.min() >= 0 and values.reshape(v, 2, 16).min(axis=2).sum(axis=1).min() == 0
    assert values.reshape(v, 2, 16).max(axis=2).sum(axis=1).max() <= 127
    assert type(printed["trellis_offset"]) is float and printed["trellis_offset"] % 1 == 0


@needs_compiler
def test_maps_prints_a_row_per_map(monkeypatch, capsys):
    monkeypatch.setattr(trellis_search, "JUDGE_BLOCKS", 8)
    assert trellis_search.main(["--maps", "--type", "itq4_t", "--steps", "5,2", "--blocks", "4,4"]) == 0
    rows = re.findall(r"^\| (c.*?) \| (0\.\d+) \|$", capsys.readouterr().out, re.M)
    assert [row[0] for row in rows] == [m.replace("|", ", ") for m in trellis_search.MAPS["itq4_t"]]


@EACH
def test_every_map_uses_all_bits(name):
    """The two indices of each weight together take all 256 values, and every bit of the state changes an index."""
    for map_text in trellis_search.MAPS[name]:
        index = trellis_search.indices(name, map_text)
        for i0, i1 in zip(index[::2], index[1::2], strict=True):
            assert len(set(zip(i0.tolist(), i1.tolist(), strict=True))) == 256
        assert all(any((i != i[np.arange(4096) ^ 1 << bit]).any() for i in index) for bit in range(12))


@pytest.mark.parametrize("argument", ["p0", "p0|p9", "p0^|p1", "c0|c1", "p0|p1|p2|e"])
def test_invalid_maps_are_refused(capsys, argument):
    with pytest.raises(SystemExit):
        trellis_search.main(["--type", "itq3_t", "--map", argument])
    assert f"--map: {argument!r} is not a map of itq3_t; needed 2 sides" in capsys.readouterr().err


@EACH
def test_code_equals_the_types(name):
    """The study's code equals the one that the types use."""
    np.testing.assert_array_equal(trellis_search.shipped(name), reference(name).values)


@needs_compiler
@EACH
def test_errors_are_ordered_as_expected(name):
    encoder, x, code = trellis_search.Encoder(name), trellis_search.sample(501, 64, scaled=True), trellis_search.shipped(name)
    k = encoder.k
    errors = encoder.errors(x, code)
    assert errors["free start"] <= errors["start byte"] < errors["zero start"]
    assert errors[trellis_search.FORMAT] <= errors["2 tries"] <= errors["E5M3, 1 try"]
    assert k == 4 or errors[trellis_search.FORMAT] < errors["circle"]  # for K = 4 a byte holds every start
    assert errors[trellis_search.FORMAT] < LIMITS[name] * 1.03
    # neighbours on a path share all bits but K; in a circle so do the last and first state
    states = encoder.paths(x, code * 0.05, trellis_search.STATES).astype(int)
    np.testing.assert_array_equal(states[:, 1:] >> k, states[:, :-1] & (4096 >> k) - 1)
    states = encoder.encode(x, code, "circle")[1].astype(int)
    np.testing.assert_array_equal(states >> k, np.roll(states, 1, 1) & (4096 >> k) - 1)


@needs_compiler
def test_compare_prints_the_expected_errors(monkeypatch, capsys):
    monkeypatch.setattr(trellis_search, "TEST_BLOCKS", 8)
    assert trellis_search.main(["--compare"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [len(row) for row in rows] == [1 + len(trellis_search.COLUMNS)] * (2 + len(LIMITS))
    assert [row[0].strip() for row in rows[2:]] == [name.upper() for name in LIMITS]
    assert all(0.5 * limit < float(cell) < 1.5 * limit for row, limit in zip(rows[2:], LIMITS.values(), strict=True) for cell in row[1:])


def test_missing_compiler_is_reported(tmp_path):
    result = subprocess.run([sys.executable, str(ROOT / "scripts" / "studies" / "trellis_search.py"), "--compare"], capture_output=True,
                            text=True, env={"PATH": str(tmp_path)})
    assert result.returncode == 1
    assert result.stderr.startswith("trellis_search.py: cannot run the C compiler")
    assert result.stderr.count("\n") == 1
