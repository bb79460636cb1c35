"""Estimates of time: what a plan's sum is made of, and that the samples give numbers. How near they are: docs/results/cost.md."""

from __future__ import annotations

import pytest
from gguf import GGMLQuantizationType as T

from ggml_ext._calibration import cost
from ggml_ext._calibration.cost import FLOPS_A_THREAD, GRAPH_SHARE, Model
from ggml_ext._commands import estimate as _estimate
from ggml_ext._encode.codec import Codec
from ggml_ext._encode.rate import Rate, measure
from ggml_ext._formats.gguf_file import Tensor
from ggml_ext._native import product
from ggml_ext._plan.plan import PlannedTensor, QuantizationPlan
from helpers.commands import tool

NAMES = ("ffn_down", "ffn_gate", "ffn_up", "attn_k", "attn_output", "attn_q", "attn_v")
N = 4096


def plan(importance: bool = True) -> QuantizationPlan:
    tensors = [Tensor(f"blk.{i}.{name}.weight", (N, N), T.F16, 0, 2 * N * N) for i in range(2) for name in NAMES]
    tensors.append(Tensor("token_embd.weight", (N, N), T.F16, 0, 2 * N * N))
    planned = [PlannedTensor(t, T.ITQ3_T, T.ITQ3_T, uses_imatrix=importance) for t in tensors[:-1]]
    return QuantizationPlan([*planned, PlannedTensor(tensors[-1], T.Q6_K, T.Q6_K)])


@pytest.fixture
def codec(lib):
    return Codec(lib)


@pytest.mark.parametrize("known", [True, False], ids=["run", "dry run"])
@pytest.mark.parametrize("kind", ["block", "full"])
def test_sum_over_a_plan(codec, monkeypatch, kind, known):
    """Weights, and of each layer the inputs that differ from the matrix before: gate's and up's are one, q's and v's too. A dry run knows
    of no importances yet, but that layers will have them."""
    asked = []
    rate = Rate(1e-6, 1e-9, 1e-12)
    monkeypatch.setattr(_estimate, "measure", lambda codec, target, kind, n: asked.append((target, kind, n)) or rate)
    found = _estimate.estimate(plan(known), codec, kind, 2)
    whole = kind == "full"
    factorizing = 2 * 5 * 1e-12 * (N**3 / 3 if whole else 16 * 256**3 / 3)
    encoding = 14 * N * N * (1e-6 + 1e-9 * (N if whole else 256)) + N * N * (1e-6 + 1e-9 * 256)
    assert found.factorizing == pytest.approx(factorizing) and found.encoding == pytest.approx(encoding + factorizing)
    assert asked == [(T.ITQ3_T, kind, 2), (T.Q6_K, "none", 2)]
    assert "on 2 threads" in found.describe() and ("factorizing" in found.describe()) == (factorizing > 0.05 * found.encoding)


def test_nothing_is_said_of_what_takes_seconds(codec):
    small = plan()
    small.tensors = small.tensors[:2]
    assert _estimate.estimate(small, codec, "block", 2) is None
    assert _estimate.estimate(plan(), Codec(None), "none", 2) is None  # numpy's encoders are not sampled


@pytest.mark.slow
@pytest.mark.parametrize(("target", "kind"), [(T.ITQ3_T, "none"), (T.ITQ3_T, "diagonal"), (T.ITQ2_T, "block"), (T.ITQ3_T, "full"), (T.Q4_K, "full")])
def test_samples(codec, target, kind):
    rate = measure(codec, target, kind, 2)
    assert rate.weight > 0 and rate.column >= 0 and (rate.factorization > 0) == (kind in ("block", "full"))
    assert 1e-9 < rate.seconds(1, 1024, kind == "full") < 1e-3


def test_products(monkeypatch):
    """Of large models alone, and a constant where libggml does not say."""
    tool("llama-imatrix")
    product.product_rate.cache_clear()
    assert 1e8 < product.product_rate(int(T.F16), 2) < 1e15
    asked = []
    monkeypatch.setattr(cost, "product_rate", lambda type_id, n: asked.append((type_id, n)))
    small, large = (Model(n, (), 1, 0.0, T.Q8_0) for n in (cost.SMALL - 1, cost.SMALL))
    assert small.rate(2) == large.rate(2) == 2 * FLOPS_A_THREAD and asked == [(int(T.Q8_0), 2)]
    monkeypatch.setattr(cost, "product_rate", lambda *_: 1e11)
    assert large.rate(2) == GRAPH_SHARE * 1e11
    monkeypatch.setattr(product._lib, "libggml_path", lambda: None)
    product.product_rate.cache_clear()
    assert product.product_rate(1, 2) is None
    product.product_rate.cache_clear()
