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

from ggml_ext._base.types import WEIGHT_TYPES
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


@EACH
def test_map_uses_all_bits(name):
    """The two indices of each weight together take all 256 values, and every bit of the state changes an index."""
    index = trellis_search.indices(name)
    for i0, i1 in zip(index[::2], index[1::2], strict=True):
        assert len(set(zip(i0.tolist(), i1.tolist(), strict=True))) == 256
    assert all(any((i != i[np.arange(4096) ^ 1 << bit]).any() for i in index) for bit in range(12))


@EACH
def test_code_equals_the_types(name):
    """The study's code equals the one that the types use."""
    info = WEIGHT_TYPES[name]
    code = trellis_search.make_code(trellis_search.indices(name), [np.array(t) for t in info.trellis_values]) - info.trellis_offset
    np.testing.assert_array_equal(code, reference(name).values)


@needs_compiler
@EACH
def test_error_is_that_of_the_format(name):
    encoder, x, code = trellis_search.Encoder(name), trellis_search.sample(501, 64, scaled=True), reference(name).values
    assert encoder.error(x, code) < LIMITS[name] * 1.03
    # neighbours on a path share all bits but K
    states = encoder.paths(x, code * 0.05).astype(int)
    np.testing.assert_array_equal(states[:, 1:] >> encoder.k, states[:, :-1] & (4096 >> encoder.k) - 1)


def test_missing_compiler_is_reported(tmp_path):
    result = subprocess.run([sys.executable, str(ROOT / "scripts" / "studies" / "trellis_search.py")], capture_output=True,
                            text=True, env={"PATH": str(tmp_path)})
    assert result.returncode == 1
    assert result.stderr.startswith("trellis_search.py: cannot run the C compiler")
    assert result.stderr.count("\n") == 1
