"""A new type needs a row in types.toml and seven files, a new trellis type only the row, as docs/maintaining/new-type.md says.

A copy of the tree gets one type of each kind: ITQ3_S under another name, and a trellis of two bits with ITQ3_T's tables.
The tests generate the lists, build the CPU backend and run the copy's own tests on both types.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_ext import TYPES
from helpers.native import ROOT

OLD, NEW = "itq3_s", "itq3_x"
TRELLIS, NEW_TRELLIS = "itq3_t", "itq2_x"
FILES = ("ggml_ext/types/{}.h", "ggml_ext/encode/{}.c", "ggml_ext/cpu/{}.h", "cuda/{}.cuh", "metal/{}.metal", "vulkan/{}.glsl",
         "py/ggml_ext/quants/{}.py")
COPIED = ("ggml_ext", "cuda", "metal", "vulkan", "py", "scripts/build", "scripts/tools", "tests", "docs/reference", "CMakeLists.txt", "pyproject.toml")
# -O1: speed does not matter here.
BUILD = ("-GNinja", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_C_FLAGS=-O1", "-DCMAKE_CXX_FLAGS=-O1", "-DGGML_EXT_TESTS=ON", "-DGGML_RPC=OFF",
         "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF")


def run_command(*command, cwd: Path, **env) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def rename_type(text: str) -> str:
    return text.replace(OLD, NEW).replace(OLD.upper(), NEW.upper())


def read_files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def new_row(table: str, old: str, new_id: int, fields: dict[str, str]) -> str:
    """Return the row of a type with changed fields, among them the id and the name."""
    row = re.search(rf'^\[\[type\]\]\nname += "{old}"\n.*?(?=^\[\[type\]\])', table, re.M | re.S)[0]
    for field, value in {"id": str(new_id), **fields}.items():
        row, n = re.subn(rf"^{field} .*", f"{field} = {value}", row, flags=re.M)
        assert n == 1, field
    return row


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Copy the project and add the two new types, without generated lists."""
    copy = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "bin", "convert"))
        else:
            shutil.copy(source, target)
    for pattern in FILES:
        (copy / pattern.format(NEW)).write_text(rename_type((copy / pattern.format(OLD)).read_text()))
    path = copy / "ggml_ext" / "types.toml"
    table, free = path.read_text(), sorted(set(range(168, 190)) - {int(t.id) for t in TYPES.values()})
    rows = new_row(table, OLD, free[0], {"name": f'"{NEW}"', "title": f'"{NEW.upper()} - 3.125 bpw"'})
    rows += new_row(table, TRELLIS, free[1], {
        "name": f'"{NEW_TRELLIS}"', "title": f'"{NEW_TRELLIS.upper()} - 2.0625 bpw"', "block_bytes": "66", "trellis_bits": "2", "trellis_unit": "174.0",
        "usual_rel_mse": "0.08"})
    path.write_text(table.replace("\n[[type]]\n", f"\n{rows}[[type]]\n", 1))
    return copy


@pytest.fixture(scope="module")
def build(tree) -> Path:
    run_command(sys.executable, "scripts/build/gen_types.py", cwd=tree)
    run_command("cmake", "-S", ".", "-B", "build", *BUILD, cwd=tree)
    run_command("cmake", "--build", "build", "--target", "ggml-cpu", "ggml-base", cwd=tree)
    return tree / "build"


def test_generator_updates_only_its_lists(tree):
    before = read_files(tree)
    run_command(sys.executable, "scripts/build/gen_types.py", cwd=tree)
    after = read_files(tree)
    changed = {name for name in after if before.get(name) != after[name]}
    written = {*re.findall(r"[\w/-]+/[\w-]+\.(?:h|cuh|metal|glsl|py|md)", (tree / "scripts/build/gen_types.py").read_text())}
    assert changed and changed <= written
    run_command(sys.executable, "scripts/build/gen_types.py", "--check", cwd=tree)


def test_gpu_sources_include_the_new_types(tree, build):
    """Checks CUDA's products, Metal's kernels and Vulkan's blocks of both types."""
    ggml = build / "llama.cpp" / "ggml" / "src"
    metal = (ggml / "ggml-metal" / "kernels" / "ggml_ext.metal").read_text()
    vulkan = (ggml / "ggml-vulkan" / "vulkan-shaders" / "ggml_ext" / "types.glsl").read_text()
    for name in (NEW, NEW_TRELLIS):
        assert f"GGML_TYPE_{name.upper()}" in (ggml / "ggml-cuda" / "template-instances" / f"mmq-{name}.cu").read_text()
        assert re.search(rf'"kernel_\w+_{name}_\w+"', metal) and f"defined(DATA_A_{name.upper()})" in vulkan
    assert f"ggml_ext_{NEW_TRELLIS}_codes[4096]" in metal


def test_kernels_of_the_new_types_pass(tree, build):
    """Runs the copied tree's kernel tests of the quick tier on the new types."""
    env = {"PYTHONPATH": str(tree / "py"), "GGML_EXT_LIB_DIR": str(build / "bin"), "GGML_EXT_TEST_BUILD": str(build)}
    out = run_command(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "quick", "-k", f"{NEW} or {NEW_TRELLIS}",
              "tests/kernels/test_kernels.py", cwd=tree, **env)
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) >= 40 and "skipped" not in out, out


def test_encoders_of_the_new_types_agree(tree, build):
    """C and numpy write the same bytes, and the copy writes those of ITQ3_S."""
    code = f"""
import numpy as np
from ggml_ext import TYPES, quants
from ggml_ext._native import library
lib = library.load()
x = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
written = {{n: lib.quantize(TYPES[n].id, x).tobytes() for n in ("{OLD}", "{NEW}", "{NEW_TRELLIS}")}}
assert written["{OLD}"] == written["{NEW}"]
for name, blocks in written.items():
    assert blocks and quants.reference(name).quantize_blocks(x.reshape(-1, TYPES[name].block_size)).tobytes() == blocks
trellis = "{NEW_TRELLIS}"
y = lib.dequantize(TYPES[trellis].id, lib.quantize(TYPES[trellis].id, x), 512)
assert ((y - x) ** 2).mean() < 0.1 * (x ** 2).mean()
"""
    run_command(sys.executable, "-c", code, cwd=tree, PYTHONPATH=str(tree / "py"), GGML_EXT_LIB_DIR=str(build / "bin"))
