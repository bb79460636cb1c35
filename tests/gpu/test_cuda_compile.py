"""nvcc compiles every CUDA source that a patch touches, with tensor cores and without.

nvcc 13 has no architecture without tensor cores. "dp4a" is sm_75 with a copy of the sources that does not define upstream's tensor core
macros, which is what older architectures compile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import cuda_tools
from ggml_ext import WEIGHT_TYPES
from helpers.native import BUILD, ROOT

ARCHITECTURES = {"sm_90": "sm_90", "dp4a": "sm_75"}
CUDA = "ggml/src/ggml-cuda"
# of the sources that differ only in the type, these compile in make check, the others in make nightly; tests/ptx covers ours for sm_90
QUICK_SOURCES = ("mmq-instance-q8_0", "mmq-itq3_s", "mmq-itq3_t")
TENSOR_CORES = re.compile(r"^#\s*define (?:VOLTA|TURING|AMPERE|BLACKWELL)_MMA_AVAILABLE$", re.M)


def touched_sources() -> list[str]:
    """Return the .cu files that patches change, ours, and upstream's instances of a changed header; relative to CUDA or absolute."""
    changed = {re.search(r"^\+\+\+ b/(\S+)", p.read_text(), re.M)[1] for p in (ROOT / "ggml_ext/patches").glob("*.patch")}
    changed = {str(Path(name).relative_to(CUDA)) for name in changed if name.startswith(CUDA + "/")}
    assert {name for name in changed if name.endswith(".cuh")} == {"mmq.cuh"}
    instances = sorted(str(p.relative_to(BUILD / "llama.cpp" / CUDA)) for p in (BUILD / "llama.cpp" / CUDA).glob("template-instances/mmq-*.cu"))
    return sorted(name for name in changed if name.endswith(".cu")) + instances + sorted(map(str, [*(ROOT / "cuda").rglob("*.cu"), ROOT / "tests/gpu/kernels.cu"]))


def source_params(sources: list[str]) -> list:
    nightly_sources = {source for source in sources if Path(source).stem.startswith("mmq-") and Path(source).stem not in QUICK_SOURCES}
    return [pytest.param(source, id=Path(source).stem, marks=pytest.mark.nightly if source in nightly_sources else ()) for source in sources]


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
    assert sum(not p.marks for p in source_params(SOURCES) if Path(p.values[0]).stem in QUICK_SOURCES) == len(QUICK_SOURCES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", source_params(SOURCES))
def test_source_compiles(trees, tmp_path, source, arch):
    folder = trees[arch] / CUDA
    command = cuda_tools.compile_command(trees[arch] / "ggml", ARCHITECTURES[arch], "-Werror=all-warnings", "-diag-suppress=177",
                                         "-c", folder / source, "-o", tmp_path / "object.o")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
