"""The Vulkan backend with our kernels on lavapipe, against the scalar reference in double precision; a model against the CPU.

lavapipe has no matrix cores, and its subgroups have eight threads. Code for other devices is compiled here but not run. It has integer dot products but
says that they are slow, so products use floats unless a test forces integers. LLVM takes nearly all of the time, once per pipeline.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

import perplexity_run
import synth_model
from ggml_ext import TYPES, WEIGHT_TYPES
from helpers import vulkan
from helpers.blocks import EACH_KIND, nightly_except
from helpers.commands import quantize
from helpers.native import BUILD, F32_U, ROOT, require_built
from helpers.perplexity_record import perplexity_tolerance
from helpers.vulkan import Case
from server import running_server

HALF_U = 2.0**-11  # unit roundoff of half
# Error over |w| |x| of products in F32. The rotation has 8 additions per value. A product adds 32 values in turn, up to 16 blocks of a thread,
# and the threads of a subgroup or workgroup: 8 + 32 + 16 + 8 roundings of terms of norm |w| |x|. ITQ3_S's codes and zero points are up to
# four times their differences. One wrong weight of 2048 costs 0.02.
VECTOR_BOUND = 4 * 64 * F32_U
# products whose weights and activations are rounded to half, with F32 sums
MATRIX_BOUND = 2 * HALF_U + VECTOR_BOUND
# sums in halves, upstream's default, have no useful bound: NMSE as test-backend-ops allows it
NMSE_BOUND = 5e-4

# DotProductFloat16AccFloat32VALVE, which Debian 12's spirv-val (2023.1) does not know by name
UNKNOWN_CAPABILITY = "Invalid capability operand: 6912"


def row_length(type_name: str, k: int) -> int:
    """Return a row length near k; for types of shorter blocks the last 256 weights are incomplete."""
    return k + TYPES[type_name].block_size % 256


def assert_close(type_name: str, cases: list[Case], *, integers: bool = False, **variables: str) -> None:
    """integers: both round the activations to 8 bits alike, and all else is exact up to sums in F32. Floats would differ by 1e-4."""
    for case, result in vulkan.run_cases(type_name, cases, integers=integers, **variables).items():
        assert result is not None, f"{type_name} {case}: refused"
        is_matrix = not integers and case.n > 8 or (case.n > 1 and case.batch * case.r2 > 1)
        if case.operation == "rows":
            assert result.different == 0, f"{type_name} {case}: {result.different} of {result.values} values have other bits"
        elif not is_matrix:
            assert result.max_error <= VECTOR_BOUND, (type_name, case, result)
        elif case.operation == "f32":
            assert result.max_error <= MATRIX_BOUND, (type_name, case, result)
        else:
            assert result.nmse <= NMSE_BOUND, (type_name, case, result)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_get_rows_is_bit_equal(name):
    assert_close(name, [Case("rows", row_length(name, 2048), 64, 5), Case("rows", row_length(name, 768), 64, 9), Case("rows", row_length(name, 256), 1, 1)])


@pytest.mark.parametrize("name", EACH_KIND)
def test_products_of_few_columns(name):
    """Rows that are not a multiple of a workgroup's; batches, views and permutations, which the rotation reads by their strides."""
    k = row_length(name, 1024)
    assert_close(name, [*(Case("plain", k, 67, n) for n in (1, 2, 4, 5, 8)), Case("view", k, 33, 5), Case("view", k, 33, 1),
                        Case("plain", k, 33, 1, 2, 2), Case("permuted", k, 33, 1, 2, 2), Case("plain", row_length(name, 256), 5, 1),
                        Case("plain", row_length(name, 4096), 9, 1)])


@pytest.mark.parametrize("name", EACH_KIND)
def test_products_of_many_columns(name):
    """The smallest tile."""
    k = row_length(name, 768)
    assert_close(name, [Case("f32", k, 70, 30), Case("plain", k, 33, 9), Case("view", k, 33, 9, 1, 3), Case("permuted", k, 33, 9, 2, 2)])


@pytest.mark.parametrize("name", EACH_KIND)
def test_integer_products(name):
    """Vectors and tiles, also of experts; rows that end inside a tile's 128 weights, batches, views and permutations."""
    k = row_length(name, 1024)
    assert_close(name, [*(Case("plain", k, 67, n) for n in (1, 2, 5, 8)), Case("view", k, 33, 5), Case("permuted", k, 33, 1, 2, 2),
                        Case("plain", row_length(name, 256), 5, 1), Case("plain", row_length(name, 4096), 9, 1), Case("experts", k, 33, 1),
                        Case("plain", row_length(name, 768), 70, 30), Case("view", k, 33, 9, 1, 3), Case("permuted", row_length(name, 512), 33, 9, 2, 2),
                        Case("experts", row_length(name, 512), 64, 33)], integers=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_larger_tiles_of_integers(name):
    k = row_length(name, 512)
    assert_close(name, [Case("plain", k, 130, 70), Case("plain", k, 64, 40), *(Case("plain", k, 67, n) for n in (3, 4, 6, 7))], integers=True)


@pytest.mark.parametrize("name", ["itq3_s", "itq2_t64"])
def test_integer_products_without_subgroup_arithmetic(name):
    k = row_length(name, 1024)
    assert_close(name, [Case("plain", k, 67, 3), Case("experts", k, 33, 1)], integers=True, GGML_EXT_VK_NO_SUBGROUPS="1")


def test_integers_are_chosen_where_they_gain():
    """One column of types with a look-up for each weight does not."""
    columns = {n: Case("plain", 1024, 67, n) for n in (1, 2)}
    for name, has_gain in (("itq3_s", True), ("itq1h_t", True), ("itq3_t", False)):
        errors = {n: vulkan.run_cases(name, [case], GGML_EXT_VK_INTEGER_DOT="1")[case].max_error for n, case in columns.items()}
        assert errors[2] > VECTOR_BOUND and (errors[1] > VECTOR_BOUND) == has_gain, (name, errors)


@pytest.mark.parametrize("variable", ["GGML_VK_DISABLE_INTEGER_DOT_PRODUCT", "GGML_VK_DISABLE_MMVQ"])
def test_variables_of_upstream_choose_floats(variable):
    """The second one only for vectors."""
    assert_close("itq3_s", [Case("plain", 1024, 67, 2), Case("experts", 1024, 33, 1)], GGML_EXT_VK_INTEGER_DOT="1", **{variable: "1"})


@pytest.mark.nightly
@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_larger_tiles_match_the_reference(name):
    k = row_length(name, 512)
    assert_close(name, [Case("f32", k, 130, 70), Case("plain", k, 130, 70), Case("f32", k, 64, 40), Case("view", k, 64, 40, 1, 3),
                        Case("permuted", k, 64, 40, 2, 2)])


@pytest.mark.parametrize("name", EACH_KIND)
def test_experts_match_the_reference(name):
    """Few tokens use vectors; many use tiles, whose sums are in halves."""
    k = row_length(name, 512)
    assert_close(name, [Case("experts", k, 64, 33), Case("experts", k, 33, 1)])


@pytest.mark.parametrize("name", ["itq3_s", "itq3_t", "itq2_t64"])
def test_products_without_subgroup_arithmetic(name):
    """As on devices without subgroup arithmetic."""
    k = row_length(name, 1024)
    assert_close(name, [Case("plain", k, 67, 3), Case("plain", k, 67, 1), Case("experts", k, 33, 1)], GGML_EXT_VK_NO_SUBGROUPS="1")


@pytest.mark.nightly
@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_all_products_without_subgroup_arithmetic(name):
    k = row_length(name, 1024)
    assert_close(name, [Case("plain", k, 67, n) for n in range(1, 9)], GGML_EXT_VK_NO_SUBGROUPS="1")


@pytest.mark.parametrize("name", ["itq3_s", "itq3_t", "itq2_t64"])
def test_products_on_a_device_without_halves(name):
    """Tiles are in F32 there."""
    k = row_length(name, 512)
    assert_close(name, [Case("f32", k, 33, 9), Case("plain", k, 33, 9), Case("plain", k, 33, 1), Case("experts", k, 33, 9)], GGML_VK_DISABLE_F16="1")


def test_trellis_types_need_more_than_16_kb_of_shared_memory():
    """Their table and tiles do not fit in shared memory; the CPU computes them."""
    case = Case("plain", 1024, 33, 1)
    refused_types = {name for name in WEIGHT_TYPES if vulkan.run_cases(name, [case], GGML_EXT_VK_SHARED_BYTES="16384")[case] is None}
    assert refused_types == {name for name in WEIGHT_TYPES if "_t" in name}


def backend_ops(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([require_built(BUILD, "test-backend-ops"), *arguments, "-b", "Vulkan0"], capture_output=True, text=True, timeout=600,
                          env=vulkan.environment(GGML_BACKEND_PATH=str(vulkan.library())))


@pytest.mark.nightly
@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_upstream_suite_passes(name):
    """ggml's test-backend-ops with ggml-ext types in its lists. Each case runs in its own process because of lavapipe (helpers/vulkan.py)."""
    listed = backend_ops("support", "-p", f"={name}").stdout
    cases = dict.fromkeys(re.findall(r"^ +(\w+\(.*\)): \x1b\[1;32mSUPPORTED", listed, re.M))  # removes duplicates
    assert {case.partition("(")[0] for case in cases} == {"GET_ROWS", "MUL_MAT", "MUL_MAT_ID"}
    for case in cases:
        done = backend_ops("test", "-o", case)
        assert done.returncode == 0 and re.search(r"([12])/\1 tests passed", done.stdout), f"{case}: {done.stdout[-1000:]}{done.stderr[-1000:]}"


def find_shaders() -> list[Path]:
    vulkan.library()
    names = re.compile("|".join(f"_{name}(_|$)" for name in WEIGHT_TYPES) + "|^ggml_ext_")
    return [path for path in sorted(vulkan.SHADERS.glob("*.spv")) if names.search(path.stem)]


def test_all_shaders_are_valid():
    """Each type has products without matrix cores (three kinds of experts, six of numbers), six reductions, four for integers, and two of rows.

    Eleven shaders copy activations.

    An old spirv-val cannot check mixed dot products, which upstream's own shaders use too.
    """
    shaders = find_shaders()
    assert len(shaders) >= len(WEIGHT_TYPES) * (3 * 6 + 6 + 4 + 2) + 11, "some shaders are not compiled"
    for path in shaders:
        done = subprocess.run(["spirv-val", "--target-env", "vulkan1.2", path], capture_output=True, text=True)
        is_unsupported = "_dot2" in path.stem and UNKNOWN_CAPABILITY in done.stderr
        assert done.returncode == 0 or is_unsupported, f"{path.name}: {done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "data" / "heldout.txt").read_bytes()[:8000])  # more than two chunks of 128 tokens
    return path


@pytest.mark.parametrize("name", nightly_except(WEIGHT_TYPES, ["itq3_t"]))
def test_model_has_the_cpus_perplexity(model, text, name, tmp_path, monkeypatch):
    """The CPU rounds activations to 8 bits, lavapipe to halves."""
    assert_same_perplexity(model, name, text, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", nightly_except(WEIGHT_TYPES, ["itq3_t"]))
def test_mixture_of_experts_has_the_cpus_perplexity(lib, text, name, tmp_path, monkeypatch):
    """Random weights; two of four experts are used."""
    synth_model.write_model("f16", tmp_path / "experts.gguf", "tiny-experts", 2)
    assert_same_perplexity(tmp_path / "experts.gguf", name, text, tmp_path, monkeypatch)


def test_server_completes(model, tmp_path, monkeypatch):
    """llama-server with all layers on Vulkan0."""
    file, log = tmp_path / "model.gguf", tmp_path / "server.log"
    quantize(model, file, "--type", "itq3_t", "--effort", "fast", *perplexity_run.UNIFORM)
    for key, value in vulkan.environment(GGML_BACKEND_PATH=str(vulkan.library())).items():
        monkeypatch.setenv(key, value)
    question = json.dumps({"prompt": "def add(a, b):", "n_predict": 8, "temperature": 0}).encode()
    with running_server(file, "-ngl", 99, "--device", "Vulkan0", "-c", 256, "--parallel", 1, "-t", 1, "-lv", 4, "--no-warmup", log=log) as url:
        request = urllib.request.Request(f"{url}/completion", question, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            completion = json.load(answer)
    (offloaded, layers), = re.findall(r"offloaded (\d+)/(\d+) layers to GPU", log.read_text(errors="replace"))
    assert offloaded == layers and "Vulkan0" in log.read_text(errors="replace")
    assert completion["tokens_predicted"] == 8 and completion["content"].strip()


def assert_same_perplexity(model: Path, name: str, text: Path, folder: Path, monkeypatch) -> None:
    file = folder / "model.gguf"
    quantize(model, file, "--type", name, "--effort", "fast", *perplexity_run.UNIFORM)
    backend = {"GGML_BACKEND_PATH": str(vulkan.library())}
    cpu, _ = vulkan.perplexity(file, text, monkeypatch, "-ngl", 0, "--device", "none", **backend)
    device, size = vulkan.perplexity(file, text, monkeypatch, "-ngl", 99, "--device", "Vulkan0", **backend)
    print(f"{name}: perplexity {device} on Vulkan0, {cpu} on the CPU; {size} MiB of weights there")
    blocks, _ = perplexity_run.block_types(file)
    assert size * 2**20 >= sum(blocks.values()) / 8 * WEIGHT_TYPES[name].bpw, "the block weights are not on the device"
    assert abs(math.log(device / cpu)) <= perplexity_tolerance(2)
