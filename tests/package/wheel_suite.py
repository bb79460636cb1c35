"""What `make wheel` runs in an environment that holds the wheel and pytest: no checkout, no compiler.

scripts/build/wheel.py puts this file, what it imports, the reference model and variants.json (the CPU variants and the instruction
sets they are compiled for) into a folder of their own. A variant is forced by a copy of
the package's folder bin without the others. By name pytest does not collect this file elsewhere.
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
N_CHUNKS = 4  # of 256 tokens, for each type and variant: 10 s of one core for ITQ3_T on x64, which has no byte shuffle, else below one

# llama.cpp's names of instruction sets -> the processor's flags in /proc/cpuinfo; of those that are not here the name itself
FLAGS = {
    "SSE42": {"sse4_2"}, "AVX512": {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}, "AVX512_VBMI": {"avx512vbmi"},
    "DOTPROD": {"asimddp"}, "FP16_VECTOR_ARITHMETIC": {"asimdhp"}, "MATMUL_INT8": {"i8mm"},
}


def lacking(variant: str) -> list[str]:
    """Flags that this processor would need for a variant and has not."""
    return sorted(set().union(*(FLAGS.get(s, {s.lower()}) for s in VARIANTS[variant])) - cpu_flags())


RUNNABLE = [v for v in VARIANTS if not lacking(v)]
for_each_variant = pytest.mark.parametrize("variant", RUNNABLE)
for_each_type = pytest.mark.parametrize("name", sorted(WEIGHT_TYPES))


def kernels_of(variant: str) -> str:
    """What ggml_ext_cpu_isa() has to say (cpu/simd.h)."""
    sets = VARIANTS[variant]
    if platform.machine() == "aarch64":
        return "neon+dotprod" if "DOTPROD" in sets else "neon"
    if not {"AVX2", "FMA", "F16C"} <= sets:
        return "scalar"
    if {"AVX512", "AVX512_VBMI", "AVX512_VNNI"} <= sets:
        return "avx512"
    return "avx2+vnni" if sets & {"AVX_VNNI", "AVX512_VNNI"} else "avx2"


@functools.cache
def score(variant: str) -> int:
    """What llama.cpp ranks a variant by: 0 if this processor cannot run it. The library is loaded in a process of its own."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ggml_backend_score())"
    done = subprocess.run([sys.executable, "-c", code, BIN / f"libggml-cpu-{variant}.so"], capture_output=True, text=True)
    assert done.returncode == 0, f"loading {variant} ended with {done.returncode}: {done.stderr}"
    return int(done.stdout)


@functools.cache
def folder_of(variant: str) -> Path:
    """The package's programs with one variant alone. Hard links: a program finds its folder through its file, not its name."""
    folder = ROOT / "variants" / variant
    folder.mkdir(parents=True)
    for path in BIN.iterdir():
        if not path.name.startswith("libggml-cpu-") or path.name == f"libggml-cpu-{variant}.so":
            os.link(path, folder / path.name)
    return folder


def loaded(log: str) -> Path:
    """The CPU backend that a program says it has loaded."""
    found = re.findall(r"loaded CPU backend from (\S+)", log)
    assert len(found) == 1, log[:2000]
    return Path(found[0])


@pytest.fixture(scope="session")
def files(tmp_path_factory, model) -> dict[str, Path]:
    """The reference model in every weight type: block matrices of that type, embeddings Q8_0."""
    folder = tmp_path_factory.mktemp("models")
    out = {name: folder / f"{name}.gguf" for name in sorted(WEIGHT_TYPES)}
    for name, path in out.items():
        quantize(model, path, "--type", name, *UNIFORM)
    return out


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """The beginning of the text: all of it would be tokenized; 16 bytes a token are plenty."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT.read_bytes()[: 16 * 256 * N_CHUNKS])
    return path


@pytest.fixture(scope="session")
def usual(files, text) -> dict[str, float]:
    """Perplexity of every type with the variant that llama.cpp chooses."""
    return {name: perplexity(path, text, n_chunks=N_CHUNKS).value for name, path in files.items()}


@pytest.fixture(scope="session")
def results() -> dict[str, dict]:
    """What the table at the end shows: variant -> figures."""
    return {variant: {} for variant in VARIANTS}


def test_environment_is_empty():
    """The wheel alone: no checkout and no compiler that could help out."""
    assert Path(ggml_ext.__file__).is_relative_to(sys.prefix)
    assert not [p for p in ("cc", "gcc", "g++", "c++", "clang", "ld", "cmake", "ninja", "git") if shutil.which(p)]
    assert not any((folder / "ggml_ext" / "types.toml").exists() for folder in Path(__file__).parents)


def test_wheel_is_tagged_and_has_the_variants():
    tags = importlib.metadata.distribution("ggml-ext").read_text("WHEEL")
    assert re.search(rf"^Tag: py3-none-manylinux_2_\d+_{platform.machine()}$", tags, re.M), tags
    assert {p.name for p in BIN.glob("libggml-cpu*")} == {f"libggml-cpu-{v}.so" for v in VARIANTS}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command):
    done = subprocess.run([Path(sys.executable).parent / command, "--help"], capture_output=True, text=True, timeout=60)
    # rpc-server and llama-quantize print their help and exit with 1; the converter of adapters needs the extra hf
    assert done.returncode in ((0, 1) if command in ("rpc-server", "llama-quantize", "convert_lora_to_gguf.py") else (0,)), done.stderr
    said = done.stdout + done.stderr
    assert "usage" in said.lower() or "convert_lora_to_gguf.py needs torch" in said


def test_checkpoints_name_the_extra_that_they_need(tmp_path):
    """The converter is in the wheel, what it imports is not."""
    convert = Path(ggml_ext.__file__).parent / "convert"
    for name in ("convert_hf_to_gguf.py", "conversion/llama.py", "gguf-py/gguf/__init__.py", "gguf-py/LICENSE"):
        assert (convert / name).is_file(), name
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    done = run_quantize(tmp_path, tmp_path / "out.gguf", "--type", "itq3_s")
    assert done.returncode == 1 and "pip install 'torch>=" in done.stderr, done.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_loader_takes_what_the_processor_can_run(variant):
    """Also of a variant that cannot run here: llama.cpp loads every one to ask for its score."""
    assert (score(variant) > 0) == (variant in RUNNABLE)


@for_each_variant
def test_nothing_of_the_tests_is_in_it(variant):
    """Such as a counter, which every tile would cost."""
    code = "import ctypes, sys; print(hasattr(ctypes.CDLL(sys.argv[1]), 'ggml_ext_cpu_n_tiles'))"
    done = subprocess.run([sys.executable, "-c", code, BIN / f"libggml-cpu-{variant}.so"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@for_each_variant
def test_kernels_of_our_types(variant, results):
    code = ("import ctypes, sys; isa = ctypes.CDLL(sys.argv[1]).ggml_ext_cpu_isa; isa.restype = ctypes.c_char_p; print(isa().decode())")
    done = subprocess.run([sys.executable, "-c", code, BIN / f"libggml-cpu-{variant}.so"], capture_output=True, text=True, check=True)
    results[variant]["kernels"] = done.stdout.strip()
    assert results[variant]["kernels"] == kernels_of(variant)


def test_best_variant_is_chosen(files):
    log = run_tool("llama-bench", "-m", files["itq3_s"], "-p", 1, "-n", 0, "-r", 1)
    assert loaded(log) == BIN / f"libggml-cpu-{max(RUNNABLE, key=score)}.so"


def test_backends_in_the_current_folder_stay_out(files, monkeypatch):
    """Better ones lie there, which stock llama.cpp would load."""
    poorest = min(RUNNABLE, key=score)
    monkeypatch.chdir(BIN)
    log = run_tool([folder_of(poorest) / "llama-bench"], "-m", files["itq3_s"], "-p", 1, "-n", 0, "-r", 1)
    assert loaded(log) == folder_of(poorest) / f"libggml-cpu-{poorest}.so"


def test_python_loads_the_libraries(tmp_path):
    """As llama-cpp-python does, by a name without a version: the program lies elsewhere then, and the backends beside the libraries."""
    folder = subprocess.run([sys.executable, "-m", "ggml_ext.libdir"], capture_output=True, text=True, check=True).stdout.strip()
    code = "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); lib.llama_backend_init(); assert lib.ggml_backend_dev_count() > 0"
    done = subprocess.run([sys.executable, "-c", code, Path(folder) / "libllama.so"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert loaded(done.stderr) == BIN / f"libggml-cpu-{max(RUNNABLE, key=score)}.so"


@for_each_type
def test_perplexity_is_as_recorded(files, name):
    found = perplexity(files[name], TEXT, n_chunks=perplexity_record.N_CHUNKS)
    assert_recorded_perplexity(name, found.value)


@for_each_variant
def test_variant_gives_the_same_perplexity(files, text, usual, variant, results):
    program = [folder_of(variant) / "llama-perplexity"]
    found = {name: perplexity(path, text, n_chunks=N_CHUNKS, program=program).value for name, path in files.items()}
    results[variant] |= found
    off = {name: math.log(found[name] / usual[name]) for name in found}
    print(f"{variant}: ln(perplexity) differs by", {name: round(d, 5) for name, d in off.items()})
    assert max(map(abs, off.values())) <= perplexity_tolerance(N_CHUNKS), (found, usual)


@for_each_variant
def test_variant_generates(files, variant):
    log = run_tool([folder_of(variant) / "llama-completion"], "-m", files["itq3_t"], "-p", "def add(a, b):", "-n", 16, "--temp", 0,
                   "-no-cnv", "-lv", 4)
    assert loaded(log) == folder_of(variant) / f"libggml-cpu-{variant}.so"
    assert "def add(a, b):" in log and "type itq3_t" in log


def ask(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@for_each_variant
def test_variant_serves(files, variant, tmp_path):
    log = tmp_path / "log"
    with running_server(files["itq2_t"], "-c", 512, "-lv", 4, program=folder_of(variant) / "llama-server", log=log) as url:
        assert loaded(log.read_text()).name == f"libggml-cpu-{variant}.so"
        answer = ask(url + "/completion", {"prompt": "import os\nimport", "n_predict": 12, "temperature": 0})
        assert answer["tokens_predicted"] == 12 and answer["content"].strip()
        answer = ask(url + "/v1/chat/completions", {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] > 0


def test_server_has_its_chat_page(files):
    with running_server(files["itq3_t"], "-c", 512) as url:
        request = urllib.request.Request(url + "/", headers={"Accept-Encoding": "gzip"})  # as browsers ask; it comes in no other form
        with urllib.request.urlopen(request, timeout=60) as page:
            assert (page.status, page.headers.get_content_type()) == (200, "text/html")
            assert b"<html" in gzip.decompress(page.read()).lower()


def needs_vulkan() -> None:
    if not (BIN / "libggml-vulkan.so").exists():
        pytest.skip("the wheel was built without the Vulkan backend: glslc, libvulkan-dev or spirv-headers were missing (as Debian names them)")


def test_vulkan_device_is_found(files, text, monkeypatch):
    """By -ngl alone, as by every llama.cpp."""
    needs_vulkan()
    here, there = (vulkan.perplexity(files["itq3_t"], text, monkeypatch, "-ngl", n) for n in (0, 99))
    print(f"perplexity {there[0]} on Vulkan0, {here[0]} on the CPU; {there[1]} MiB of weights there")
    assert there[1] > 0 == here[1] and abs(math.log(there[0] / here[0])) <= perplexity_tolerance(2)


@pytest.mark.parametrize("lacking", ["loader", "device"])
def test_without_vulkan_the_cpu_is_used(files, text, monkeypatch, tmp_path, lacking):
    """A loader that cannot be loaded stands for none; without GGML_VK_VISIBLE_DEVICES lavapipe does not count."""
    needs_vulkan()
    if lacking == "loader":
        (tmp_path / "libvulkan.so.1").touch()
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    log = run_tool("llama-perplexity", "-m", files["itq3_t"], "-f", text, "-c", 128, "--chunks", 2, "-ngl", 99)
    assert "Final estimate" in log and "no usable GPU found" in log
    assert not re.search(r"libvulkan|cannot open|failed to load", log), log[:2000]


def test_quantize_command(files, model, tmp_path):
    """The command makes the same file as the module, and llama-quantize the same tensors."""
    out = tmp_path / "command.gguf"
    subprocess.run([Path(sys.executable).parent / "ggml-ext", "quantize", model, out, "--type", "itq3_s", *UNIFORM, "--quiet",
                    "--importance", "none"], check=True)
    assert out.read_bytes() == files["itq3_s"].read_bytes()
    run_tool("llama-quantize", *UNIFORM, model, tmp_path / "tool.gguf", "ITQ3_S")
    assert block_types(tmp_path / "tool.gguf") == block_types(out)
    tensors = [read_tensors(path) for path in (out, tmp_path / "tool.gguf")]
    assert all((tensors[0][name].data == tensors[1][name].data).all() for name in tensors[0])


def test_inspect(files, model):
    text = subprocess.run([sys.executable, "-m", "ggml_ext.inspect", files["ditto3"], "--against", model], capture_output=True, text=True,
                          check=True).stdout
    assert "ditto3" in text.lower() and "epsilon" in text


def test_evaluate_and_bench(files, model, tmp_path):
    """A file of ours and a stock one against F16, on the text of the package; and their speeds."""
    stock = tmp_path / "q3_k_m.gguf"
    run_tool("llama-quantize", model, stock, "Q3_K_M")
    program = Path(sys.executable).parent / "ggml-ext"
    evaluate = [program, "evaluate", files["itq3_t"], stock, "--against", model, "--base-logits", tmp_path / "logits.bin", "-c", 256, "--chunks", 4, "--json"]
    found = json.loads(subprocess.run([*map(str, evaluate)], capture_output=True, text=True, check=True).stdout)
    assert found["text"]["name"] == "built-in" and [m["label"] for m in found["models"]] == ["itq3_t.gguf", "q3_k_m.gguf"]
    assert all(0 < m["statistics"]["Mean KLD"][0] < 1 for m in found["models"]) and len(found["paired"]) == 1
    bench = [program, "bench", files["itq3_t"], stock, "--stock", "none", "-p", 8, "-n", 4, "-r", 1]
    table = subprocess.run([*map(str, bench)], capture_output=True, text=True, check=True).stdout
    assert all(word in table for word in ("itq3_t.gguf", "q3_k_m.gguf", "tokens/s")), table


@for_each_variant
def test_variant_decodes(files, variant, results):
    """For the table; a figure of so small a model says which kernels run, and little about large ones."""
    for name in ("itq3_s", "itq3_t"):
        log = run_tool([folder_of(variant) / "llama-bench"], "-m", files[name], "-p", 0, "-n", 64, "-r", 2, "-t", 2, "-o", "json")
        assert loaded(log).name == f"libggml-cpu-{variant}.so"
        results[variant][f"decode {name}"] = json.loads(re.search(r"\[\n.*\]", log, re.S)[0])[0]["avg_ts"]
        assert results[variant][f"decode {name}"] > 0


def test_table(results, usual, capsys):
    """Prints what ran; on x86-64 a variant without AVX2 is among it."""
    heads = ["variant", "our kernels", *(f"PPL {name.upper()}" for name in usual), "t/s ITQ3_S", "t/s ITQ3_T"]
    rows = []
    for variant, found in results.items():
        if variant in RUNNABLE:
            figures = [f"{found[k]:.{d}f}" if k in found else "-" for k, d in (*((name, 3) for name in usual),
                                                                             ("decode itq3_s", 0), ("decode itq3_t", 0))]
            rows.append([variant, found.get("kernels", "-"), *figures])
        else:
            rows.append([variant, kernels_of(variant), f"not run: this processor lacks {', '.join(lacking(variant))}"])
    widths = [max(len(row[i]) for row in [heads, *rows] if i < 2 or len(row) == len(heads)) for i in range(len(heads))]
    with capsys.disabled():
        print(f"\n\n{platform.machine()}, {N_CHUNKS} chunks of 256 tokens, two threads; chosen by itself: {max(RUNNABLE, key=score)}")
        for row in [heads, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    if platform.machine() == "x86_64":
        assert any("AVX2" not in VARIANTS[v] for v in RUNNABLE)
