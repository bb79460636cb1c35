"""The reference model in llama.cpp's programs: perplexity, completions, the upstream llama-cli."""

from __future__ import annotations

import ctypes
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ggml_ext import WEIGHT_TYPES
from helpers.blocks import EACH_KIND
from helpers.commands import quantize, tool
from helpers.native import BUILD, EMULATED_ISAS, ROOT, STOCK, emulator_command, require_built, run_upstream
from helpers.perplexity_record import N_CHUNKS, assert_recorded_perplexity, perplexity_tolerance
from perplexity_run import UNIFORM, perplexity, run_tool

TEXT = ROOT / "data" / "heldout.txt"


class Files(dict):
    """Paths of the reference model by type, which are written when they are asked for: block weights of that type, embeddings Q8_0."""

    def __init__(self, model: Path, folder: Path):
        super().__init__(f16=model)
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        self[name] = self.folder / f"{name}.gguf"
        quantize(self["f16"], self[name], "--type", name, *UNIFORM)
        return self[name]


@pytest.fixture(scope="session")
def files(tmp_path_factory, model) -> Files:
    return Files(model, tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND)
def test_vec_dot_gives_the_recorded_perplexity(files, name, monkeypatch):
    """vec_dot without the GEMM on the full graph; test_perplexity_script.py covers the default path."""
    monkeypatch.setenv("GGML_CPU_TILED_MM", "0")
    value = perplexity(files[name], TEXT, n_chunks=N_CHUNKS, threads=1).value
    assert_recorded_perplexity(name, value)


# one pass of four sequences: 20 s per type and core under the emulator
N_CHUNKS_EMULATED = 4


@pytest.mark.nightly  # its llama-perplexity takes minutes to build; test_kernels.py covers products of all types under the emulator
@pytest.mark.parametrize("cpu", [cpu for isa, cpu in EMULATED_ISAS.items() if isa == "dotprod"])
@pytest.mark.parametrize("name", sorted(WEIGHT_TYPES))
def test_neon_gives_the_same_perplexity(files, name, cpu, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT.read_bytes()[: 16 * 256 * N_CHUNKS_EMULATED])  # the start is enough and saves time; no token has more than 16 bytes
    native = perplexity(files[name], text, n_chunks=N_CHUNKS_EMULATED).value
    emulated = perplexity(files[name], text, n_chunks=N_CHUNKS_EMULATED, program=emulator_command("llama-perplexity", cpu)).value
    print(f"{name}: perplexity {native:.4f} here, {emulated:.4f} on the emulated {cpu}")
    assert abs(math.log(emulated / native)) <= perplexity_tolerance(N_CHUNKS_EMULATED)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND)
def test_embeddings_can_have_the_type(files, name, tmp_path, model):
    """token_embd goes through get_rows and, tied, through mul_mat: both must apply the rotation."""
    out = tmp_path / "all.gguf"
    quantize(model, out, "--type", name, "--pure", "--token-embedding-type", name)
    # measured: up to 1.5 at 1.5 bits and 3.9 at one bit, whose model is broken by then; a wrong rotation gives 38, random words
    limit = 1.5 if WEIGHT_TYPES[name].bpw > 2 else 2 if WEIGHT_TYPES[name].bpw > 1.5 else 5
    assert perplexity(out, TEXT, n_chunks=10).value < limit * perplexity(files[name], TEXT, n_chunks=10).value


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND)
def test_llama_bench_and_completion_name_the_type(files, name):
    rows = json.loads(re.search(r"\[\n.*\]", run_tool("llama-bench", "-m", files[name], "-p", 16, "-n", 4, "-r", 1, "-o", "json"), re.S)[0])
    assert name.upper() in rows[0]["model_type"]
    command = [tool("llama-completion"), "-m", files[name], "-p", "def add(a, b):", "-n", "16", "--temp", "0", "-no-cnv", "-lv", "4"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0 and f"type {name}" in done.stdout + done.stderr
    # the code model indents a function body; a model with broken weights does not
    assert WEIGHT_TYPES[name].bpw < 1.5 or re.search(r"def add\(a, b\):\n    \S", done.stdout), done.stdout  # one bit needs calibration


def complete(model: Path) -> str:
    """Return what the package's llama-completion writes after "import os", with greedy sampling."""
    command = [tool("llama-completion"), "-m", model, "-p", "import os", "-n", "24", "--temp", "0", "-no-cnv", "--no-display-prompt"]
    return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout


@pytest.mark.extra_build
@pytest.mark.parametrize("name", EACH_KIND)
def test_upstream_program_runs_with_the_packages_ggml(files, name, tmp_path):
    """An upstream program and libllama with the package's ggml libraries run the file and give the package's answer."""
    for lib in (BUILD / "bin").glob("libggml*.so*"):
        if "kernels" not in lib.name:
            shutil.copy(lib, tmp_path / lib.name)
    upstream, expected = run_upstream(files[name], libraries=tmp_path), complete(files[name])
    assert upstream.returncode == 0, upstream.stdout[-500:] + upstream.stderr[-2000:]
    assert upstream.stdout.split("import os", 1)[1].strip("\n") == expected.strip("\n")
    assert len(expected) >= 24  # characters of 24 tokens; a broken model may write nothing but line breaks


@pytest.mark.extra_build
@pytest.mark.parametrize("name", EACH_KIND)
def test_upstream_refuses_the_type(files, name):
    """With its own ggml it fails with a reason instead of misreading the blocks."""
    result = run_upstream(files[name])
    assert result.returncode != 0
    assert f"invalid ggml type {int(WEIGHT_TYPES[name].id)}" in result.stdout + result.stderr


@pytest.mark.extra_build
def test_upstream_program_is_unpatched(files):
    assert run_upstream(files["f16"]).returncode == 0
    assert not hasattr(ctypes.CDLL(str(require_built(STOCK, "libggml-base.so"))), "ggml_ext_abi_version")
