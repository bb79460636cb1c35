"""scripts/studies/variants.py: that the variants are what they are said to be, that their searches do as well as the library's,
and what the command says to bad input."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import figures
import variant_types
import variants
from ggml_ext import TYPES, WEIGHT_TYPES
from ggml_ext.quants import rotate
from helpers.importances import write_imatrix
from helpers.models import MODEL, ROOT
from variant_types import VARIANTS

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
GAUSSIAN = np.random.default_rng(1).standard_normal((32, 512)).astype(np.float32)
IMPORTANCE = np.exp(np.random.default_rng(2).standard_normal(512)).astype(np.float32)
RESULTS = json.loads(figures.VARIANTS.read_text())


def error(stored: np.ndarray, x: np.ndarray, weights=1.0) -> float:
    return float(((stored - x) ** 2 * weights).sum() / (x**2 * weights).sum())


def encode(name: str, x: np.ndarray = GAUSSIAN, importance=None) -> np.ndarray:
    return VARIANTS[name].encode(x, importance, x)


@pytest.mark.parametrize("size", variant_types.TRANSFORMS)
def test_transform(size):
    y = variant_types.transform(GAUSSIAN, size)
    # 9 stages of float sums, each to a relative 2^-24 of values up to 5
    np.testing.assert_allclose(variant_types.transform(y, size, back=True), GAUSSIAN, atol=9 * 5 * 2.0**-23)
    assert np.linalg.norm(y) == pytest.approx(np.linalg.norm(GAUSSIAN), rel=1e-6)
    if size in (64, 256):
        np.testing.assert_allclose(y, rotate(GAUSSIAN.reshape(-1, size)).reshape(y.shape), atol=9 * 5 * 2.0**-23)


@pytest.mark.parametrize("size", [32, 256, 512])
def test_form_is_the_weighted_error(size):
    span = max(size, 256)
    forms, gains = variant_types.forms(IMPORTANCE, size, span)
    e = GAUSSIAN[:1]
    rotated = variant_types.transform(e, size).reshape(-1, span).astype(np.float64)
    cost = np.einsum("bi,bij,bj->b", rotated, forms, rotated)
    blocks = IMPORTANCE.reshape(-1, span)
    weights = blocks / blocks.mean(1, keepdims=True) + variant_types.FLOOR
    np.testing.assert_allclose(cost, (weights * e.reshape(-1, span) ** 2).sum(1), rtol=1e-4)  # float32 forms of 512 terms
    # the same as a sum of squares, each with the errors before it fed back: D follows from the diagonal, last weight first
    for form, gain in zip(forms.astype(np.float64), gains.astype(np.float64), strict=True):
        lower = gain + np.eye(span)
        d = np.linalg.inv(lower.T) @ form @ np.linalg.inv(lower)
        assert np.abs(d - np.diag(np.diag(d))).max() < 1e-3 * np.diag(d).min()  # float32 of 512 terms, no gain above 2


@needs_compiler
@pytest.mark.parametrize(("variant", "type_name"), [("itq3_s-t256", "itq3_s"), ("ditto3-block", "ditto3")])
def test_searches_do_as_well_as_the_types(lib, variant, type_name):
    """The same format, another search: within 1.5 % (measured: 0.3), DITTO3's entries have seven bits in place of eight."""
    type_id = int(TYPES[type_name].id)
    for importance in (None, IMPORTANCE):
        stored = lib.dequantize(type_id, lib.quantize(type_id, GAUSSIAN, imatrix=importance), 512)
        weights = 1.0 if importance is None else importance
        expected = error(stored, GAUSSIAN, weights)
        assert error(encode(variant, importance=importance), GAUSSIAN, weights) == pytest.approx(expected, rel=0.015)


@needs_compiler
@pytest.mark.parametrize("name", VARIANTS)
def test_importances_lower_the_weighted_error(name):
    plain, weighted = encode(name), encode(name, importance=IMPORTANCE)
    assert error(plain, GAUSSIAN) < {2: 0.095, 3: 0.042, 4: 0.025, 5: 0.004, 6: 0.002}[int(VARIANTS[name].bits)]
    if name.split("-")[1] != "tensor":  # whose entries columns that are alike but for their importance would not change
        assert error(weighted, GAUSSIAN, IMPORTANCE) < 0.99 * error(plain, GAUSSIAN, IMPORTANCE)


@needs_compiler
@pytest.mark.parametrize("name", ["itq3_s-sub-t256", "itq3_s-t256", "itq3_s-own32"])
@pytest.mark.parametrize("importance", [None, IMPORTANCE], ids=["plain", "weighted"])
def test_itq3_s_stores_eight_levels(name, importance):
    """Rotated, groups hold at most eight values in equal steps."""
    group = {"itq3_s-sub-t256": 32, "itq3_s-t256": 256, "itq3_s-own32": 32}[name]
    v = variant_types.transform(encode(name, importance=importance), 32 if "own" in name else 256)
    for values in v.reshape(-1, group)[:40]:
        steps = np.diff(np.unique(np.round(values, 4)))  # the transform there and back, float32
        d = steps.min()
        assert np.abs(steps / d - np.round(steps / d)).max() < 0.02
        assert steps.sum() / d < 7.05


@needs_compiler
@pytest.mark.parametrize("importance", [None, IMPORTANCE], ids=["plain", "weighted"])
@pytest.mark.parametrize(("name", "lengths", "shared"), [("ccq-2.75", [3] * 21 + [1], 2), ("ccq-2.5", [3, 4] * 9 + [1], 1)])
def test_ccq_stores_codes(name, lengths, shared, importance):
    """A group's values are odd multiples of half its step, and neighbours in a vector share bits."""
    n_levels = {"ccq-2.75": 16, "ccq-2.5": 8}[name]
    assert sum(lengths) == 64
    for values in encode(name, importance=importance).reshape(-1, 64)[:64]:
        magnitudes = np.unique(np.abs(values))
        codes = [values * odd / (2 * magnitudes[0]) + (n_levels - 1) / 2 for odd in range(1, n_levels, 2)]
        whole = [np.round(q).astype(int) for q in codes if np.abs(q - np.round(q)).max() < 1e-3]
        assert any(q.min() >= 0 and q.max() < n_levels and shares(q, lengths, n_levels, shared) for q in whole)


def shares(q: np.ndarray, lengths: list[int], n_levels: int, shared: int) -> bool:
    at = 0
    for n in lengths:
        v = q[at : at + n]
        if not ((v[:-1] & (1 << shared) - 1) == v[1:] >> (n_levels.bit_length() - 1 - shared)).all():
            return False
        at += n
    return True


@needs_compiler
@pytest.mark.parametrize("k", [2, 3, 4])
def test_clusters_are_the_best(k):
    """Against all ways to cut eleven samples."""
    rng = np.random.default_rng(k)
    for _ in range(10):
        x, w = rng.standard_normal(11).astype(np.float32), rng.random(11).astype(np.float32)
        order = np.argsort(x)
        xs, ws = x[order].astype(float), w[order].astype(float)
        least = min(sum(cost(xs[a:b], ws[a:b]) for a, b in itertools.pairwise((0, *cuts, 11)))
                    for cuts in itertools.combinations(range(1, 11), k - 1))
        c = variant_types.clusters(x, w, k)
        assert (np.diff(c) > 0).all()
        assert (w * ((x[:, None] - c) ** 2).min(1)).sum() == pytest.approx(least, rel=1e-4)  # entries are float32


def cost(x: np.ndarray, w: np.ndarray) -> float:
    return float((w * (x - w @ x / w.sum()) ** 2).sum())


@needs_compiler
def test_codebooks_of_a_tensor():
    x = np.random.default_rng(5).standard_t(4, (64, 512)).astype(np.float32)
    stored = {what: encode(f"ditto4-{what}", x) for what in ("block", "tensor", "scaled", "fixed")}
    assert len(np.unique(stored["tensor"])) <= 16
    assert all(len(np.unique(b)) <= 16 for what in stored for b in stored[what].reshape(-1, 256))
    errors = {what: error(s, x) for what, s in stored.items()}
    # a codebook of their own serves blocks best, a scale of their own next; the fixed one is of other weights
    assert errors["block"] < errors["scaled"] < errors["fixed"] < errors["tensor"]


@needs_compiler
def test_zeros_stay_zeros():
    """Blocks, groups and sub-blocks of zeros: no NaN, and nothing but zeros."""
    x = GAUSSIAN.copy()
    x[:, 256:] = 0
    for name in VARIANTS:
        if name.split("-")[-1] not in ("t512", "own512"):
            for importance in (None, IMPORTANCE):
                stored = encode(name, x, importance)
                assert np.isfinite(stored).all(), name
                if "tensor" not in name:
                    assert (stored[:, 256:] == 0).all(), name


def test_frontier():
    points = [(2.0, 0.07), (2.0, 0.1), (2.5, 0.06), (3.0, 0.02), (3.5, 0.03), (4.0, 0.01)]
    hull = figures.frontier(points)
    assert hull == [(2.0, 0.07), (3.0, 0.02), (4.0, 0.01)]
    assert figures.over_frontier(hull, 2.5, 0.09) == pytest.approx(2)


def test_every_variant_is_judged():
    c = figures.Comparison(RESULTS)
    assert set(c.variants) == set(VARIANTS)
    peers = set(variants.peers())
    assert peers - set(WEIGHT_TYPES) <= set(c.types) <= peers  # of ours those that there were
    text = (ROOT / "docs" / "results" / "variants.md").read_text()
    assert all(f"| {name} |" in text for name in VARIANTS)
    for r in RESULTS.values():
        layers = {len(r["layers"]), *(len(of) for by_kind in r["budget"].values() for of in by_kind.values())}
        assert set(r["budget"]) == {b for b in "345" if f"ditto{b}-block" in r["errors"]} and len(layers) == 1


@pytest.mark.slow
def test_the_same_figures_make_the_same_picture(tmp_path):
    for name in ("a.svg", "b.svg"):
        figures.draw_variants(RESULTS, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def run(*args: object, env=None) -> subprocess.CompletedProcess:
    script = ROOT / "scripts" / "studies" / "variants.py"
    return subprocess.run([sys.executable, script, *map(str, args)], capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def importances(tmp_path_factory):
    path = tmp_path_factory.mktemp("variants") / "imatrix.gguf"
    rng = np.random.default_rng(3)
    sizes = {t.name: int(t.shape[0]) for *_, t in variants.block_matrices(MODEL)}
    return write_imatrix(path, {name: (rng.random((1, n)).astype(np.float32), [1]) for name, n in sizes.items()})


@pytest.mark.slow
@needs_compiler
def test_study(tmp_path, importances):
    out = tmp_path / "v.json"
    args = MODEL, "--imatrix", importances, "--name", "m", "--weights", 60000, "--json", out, "-t", 2
    for types in ("itq3_s-t32,itq3_s-t512", "q4_k"):
        done = run(*args, "--types", types)
        assert (done.returncode, done.stderr) == (0, "")
    errors = json.loads(out.read_text())["m"]["errors"]
    assert set(errors) == {"itq3_s-t32", "q4_k"}  # rows of 256 have no place for a transform of 512
    bits, plain, weighted = errors["itq3_s-t32"]
    assert bits == 3.125 and plain == pytest.approx(0.034, rel=0.05) and weighted < plain


@needs_compiler
def test_checkpoint(tmp_path):
    """A safetensors file: rows of 384 give their first 256, and nothing is weighted."""
    x = np.random.default_rng(4).standard_normal((64, 384)).astype(np.float32)
    info = {"dtype": "F32", "shape": [64, 384], "data_offsets": [0, x.nbytes]}
    header = json.dumps({"encoder.layer.1.output.dense.weight": info}).encode()
    path, out = tmp_path / "model.safetensors", tmp_path / "v.json"
    path.write_bytes(len(header).to_bytes(8, "little") + header + x.tobytes())
    done = run(path, "--types", "itq3_s-t256,itq3_s-t512", "--json", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(out.read_text())["model"]["errors"] == {"itq3_s-t256": [3.125, pytest.approx(0.034, rel=0.05), None]}


@needs_compiler
def test_types_below(tmp_path):
    out = tmp_path / "v.json"
    done = run(MODEL, "--weights", 60000, "--types", "q4_k,q2_k", "--below", 4, "--json", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(json.loads(out.read_text())[MODEL.stem]["errors"]) == {"q2_k"}


@pytest.mark.parametrize(("args", "message"), [
    (["none.gguf", "--imatrix", "{imatrix}"], "none.gguf: no such file"),
    (["{model}", "--imatrix", "{imatrix}", "--types", "itq9"], "--types: unknown type 'itq9'; known: "),
    (["{imatrix}", "--imatrix", "{imatrix}"], "its matrices of blocks are none"),
    (["{model}", "--imatrix", "{other}"], "has not the 256 importances of blk.0."),
    (["{model}", "--kld", "{model}"], "--kld needs --imatrix"),
    (["{checkpoint}"], "has no matrices of layers"),
])
def test_bad_input(tmp_path, importances, args, message):
    other = write_imatrix(tmp_path / "other.gguf", {"blk.0.attn_q.weight": (np.ones((1, 512), np.float32), [1])})
    checkpoint = tmp_path / "empty.safetensors"
    checkpoint.write_bytes((2).to_bytes(8, "little") + b"{}")
    done = run(*(a.format(model=MODEL, imatrix=importances, other=other, checkpoint=checkpoint) for a in args))
    assert done.returncode == 1
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_without_a_compiler(tmp_path, importances):
    done = run(MODEL, "--imatrix", importances, "--types", "ccq-2.5", "--weights", 60000,
               env={"PATH": str(tmp_path), **{k: v for k, v in os.environ.items() if k.startswith(("PYTHON", "GGML"))}})
    assert done.returncode == 1
    assert "cannot run the C compiler" in done.stderr and done.stderr.count("\n") == 1
