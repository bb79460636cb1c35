"""Tests that `make wheel` runs in an environment with only the wheel and pytest: no checkout, no compiler.

scripts/build/wheel.py copies this file, its imports, the reference model and variants.json (CPU variants and their instruction
sets) into a directory. A copy of the package's directory bin with one variant forces that variant. pytest does not collect this
file elsewhere, because of its name.
"""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import ggml_ext
from ggml_ext import WEIGHT_TYPES
from helpers import perplexity_record, vulkan
from helpers.commands import quantize, run_quantize
from helpers.models import ROOT, read_tensors
from helpers.native import cpu_flags
from helpers.perplexity_record import assert_recorded_perplexity, perplexity_tolerance
from perplexity_run import UNIFORM, block_types, perplexity, run_tool
from server import running_server

TEXT = ROOT / "data" / "heldout.txt"
VARIANTS = {name: set(sets) for name, sets in json.loads((ROOT / "variants.json").read_text()).items()}
BIN = Path(ggml_ext.__file__).parent / "bin"
COMMANDS = [e.name for e in importlib.metadata.distribution("ggml-ext").entry_points if e.group == "console_scripts"]
N_CHUNKS = 4  # of 256 tokens, per type and variant: 10 s of one core for ITQ3_T on x64, which has no byte shuffle, else below one

# llama.cpp's names of instruction sets -> flags in /proc/cpuinfo, where the names differ.
FLAGS = {
    "SSE42": {"sse4_2"}, "AVX512": {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}, "AVX512_VBMI": {"avx512vbmi"},
    "DOTPROD": {"asimddp"}, "FP16_VECTOR_ARITHMETIC": {"asimdhp"}, "MATMUL_INT8": {"i8mm"},
}


def missing_flags(variant: str) -> list[str]:
    """Return the CPU flags that a variant needs and this machine lacks."""
    return sorted(set().union(*(FLAGS.get(s, {s.lower()}) for s in VARIANTS[variant])) - cpu_flags())


RUNNABLE = [v for v in VARIANTS if not missing_flags(v)]
for_each_variant = pytest.mark.parametrize("variant", RUNNABLE)
for_each_type = pytest.mark.parametrize("name", sorted(WEIGHT_TYPES))


def expected_kernels(variant: str) -> str:
    """Return what ggml_ext_cpu_isa() must return (cpu/simd.h)."""
    sets = VARIANTS[variant]
    if platform.machine() == "aarch64":
        return "neon+i8mm" if {"DOTPROD", "MATMUL_INT8"} <= sets else "neon+dotprod" if "DOTPROD" in sets else "neon"
    if not {"AVX2", "FMA", "F16C"} <= sets:
        return "scalar"
    if {"AVX512", "AVX512_VBMI", "AVX512_VNNI"} <= sets:
        return "avx512+amx" if "AMX_INT8" in sets else "avx512"
    return "avx2+vnni" if sets & {"AVX_VNNI", "AVX512_VNNI"} else "avx2"


@functools.cache
def variant_score(variant: str) -> int:
    """Return llama.cpp's score of a variant, 0 if this CPU cannot run it. Loads the library in a separate process."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ggml_backend_score())"
    done = subprocess.run([sys.executable, "-c", code, BIN / f"libggml-cpu-{variant}.so"], capture_output=True, text=True)
    assert done.returncode == 0, f"loading {variant} ended with {done.returncode}: {done.stderr}"
    return int(done.stdout)


@functools.cache
def variant_directory(variant: str) -> Path:
    """Link the package's programs with one variant. Hard links, since a program finds its directory by its file."""
    folder = ROOT / "variants" / variant
    folder.mkdir(parents=True)
    for path in BIN.iterdir():
        if not path.name.startswith("libggml-cpu-") or path.name == f"libggml-cpu-{variant}.so":
            os.link(path, folder / path.name)
    return folder


def loaded_backend(log: str) -> Path:
    """Return the CPU backend that a program reports."""
    paths = re.findall(r"loaded CPU backend from (\S+)", log)
    assert len(paths) == 1, log[:2000]
    return Path(paths[0])


@pytest.fixture(scope="session")
def files(tmp_path_factory, model) -> dict[str, Path]:
    """Quantize the block weights of the reference model to every weight type, the embeddings to Q8_0."""
    folder = tmp_path_factory.mktemp("models")
    out = {name: folder / f"{name}.gguf" for name in sorted(WEIGHT_TYPES)}
    for name, path in out.items():
        quantize(model, path, "--type", name, *UNIFORM)
    return out


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Write the beginning of the text, with plenty of bytes per token: the programs tokenize all of it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT.read_bytes()[: 16 * 256 * N_CHUNKS])
    return path


@pytest.fixture(scope="session")
def default_perplexity(files, text) -> dict[str, float]:
    """Measure the perplexity of every type with the variant that llama.cpp chooses."""
    return {name: perplexity(path, text, n_chunks=N_CHUNKS).value for name, path in files.items()}


@pytest.fixture(scope="session")
def results() -> dict[str, dict]:
    """Collect the figures of the final table: variant -> figures."""
    return {variant: {} for variant in VARIANTS}


def test_environment_has_only_the_wheel():
    """There is no checkout and no compiler."""
    assert Path(ggml_ext.__file__).is_relative_to(sys.prefix)
    assert not [p for p in ("cc", "gcc", "g++", "c++", "clang", "ld", "cmake", "ninja", "git") if shutil.which(p)]
    assert not any((folder / "ggml_ext" / "types.toml").exists() for folder in Path(__file__).parents)


def test_wheel_has_its_tag_and_variants():
    tags = importlib.metadata.distribution("ggml-ext").read_text("WHEEL")
    assert re.search(rf"^Tag: py3-none-manylinux_2_\d+_{platform.machine()}$", tags, re.M), tags
    assert {p.name for p in BIN.glob("libggml-cpu*")} == {f"libggml-cpu-{v}.so" for v in VARIANTS}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command):
    done = subprocess.run([Path(sys.executable).parent / command, "--help"], capture_output=True, text=True, timeout=60)
    # rpc-server and llama-quantize print their help and exit with 1; the converter of adapters needs the extra hf.
    assert done.returncode in ((0, 1) if command in ("rpc-server", "llama-quantize", "convert_lora_to_gguf.py") else (0,)), done.stderr
    output = done.stdout + done.stderr
    assert "usage" in output.lower() or "convert_lora_to_gguf.py needs torch" in output


def test_checkpoint_names_the_missing_extra(tmp_path):
    """The wheel contains the converter but not its dependencies."""
    convert = Path(ggml_ext.__file__).parent / "convert"
    for name in ("convert_hf_to_gguf.py", "conversion/llama.py", "gguf-py/gguf/__init__.py", "gguf-py/LICENSE"):
        assert (convert / name).is_file(), name
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    done = run_quantize(tmp_path, tmp_path / "out.gguf", "--type", "itq3_s")
    assert done.returncode == 1 and "pip install 'torch>=" in done.stderr, done.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_score_shows_whether_the_cpu_can_run_a_variant(variant):
    """llama.cpp loads every variant to ask for its score, also those that cannot run."""
    assert (variant_score(variant) > 0) == (variant in RUNNABLE)


@for_each_variant
def test_backend_has_no_test_functions(variant):
    """An example is the counter of the GEMM's panels."""
    code = "import ctypes, sys; print(hasattr(ctypes.CDLL(sys.argv[1]), 'ggml_ext_cpu_n_panels'))"
    done = subprocess.run([sys.executable, "-c", code, BIN / f"libggml-cpu-{variant}.so"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@for_each_variant
def test_variant_has_its_kernels(variant, results):
    code = ("import ctypes, sys; isa = ctypes.CDLL(sys.argv[1]).ggml_ext_cpu_isa; isa.restype = ctypes.c_char_p; print(isa().decode())")
    done = subprocess.run([sys.executable, "-c", code, BIN / f"libggml-cpu-{variant}.so"], capture_output=True, text=True, check=True)
    results[variant]["kernels"] = done.stdout.strip()
    assert results[variant]["kernels"] == expected_kernels(variant)


def test_best_variant_is_chosen(files):
    log = run_tool("llama-bench", "-m", files["itq3_s"], "-p", 1, "-n", 0, "-r", 1)
    assert loaded_backend(log) == BIN / f"libggml-cpu-{max(RUNNABLE, key=variant_score)}.so"


def test_backends_in_the_current_directory_are_not_loaded(files, monkeypatch):
    """Unmodified llama.cpp would load the better backends there."""
    poorest = min(RUNNABLE, key=variant_score)
    monkeypatch.chdir(BIN)
    log = run_tool([variant_directory(poorest) / "llama-bench"], "-m", files["itq3_s"], "-p", 1, "-n", 0, "-r", 1)
    assert loaded_backend(log) == variant_directory(poorest) / f"libggml-cpu-{poorest}.so"


def test_python_loads_the_libraries(tmp_path):
    """Loads by a name without a version, as llama-cpp-python does. The backends are next to the libraries, the program elsewhere."""
    folder = subprocess.run([sys.executable, "-m", "ggml_ext.libdir"], capture_output=True, text=True, check=True).stdout.strip()
    code = "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); lib.llama_backend_init(); assert lib.ggml_backend_dev_count() > 0"
    done = subprocess.run([sys.executable, "-c", code, Path(folder) / "libllama.so"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert loaded_backend(done.stderr) == BIN / f"libggml-cpu-{max(RUNNABLE, key=variant_score)}.so"


@for_each_type
def test_perplexity_is_as_recorded(files, name):
    measured = perplexity(files[name], TEXT, n_chunks=perplexity_record.N_CHUNKS)
    assert_recorded_perplexity(name, measured.value)


@for_each_variant
def test_variant_gives_the_same_perplexity(files, text, default_perplexity, variant, results):
    program = [variant_directory(variant) / "llama-perplexity"]
    perplexities = {name: perplexity(path, text, n_chunks=N_CHUNKS, program=program).value for name, path in files.items()}
    results[variant] |= perplexities
    differences = {name: math.log(perplexities[name] / default_perplexity[name]) for name in perplexities}
    print(f"{variant}: ln(perplexity) differs by", {name: round(d, 5) for name, d in differences.items()})
    assert max(map(abs, differences.values())) <= perplexity_tolerance(N_CHUNKS), (perplexities, default_perplexity)


@for_each_variant
def test_variant_generates(files, variant):
    log = run_tool([variant_directory(variant) / "llama-completion"], "-m", files["itq3_t"], "-p", "def add(a, b):", "-n", 16, "--temp", 0,
                   "-no-cnv", "-lv", 4)
    assert loaded_backend(log) == variant_directory(variant) / f"libggml-cpu-{variant}.so"
    assert "def add(a, b):" in log and "type itq3_t" in log


def post_json(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@for_each_variant
def test_variant_serves(files, variant, tmp_path):
    log = tmp_path / "log"
    with running_server(files["itq2_t"], "-c", 512, "-lv", 4, program=variant_directory(variant) / "llama-server", log=log) as url:
        assert loaded_backend(log.read_text()).name == f"libggml-cpu-{variant}.so"
        answer = post_json(url + "/completion", {"prompt": "import os\nimport", "n_predict": 12, "temperature": 0})
        assert answer["tokens_predicted"] == 12 and answer["content"].strip()
        answer = post_json(url + "/v1/chat/completions", {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] > 0


def test_server_has_its_chat_page(files):
    with running_server(files["itq3_t"], "-c", 512) as url:
        request = urllib.request.Request(url + "/", headers={"Accept-Encoding": "gzip"})  # browsers ask so, and there is no other form
        with urllib.request.urlopen(request, timeout=60) as page:
            assert (page.status, page.headers.get_content_type()) == (200, "text/html")
            assert b"<html" in gzip.decompress(page.read()).lower()


def skip_without_vulkan() -> None:
    if not (BIN / "libggml-vulkan.so").exists():
        pytest.skip("the wheel was built without the Vulkan backend: glslc, libvulkan-dev or spirv-headers were missing (as Debian names them)")


def test_vulkan_device_is_used(files, text, monkeypatch):
    """-ngl alone selects the device, as in every llama.cpp."""
    skip_without_vulkan()
    cpu, gpu = (vulkan.perplexity(files["itq3_t"], text, monkeypatch, "-ngl", n) for n in (0, 99))
    print(f"perplexity {gpu[0]} on Vulkan0, {cpu[0]} on the CPU; {gpu[1]} MiB of weights there")
    assert gpu[1] > 0 == cpu[1] and abs(math.log(gpu[0] / cpu[0])) <= perplexity_tolerance(2)


@pytest.mark.parametrize("missing", ["loader", "device"])
def test_cpu_replaces_missing_vulkan(files, text, monkeypatch, tmp_path, missing):
    """A loader that cannot be loaded stands for a missing one; lavapipe counts only with GGML_VK_VISIBLE_DEVICES."""
    skip_without_vulkan()
    if missing == "loader":
        (tmp_path / "libvulkan.so.1").touch()
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    log = run_tool("llama-perplexity", "-m", files["itq3_t"], "-f", text, "-c", 128, "--chunks", 2, "-ngl", 99)
    assert "Final estimate" in log and "no usable GPU found" in log
    assert not re.search(r"libvulkan|cannot open|failed to load", log), log[:2000]


def test_quantize_command_matches_module_and_llama_quantize(files, model, tmp_path):
    """The command writes the module's file, llama-quantize the same tensors."""
    out = tmp_path / "command.gguf"
    subprocess.run([Path(sys.executable).parent / "ggml-ext", "quantize", model, out, "--type", "itq3_s", *UNIFORM, "--quiet",
                    "--importance", "none"], check=True)
    assert out.read_bytes() == files["itq3_s"].read_bytes()
    run_tool("llama-quantize", *UNIFORM, model, tmp_path / "tool.gguf", "ITQ3_S")
    assert block_types(tmp_path / "tool.gguf") == block_types(out)
    tensors = [read_tensors(path) for path in (out, tmp_path / "tool.gguf")]
    assert all((tensors[0][name].data == tensors[1][name].data).all() for name in tensors[0])


def test_inspect_shows_type_and_epsilon(files, model):
    text = subprocess.run([sys.executable, "-m", "ggml_ext.inspect", files["ditto3"], "--against", model], capture_output=True, text=True,
                          check=True).stdout
    assert "ditto3" in text.lower() and "epsilon" in text


def test_evaluate_and_bench_run(files, model, tmp_path):
    """Compares a ggml-ext file and an upstream one with F16 on the built-in text, and their speeds."""
    stock = tmp_path / "q3_k_m.gguf"
    run_tool("llama-quantize", model, stock, "Q3_K_M")
    program = Path(sys.executable).parent / "ggml-ext"
    evaluate = [program, "evaluate", files["itq3_t"], stock, "--against", model, "--base-logits", tmp_path / "logits.bin", "-c", 256, "--chunks", 4, "--json"]
    report = json.loads(subprocess.run([*map(str, evaluate)], capture_output=True, text=True, check=True).stdout)
    assert report["text"]["name"] == "built-in" and [m["label"] for m in report["models"]] == ["itq3_t.gguf", "q3_k_m.gguf"]
    assert all(0 < m["statistics"]["Mean KLD"][0] < 1 for m in report["models"]) and len(report["paired"]) == 1
    bench = [program, "bench", files["itq3_t"], stock, "--stock", "none", "-p", 8, "-n", 4, "-r", 1]
    table = subprocess.run([*map(str, bench)], capture_output=True, text=True, check=True).stdout
    assert all(word in table for word in ("itq3_t.gguf", "q3_k_m.gguf", "tokens/s")), table


@for_each_variant
def test_variant_decodes(files, variant, results):
    """Speeds for the table; with so small a model they show which kernels run, and little about large models."""
    for name in ("itq3_s", "itq3_t"):
        log = run_tool([variant_directory(variant) / "llama-bench"], "-m", files[name], "-p", 0, "-n", 64, "-r", 2, "-t", 2, "-o", "json")
        assert loaded_backend(log).name == f"libggml-cpu-{variant}.so"
        results[variant][f"decode {name}"] = json.loads(re.search(r"\[\n.*\]", log, re.S)[0])[0]["avg_ts"]
        assert results[variant][f"decode {name}"] > 0


def test_print_table(results, default_perplexity, capsys):
    """Prints the results; on x86-64 they include a variant without AVX2."""
    heads = ["variant", "our kernels", *(f"PPL {name.upper()}" for name in default_perplexity), "t/s ITQ3_S", "t/s ITQ3_T"]
    rows = []
    for variant, figures_of_variant in results.items():
        if variant in RUNNABLE:
            figures = [f"{figures_of_variant[k]:.{d}f}" if k in figures_of_variant else "-" for k, d in (*((name, 3) for name in default_perplexity),
                                                                             ("decode itq3_s", 0), ("decode itq3_t", 0))]
            rows.append([variant, figures_of_variant.get("kernels", "-"), *figures])
        else:
            rows.append([variant, expected_kernels(variant), f"not run: this processor lacks {', '.join(missing_flags(variant))}"])
    widths = [max(len(row[i]) for row in [heads, *rows] if i < 2 or len(row) == len(heads)) for i in range(len(heads))]
    with capsys.disabled():
        print(f"\n\n{platform.machine()}, {N_CHUNKS} chunks of 256 tokens, two threads; chosen by itself: {max(RUNNABLE, key=variant_score)}")
        for row in [heads, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    if platform.machine() == "x86_64":
        assert any("AVX2" not in VARIANTS[v] for v in RUNNABLE)
