"""Backends without kernels for ggml-ext types refuse them: the patches, docs/reference/backends.md, the rule and RPC."""

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
from helpers.blocks import nightly_except
from helpers.commands import quantize, tool
from helpers.native import ROOT
from helpers.placement import measure
from helpers.rpc import rpc_server

DOCS = ROOT / "docs" / "reference" / "backends.md"
# The backends that the common check accepts, and the directories of their sources.
KNOWN = {"CPU": "ggml-cpu", "CUDA": "ggml-cuda", "MTL": "ggml-metal", "Vulkan": "ggml-vulkan", "RPC[10.0.0.1:50052]": "ggml-rpc"}


@pytest.fixture(scope="module")
def patched_tree(tmp_path_factory) -> Path:
    """The pinned llama.cpp with all patches."""
    tree = tmp_path_factory.mktemp("tree") / "llama.cpp"
    llama_cpp.patch_tree(llama_cpp.pristine_tree(), tree)
    return tree


def read_table() -> dict[str, list[str]]:
    """Return the rows of the first table of docs/reference/backends.md: directory -> the other cells."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| `ggml-")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {folder: row[1:] for row in rows for folder in re.findall(r"`(ggml-[\w-]+)`", row[0])}


def test_table_lists_every_backend(patched_tree):
    """For a backend that llama.cpp adds: read its supports_op, add a patch if it accepts ggml-ext types, and a row."""
    assert set(read_table()) == {p.name for p in (patched_tree / "ggml" / "src").glob("ggml-*") if p.is_dir()}


def test_table_names_backends_with_kernels():
    for folder, (does, rule, how) in read_table().items():
        assert does and rule and how, folder
        assert does.startswith("runs") == (folder in KNOWN.values()), f"{folder}: {does}"
        assert (rule == "patch 0022") == (does == "falls back to the CPU"), f"{folder}: {rule}"


@pytest.fixture(scope="module")
def foreign_device(patched_tree, tmp_path_factory) -> ctypes.CDLL:
    """Build tests/native/foreign_device.cpp against the libggml-base of the build."""
    if shutil.which("c++") is None:
        pytest.skip("no c++")
    out, base = tmp_path_factory.mktemp("foreign") / "foreign.so", native.require_built(native.BUILD, "libggml-base.so")
    subprocess.run(["c++", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", "-I", patched_tree / "ggml/include", "-I", patched_tree / "ggml/src",
                    "-I", ROOT / "ggml_ext" / "hooks", ROOT / "tests/native/foreign_device.cpp", base, f"-Wl,-rpath,{base.parent}", "-o", out], check=True)
    lib = ctypes.CDLL(str(out))
    for name in ("foreign_device_multiplies", "foreign_device_views"):
        getattr(lib, name).restype = ctypes.c_bool
        getattr(lib, name).argtypes = [ctypes.c_char_p, ctypes.c_int]
    lib.rpc_asks_again.restype = ctypes.c_bool
    return lib


@pytest.mark.parametrize("name", ["BLAS", "SYCL", "CANN", "ggml-virtgpu", "RPCX", "cpu", "a backend of tomorrow"])
def test_unknown_backend_is_refused_without_asking(foreign_device, name):
    for type_id in ExtType:
        if int(type_id) in (int(TYPES[weights].id) for weights in WEIGHT_TYPES):
            assert not foreign_device.foreign_device_multiplies(name.encode(), int(type_id)), type_id
        assert foreign_device.foreign_device_views(name.encode(), int(type_id)), type_id
    assert foreign_device.foreign_device_multiplies(name.encode(), int(GGMLQuantizationType.F16))


@pytest.mark.parametrize("name", [*KNOWN, "RPC", None])
def test_backend_with_kernels_is_asked(foreign_device, name):
    """The name None stands for a meta device: ggml asks its devices one by one."""
    for weights in WEIGHT_TYPES:
        assert foreign_device.foreign_device_multiplies(name and name.encode(), int(TYPES[weights].id))


@pytest.mark.parametrize(("new_shape", "is_asked_again"), [
    ((2048, 512, 1), False), ((2048, 512, 300), False),
    ((2048, 1 << 20, 1), True),  # may exceed the largest Vulkan buffer
    ((4096, 512, 1), True),
    ((2048, 512, 1 << 17), True),  # 256 MiB of products
])
def test_rpc_asks_again_if_sizes_may_change_the_answer(foreign_device, new_shape, is_asked_again):
    """The number of tokens, which changes all the time, counts only where a product exceeds what every device holds."""
    shape = ctypes.c_int64 * 3
    for weights in WEIGHT_TYPES.values():
        assert foreign_device.rpc_asks_again(int(weights.id), shape(2048, 512, 7), shape(*new_shape)) == is_asked_again


def test_table_names_the_pinned_llama_cpp():
    """Rows without a patch rest on upstream's code: read those functions again before changing the version there."""
    assert f"llama.cpp {llama_cpp.PIN['llama_cpp']}, ggml {llama_cpp.PIN['ggml']}" in DOCS.read_text()


def test_ggml_h_needs_no_other_include_directory(patched_tree):
    """Hexagon compiles its device code in a separate project that knows only ggml/include."""
    done = subprocess.run(["cc", "-fsyntax-only", str(patched_tree / "ggml/include/ggml.h")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=["c", "c++"])
def helper(request, patched_tree, tmp_path_factory) -> ctypes.CDLL:
    """Compile tests/native/supports_helper.c in the given language."""
    compiler, standard = {"c": ("cc", "c11"), "c++": ("c++", "c++17")}[request.param]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    out = tmp_path_factory.mktemp("helper") / "helper.so"
    subprocess.run([compiler, "-x", request.param, f"-std={standard}", "-Wall", "-Werror", "-shared", "-fPIC",
                    "-I", ROOT / "ggml_ext" / "hooks", "-I", patched_tree / "ggml/include", ROOT / "tests/native/supports_helper.c", "-o", out], check=True)
    lib = ctypes.CDLL(str(out))
    for name in ("is_ext_type", "op_needs_kernels", "only_names_memory"):
        getattr(lib, name).restype = ctypes.c_bool
    return lib


def test_helper_accepts_only_ggml_ext_types(helper):
    assert [i for i in range(256) if helper.is_ext_type(i)] == sorted(t.id for t in TYPES.values())


def test_helper_checks_every_operand(helper):
    for op in range(helper.op_count()):
        for position in range(-1, helper.max_src()):
            assert not helper.op_needs_kernels(op, position, 0)
            for type_id in ExtType:
                needs_kernels = helper.op_needs_kernels(op, position, int(type_id))
                assert needs_kernels != helper.only_names_memory(op), (op, position, type_id)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "data" / "heldout.txt").read_bytes()[:20000])  # more than two chunks of 256 tokens
    return path


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    """Start two RPC servers, as on two machines, and return their endpoints for --rpc."""
    with rpc_server(tmp_path_factory.mktemp("first")) as first, rpc_server(tmp_path_factory.mktemp("second")) as second:
        yield f"{first},{second}"


@pytest.mark.parametrize("name", nightly_except(sorted(WEIGHT_TYPES), ["itq3_s", "itq2_t64"]))
def test_two_rpc_servers_give_the_local_perplexity(model, text, two_servers, name, tmp_path):
    """Half of the layers runs on each server with the same code and CPU, so all digits agree."""
    file = tmp_path / "model.gguf"
    quantize(model, file, "--type", name, "--effort", "fast", *perplexity_run.UNIFORM)
    local, remote = (measure(file, 256, 1, "-f", text, "--chunks", 2, *options)
                     for options in ((), ("--rpc", two_servers, "-ngl", 99, "--tensor-split", "1,1")))
    assert local.perplexity == remote.perplexity
    blocks, _ = perplexity_run.block_types(file)
    n_bytes = sum(blocks.values()) / 8 * WEIGHT_TYPES[name].bpw
    none, sizes = ([size for name, size in measured.buffers.items() if name.startswith("RPC")] for measured in (local, remote))
    assert not none and len(sizes) == 2 and sum(sizes) * 2**20 >= n_bytes, "the weights of the blocks are not on the servers"
    assert min(sizes) * 2**20 >= n_bytes / 3, "one server holds nearly all"


# Prints which products the device of an RPC server supports, one per line; a separate process, since a lost server aborts.
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


def test_rpc_device_reports_the_server_support(tmp_path):
    """The CPU backend has no product of quantized weights and F16 activations. The server says so for a ggml-ext type;
    for Q4_0, which upstream's client does not ask about, the answer stays yes."""
    f32, f16, q4_0 = 0, 1, 2
    expected = {f"{q4_0}x{f16}": True}
    for t in WEIGHT_TYPES.values():
        expected |= {f"{int(t.id)}x{f32}": True, f"{int(t.id)}x{f16}": False}
    with rpc_server(tmp_path) as endpoint:
        done = subprocess.run([sys.executable, "-c", ASK, str(tool("ggml-rpc-server").parent), endpoint, *expected],
                              capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {product: answer == "True" for product, answer in re.findall(r"^(\S+) (True|False)$", done.stdout, re.M)} == expected
