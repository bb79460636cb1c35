"""The Vulkan backend with our kernels on lavapipe, against the scalar reference in double precision, and a model against the CPU.

lavapipe has neither matrix cores nor integer dot products, and its subgroups have eight threads: what other devices do differently
is compiled here and not run. Nearly all of the time goes into LLVM, once a pipeline.
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
from helpers.blocks import EACH_KIND, by_day
from helpers.commands import quantize
from helpers.native import BUILD, F32_U, ROOT, built
from helpers.perplexity_record import perplexity_tolerance
from helpers.vulkan import Case
from server import running_server

HALF_U = 2.0**-11  # unit roundoff of half
# Errors over |w| |x| of products in F32. The rotation has 8 additions a value. A product is sums of 32 values in turn, then of the up to 16
# blocks of a thread, then of the threads of a subgroup or workgroup: 8 + 32 + 16 + 8 roundings of terms whose norm is |w| |x|, but for
# ITQ3_S, whose codes and zero points are up to four times as large as their differences. One wrong weight of 2048 costs 0.02.
VECTOR_BOUND = 4 * 64 * F32_U
# of products whose weights and activations are rounded to halves and whose sums are F32's
MATRIX_BOUND = 2 * HALF_U + VECTOR_BOUND
# Sums in halves, which upstream takes by default, have no bound that says anything: squared errors as test-backend-ops allows them
NMSE_BOUND = 5e-4

# DotProductFloat16AccFloat32VALVE, as Debian 12's spirv-val (2023.1) names what it does not know
UNKNOWN_CAPABILITY = "Invalid capability operand: 6912"


def sizes(type_name: str, k: int) -> int:
    """Rows of about k weights; of types of 64 such that the last block of 256 is not whole."""
    return k + 64 if TYPES[type_name].block_size == 64 else k


def assert_close(type_name: str, cases: list[Case], **variables: str) -> None:
    for case, found in vulkan.run_cases(type_name, cases, **variables).items():
        assert found is not None, f"{type_name} {case}: refused"
        is_matrix = case.n > 8 or (case.n > 1 and case.batch * case.r2 > 1)
        if case.operation == "rows":
            assert found.different == 0, f"{type_name} {case}: {found.different} of {found.values} values have other bits"
        elif not is_matrix:
            assert found.max_error <= VECTOR_BOUND, (type_name, case, found)
        elif case.operation == "f32":
            assert found.max_error <= MATRIX_BOUND, (type_name, case, found)
        else:
            assert found.nmse <= NMSE_BOUND, (type_name, case, found)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_rows_by_index_have_the_bits_of_the_reference(name):
    assert_close(name, [Case("rows", sizes(name, 2048), 64, 5), Case("rows", sizes(name, 768), 64, 9), Case("rows", sizes(name, 256), 1, 1)])


@pytest.mark.parametrize("name", EACH_KIND)
def test_products_of_few_columns(name):
    """Rows that are no multiple of what a workgroup has; batches, views and permutations, which the rotation reads by their strides."""
    k = sizes(name, 1024)
    assert_close(name, [*(Case("plain", k, 67, n) for n in (1, 2, 4, 5, 8)), Case("view", k, 33, 5), Case("view", k, 33, 1),
                        Case("plain", k, 33, 1, 2, 2), Case("permuted", k, 33, 1, 2, 2), Case("plain", sizes(name, 256), 5, 1),
                        Case("plain", sizes(name, 4096), 9, 1)])


@pytest.mark.parametrize("name", EACH_KIND)
def test_products_of_many_columns(name):
    """The smallest tile."""
    k = sizes(name, 768)
    assert_close(name, [Case("f32", k, 70, 30), Case("plain", k, 33, 9), Case("view", k, 33, 9, 1, 3), Case("permuted", k, 33, 9, 2, 2)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_larger_tiles(name):
    k = sizes(name, 512)
    assert_close(name, [Case("f32", k, 130, 70), Case("plain", k, 130, 70), Case("f32", k, 64, 40), Case("view", k, 64, 40, 1, 3),
                        Case("permuted", k, 64, 40, 2, 2)])


@pytest.mark.parametrize("name", EACH_KIND)
def test_experts(name):
    """By vectors for few tokens; by tiles for many, whose sums are in halves."""
    k = sizes(name, 512)
    assert_close(name, [Case("experts", k, 64, 33), Case("experts", k, 33, 1)])


@pytest.mark.parametrize("name", ["itq3_s", "itq3_t", "itq2_t64"])
def test_reductions_in_shared_memory(name):
    """As on devices without arithmetic in subgroups."""
    k = sizes(name, 1024)
    assert_close(name, [Case("plain", k, 67, 3), Case("plain", k, 67, 1), Case("experts", k, 33, 1)], GGML_EXT_VK_NO_SUBGROUPS="1")


@pytest.mark.nightly
@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_all_reductions_in_shared_memory(name):
    k = sizes(name, 1024)
    assert_close(name, [Case("plain", k, 67, n) for n in range(1, 9)], GGML_EXT_VK_NO_SUBGROUPS="1")


@pytest.mark.parametrize("name", ["itq3_s", "itq3_t", "itq2_t64"])
def test_a_device_without_halves(name):
    """Tiles are in F32 there."""
    k = sizes(name, 512)
    assert_close(name, [Case("f32", k, 33, 9), Case("plain", k, 33, 9), Case("plain", k, 33, 1), Case("experts", k, 33, 9)], GGML_VK_DISABLE_F16="1")


def test_a_device_of_16_kb_is_refused_the_trellis_types():
    """Whose table and tiles have no room there; the CPU takes over."""
    case = Case("plain", 1024, 33, 1)
    refused = {name for name in WEIGHT_TYPES if vulkan.run_cases(name, [case], GGML_EXT_VK_SHARED_BYTES="16384")[case] is None}
    assert refused == {name for name in WEIGHT_TYPES if "_t" in name}


def backend_ops(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([built(BUILD, "test-backend-ops"), *arguments, "-b", "Vulkan0"], capture_output=True, text=True, timeout=600,
                          env=vulkan.environment(GGML_BACKEND_PATH=str(vulkan.library())))


@pytest.mark.nightly
@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_upstream_suite(name):
    """ggml's own test-backend-ops with our types in its lists. A process a case: lavapipe 22.3 corrupts its heap when a buffer grows
    (helpers/vulkan.py)."""
    listed = backend_ops("support", "-p", f"={name}").stdout
    cases = dict.fromkeys(re.findall(r"^ +(\w+\(.*\)): \x1b\[1;32mSUPPORTED", listed, re.M))  # some are there twice
    assert {case.partition("(")[0] for case in cases} == {"GET_ROWS", "MUL_MAT", "MUL_MAT_ID"}
    for case in cases:
        done = backend_ops("test", "-o", case)
        assert done.returncode == 0 and re.search(r"([12])/\1 tests passed", done.stdout), f"{case}: {done.stdout[-1000:]}{done.stderr[-1000:]}"


def our_shaders() -> list[Path]:
    vulkan.library()
    names = re.compile("|".join(f"_{name}(_|$)" for name in WEIGHT_TYPES) + "|^ggml_ext_")
    return [path for path in sorted(vulkan.SHADERS.glob("*.spv")) if names.search(path.stem)]


def test_all_shaders_of_ours_are_valid():
    """For each type: matrix products without matrix cores by three kinds of experts and five of numbers, six reductions, two of rows. A
    spirv-val older than an extension that upstream uses in its own shaders, mixed dot products, can say nothing of those."""
    shaders = our_shaders()
    assert len(shaders) >= len(WEIGHT_TYPES) * (3 * 5 + 6 + 2) + 4, "some are not compiled"
    for path in shaders:
        done = subprocess.run(["spirv-val", "--target-env", "vulkan1.2", path], capture_output=True, text=True)
        is_unknown = "_dot2" in path.stem and UNKNOWN_CAPABILITY in done.stderr
        assert done.returncode == 0 or is_unknown, f"{path.name}: {done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "data" / "heldout.txt").read_bytes()[:8000])  # more than two chunks of 128 tokens
    return path


@pytest.mark.parametrize("name", by_day(WEIGHT_TYPES, ["itq3_t"]))
def test_a_model_has_the_perplexity_that_it_has_on_the_cpu(model, text, name, tmp_path, monkeypatch):
    """The CPU rounds activations to 8 bits, lavapipe to halves."""
    assert_same_perplexity(model, name, text, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", by_day(WEIGHT_TYPES, ["itq3_t"]))
def test_so_has_a_mixture_of_experts(lib, text, name, tmp_path, monkeypatch):
    """Random weights, four experts of which two are used."""
    synth_model.write_model("f16", tmp_path / "experts.gguf", "tiny-experts", 2)
    assert_same_perplexity(tmp_path / "experts.gguf", name, text, tmp_path, monkeypatch)


def test_a_server_answers(model, tmp_path, monkeypatch):
    """llama-server with all layers on Vulkan0."""
    file, log = tmp_path / "model.gguf", tmp_path / "server.log"
    quantize(model, file, "--type", "itq3_t", "--effort", "fast", *perplexity_run.UNIFORM)
    for key, value in vulkan.environment(GGML_BACKEND_PATH=str(vulkan.library())).items():
        monkeypatch.setenv(key, value)
    question = json.dumps({"prompt": "def add(a, b):", "n_predict": 8, "temperature": 0}).encode()
    with running_server(file, "-ngl", 99, "--device", "Vulkan0", "-c", 256, "--parallel", 1, "-t", 1, "-lv", 4, "--no-warmup", log=log) as url:
        request = urllib.request.Request(f"{url}/completion", question, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            said = json.load(answer)
    (offloaded, layers), = re.findall(r"offloaded (\d+)/(\d+) layers to GPU", log.read_text(errors="replace"))
    assert offloaded == layers and "Vulkan0" in log.read_text(errors="replace")
    assert said["tokens_predicted"] == 8 and said["content"].strip()


def assert_same_perplexity(model: Path, name: str, text: Path, folder: Path, monkeypatch) -> None:
    file = folder / "model.gguf"
    quantize(model, file, "--type", name, "--effort", "fast", *perplexity_run.UNIFORM)
    backend = {"GGML_BACKEND_PATH": str(vulkan.library())}
    here, _ = vulkan.perplexity(file, text, monkeypatch, "-ngl", 0, "--device", "none", **backend)
    there, size = vulkan.perplexity(file, text, monkeypatch, "-ngl", 99, "--device", "Vulkan0", **backend)
    print(f"{name}: perplexity {there} on Vulkan0, {here} on the CPU; {size} MiB of weights there")
    blocks, _ = perplexity_run.block_types(file)
    assert size * 2**20 >= sum(blocks.values()) / 8 * WEIGHT_TYPES[name].bpw, "the weights of the blocks are not on the device"
    assert abs(math.log(there / here)) <= perplexity_tolerance(2)
