"""What the tests share: the installed package as a real process, small GGUF files, and the rule about skipping.

GGML_EXT_NO_SKIP=1 turns every skip into a failure: for machines on which everything has to run.
GGML_EXT_TEST_MODEL=FILE replaces data/model-f16.gguf.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import ggml_ext
from ggml_ext._native import library as _lib

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path(os.environ.get("GGML_EXT_TEST_MODEL", ROOT / "data" / "model-f16.gguf"))
BASELINE = ROOT / "tests" / "data" / "perplexity_baseline.json"
N_CHUNKS = 60  # of 256 tokens: the run in the baseline that tests repeat
# The same ITQ3_S file gives 12.848 with vec_dot alone and 12.853 with the tiled GEMM at 60 chunks (Q3_K: 12.625, 12.626):
# float sums in another order change roundings of activations. Five times that difference, for instruction sets that
# were not at hand. Between IQ3_XXS and ITQ3_S lie 0.1; a forgotten rotation or zero point costs whole units.
PERPLEXITY_TOLERANCE = 0.025
# Roundings of activations differ where float sums do. Between vec_dot and the tiled GEMM of one machine that makes a
# standard deviation of 0.0018 in the mean log-likelihood of a chunk (60 chunks, ITQ3_S and DITTO3 alike; largest
# difference 0.0049) without a bias that shows.
CHUNK_DEVIATION = 0.0018
NO_SKIP = os.environ.get("GGML_EXT_NO_SKIP") == "1"


def _forbid_skip(report) -> None:
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which GGML_EXT_NO_SKIP=1 forbids: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _forbid_skip(report)
    return report


@pytest.fixture(scope="session")
def lib() -> _lib.Library:
    """The built libggml-base."""
    library = _lib.load()
    if library is None:
        pytest.skip("libggml-base is not built into the installed package")
    return library


@pytest.fixture(scope="session")
def model() -> Path:
    """The reference model in F16."""
    if not MODEL.is_file():
        pytest.skip(f"{MODEL} is missing")
    return MODEL


def tool(name: str) -> Path:
    """One of the llama.cpp tools of the installed package; skips if it is not built."""
    path = Path(ggml_ext.__file__).parent / "bin" / (name + (".exe" if sys.platform == "win32" else ""))
    if not path.is_file():
        pytest.skip(f"{name} is not built into the installed package")
    return path


def quantize_command(*args) -> list[str]:
    """Without calibration, unless the arguments say where importances come from."""
    args = [*map(str, args)]
    chosen = any(a.startswith(("--imatrix", "--importance", "--no-calibration", "--calibration")) for a in args)
    return [sys.executable, "-m", "ggml_ext.quantize", *args, *([] if chosen else ["--importance", "none"])]


def run_quantize(*args, **kwargs) -> subprocess.CompletedProcess:
    """The quantizer as a process of its own; does not raise when it fails."""
    return subprocess.run(quantize_command(*args), capture_output=True, text=True, timeout=300, **kwargs)


def quantize(*args) -> subprocess.CompletedProcess:
    """run_quantize() that has to succeed."""
    result = run_quantize(*args)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def run_main(main, *args) -> subprocess.CompletedProcess:
    """A command's main() in this process, which has the imports behind it; other tests run the commands as processes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, args)])
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def recorded_run() -> dict:
    """The run of scripts/tools/perplexity.py in its baseline that tests repeat."""
    return next(r for r in json.loads(BASELINE.read_text()) if r["run"]["chunks"] == N_CHUNKS)


def assert_recorded_perplexity(name: str, found: float) -> None:
    """name: a type of the baseline, or "f16" for the model that the others were made from."""
    run = recorded_run()
    recorded = (run["base"] if name == "f16" else run["types"][name])["ppl"][0]
    print(f"{name}: perplexity {found:.4f}, recorded {recorded:.4f}")
    assert abs(found - recorded) <= PERPLEXITY_TOLERANCE, f"{name}: perplexity {found}, recorded {recorded}"


def perplexity_tolerance(n_chunks: int) -> float:
    """How far ln(perplexity) may differ between instruction sets: five standard deviations of the mean over the chunks."""
    return 5 * CHUNK_DEVIATION / math.sqrt(n_chunks)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], qtype: str = "F16", arch: str = "llama", fill=None) -> Path:
    """A GGUF file of float32 arrays stored as qtype (vectors as F32). fill(writer) adds metadata."""
    writer = gguf.GGUFWriter(path, arch)
    if fill:
        fill(writer)
    for name, values in tensors.items():
        target = gguf.GGMLQuantizationType[qtype if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gaussian(*shape: int, seed: int = 1) -> np.ndarray:
    """Weights of a usual size, float32; shape in numpy's order, rows last."""
    return (0.02 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def read_tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def relative_mse(actual: np.ndarray, expected: np.ndarray) -> float:
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    return float(((actual - expected) ** 2).sum() / (expected**2).sum())


def weighted_blocks(
    kind: str, n_blocks: int, decades: int, seed: int = 20240611, block_size: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian weights float32 (n_blocks, block_size) and importances 10^-decades .. 10^decades, of the kind: "spread", seven
    of ten "zeros", "all zero" or "huge"; with "ties" the weights are multiples of a quarter."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_blocks, block_size)).astype(np.float32)
    importance = (10.0 ** rng.uniform(-decades, decades, x.shape)).astype(np.float32)
    if kind == "zeros":
        importance[rng.random(x.shape) < 0.7] = 0
    elif kind == "all zero":
        importance[:] = 0
    elif kind == "huge":
        importance *= np.float32(1e34)
    elif kind == "ties":
        x = np.round(4 * x) / 4
    else:
        assert kind == "spread"
    return x, importance


def weighted_error_ratio(lib, type_name: str) -> float:
    """Weighted squared error of Gaussian weights with importances over four decades: with them over without."""
    rng = np.random.default_rng(20240611)
    type_id, x = int(ggml_ext.TYPES[type_name].id), rng.standard_normal((1, 65536)).astype(np.float32)
    importance = (10.0 ** rng.uniform(-2, 2, x.shape)).astype(np.float32)

    def error(blocks: np.ndarray) -> float:
        return (importance * (lib.dequantize(type_id, blocks, x.shape[1]) - x).astype(np.float64) ** 2).sum()

    ratio = error(lib.quantize(type_id, x, imatrix=importance.ravel())) / error(lib.quantize(type_id, x))
    print(f"{type_name}: weighted error {ratio:.3f} of the unweighted encoder's")
    return ratio


def assert_same_blocks(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Two uint8 (n_blocks, block_bytes) arrays; a failure names `what`, which says type and seed, block and bytes."""
    assert actual.shape == expected.shape, what
    different = np.flatnonzero((actual != expected).any(axis=1))
    if different.size:
        i = different[0]
        pytest.fail(
            f"{what}: {different.size} of {len(actual)} blocks differ; block {i}:\n"
            f"  {actual[i].tobytes().hex()}\n  {expected[i].tobytes().hex()}"
        )
