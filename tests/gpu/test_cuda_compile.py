"""nvcc compiles every CUDA source that a patch touches; sources with tensor core code also without tensor cores.

nvcc 13 has no architecture without tensor cores. "dp4a" is sm_75 with a copy of the sources that does not define upstream's tensor core
macros, which is what older architectures compile. GCC only checks the host code, which saves a third of the time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import cuda_tools
import kernel_counts
from ggml_ext import WEIGHT_TYPES
from helpers.native import BUILD, ROOT

ARCHITECTURES = {"sm_90": "sm_90", "dp4a": "sm_75"}
CUDA = "ggml/src/ggml-cuda"
# Sources that make test compiles without tensor cores, one type among them. tests/ptx compiles those of ours for sm_90, and upstream's. The others are
# for make nightly.
QUICK_DP4A = ("mmq", "quantize", "mmq-itq3_t")
QUICK_MMVQ = {"ccq2": True, "itq3_t64": True, "itq1h_t": True, "q4_k": False}  # types whose kernels make test compiles, which take most of the time; True: ours
TENSOR_CORES = re.compile(r"^#\s*define (?:VOLTA|TURING|AMPERE|BLACKWELL)_MMA_AVAILABLE$", re.M)


def touched_sources() -> list[str]:
    """Return the .cu files that patches change, ours, and upstream's instances of a changed header; relative to CUDA or absolute."""
    changed = {re.search(r"^\+\+\+ b/(\S+)", p.read_text(), re.M)[1] for p in (ROOT / "ggml_ext/patches").glob("*.patch")}
    changed = {str(Path(name).relative_to(CUDA)) for name in changed if name.startswith(CUDA + "/")}
    assert {name for name in changed if name.endswith(".cuh")} == {"mmq.cuh"}
    instances = sorted(str(p.relative_to(BUILD / "llama.cpp" / CUDA)) for p in (BUILD / "llama.cpp" / CUDA).glob("template-instances/mmq-*.cu"))
    return sorted(name for name in changed if name.endswith(".cu")) + instances + sorted(map(str, [*(ROOT / "cuda").rglob("*.cu"), ROOT / "tests/gpu/kernels.cu"]))


def has_tensor_cores(source: str) -> bool:
    """Return whether a source has code for tensor cores; quantize.cu has other code for Blackwell."""
    return Path(source).stem.startswith(("mmq", "quantize", "kernels"))


def cases(sources: list[str]) -> list:
    """Return (source, architecture) of all compilations, with a mark for make nightly."""
    params = []
    for source in sources:
        stem = Path(source).stem
        for arch in ARCHITECTURES if has_tensor_cores(source) else ("sm_90",):
            is_quick = stem in QUICK_DP4A if arch == "dp4a" else not stem.startswith("mmq-")
            params.append(pytest.param(source, arch, id=f"{stem}-{arch}", marks=() if is_quick else pytest.mark.nightly))
    return [*params, pytest.param("mmvq.cu", "all types", id="mmvq-all-types", marks=pytest.mark.nightly)]


SOURCES = touched_sources()


@pytest.fixture(scope="session")
def trees(tmp_path_factory) -> dict[str, Path]:
    """ggml's sources per architecture."""
    if not cuda_tools.nvcc():
        pytest.skip("nvcc is missing: install the CUDA toolkit, 12.8 or later")
    if not cuda_tools.has_cublas():
        pytest.skip("the headers of cuBLAS are missing: pip install nvidia-cublas")
    copy = tmp_path_factory.mktemp("cuda")
    shutil.copytree(BUILD / "llama.cpp" / "ggml", copy / "ggml")
    common = copy / CUDA / "common.cuh"
    text, n = TENSOR_CORES.subn("", common.read_text())
    assert n == 4
    common.write_text(text)
    return {"sm_90": BUILD / "llama.cpp", "dp4a": copy}


def test_sources_are_found():
    assert {"mmvq.cu", "mmq.cu", "convert.cu", "getrows.cu", "cpy.cu", "quantize.cu", "ggml-cuda.cu"} <= set(SOURCES)
    assert sum(Path(source).stem.removeprefix("mmq-") in WEIGHT_TYPES for source in SOURCES) == len(WEIGHT_TYPES)


@pytest.mark.parametrize("source, arch", cases(SOURCES))
def test_source_compiles(trees, tmp_path, source, arch):
    tree = trees["dp4a" if arch == "dp4a" else "sm_90"]
    folder, path = tree / CUDA, tree / CUDA / source
    if source == "mmvq.cu" and arch != "all types":
        text = cuda_tools.trimmed_mmvq(path.read_text(), QUICK_MMVQ, columns=(1, 8))
        path = tmp_path / source
        path.write_text(text)
    command = cuda_tools.compile_command(tree / "ggml", ARCHITECTURES.get(arch, "sm_90"), "-Werror=all-warnings", "-diag-suppress=177",
                                         "-Xptxas=-v", "-Xcompiler=-fsyntax-only", "-c", path, "-o", tmp_path / "object.o")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    if source == "mmvq.cu":
        instances = kernel_counts.read_instances(done.stderr)
        assert instances and not [key for key, instance in instances if instance.spilled], "kernels spill registers"
