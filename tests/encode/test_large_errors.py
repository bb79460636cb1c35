"""Tensors with unusually large errors: one warning, and --fallback-above."""

from __future__ import annotations

import numpy as np
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from helpers.commands import quantize, run_quantize
from helpers.errors import check_error
from helpers.inspecting import inspect
from helpers.models import gaussian, read_tensors, write_gguf

# CCQ2 is worst for a few large weights among small ones
OUTLIERS = ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight"]


def write_outlier_model(path):
    bad = gaussian(4, 512)
    bad[:, ::64] = 50
    return write_gguf(path, {name: bad for name in OUTLIERS} | {"blk.0.attn_q.weight": gaussian(4, 512), "output_norm.weight": gaussian(512)})


@pytest.fixture
def source(tmp_path):
    return write_outlier_model(tmp_path / "in.gguf")


def warnings(result) -> list[str]:
    return [line.removeprefix("warning: ") for line in result.stderr.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_large_errors_give_one_warning(source, tmp_path, quiet):
    result = quantize(source, tmp_path / "out.gguf", "--type", "ccq2", *quiet)
    (line,) = warnings(result)
    assert line.startswith("2 tensors in 1 class: NMSE up to 0.")
    assert f"in ccq2, usual {WEIGHT_TYPES['ccq2'].usual_rel_mse:g}: {', '.join(OUTLIERS)}; --fallback-above 3 stores such tensors as iq4_nl" in line
    assert {t.tensor_type.name for n, t in read_tensors(tmp_path / "out.gguf").items() if n.startswith("blk")} == {"CCQ2"}


def test_usual_errors_give_no_warning(tmp_path):
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.attn_q.weight": gaussian(8, 1024)})
    for name in WEIGHT_TYPES:
        assert warnings(quantize(source, tmp_path / f"{name}.gguf", "--type", name)) == []


def test_fallback_above_replaces_only_those_tensors(source, tmp_path):
    out = tmp_path / "out.gguf"
    result = quantize(source, out, "--type", "ccq2", "--fallback-above", "3")
    assert warnings(result) == []
    assert f"2 tensors in 1 class: iq4_nl instead of ccq2 (--fallback-above): {', '.join(OUTLIERS)}" in result.stdout
    assert "requested ccq2, 2.0625 bpw; result: 3.6875 bpw in the layers" in result.stdout  # two of three matrices have 4.5 bpw
    types = {name: t.tensor_type.name for name, t in read_tensors(out).items()}
    assert types == {"blk.0.attn_q.weight": "CCQ2", **dict.fromkeys(OUTLIERS, "IQ4_NL"), "output_norm.weight": "F32"}
    # the same bytes as with --tensor-type
    quantize(source, tmp_path / "explicit.gguf", "--type", "ccq2", "--tensor-type", "ffn_up=iq4_nl")
    for name, tensor in read_tensors(tmp_path / "explicit.gguf").items():
        np.testing.assert_array_equal(tensor.data, read_tensors(out)[name].data)


def upstream_fallback(type_name: str) -> str:
    """Return the upstream type at the end of a type's fallbacks."""
    while type_name in TYPES:
        type_name = TYPES[type_name].fallback
    return type_name


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_the_replacement_is_an_upstream_type(lib, tmp_path, type_name):
    """The 64-block types have the same range of scales, and weights of 1e-9 are noise to both. Rows of 576 use them."""
    names = {n: f"blk.{i}.ffn_up.weight" for i, n in enumerate((512, 576))}
    tensors = {name: 1e-9 * gaussian(4, n) for n, name in names.items()} | {"blk.0.attn_q.weight": gaussian(4, 576)}
    source = write_gguf(tmp_path / "in.gguf", tensors, "F32")
    result = quantize(source, tmp_path / "out.gguf", "--type", type_name, "--fallback-above", "1")
    types = {name: t.tensor_type.name for name, t in read_tensors(tmp_path / "out.gguf").items()}
    replacement = upstream_fallback(type_name)
    assert [types[name] for name in names.values()] == [replacement.upper()] * 2
    type_for_576 = TYPES[type_name].fallback if TYPES[type_name].block_size == 256 else type_name
    for original in {type_name, type_for_576} - {replacement}:
        assert f": {replacement} instead of {original} (--fallback-above)" in result.stdout


def test_epsilon_covers_replaced_tensors(tmp_path):
    """The header keeps its size, and the bound holds for the fallback's weights too."""
    source = write_gguf(tmp_path / "in.gguf", {OUTLIERS[0]: (50 * gaussian(4, 512)) ** 7, "blk.0.attn_q.weight": gaussian(4, 512)})
    out = tmp_path / "out.gguf"
    result = quantize(source, out, "--type", "ditto3", "--ditto-codebook", "tensor", "--fallback-above", "1.01")
    assert "iq4_nl instead of ditto3" in result.stdout
    rows = inspect(out, "--against", source)
    assert "iq4_nl" in rows[OUTLIERS[0]]
    assert all(rows[name][-1] == "ok" for name in (OUTLIERS[0], "blk.0.attn_q.weight"))


@pytest.mark.parametrize("value", ["0.5", "nan", "inf", "-1"])
def test_limits_below_one_are_refused(source, tmp_path, value):
    result = run_quantize(source, tmp_path / "out.gguf", "--type", "ccq2", "--fallback-above", value)
    check_error(result, "--fallback-above", "must be at least 1")
    assert not (tmp_path / "out.gguf").exists()


def test_numpy_refuses_a_fallback_it_cannot_encode(source, tmp_path):
    result = run_quantize(source, tmp_path / "out.gguf", "--type", "ccq2", "--fallback-above", "3", "--encoder", "numpy")
    check_error(result, "--fallback-above: iq4_nl has no numpy encoder")
