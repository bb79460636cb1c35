"""The cost of a calibration, and the choice of full and block-diagonal Hessians that follows from it."""

import pytest

from ggml_ext._base.units import GIB
from ggml_ext._calibration import cost
from ggml_ext._calibration.cost import FACTORIZATION_RATE, CalibrationCost, Input, choose_importance
from ggml_ext._formats.gguf_file import GGUFFile
from helpers.models import gaussian, write_gguf


def model(width: int, n_layers: int = 4, n_weights: float = 1e9, **replaced) -> CalibrationCost:
    inputs = tuple(Input(i, width, 1, 1) for i in range(n_layers))
    return CalibrationCost(**{"n_bytes": GIB, "inputs": inputs, "n_weights_used": int(n_weights), "factorizations": {width: n_layers * width**3 / 3}} | replaced)


@pytest.mark.parametrize(("model_cost", "n_tokens", "memory", "full_columns", "why"), [
    (model(4096), 51200, 10 * GIB, 4096, ""),
    (model(4096), 51200, 1.1 * GIB, 0, "need 1.1 GiB, the limit is 1.1 GiB"),  # 4 triangles of 32 MiB next to 1 GiB
    (model(4096), 2 * 4096 - 1, 10 * GIB, 0, "of 4,096 columns need 8,192 tokens"),
    (model(4096, n_weights=1e7), 51200, 10 * GIB, 0, "more than double the time"),
])
@pytest.mark.parametrize("n_threads", [1, 2, 64])
def test_importance_follows_memory(model_cost, n_tokens, memory, full_columns, why, n_threads):
    choice = choose_importance(model_cost, n_tokens, memory, n_threads, 0)
    assert choice[0] == full_columns and why in choice[1]


def test_each_width_has_its_own_choice():
    """A wide input does not take the full Hessians from the narrow ones: 14 layers of Llama-3.1-8B's shape on two threads."""
    inputs = tuple(Input(i, n, 1, 1) for i in range(14) for n in (4096, 14336))
    wide = model(0, inputs=inputs, n_weights=14 * 218e6, factorizations={4096: 14 * 6 * 4096**3 / 3, 14336: 14 * 14336**3 / 3})
    assert choose_importance(wide, 28000, 100 * GIB, 2, 0) == (4096, "full Hessians of 14,336 columns need 28,672 tokens")
    columns, why = choose_importance(wide, 51200, 100 * GIB, 2, 0)
    assert columns == 14336 and not why
    columns, why = choose_importance(wide, 51200, 100 * GIB, 2, 5)
    assert columns == 4096 and "14,336 columns would take" in why
    assert choose_importance(wide, 51200, 2.5 * GIB, 2, 0)[0] == 4096  # 0.44 GiB of Hessians, or 5.7


@pytest.mark.parametrize("n_threads", [1, 2, 64])
@pytest.mark.parametrize(("n_compared_metrics", "times"), [(0, 1), (5, 7)], ids=["OUT", "five metrics, the sensitivities and OUT"])
def test_all_threads_factorize_within_15_minutes(n_threads, n_compared_metrics, times):
    most = 900 * FACTORIZATION_RATE * n_threads / times
    assert choose_importance(model(4096, factorizations={4096: 0.98 * most}), 51200, 100 * GIB, n_threads, n_compared_metrics) == (4096, "")
    full_columns, why = choose_importance(model(4096, factorizations={4096: 1.02 * most}), 51200, 100 * GIB, n_threads, n_compared_metrics)
    assert full_columns == 0 and "take 15 minutes to factorize" in why


@pytest.mark.parametrize(("model_cost", "memory", "n_threads", "full_columns", "why"), [
    # 256 MiB per thread; model and Hessians take 1.1 GiB.
    (model(4096), 1.9 * GIB, 7, 4096, ""),
    (model(4096), 1.9 * GIB, 8, 0, "need 2.0 GiB, the limit is 1.9 GiB"),
])
def test_importance_of_a_target_follows_memory(model_cost, memory, n_threads, full_columns, why):
    """A target measures errors of five types, each thread on its own tensor."""
    choice = choose_importance(model_cost, 51200, memory, n_threads, 5)
    assert choice[0] == full_columns and why in choice[1]


def test_experts_have_the_speed_of_few_columns(monkeypatch):
    """A product of an expert has few columns, because the tokens of a chunk are distributed over the experts."""
    rates = {(512, False): 4e11, (8, True): 1e11}
    monkeypatch.setattr(cost, "product_rate", lambda type_id, n_threads, *product: rates[product])
    experts = model(4096, n_expert_weights_used=int(6e8), expert_columns=8)
    seconds = 2 * (4e8 / 4e11 + 6e8 / 1e11) / cost.GRAPH_SHARE
    assert experts.seconds("diagonal", 1000, 2) == pytest.approx(1000 * seconds)


def test_cost_of_a_model_is_read_from_its_tensors(tmp_path):
    """Shared inputs count once, each expert has its own."""
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": gaussian(8, 256), "blk.0.attn_k.weight": gaussian(8, 256),
                                            "blk.0.ffn_down_exps.weight": gaussian(4, 8, 320), "blk.0.attn_norm.weight": gaussian(256),
                                            "token_embd.weight": gaussian(8, 256)},
                      fill=lambda w: (w.add_expert_count(4), w.add_expert_used_count(2)))
    model_cost = CalibrationCost.read(GGUFFile(path))
    assert model_cost.inputs == (Input(0, 256, 1, 1, 2, 16), Input(0, 320, 4, 2, 1, 32)) and model_cost.n_weights_used == 3 * 8 * 256 + 2 * 8 * 320  # the embeddings are also the output matrix
    assert (model_cost.n_expert_weights_used, model_cost.expert_columns) == (2 * 8 * 320, 256)
    small = 256 * 257 // 2
    assert model_cost.hessian_bytes("block") == 4 * (small + 256 + 4 * (small + 64 * 65 // 2 + 320))
    assert model_cost.hessian_bytes("full") == 4 * (small + 256 + 4 * (320 * 321 // 2 + 320))
    assert model_cost.hessian_bytes("diagonal") == 4 * (256 + 4 * 320)


def test_experts_used_may_differ_by_layer(tmp_path):
    """The most of all layers count (Nemotron-H)."""
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_down_exps.weight": gaussian(4, 8, 320)},
                      fill=lambda w: (w.add_expert_count(4), w.add_array("llama.expert_used_count", [0, 3, 1])))
    assert CalibrationCost.read(GGUFFile(path)).inputs == (Input(0, 320, 4, 3, 1, 32),)
