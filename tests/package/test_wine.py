"""The archive of `make windows` under Wine, compared with the programs of this machine, and the Python package with Windows' Python."""

import json
import math
import re
import shutil
import subprocess
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest

import ggml_ext
import windows
from ggml_ext import WEIGHT_TYPES
from ggml_ext._formats.gguf_file import GGUFFile
from helpers import windows_checks
from helpers.commands import quantize, tool
from helpers.models import MODEL, ROOT
from helpers.native import cpu_flags
from helpers.perplexity_record import perplexity_tolerance
from helpers.wine import WINE, Wine, find_archive, windows_path
from server import running_server

TEXT = ROOT / "data" / "heldout.txt"
PROMPT = "def add(a, b):"
N_CHUNKS = 8
UNROUNDED = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
# CPU variant -> CPU flags that tell whether it runs: one for each kind of kernels
VARIANTS = {"x64": set(), "haswell": {"avx2", "fma", "f16c", "bmi2"}, "cascadelake": {"avx512f", "avx512_vnni"},
            "zen4": {"avx512_vnni", "avx512vbmi", "avx512_bf16"}}
for_each_variant = pytest.mark.parametrize("variant", VARIANTS)


def test_aligned_moves_are_found():
    """Moves of 16 bytes and between registers need no aligned stack."""
    needs = ["vmovaps %ymm1,0x20(%rsp)", "vmovdqa64 (%rax),%zmm3", "vmovntps %zmm0,(%rcx)", "vmovdqa %ymm6,(%rdi,%rax,1)"]
    fine = ["vmovups %ymm1,0x20(%rsp)", "vmovdqu64 (%rax),%zmm3", "vmovaps %xmm1,(%rsp)", "vmovaps %zmm1,%zmm2", "vaddps (%rsp),%ymm1,%ymm2"]
    assert windows.aligned_moves("\n".join([*needs, *fine])) == needs


@pytest.fixture(scope="module")
def wine(tmp_path_factory):
    machine = Wine(tmp_path_factory.mktemp("wine"))
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def programs(wine) -> Path:
    return wine.unpack(find_archive())


@pytest.fixture(scope="module")
def model_itq3_t(tmp_path_factory) -> Path:
    """Return the reference model in ITQ3_T, from this machine's llama-quantize."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    subprocess.run([tool("llama-quantize"), MODEL, path, "ITQ3_T"], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def model_f32(tmp_path_factory) -> Path:
    """Return the reference model in F32.

    mingw's tanh, sin, cos, exp and log differ from glibc's in the last bit of some values. Rounding to 16 or 8 bits makes that visible: some
    activations get another code.
    """
    path = tmp_path_factory.mktemp("model") / "f32.gguf"
    subprocess.run([tool("llama-quantize"), MODEL, path, "F32"], check=True, capture_output=True)
    return path


def skip_unless_runnable(variant: str) -> None:
    if missing := VARIANTS[variant] - cpu_flags():
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")


@pytest.mark.nightly
def test_archive_has_a_short_readme_and_all_programs():
    with zipfile.ZipFile(find_archive()) as archive:
        names = archive.namelist()
        assert len(archive.read("README.txt").decode().splitlines()) <= 10
    assert {f"{name}.exe" for name in windows.PROGRAMS} <= set(names) and set(windows.RUNTIME) <= set(names)
    assert sum(name.startswith("ggml-cpu-") for name in names) == 14


@pytest.mark.nightly
@pytest.mark.parametrize("type_name", [*sorted(name.upper() for name in WEIGHT_TYPES), "Q4_K_M"])
def test_llama_quantize_writes_the_same_bytes(wine, programs, tmp_path, type_name):
    for program, name in ((tool("llama-quantize"), "linux.gguf"), (programs / "llama-quantize", "windows.gguf")):
        wine.run(program, MODEL, tmp_path / name, type_name)
    assert (tmp_path / "linux.gguf").read_bytes() == (tmp_path / "windows.gguf").read_bytes()


@pytest.mark.nightly
def test_greedy_text_is_the_same(wine, programs, model_itq3_t):
    texts = [wine.run(program, "-m", model_itq3_t, "-p", PROMPT, "-n", 48, "--temp", 0, "-no-cnv", "-t", 2, "--no-warmup").stdout.replace("\r", "")
             for program in (tool("llama-completion"), programs / "llama-completion")]
    assert texts[0] == texts[1] and len(texts[0]) > len(PROMPT) + 48


def measure_perplexity(wine, program: Path, model: Path, *options: str) -> str:
    done = wine.run(program, "-m", model, "-f", TEXT, "-c", 256, "--chunks", N_CHUNKS, "-t", 2, *options)
    return re.search(r"Final estimate: PPL = (.*)", done.stdout + done.stderr)[1].strip()


@pytest.mark.nightly
def test_perplexity_has_the_same_digits(wine, programs, model_f32):
    linux, other = (measure_perplexity(wine, program, model_f32, *UNROUNDED) for program in (tool("llama-perplexity"), programs / "llama-perplexity"))
    assert linux == other


@pytest.mark.nightly
@for_each_variant
def test_perplexity_of_a_variant(wine, model_itq3_t, variant):
    """A file with our types differs by no more than instruction sets do on Linux."""
    skip_unless_runnable(variant)
    programs = (tool("llama-perplexity"), wine.unpack(find_archive(), variant) / "llama-perplexity")
    linux, other = (float(measure_perplexity(wine, program, model_itq3_t).split()[0]) for program in programs)
    print(f"{variant}: perplexity {other}, on Linux {linux}")
    assert abs(math.log(other / linux)) <= perplexity_tolerance(N_CHUNKS)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["haswell", "zen4"])
def test_types_pass_ggmls_test(wine, variant, tmp_path):
    """Dequantization and dot products of all types, by test-quantize-fns, which takes one variant when it is linked."""
    skip_unless_runnable(variant)
    compiler, directory = shutil.which(f"{windows.PREFIX}g++-posix"), wine.unpack(find_archive(), variant)
    if not compiler:
        pytest.skip("mingw-w64 is missing (Debian: g++-mingw-w64-x86-64-posix)")
    tree, program = windows.BUILD / "llama.cpp", directory / "test-quantize-fns.exe"
    wine.run(compiler, "-std=c++17", "-O1", "-I", tree / "ggml" / "include", "-I", ROOT / "ggml_ext" / "hooks", tree / "tests" / "test-quantize-fns.cpp",
             directory / f"ggml-cpu-{variant}.dll", directory / "ggml-base.dll", "-o", program)
    done = wine.run(WINE, program)
    assert {f"Testing {name}" for name in WEIGHT_TYPES} <= {*done.stdout.splitlines()}


@pytest.mark.nightly
def test_imatrix_collects_hessians(wine, programs, model_f32, tmp_path):
    """The sums of both machines differ by their order of summation: eps of float32 times the number of tokens at most."""
    for program, name in ((tool("llama-imatrix"), "linux.gguf"), (programs / "llama-imatrix", "windows.gguf")):
        wine.run(program, "-m", model_f32, "-f", TEXT, "-c", 128, "--chunks", 2, "--moments", "block", "-t", 2, *UNROUNDED, "-o", tmp_path / name)
    linux, windows_ = (GGUFFile(tmp_path / f"{name}.gguf") for name in ("linux", "windows"))
    assert [t.name for t in linux.tensors] == [t.name for t in windows_.tensors] and len(linux.tensors) > 10
    for a, b in zip(linux.tensors, windows_.tensors, strict=True):
        x, y = (file.rows(t, 0, t.n_rows).view(np.float32) for file, t in ((linux, a), (windows_, b)))
        assert np.abs(x - y).max() <= 256 * 2.0**-24 * np.abs(x).max(), a.name


@pytest.mark.nightly
def test_bench_measures_a_speed(wine, programs, model_itq3_t):
    rows = json.loads(wine.run(programs / "llama-bench", "-m", model_itq3_t, "-p", 16, "-n", 4, "-r", 1, "-t", 2, "-o", "json").stdout)
    assert [row["avg_ts"] > 0 for row in rows] == [True, True]


@pytest.mark.nightly
def test_server_answers_and_has_the_chat_page(wine, programs, model_itq3_t, monkeypatch):
    for name, value in wine.env.items():
        monkeypatch.setenv(name, value)
    with running_server(model_itq3_t, "-c", 512, "-t", 2, program=programs / "llama-server") as url:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        page = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(page, timeout=60) as answer:
            assert answer.status == 200 and "text/html" in answer.headers["Content-Type"]


# --- Python


@pytest.fixture(scope="module")
def python(wine) -> list:
    return wine.install_python(Path(ggml_ext.__file__).parents[1])


@pytest.mark.nightly
def test_python_package_passes_its_checks(wine, python, tmp_path):
    done = wine.run(*python, windows_checks.__file__, tmp_path)
    assert done.stdout.split() == [word for check in windows_checks.CHECKS for word in ("passed", check.__name__)]


GOLDEN = """
import pathlib, sys
import numpy as np
from ggml_ext import TYPES
from ggml_ext._native.library import load
for path in sorted(pathlib.Path(sys.argv[1]).glob("golden_*.npz")):
    info, golden = TYPES[path.stem.removeprefix("golden_")], np.load(path)
    decoded = load().dequantize(int(info.id), golden["blocks"], info.block_size)
    encoded = load().quantize(int(info.id), golden["weights"])
    print(info.name, (decoded == golden["decoded"]).all() and (encoded == golden["encoded"]).all())
"""


@pytest.mark.nightly
def test_libraries_give_the_golden_blocks(wine, python, programs):
    """As test_golden_blocks_are_unchanged() on Linux, which Windows' Python cannot run without pytest."""
    done = wine.run(*python, "-c", GOLDEN, ROOT / "tests" / "data", GGML_EXT_LIB_DIR=windows_path(programs))
    assert done.stdout.split() == [word for name in sorted(WEIGHT_TYPES) for word in (name, "True")]


@pytest.mark.nightly
def test_python_package_quantizes_to_the_same_bytes(wine, python, programs, tmp_path):
    """With calibration by llama-imatrix.exe off: its sums have another order."""
    flags = ("--type", "itq3_t", "--importance", "none", "--verify", "-t", "2")
    quantize(MODEL, tmp_path / "linux.gguf", *flags)
    wine.run(*python, "-m", "ggml_ext.quantize", MODEL, tmp_path / "windows.gguf", *flags, GGML_EXT_LIB_DIR=windows_path(programs))
    assert (tmp_path / "linux.gguf").read_bytes() == (tmp_path / "windows.gguf").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["linux.gguf", "windows.gguf"]
