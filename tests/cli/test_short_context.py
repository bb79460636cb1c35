"""Models with a shorter context than a chunk: llama.cpp fails if it is asked for more positions."""

import json

import pytest

from ggml_ext import bench, evaluate
from helpers.commands import quantize, run_main, tool
from helpers.errors import check_error
from helpers.models import ROOT, write_gpt2

N = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tool("llama-imatrix")
    folder = tmp_path_factory.mktemp("short")
    write_gpt2(folder / "f16.gguf", N)
    # Characters are tokens.
    (folder / "text.txt").write_text((ROOT / "docs" / "using" / "quantize.md").read_text()[:8 * 512 + 1])
    return folder


@pytest.mark.parametrize("flags", [("--target-bpw", 4.5), ("--type", "itq3_t", "--propagate")], ids=["target", "propagate"])
def test_calibration_uses_short_chunks(folder, flags):
    """Covers the sensitivity runs of a target."""
    done = quantize(folder / "f16.gguf", folder / "out.gguf", *flags, "--imatrix-from", folder / "text.txt", "--force", "-t", 1)
    assert f" chunks of {N} tokens of text.txt" in done.stderr


def test_evaluate_uses_short_chunks(folder):
    args = folder / "f16.gguf", "-f", folder / "text.txt", "-t", 1
    done = run_main(evaluate.main, *args, "--chunks", 4, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["ctx_size"] == N, done.stderr
    check_error(run_main(evaluate.main, *args, "-c", 512), f"--ctx-size: got chunks of 512 tokens, {folder}/f16.gguf has a context of {N}: pass --ctx-size {N}")


def test_bench_uses_short_prompts(folder):
    done = run_main(bench.main, folder / "f16.gguf", "--stock", "none", "-r", 1, "-t", 1, "--json")
    assert f"note: using {N} tokens: the context length of a model" in done.stderr
    report = json.loads(done.stdout)
    assert (report["n_prompt"], report["n_gen"]) == (N, 32)
