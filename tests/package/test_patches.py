"""The patch step: what it refuses, and that it leaves the user's tree unchanged."""

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


def run_script(*args, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **env})


def tree_digest(tree: Path) -> str:
    h = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        h.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return h.hexdigest()


@pytest.fixture(scope="module")
def upstream() -> Path:
    done = run_script("tree")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def own_tree(upstream, tmp_path) -> Path:
    """Copy the parts of a tree that the patches touch and that the version is read from, as a user's own tree."""
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(upstream / "CMakeLists.txt", own)
    for name in ("common", "ggml", "include", "src", "tests", "tools"):
        shutil.copytree(upstream / name, own / name)
    return own


def test_encoders_are_the_architectures_without_logits(upstream):
    folder = upstream / "src" / "models"
    without = {"llama-embed", "t5encoder"}  # they have no logits by a parameter of llama's and T5's graphs
    for text in (folder / "models.h").read_text().split("\nstruct llama_model_")[1:]:
        own = re.match(r"\w+", text)[0].replace("_", "-")
        base = re.search(r"using graph = llama_model_(\w+)::graph", text)
        source = folder / f"{base[1].replace('_', '-') if base else own}.cpp"
        if "build_arch_graph" in text and source.is_file() and "t_logits" not in source.read_text():
            without.add(own)
    assert without == ENCODERS


def test_all_patches_apply_to_the_pinned_tree(upstream):
    done = run_script("check", upstream)
    assert done.returncode == 0
    assert f"{N_PATCHES} of {N_PATCHES} patches apply" in done.stdout and "hunk(s) moved" not in done.stdout


def test_commit_matches_the_archive(upstream):
    pin = tomllib.loads((ROOT / "ggml_ext" / "upstream.toml").read_text())
    with tarfile.open(upstream.parent / pin["archive"]) as archive:
        text = archive.extractfile(pin["tree"].split("/")[0] + "/CHANGELOG.md").read().decode()
    section = text.split(f"## [{pin['version']}]")[1].split("## [")[0]
    assert f"ggml-org/llama.cpp@{pin['commit']}" in section


def test_user_tree_is_used_and_unchanged(own_tree, tmp_path):
    assert run_script("tree", GGML_EXT_LLAMA_CPP_DIR=str(own_tree)).stdout.strip() == str(own_tree)
    before = tree_digest(own_tree)
    assert run_script("patch", own_tree, tmp_path / "patched").returncode == 0
    assert tree_digest(own_tree) == before
    assert "GGML_EXT_TYPE_ENUM" in (tmp_path / "patched/ggml/include/ggml.h").read_text()


def test_patch_that_does_not_apply_stops_the_build(own_tree, tmp_path):
    header = own_tree / "ggml/include/ggml.h"
    header.write_text(header.read_text().replace("GGML_TYPE_COUNT   = 43", "GGML_TYPE_COUNT   = 44"))
    version = own_tree / "CMakeLists.txt"
    version.write_text(version.read_text().replace("LLAMA_VERSION_MINOR 5", "LLAMA_VERSION_MINOR 6"))
    done = run_script("patch", own_tree, tmp_path / "patched")
    assert done.returncode == 1
    for part in ("0001-ggml-h.patch", "ggml/include/ggml.h", "llama.cpp 0.5.0-dev", "llama.cpp 0.6.0"):
        assert part in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "patched").exists()
    assert f"{N_PATCHES - 1} of {N_PATCHES} patches apply" in run_script("check", own_tree).stdout


def test_check_reports_moved_metal_kernels(own_tree):
    kernels = own_tree / "ggml/src/ggml-metal/kernels/mul_mm.metal"
    kernels.write_text(kernels.read_text().replace("constant bool FC_mul_mm_bc_inp", "constant bool FC_other"))
    done = run_script("check", own_tree)
    assert done.returncode == 1 and f"{N_PATCHES} of {N_PATCHES} patches apply" in done.stdout
    assert "Metal's kernels cannot be made: " in done.stdout and "mul_mm.metal" in done.stdout


def test_second_run_writes_only_changed_files(own_tree, tmp_path):
    """A rebuild then compiles only what changed."""
    def read_times():
        return {p: p.stat().st_mtime_ns for p in (tmp_path / "patched").rglob("*") if p.is_file()}

    run_script("patch", own_tree, tmp_path / "patched")
    before = read_times()
    source = own_tree / "src/llama.cpp"
    source.write_text(source.read_text() + "// changed\n")
    run_script("patch", own_tree, tmp_path / "patched")
    assert {p.name for p, t in read_times().items() if before[p] != t} == {"llama.cpp"}


def test_damaged_archive_is_refused(tmp_path):
    archive = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    archive.write_bytes(b"not the archive")
    done = run_script("tree", GGML_EXT_CACHE_DIR=str(tmp_path), GGML_EXT_LLAMA_CPP_DIR="")
    assert done.returncode == 1 and "SHA-256" in done.stderr and str(archive) in done.stderr


def test_wrong_tree_is_refused(tmp_path):
    done = run_script("tree", GGML_EXT_LLAMA_CPP_DIR=str(tmp_path))
    assert done.returncode == 1 and "GGML_EXT_LLAMA_CPP_DIR" in done.stderr


# --- rebase


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Copy the script with patches that it may write."""
    root = tmp_path / "checkout"
    for name in ("scripts/build", "ggml_ext", "metal", "vulkan"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def run_rebase(root: Path, new: Path, *args) -> subprocess.CompletedProcess:
    command = [sys.executable, root / "scripts" / "build" / "llama_cpp.py", "rebase", new, *args]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)


def read_patches(root: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in (root / "ggml_ext" / "patches").glob("*.patch")}


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new, 1))


def test_rebase_onto_the_same_tree_changes_nothing(checkout, own_tree, tmp_path):
    before = read_patches(checkout)
    done = run_rebase(checkout, own_tree, "--work", tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{N_PATCHES} patches written" in done.stdout and read_patches(checkout) == before


def test_rebase_follows_moved_and_changed_context(checkout, own_tree, tmp_path):
    """Lines are inserted above, and a context line changes: git apply refuses the latter, a merge does not."""
    backend, amx = own_tree / "ggml/src/ggml-backend.cpp", own_tree / "ggml/src/ggml-cpu/amx/mmq.cpp"
    backend.write_text("// a newer file\n// with two more lines\n" + backend.read_text())
    replace_text(amx, "    tc.rows[7] = 16;  tc.colsb[7] = 64;\n", "    tc.rows[7] = 16;  tc.colsb[7] = 32;\n")
    assert run_script("check", own_tree).returncode == 1
    before = read_patches(checkout)
    done = run_rebase(checkout, own_tree, "--work", tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    after = read_patches(checkout)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"0022-ggml-backend-cpp.patch", "0035-ggml-cpu-amx-mmq-cpp.patch"}
    assert "+    return ggml_ext_device_may_run" in after["0022-ggml-backend-cpp.patch"] and "\nindex " not in "".join(after.values())
    assert after["0035-ggml-cpu-amx-mmq-cpp.patch"].startswith(before["0035-ggml-cpu-amx-mmq-cpp.patch"].split("diff --git")[0])
    applied = subprocess.run([sys.executable, str(checkout / "scripts/build/llama_cpp.py"), "check", str(own_tree)], capture_output=True, text=True)
    assert applied.returncode == 0 and "hunk(s) moved" not in applied.stdout, applied.stdout


def test_rebase_names_conflicts_and_accepts_manual_merges(checkout, own_tree, tmp_path):
    replace_text(own_tree / "ggml/src/ggml-backend.cpp", "    return device->iface.supports_op(device, op);\n",
         "    return device->iface.supports_operation(device, op);\n")
    (own_tree / "common" / "log.cpp").unlink()
    before, work = read_patches(checkout), tmp_path / "work"
    done = run_rebase(checkout, own_tree, "--work", work)
    marked = work / "ggml/src/ggml-backend.cpp"
    line = marked.read_text().splitlines().index("<<<<<<< this patch") + 1
    assert done.returncode == 1 and f"{marked}: lines {line}\n" in done.stdout and read_patches(checkout) == before
    assert "common/log.cpp is not in the new tree" in done.stdout and "2 of" in done.stdout and "need manual merging" in done.stdout
    text = marked.read_text()
    start, end = text.index("<<<<<<< this patch"), text.index(">>>>>>> the new llama.cpp\n") + len(">>>>>>> the new llama.cpp\n")
    resolution = "    return ggml_ext_device_may_run(device, op) && device->iface.supports_operation(device, op);\n"
    marked.write_text(text[:start] + resolution + text[end:])
    shutil.copy(Path(run_script("tree").stdout.strip()) / "common" / "log.cpp", own_tree / "common")
    done = run_rebase(checkout, own_tree, "--work", work, "--merged", work)
    assert done.returncode == 0 and "merged by hand" in done.stdout, done.stdout + done.stderr
    assert f"+{resolution}" in read_patches(checkout)["0022-ggml-backend-cpp.patch"]


def test_rebase_without_a_tree_is_refused(checkout, tmp_path):
    done = run_rebase(checkout, tmp_path)
    assert done.returncode == 1 and done.stderr == f"error: {tmp_path}: no llama.cpp source tree there\n"
