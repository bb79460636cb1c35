"""Backends without kernels for our types refuse them: the patches, the table in docs/reference/backends.md, the rule itself, RPC."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

import llama_cpp
import perplexity_run
from ggml_ext import TYPES, WEIGHT_TYPES, ExtType
from helpers import native
from helpers.commands import quantize, tool
from helpers.native import ROOT
from helpers.rpc import rpc_server

DOCS = ROOT / "docs" / "reference" / "backends.md"
# The backends that our one refusal lets through, and the folders of their sources.
KNOWN = {"CPU": "ggml-cpu", "CUDA": "ggml-cuda", "MTL": "ggml-metal", "Vulkan": "ggml-vulkan", "RPC[10.0.0.1:50052]": "ggml-rpc"}


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """The pinned llama.cpp with all patches."""
    tree = tmp_path_factory.mktemp("tree") / "llama.cpp"
    llama_cpp.patch_tree(llama_cpp.pristine_tree(), tree)
    return tree


def table() -> dict[str, list[str]]:
    """The rows of the first table of docs/reference/backends.md: names of folders -> the other cells."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| `ggml-")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {folder: row[1:] for row in rows for folder in re.findall(r"`(ggml-[\w-]+)`", row[0])}


def test_every_backend_of_llama_cpp_is_in_the_table(patched):
    """A newer llama.cpp may bring one: read its supports_op, add a patch if it accepts our types, and a row."""
    assert set(table()) == {p.name for p in (patched / "ggml" / "src").glob("ggml-*") if p.is_dir()}


def test_the_table_says_who_runs_our_types():
    for folder, (does, rule, how) in table().items():
        assert does and rule and how, folder
        assert does.startswith("runs") == (folder in KNOWN.values()), f"{folder}: {does}"
        assert (rule == "patch 0022") == (does == "falls back to the CPU"), f"{folder}: {rule}"


@pytest.fixture(scope="module")
def foreign(patched, tmp_path_factory) -> ctypes.CDLL:
    """tests/native/foreign_device.cpp on the libggml-base of the build."""
    if shutil.which("c++") is None:
        pytest.skip("no c++")
    out, base = tmp_path_factory.mktemp("foreign") / "foreign.so", native.require_built(native.BUILD, "libggml-base.so")
    subprocess.run(["c++", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", "-I", patched / "ggml/include", "-I", patched / "ggml/src",
                    "-I", ROOT / "ggml_ext" / "hooks", ROOT / "tests/native/foreign_device.cpp", base, f"-Wl,-rpath,{base.parent}", "-o", out], check=True)
    lib = ctypes.CDLL(str(out))
    for name in ("foreign_device_multiplies", "foreign_device_views"):
        getattr(lib, name).restype = ctypes.c_bool
        getattr(lib, name).argtypes = [ctypes.c_char_p, ctypes.c_int]
    lib.rpc_asks_again.restype = ctypes.c_bool
    return lib


@pytest.mark.parametrize("name", ["BLAS", "SYCL", "CANN", "ggml-virtgpu", "RPCX", "cpu", "a backend of tomorrow"])
def test_a_foreign_device_that_says_yes_to_all_is_not_asked(foreign, name):
    for type_id in ExtType:
        if int(type_id) in (int(TYPES[weights].id) for weights in WEIGHT_TYPES):
            assert not foreign.foreign_device_multiplies(name.encode(), int(type_id)), type_id
        assert foreign.foreign_device_views(name.encode(), int(type_id)), type_id
    assert foreign.foreign_device_multiplies(name.encode(), int(GGMLQuantizationType.F16))


@pytest.mark.parametrize("name", [*KNOWN, "RPC", None])
def test_backends_that_know_our_types_are_asked(foreign, name):
    """None: several devices in one, which ggml asks one by one."""
    for weights in WEIGHT_TYPES:
        assert foreign.foreign_device_multiplies(name and name.encode(), int(TYPES[weights].id))


@pytest.mark.parametrize(("asked", "again"), [
    ((2048, 512, 1), False), ((2048, 512, 300), False),
    ((2048, 1 << 20, 1), True),  # more than a buffer of Vulkan may hold
    ((4096, 512, 1), True),
    ((2048, 512, 1 << 17), True),  # 256 MiB of products
])
def test_rpc_asks_again_where_the_answer_may_differ(foreign, asked, again):
    """A device's answer may depend on sizes; the number of tokens, which changes all the time, counts where they are beyond what all hold."""
    shape = ctypes.c_int64 * 3
    for weights in WEIGHT_TYPES.values():
        assert foreign.rpc_asks_again(int(weights.id), shape(2048, 512, 7), shape(*asked)) == again


def test_the_table_was_made_for_the_pinned_llama_cpp():
    """Rows without a patch rest on upstream's code: read those functions again before changing the version there."""
    assert f"llama.cpp {llama_cpp.PIN['llama_cpp']}, ggml {llama_cpp.PIN['ggml']}" in DOCS.read_text()


def test_ggml_h_needs_no_other_include_folder(patched):
    """Hexagon compiles its device code in a project of its own, which knows ggml/include alone."""
    done = subprocess.run(["cc", "-fsyntax-only", str(patched / "ggml/include/ggml.h")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=["c", "c++"])
def helper(request, patched, tmp_path_factory) -> ctypes.CDLL:
    """tests/native/supports_helper.c, compiled as that language."""
    compiler, standard = {"c": ("cc", "c11"), "c++": ("c++", "c++17")}[request.param]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    out = tmp_path_factory.mktemp("helper") / "helper.so"
    subprocess.run([compiler, "-x", request.param, f"-std={standard}", "-Wall", "-Werror", "-shared", "-fPIC",
                    "-I", ROOT / "ggml_ext" / "hooks", "-I", patched / "ggml/include", ROOT / "tests/native/supports_helper.c", "-o", out], check=True)
    lib = ctypes.CDLL(str(out))
    for name in ("is_ext_type", "op_needs_kernels", "only_names_memory"):
        getattr(lib, name).restype = ctypes.c_bool
    return lib


def test_our_types_and_no_others(helper):
    assert [i for i in range(256) if helper.is_ext_type(i)] == sorted(t.id for t in TYPES.values())


def test_every_operand_of_every_operation_counts(helper):
    for op in range(helper.op_count()):
        for position in range(-1, helper.max_src()):
            assert not helper.op_needs_kernels(op, position, 0)
            for type_id in ExtType:
                found = helper.op_needs_kernels(op, position, int(type_id))
                assert found != helper.only_names_memory(op), (op, position, type_id)


def perplexity_by(file: Path, text: Path, *options) -> tuple[str, list[str]]:
    """The estimate of two chunks as printed, and the sizes in MiB of the weights on each server. With one thread on all sides no sum is
    split in another way."""

    def parse(log: str) -> tuple[str, list[str]] | None:
        found = re.search(r"Final estimate: PPL = ([\d.]+)", log)
        return found and (found[1], re.findall(r"RPC\d\[127\.0\.0\.1:\d+\] model buffer size = +([\d.]+) MiB", log))

    return perplexity_run.run_perplexity("final estimate", parse, file, 256, 1, "-f", text, "--chunks", 2, "-lv", 4, *options)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "data" / "heldout.txt").read_bytes()[:20000])  # more than two chunks of 256 tokens
    return path


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    """As two machines would run them; their endpoints for --rpc."""
    with rpc_server(tmp_path_factory.mktemp("first")) as first, rpc_server(tmp_path_factory.mktemp("second")) as second:
        yield f"{first},{second}"


@pytest.mark.parametrize("name", sorted(WEIGHT_TYPES))
def test_a_model_over_two_rpc_servers(model, text, two_servers, name, tmp_path):
    """Half of the layers on each gives the perplexity of a local run, digit for digit: the same code on the same processor."""
    file = tmp_path / "model.gguf"
    quantize(model, file, "--type", name, "--effort", "fast", *perplexity_run.UNIFORM)
    here, none = perplexity_by(file, text)
    there, sizes = perplexity_by(file, text, "--rpc", two_servers, "-ngl", 99, "--tensor-split", "1,1")
    assert here == there
    blocks, _ = perplexity_run.block_types(file)
    n_bytes = sum(blocks.values()) / 8 * WEIGHT_TYPES[name].bpw
    assert not none and len(sizes) == 2 and sum(map(float, sizes)) * 2**20 >= n_bytes, "the weights of the blocks are not on the servers"
    assert min(map(float, sizes)) * 2**20 >= n_bytes / 3, "one server holds nearly all"


# Which products the device of an RPC server takes, one line each; in a process of its own, since a lost server aborts.
ASK = """
import ctypes, sys
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
folder, endpoint, products = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
load = lambda name: ctypes.CDLL(str(next(folder.glob(f"lib{name}.*"))), mode=ctypes.RTLD_GLOBAL)
base, rpc = load("ggml-base"), load("ggml-rpc")

def call(lib, name, result, *args):
    function = getattr(lib, name)
    function.restype = result
    return function(*args)

class Params(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]

ctx = c_void_p(call(base, "ggml_init", c_void_p, Params(1 << 20, None, True)))
reg = c_void_p(call(rpc, "ggml_backend_rpc_add_server", c_void_p, c_char_p(endpoint.encode())))
dev = c_void_p(call(base, "ggml_backend_reg_dev_get", c_void_p, reg, c_size_t(0)))
for product in products:
    new = lambda t: c_void_p(call(base, "ggml_new_tensor_2d", c_void_p, ctx, c_int(int(t)), c_int64(256), c_int64(4)))
    a, b = map(new, product.split("x"))
    op = c_void_p(call(base, "ggml_mul_mat", c_void_p, ctx, a, b))
    print(product, call(base, "ggml_backend_dev_supports_op", c_bool, dev, op), flush=True)
"""


def test_rpc_asks_the_server(tmp_path):
    """The CPU backend has no product of quantised weights and F16 activations: asked for one of ours the server says so, and for
    Q4_0, which upstream's client does not ask about, the answer stays yes."""
    f32, f16, q4_0 = 0, 1, 2
    expected = {f"{q4_0}x{f16}": True}
    for t in WEIGHT_TYPES.values():
        expected |= {f"{int(t.id)}x{f32}": True, f"{int(t.id)}x{f16}": False}
    with rpc_server(tmp_path) as endpoint:
        done = subprocess.run([sys.executable, "-c", ASK, str(tool("ggml-rpc-server").parent), endpoint, *expected],
                              capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {product: answer == "True" for product, answer in re.findall(r"^(\S+) (True|False)$", done.stdout, re.M)} == expected
