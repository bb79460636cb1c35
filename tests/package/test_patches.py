"""The patch step: what it refuses, and that it leaves the user's tree alone."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ggml_ext._formats.language_model import ENCODERS
from helpers.native import ROOT

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

SCRIPT = ROOT / "scripts" / "build" / "llama_cpp.py"
N_PATCHES = len(list((ROOT / "ggml_ext" / "patches").glob("*.patch")))


def script(*args, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **env})


def digest(tree: Path) -> str:
    h = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        h.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return h.hexdigest()


@pytest.fixture(scope="module")
def upstream() -> Path:
    done = script("tree")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def own_tree(upstream, tmp_path) -> Path:
    """A tree such as a user may have: the parts that the patches touch and that the version is read from."""
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(upstream / "CMakeLists.txt", own)
    for name in ("common", "ggml", "include", "src", "tests", "tools"):
        shutil.copytree(upstream / name, own / name)
    return own


def test_encoders_are_the_architectures_without_logits(upstream):
    folder = upstream / "src" / "models"
    without = {"llama-embed", "t5encoder"}  # by a parameter of llama's and T5's graphs
    for text in (folder / "models.h").read_text().split("\nstruct llama_model_")[1:]:
        own = re.match(r"\w+", text)[0].replace("_", "-")
        base = re.search(r"using graph = llama_model_(\w+)::graph", text)
        source = folder / f"{base[1].replace('_', '-') if base else own}.cpp"
        if "build_arch_graph" in text and source.is_file() and "t_logits" not in source.read_text():
            without.add(own)
    assert without == ENCODERS


def test_all_patches_apply_to_the_pinned_tree(upstream):
    done = script("check", upstream)
    assert done.returncode == 0
    assert f"{N_PATCHES} of {N_PATCHES} patches apply" in done.stdout and "hunk(s) moved" not in done.stdout


def test_the_commit_is_the_one_that_the_archive_names(upstream):
    pin = tomllib.loads((ROOT / "ggml_ext" / "upstream.toml").read_text())
    with tarfile.open(upstream.parent / pin["archive"]) as archive:
        text = archive.extractfile(pin["tree"].split("/")[0] + "/CHANGELOG.md").read().decode()
    section = text.split(f"## [{pin['version']}]")[1].split("## [")[0]
    assert f"ggml-org/llama.cpp@{pin['commit']}" in section


def test_users_tree_is_used_and_not_touched(own_tree, tmp_path):
    assert script("tree", GGML_EXT_LLAMA_CPP_DIR=str(own_tree)).stdout.strip() == str(own_tree)
    before = digest(own_tree)
    assert script("patch", own_tree, tmp_path / "patched").returncode == 0
    assert digest(own_tree) == before
    assert "GGML_EXT_TYPE_ENUM" in (tmp_path / "patched/ggml/include/ggml.h").read_text()


def test_a_patch_that_does_not_apply_stops_the_build(own_tree, tmp_path):
    header = own_tree / "ggml/include/ggml.h"
    header.write_text(header.read_text().replace("GGML_TYPE_COUNT   = 43", "GGML_TYPE_COUNT   = 44"))
    version = own_tree / "CMakeLists.txt"
    version.write_text(version.read_text().replace("LLAMA_VERSION_MINOR 5", "LLAMA_VERSION_MINOR 6"))
    done = script("patch", own_tree, tmp_path / "patched")
    assert done.returncode == 1
    for part in ("0001-ggml-h.patch", "ggml/include/ggml.h", "llama.cpp 0.5.0-dev", "llama.cpp 0.6.0"):
        assert part in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "patched").exists()
    assert f"{N_PATCHES - 1} of {N_PATCHES} patches apply" in script("check", own_tree).stdout


def test_kernels_of_metal_that_moved_are_told_by_the_check(own_tree):
    kernels = own_tree / "ggml/src/ggml-metal/kernels/mul_mm.metal"
    kernels.write_text(kernels.read_text().replace("constant bool FC_mul_mm_bc_inp", "constant bool FC_other"))
    done = script("check", own_tree)
    assert done.returncode == 1 and f"{N_PATCHES} of {N_PATCHES} patches apply" in done.stdout
    assert "Metal's kernels cannot be made: " in done.stdout and "mul_mm.metal" in done.stdout


def test_second_run_touches_nothing(own_tree, tmp_path):
    """So that a rebuild compiles only what changed."""
    def times():
        return {p: p.stat().st_mtime_ns for p in (tmp_path / "patched").rglob("*") if p.is_file()}

    script("patch", own_tree, tmp_path / "patched")
    before = times()
    source = own_tree / "src/llama.cpp"
    source.write_text(source.read_text() + "// changed\n")
    script("patch", own_tree, tmp_path / "patched")
    assert {p.name for p, t in times().items() if before[p] != t} == {"llama.cpp"}


def test_damaged_archive_is_refused(tmp_path):
    archive = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    archive.write_bytes(b"not the archive")
    done = script("tree", GGML_EXT_CACHE_DIR=str(tmp_path), GGML_EXT_LLAMA_CPP_DIR="")
    assert done.returncode == 1 and "SHA-256" in done.stderr and str(archive) in done.stderr


def test_wrong_tree_is_refused(tmp_path):
    done = script("tree", GGML_EXT_LLAMA_CPP_DIR=str(tmp_path))
    assert done.returncode == 1 and "GGML_EXT_LLAMA_CPP_DIR" in done.stderr


# --- rebase


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The script with patches of its own, which it may write."""
    root = tmp_path / "checkout"
    for name in ("scripts/build", "ggml_ext", "metal", "vulkan"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def rebase(root: Path, new: Path, *args) -> subprocess.CompletedProcess:
    command = [sys.executable, root / "scripts" / "build" / "llama_cpp.py", "rebase", new, *args]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)


def patches_of(root: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in (root / "ggml_ext" / "patches").glob("*.patch")}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new, 1))


def test_rebase_onto_the_same_tree_changes_nothing(checkout, own_tree, tmp_path):
    before = patches_of(checkout)
    done = rebase(checkout, own_tree, "--work", tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{N_PATCHES} patches written" in done.stdout and patches_of(checkout) == before


def test_rebase_follows_what_moved_and_what_changed_beside_a_hunk(checkout, own_tree, tmp_path):
    """Lines above, and a line of the context: git apply refuses the second, a merge does not."""
    backend, amx = own_tree / "ggml/src/ggml-backend.cpp", own_tree / "ggml/src/ggml-cpu/amx/mmq.cpp"
    backend.write_text("// a newer file\n// with two more lines\n" + backend.read_text())
    edit(amx, "    tc.rows[7] = 16;  tc.colsb[7] = 64;\n", "    tc.rows[7] = 16;  tc.colsb[7] = 32;\n")
    assert script("check", own_tree).returncode == 1
    before = patches_of(checkout)
    done = rebase(checkout, own_tree, "--work", tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    after = patches_of(checkout)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"0022-ggml-backend-cpp.patch", "0035-ggml-cpu-amx-mmq-cpp.patch"}
    assert "+    return ggml_ext_device_may_run" in after["0022-ggml-backend-cpp.patch"] and "\nindex " not in "".join(after.values())
    assert after["0035-ggml-cpu-amx-mmq-cpp.patch"].startswith(before["0035-ggml-cpu-amx-mmq-cpp.patch"].split("diff --git")[0])
    applied = subprocess.run([sys.executable, str(checkout / "scripts/build/llama_cpp.py"), "check", str(own_tree)], capture_output=True, text=True)
    assert applied.returncode == 0 and "hunk(s) moved" not in applied.stdout, applied.stdout


def test_rebase_names_conflicts_and_takes_what_was_merged_by_hand(checkout, own_tree, tmp_path):
    edit(own_tree / "ggml/src/ggml-backend.cpp", "    return device->iface.supports_op(device, op);\n",
         "    return device->iface.supports_operation(device, op);\n")
    (own_tree / "common" / "log.cpp").unlink()
    before, work = patches_of(checkout), tmp_path / "work"
    done = rebase(checkout, own_tree, "--work", work)
    marked = work / "ggml/src/ggml-backend.cpp"
    line = marked.read_text().splitlines().index("<<<<<<< this patch") + 1
    assert done.returncode == 1 and f"{marked}: lines {line}\n" in done.stdout and patches_of(checkout) == before
    assert "common/log.cpp is not in the new tree" in done.stdout and "2 of" in done.stdout and "need manual merging" in done.stdout
    text = marked.read_text()
    start, end = text.index("<<<<<<< this patch"), text.index(">>>>>>> the new llama.cpp\n") + len(">>>>>>> the new llama.cpp\n")
    mended = "    return ggml_ext_device_may_run(device, op) && device->iface.supports_operation(device, op);\n"
    marked.write_text(text[:start] + mended + text[end:])
    shutil.copy(Path(script("tree").stdout.strip()) / "common" / "log.cpp", own_tree / "common")
    done = rebase(checkout, own_tree, "--work", work, "--merged", work)
    assert done.returncode == 0 and "merged by hand" in done.stdout, done.stdout + done.stderr
    assert f"+{mended}" in patches_of(checkout)["0022-ggml-backend-cpp.patch"]


def test_rebase_onto_no_tree(checkout, tmp_path):
    done = rebase(checkout, tmp_path)
    assert done.returncode == 1 and done.stderr == f"error: {tmp_path}: no llama.cpp source tree there\n"
