"""nvcc takes every CUDA source that a patch touches, for an architecture with tensor cores and for DP4A alone.

nvcc 13 knows no architecture without tensor cores: "dp4a" is sm_75 from a copy of the sources in which upstream's macros
for tensor cores are not defined, which is what older architectures compile.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import cuda_tools
from ggml_ext import WEIGHT_TYPES
from helpers.native import BUILD, ROOT

ARCHITECTURES = {"sm_90": "sm_90", "dp4a": "sm_75"}
CUDA = "ggml/src/ggml-cuda"
ALL = os.environ.get("GGML_EXT_CUDA_ALL") == "1"
ASSEMBLED = ("itq3_s", "itq3_t")  # whose MMQ becomes machine code, a minute each; of the other types it becomes PTX, without GGML_EXT_CUDA_ALL=1
TENSOR_CORES = re.compile(r"^#\s*define (?:VOLTA|TURING|AMPERE|BLACKWELL)_MMA_AVAILABLE$", re.M)


def touched_sources() -> list[str]:
    """The .cu files that patches change, ours, and of upstream's 24 that are little but a changed header, and differ in the
    type, one. GGML_EXT_CUDA_ALL=1 takes all of those, 20 minutes more. Relative to CUDA, or absolute."""
    changed = {re.search(r"^\+\+\+ b/(\S+)", p.read_text(), re.M)[1] for p in (ROOT / "ggml_ext/patches").glob("*.patch")}
    changed = {str(Path(name).relative_to(CUDA)) for name in changed if name.startswith(CUDA + "/")}
    assert {name for name in changed if name.endswith(".cuh")} == {"mmq.cuh"}
    instances = (BUILD / "llama.cpp" / CUDA).glob("template-instances/mmq-*.cu")
    including = sorted(str(p.relative_to(BUILD / "llama.cpp" / CUDA)) for p in instances) if ALL else ["template-instances/mmq-instance-q8_0.cu"]
    return sorted(name for name in changed if name.endswith(".cu")) + including + sorted(map(str, [*(ROOT / "cuda").rglob("*.cu"), ROOT / "tests/gpu/kernels.cu"]))


SOURCES = touched_sources()


class Compiler:
    """Compiles all sources for all architectures in the background, a processor each."""

    def __init__(self, folder: Path):
        if not cuda_tools.nvcc():
            pytest.skip("nvcc is missing: install the CUDA toolkit, 12.8 or later")
        if not cuda_tools.has_cublas():
            pytest.skip("the headers of cuBLAS are missing: pip install nvidia-cublas")
        self.folder = folder
        self.trees = {"sm_90": BUILD / "llama.cpp", "dp4a": folder / "dp4a"}
        shutil.copytree(BUILD / "llama.cpp" / "ggml", self.trees["dp4a"] / "ggml")
        common = self.trees["dp4a"] / CUDA / "common.cuh"
        text, n = TENSOR_CORES.subn("", common.read_text())
        assert n == 4
        common.write_text(text)
        pool = ThreadPoolExecutor(os.cpu_count())
        self.results: dict[tuple[str, str], Future] = {
            (arch, source): pool.submit(self.compile, arch, source) for source in SOURCES for arch in ARCHITECTURES}

    def compile(self, arch: str, source: str) -> subprocess.CompletedProcess:
        folder, name = self.trees[arch] / CUDA, Path(source).stem
        stage = "-ptx" if name.startswith("mmq-") and name.removeprefix("mmq-") in set(WEIGHT_TYPES) - set(ASSEMBLED) and not ALL else "-c"
        command = cuda_tools.compile_command(self.trees[arch] / "ggml", ARCHITECTURES[arch], "-Werror=all-warnings", "-diag-suppress=177",
                                             stage, folder / source, "-o", self.folder / f"{arch}-{Path(source).name}.o")
        try:
            return subprocess.run(command, cwd=folder, capture_output=True, text=True)
        except OSError:  # starting a process from several threads has failed for once
            return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="session")
def compiler(tmp_path_factory) -> Compiler:
    return Compiler(tmp_path_factory.mktemp("cuda"))


def test_there_are_sources():
    assert {"mmvq.cu", "mmq.cu", "convert.cu", "getrows.cu", "cpy.cu", "quantize.cu", "ggml-cuda.cu"} <= set(SOURCES)
    assert sum("cuda/instances/mmq-" in source for source in SOURCES) == len(WEIGHT_TYPES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_source_compiles(compiler, source, arch):
    done = compiler.results[arch, source].result()
    assert done.returncode == 0, done.stderr[-3000:]
