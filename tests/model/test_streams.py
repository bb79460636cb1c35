"""ggml-ext-streams: graphs that are cut at their layers, against llama-imatrix."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggml_ext._base.errors import UserError
from ggml_ext._sequential.sums import Sums
from helpers import architectures
from helpers.models import ROOT, read_tensors
from helpers.streams import SAME, start_streams, sums_of_squares

# Architectures with different graphs: experts, a state-space model, parallel layers, norms after the products, compressed keys.
CUT = ("gemma2", "gptneox", "command-r", "deepseek2", "mamba", "falcon-h1", "granitemoe", "qwen3moe")
# Graphs whose layers' outputs have other names or other shapes: layers of one kind, several residual streams, keys that an earlier layer selects.
CUT_BY_STRUCTURE = ("nemotron_h", "plamo2", "deepseek4", "qwen4exp", "hy_v4")
# Why the other architectures are refused.
NOT_CUT = {"hrm_text": "uses blk.0.attn_q.bias again after weights of layer 1"}


def check_streams(model, text, context, folder) -> None:
    """Check that all inputs equal those of the complete graph, and that two streams of one model agree."""
    expected, n_compared = sums_of_squares(model, text, context, folder), 0
    with start_streams(model, text, context, folder) as layer_streams, ThreadPoolExecutor(2) as pool:
        for k, groups in enumerate(layer_streams.layers):
            layer_streams.enter_layer(k)
            for g, group in enumerate(groups):
                sums = Sums(group, pool)
                for chunk in range(layer_streams.n_chunks):
                    sums.add(layer_streams.compute_inputs(k, g, chunk, g == len(groups) - 1))
                sums.flush()
                assert not sums.d.any() and not any(r.any() for r in sums.r.values())
                squares = np.einsum("eii->ei", sums.h)
                for product in group.products:
                    if product.weight not in expected:  # llama-imatrix has only those of the layers and output.weight
                        assert product.weight == "token_embd.weight" or product.weight.startswith("output_hc_")
                        continue
                    n_compared += 1
                    exact = expected[product.weight]
                    assert np.abs(squares - exact).max() <= SAME * exact.max(), product.weight
            if k + 1 < len(layer_streams.layers):
                assert layer_streams.advance() == 0
    assert n_compared >= len(layer_streams.layers)


@pytest.mark.parametrize("architecture", [*CUT, *CUT_BY_STRUCTURE])
def test_graph_is_cut_into_layers(architecture, letters, tmp_path, float32_sums):
    for model in architectures.write_models(architecture, tmp_path):
        check_streams(model, letters, 128, tmp_path)


def scale_matrices(group, tensors, factor, *streams) -> None:
    """Replace the matrices of a group in the quantized models by themselves times a power of two."""
    for product in group.products:
        if product.weight != "token_embd.weight":
            tensor = tensors[product.weight]
            for layer_streams in streams:
                layer_streams.replace(product.weight, tensor.tensor_type.name, tensor.data * tensor.data.dtype.type(factor))


def check_same_inputs(k, g, advance, continued, restarted) -> None:
    """Check that the inputs of a group are the same in both, `restarted` from the layer's input on."""
    restarted.enter_layer(k)
    for chunk in range(continued.n_chunks):
        arrays = [s.compute_inputs(k, g, chunk, a) for s, a in ((continued, advance), (restarted, False))]
        pairs = [(a.x, *([a.ids] if a.ids else []), *a.residuals.values()) for a in arrays]
        for one, other in zip(*pairs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_bf16_changes_the_original_model_little(text, tmp_path):
    """Weights and inputs are rounded by at most 2^-8 of their values, so a product by 2^-7 of the sum of magnitudes; four follow each other in a
    layer. The other model keeps F16."""
    with start_streams(ROOT / "data" / "model-f16.gguf", text, 256, tmp_path) as layer_streams:
        layer_streams.prefer_bf16()
        errors = []
        for k in range(n := len(layer_streams.layers) - 1):
            layer_streams.enter_layer(k)
            errors.append(layer_streams.advance())
    has_bf16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert all((error > 0) == has_bf16 for error in errors) and max(errors) < (4 * n * 2**-7) ** 2


@pytest.mark.parametrize("architecture", ["llama", *CUT, *CUT_BY_STRUCTURE])
def test_runs_continue_at_the_inputs_of_the_group_before(architecture, letters, tmp_path):
    """A layer computes the same with the values that it keeps between groups as from its input on."""
    for model in architectures.write_models(architecture, tmp_path):
        tensors, (one, other) = read_tensors(model), (tmp_path / "1", tmp_path / "2")
        one.mkdir(exist_ok=True), other.mkdir(exist_ok=True)
        with start_streams(model, letters, 128, one) as continued, start_streams(model, letters, 128, other) as restarted:
            for k, groups in enumerate(continued.layers):
                continued.enter_layer(k)
                for g, group in enumerate(groups):
                    check_same_inputs(k, g, g == len(groups) - 1, continued, restarted)
                    scale_matrices(group, tensors, 0.5, continued, restarted)
                restarted.enter_layer(k)
                if k + 1 < len(continued.layers):
                    assert continued.advance() == restarted.advance() > 0
            # what depends on a replaced matrix is computed again
            continued.enter_layer(0)
            last = len(continued.layers[0]) - 1
            for g in (last - 1, last):
                check_same_inputs(0, g, False, continued, restarted)
                scale_matrices(continued.layers[0][0], tensors, 2, continued, restarted)


@pytest.mark.parametrize("architecture", NOT_CUT)
def test_graph_that_cannot_be_cut_is_refused(architecture, letters, tmp_path):
    for model in architectures.write_models(architecture, tmp_path):
        with pytest.raises(UserError, match=NOT_CUT[architecture]), start_streams(model, letters, 128, tmp_path):
            pass


def test_factor_of_the_residual_is_read_from_the_graph(letters, tmp_path):
    """The sums of the residual are divided by it."""
    model = next(path for path in architectures.write_models("granite", tmp_path) if "dense" in path.name)
    factor = gguf.GGUFReader(model).fields["granite.residual_scale"].contents()
    with start_streams(model, letters, 128, tmp_path) as layer_streams:
        scales = {p.weight: p.scale for groups in layer_streams.layers for g in groups for p in g.products}
    assert factor != 1 and scales["blk.0.ffn_down.weight"] == scales["blk.1.ffn_down.weight"] == factor
    assert not any(scale for name, scale in scales.items() if "ffn_down" not in name)  # attn_output is multiplied by a tensor in this model


def architecture_of(path) -> str:
    return path.stem.rpartition("-")[0]


@pytest.mark.nightly
def test_all_architectures_are_cut_or_refused(letters, tmp_path, float32_sums):
    errors = {}
    for model in architectures.write_models("all", tmp_path):
        try:
            check_streams(model, letters, 128, tmp_path)
        except UserError as e:
            errors[architecture_of(model)] = str(e)
    assert errors.keys() == NOT_CUT.keys() and all(NOT_CUT[name] in line for name, line in errors.items()), errors
