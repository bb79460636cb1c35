"""Estimates of time: the terms of a plan's sum, and the samples. Their accuracy is in docs/results/cost.md."""

from __future__ import annotations

import pytest
from gguf import GGMLQuantizationType as T

from ggml_ext._calibration import cost
from ggml_ext._calibration.cost import FLOPS_PER_THREAD, GRAPH_SHARE, CalibrationCost
from ggml_ext._calibration.importance import Importance
from ggml_ext._commands import estimate as _estimate
from ggml_ext._encode.codec import Codec
from ggml_ext._encode.rate import Rate, measure
from ggml_ext._formats.gguf_file import Tensor
from ggml_ext._native import product
from ggml_ext._plan.plan import PlannedTensor, QuantizationPlan
from helpers.commands import tool

NAMES = ("ffn_down", "ffn_gate", "ffn_up", "attn_k", "attn_output", "attn_q", "attn_v")
N = 4096


def make_plan(importance: bool = True) -> QuantizationPlan:
    tensors = [Tensor(f"blk.{i}.{name}.weight", (N, N), T.F16, 0, 2 * N * N) for i in range(2) for name in NAMES]
    tensors.append(Tensor("token_embd.weight", (N, N), T.F16, 0, 2 * N * N))
    planned = [PlannedTensor(t, T.ITQ3_T, T.ITQ3_T, uses_imatrix=importance) for t in tensors[:-1]]
    return QuantizationPlan([*planned, PlannedTensor(tensors[-1], T.Q6_K, T.Q6_K)])


@pytest.fixture
def codec(lib):
    return Codec(lib)


@pytest.mark.parametrize("known", [True, False], ids=["run", "dry run"])
@pytest.mark.parametrize("kind", ["block", "full"])
def test_estimate_sums_over_the_plan(codec, monkeypatch, kind, known):
    """The sum has the weights, and per layer the inputs that differ from the previous matrix: gate and up share one, q and v another.
    A dry run has no importances yet but plans for those of the layers."""
    calls = []
    rate = Rate(1e-6, 1e-9, 1e-12)
    monkeypatch.setattr(_estimate, "measure", lambda codec, target, kind, n: calls.append((target, kind, n)) or rate)
    seconds = _estimate.estimate(make_plan(known), codec, Importance(kind), 2)
    whole = kind == "full"
    factorizing = 2 * 5 * 1e-12 * (N**3 / 3 if whole else 16 * 256**3 / 3)
    encoding = 14 * N * N * (1e-6 + 1e-9 * (N if whole else 256)) + N * N * (1e-6 + 1e-9 * 256)
    assert seconds.factorizing == pytest.approx(factorizing) and seconds.encoding == pytest.approx(encoding + factorizing)
    assert calls == [(T.ITQ3_T, kind, 2), (T.Q6_K, "none", 2)]
    assert "on 2 threads" in seconds.describe() and ("factorizing" in seconds.describe()) == (factorizing > 0.05 * seconds.encoding)


def test_short_runs_have_no_estimate(codec):
    small = make_plan()
    small.tensors = small.tensors[:2]
    assert _estimate.estimate(small, codec, Importance("block"), 2) is None
    assert _estimate.estimate(make_plan(), Codec(None), Importance("none"), 2) is None  # numpy's encoders are not sampled


@pytest.mark.slow
@pytest.mark.parametrize(("target", "kind"), [(T.ITQ3_T, "none"), (T.ITQ3_T, "diagonal"), (T.ITQ2_T, "block"), (T.ITQ3_T, "full"), (T.Q4_K, "full")])
def test_samples_are_positive(codec, target, kind):
    rate = measure(codec, target, kind, 2)
    assert rate.weight > 0 and rate.column >= 0 and (rate.factorization > 0) == (kind in ("block", "full"))
    assert 1e-9 < rate.seconds(1, 1024, kind == "full") < 1e-3


def test_products_are_timed_for_large_models(monkeypatch):
    """A constant replaces the measurement if libggml does not provide it."""
    tool("llama-imatrix")
    product.product_rate.cache_clear()
    assert 1e8 < product.product_rate(int(T.F16), 2, 512, False) < 1e15
    assert 1e8 < product.product_rate(int(T.Q4_0), 2, 10, True) < 1e15
    calls = []
    monkeypatch.setattr(cost, "product_rate", lambda *arguments: calls.append(arguments))
    small, large = (CalibrationCost(n, (), 1, {}, T.Q8_0) for n in (cost.UNTIMED_BYTES - 1, cost.UNTIMED_BYTES))
    assert small.rate(2) == large.rate(2) == 2 * FLOPS_PER_THREAD and calls == [(int(T.Q8_0), 2, 512, False)]
    monkeypatch.setattr(cost, "product_rate", lambda *_: 1e11)
    assert large.rate(2) == GRAPH_SHARE * 1e11
    monkeypatch.setattr(product.backend, "can_run", lambda: False)
    product.product_rate.cache_clear()
    assert product.product_rate(1, 2, 512, False) is None
    product.product_rate.cache_clear()
