"""nvcc takes every CUDA source that a patch touches, for an architecture with tensor cores and for DP4A alone.

nvcc 13 knows no architecture without tensor cores: "dp4a" is sm_75 from a copy of the sources in which upstream's macros
for tensor cores are not defined, which is what older architectures compile.
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
# Of sources that differ in the type alone. The night compiles the others; tests/ptx compiles all of ours for sm_90 by day.
BY_DAY = ("mmq-instance-q8_0", "mmq-itq3_s", "mmq-itq3_t")
TENSOR_CORES = re.compile(r"^#\s*define (?:VOLTA|TURING|AMPERE|BLACKWELL)_MMA_AVAILABLE$", re.M)


def touched_sources() -> list[str]:
    """The .cu files that patches change, ours, and those of upstream that are little but a changed header. Relative to CUDA, or absolute."""
    changed = {re.search(r"^\+\+\+ b/(\S+)", p.read_text(), re.M)[1] for p in (ROOT / "ggml_ext/patches").glob("*.patch")}
    changed = {str(Path(name).relative_to(CUDA)) for name in changed if name.startswith(CUDA + "/")}
    assert {name for name in changed if name.endswith(".cuh")} == {"mmq.cuh"}
    including = sorted(str(p.relative_to(BUILD / "llama.cpp" / CUDA)) for p in (BUILD / "llama.cpp" / CUDA).glob("template-instances/mmq-*.cu"))
    return sorted(name for name in changed if name.endswith(".cu")) + including + sorted(map(str, [*(ROOT / "cuda").rglob("*.cu"), ROOT / "tests/gpu/kernels.cu"]))


def parameters(sources: list[str]) -> list:
    of_a_type = {source for source in sources if Path(source).stem.startswith("mmq-") and Path(source).stem not in BY_DAY}
    return [pytest.param(source, id=Path(source).stem, marks=pytest.mark.nightly if source in of_a_type else ()) for source in sources]


SOURCES = touched_sources()


@pytest.fixture(scope="session")
def trees(tmp_path_factory) -> dict[str, Path]:
    """Of ggml's sources by architecture."""
    if not cuda_tools.nvcc():
        pytest.skip("nvcc is missing: install the CUDA toolkit, 12.8 or later")
    if not cuda_tools.has_cublas():
        pytest.skip("the headers of cuBLAS are missing: pip install nvidia-cublas")
    without = tmp_path_factory.mktemp("cuda")
    shutil.copytree(BUILD / "llama.cpp" / "ggml", without / "ggml")
    common = without / CUDA / "common.cuh"
    text, n = TENSOR_CORES.subn("", common.read_text())
    assert n == 4
    common.write_text(text)
    return {"sm_90": BUILD / "llama.cpp", "dp4a": without}


def test_there_are_sources():
    assert {"mmvq.cu", "mmq.cu", "convert.cu", "getrows.cu", "cpy.cu", "quantize.cu", "ggml-cuda.cu"} <= set(SOURCES)
    assert sum(Path(source).stem.removeprefix("mmq-") in WEIGHT_TYPES for source in SOURCES) == len(WEIGHT_TYPES)
    assert sum(not p.marks for p in parameters(SOURCES) if Path(p.values[0]).stem in BY_DAY) == len(BY_DAY)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", parameters(SOURCES))
def test_source_compiles(trees, tmp_path, source, arch):
    folder = trees[arch] / CUDA
    command = cuda_tools.compile_command(trees[arch] / "ggml", ARCHITECTURES[arch], "-Werror=all-warnings", "-diag-suppress=177",
                                         "-c", folder / source, "-o", tmp_path / "object.o")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
