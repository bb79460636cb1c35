"""A new type is a row in a table and six files: a copy of a type under another name becomes one, and no other file is touched.

It keeps docs/maintaining/new-type.md true. The copy of the tree is generated, its CPU backend built, and its own tests run on the copied type.
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
FILES = ("ggml_ext/types/{}.h", "ggml_ext/encode/{}.c", "ggml_ext/cpu/{}.h", "cuda/{}.cuh", "metal/{}.metal", "vulkan/{}.glsl",
         "py/ggml_ext/quants/{}.py")
COPIED = ("ggml_ext", "cuda", "metal", "vulkan", "py", "scripts/build", "scripts/tools", "tests", "docs/reference", "CMakeLists.txt", "pyproject.toml")
# -O1: what is tested is that all is there, not its speed
BUILD = ("-GNinja", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_C_FLAGS=-O1", "-DCMAKE_CXX_FLAGS=-O1", "-DGGML_EXT_TESTS=ON", "-DGGML_RPC=OFF",
         "-DGGML_OPENMP=OFF", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF")


def run(*command, cwd: Path, **env) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def renamed(text: str) -> str:
    return text.replace(OLD, NEW).replace(OLD.upper(), NEW.upper())


def texts(tree: Path) -> dict[str, bytes]:
    return {str(p.relative_to(tree)): p.read_bytes() for p in tree.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The project with the type OLD a second time, as NEW."""
    copy = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "bin", "convert"))
        else:
            shutil.copy(source, target)
    for pattern in FILES:
        (copy / pattern.format(NEW)).write_text(renamed((copy / pattern.format(OLD)).read_text()))
    table = copy / "ggml_ext" / "types.toml"
    row = re.search(rf'^\[\[type\]\]\nname +=  ?"{OLD}"\n.*?(?=^\[\[type\]\])', table.read_text(), re.M | re.S)[0]
    new_id = min(set(range(168, 190)) - {int(t.id) for t in TYPES.values()})
    row = re.sub(r"^id .*", f"id = {new_id}", renamed(row), flags=re.M)
    table.write_text(re.sub(r"^\[\[type\]\]", lambda _: f"{row}[[type]]", table.read_text(), count=1, flags=re.M))
    return copy


@pytest.fixture(scope="module")
def build(tree) -> Path:
    run(sys.executable, "scripts/build/gen_types.py", cwd=tree)
    run("cmake", "-S", ".", "-B", "build", *BUILD, cwd=tree)
    run("cmake", "--build", "build", "--target", "ggml-cpu", "ggml-base", cwd=tree)
    return tree / "build"


def test_the_lists_follow_and_nothing_else_changes(tree):
    before = texts(tree)
    run(sys.executable, "scripts/build/gen_types.py", cwd=tree)
    after = texts(tree)
    changed = {name for name in after if before.get(name) != after[name]}
    written = {*re.findall(r"[\w/-]+/[\w-]+\.(?:h|cuh|metal|glsl|py|md)", (tree / "scripts/build/gen_types.py").read_text()),
               f"cuda/instances/mmq-{NEW}.cu"}
    assert changed and changed <= written
    run(sys.executable, "scripts/build/gen_types.py", "--check", cwd=tree)


def test_its_kernels_are_right(tree, build):
    """The copied tree's own tests of the quick tier, on the new type alone."""
    env = {"PYTHONPATH": str(tree / "py"), "GGML_EXT_LIB_DIR": str(build / "bin"), "GGML_EXT_TEST_BUILD": str(build)}
    out = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "quick", "-k", NEW, "tests/kernels/test_kernels.py",
              cwd=tree, **env)
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) >= 20 and "skipped" not in out, out


def test_it_writes_the_same_bytes(tree, build):
    """By both encoders, C and numpy."""
    code = f"""
import numpy as np
from ggml_ext import TYPES, quants
from ggml_ext._native import library
lib = library.load()
x = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
made = [lib.quantize(TYPES[n].id, x) for n in ("{OLD}", "{NEW}")]
assert made[0].tobytes() == made[1].tobytes() and made[0].size
blocks = x.reshape(-1, TYPES["{OLD}"].block_size)
by_numpy = [quants.reference(n).quantize_blocks(blocks) for n in ("{OLD}", "{NEW}")]
assert by_numpy[0].tobytes() == by_numpy[1].tobytes() == made[0].tobytes()
"""
    run(sys.executable, "-c", code, cwd=tree, PYTHONPATH=str(tree / "py"), GGML_EXT_LIB_DIR=str(build / "bin"))
