"""llama-cpp-python with this package's libllama, at the version whose source distribution holds the pinned llama.cpp."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_ext import libdir
from ggml_ext._base.errors import UserError
from helpers.commands import quantize
from llama_cpp import PIN  # scripts/build/llama_cpp.py, which hides the package of that name here
from perplexity_run import run_tool

PROMPT, N_TOKENS = "def add(a, b):", 24

# Runs in its own process: the package reads the environment on import. Prints JSON.
USER = """
import ctypes, json, sys
import llama_cpp, llama_cpp.mtmd_cpp
from llama_cpp import Llama, llama_chat_format

log = []

@llama_cpp.llama_log_callback
def keep(level, text, data):
    log.append(text.decode(errors="replace"))

model, prompt, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
llm = Llama(model, n_ctx=512, n_threads=1, chat_format="chatml", verbose=True)
options = {"temperature": 0, "max_tokens": n}
chat = [{"role": "user", "content": "import os"}]
# Each answer begins anew, as llama-completion does: else the tokens that prompts begin with would not be computed again, and the last
# bits of a product depend on the columns beside it.
streamed = "".join(part["choices"][0]["text"] for part in llm(prompt, stream=True, **options))
llm.reset()
completion = llm.create_completion(prompt, **options)
llm.reset()
print(json.dumps({
    "library": llama_cpp.llama_cpp._lib._name,
    "completion": completion,
    "streamed": streamed,
    "prompt": llama_chat_format.format_chatml(chat).prompt,
    "chat": llm.create_chat_completion(chat, **options),
    "tokens": llm.tokenize(prompt.encode()),
    "log": "".join(log),
}))
"""


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    """Check the version of PyPI's package in its metadata: a module of this suite has the same name."""
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llama-cpp-python is not installed: pip install -r tests/requirements.txt")
    assert version == PIN["version"], f"tests/requirements.txt: {PIN['version']} has the structs of the pinned llama.cpp"


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("python") / "model-itq3_t.gguf"
    quantize(model, path, "--type", "itq3_t", "--effort", "fast")
    return path


@pytest.fixture(scope="module")
def user_output(quantized) -> dict:
    """Run a user's program."""
    return run_with_package(quantized)


def run_user(quantized: Path, **variables) -> dict:
    done = subprocess.run([sys.executable, "-c", USER, quantized, PROMPT, str(N_TOKENS)], env={**os.environ, **variables}, capture_output=True,
                          text=True, timeout=300, cwd=quantized.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def library_variables() -> dict[str, str]:
    """Return the environment variables that a user sets."""
    folder = subprocess.run([sys.executable, "-m", "ggml_ext.libdir"], capture_output=True, text=True, check=True).stdout.strip()
    return {"LLAMA_CPP_LIB_PATH": folder, "MTMD_CPP_LIB": folder}


def run_with_package(quantized: Path) -> dict:
    variables = library_variables()
    return run_user(quantized, **variables) | {"folder": variables["LLAMA_CPP_LIB_PATH"]}


PRECISION = """
import ctypes, sys
import llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
get = llama_cpp.llama_cpp._lib.llama_get_act_prec
get.argtypes = [ctypes.c_void_p]
print(get(llm._ctx.ctx))
"""


@pytest.mark.parametrize(("variables", "expected"), [({}, "0"), ({"LLAMA_ARG_ACT_PREC": "q8"}, "0"), ({"LLAMA_ARG_ACT_PREC": "f16"}, "1")])
def test_environment_sets_activation_precision(quantized, variables, expected):
    env = {**os.environ, **library_variables(), **variables}
    done = subprocess.run([sys.executable, "-c", PRECISION, quantized], env=env, capture_output=True, text=True, timeout=60,
                          cwd=quantized.parent)
    assert done.stdout.strip() == expected, done.stderr[-2000:]


def test_library_of_the_package_is_loaded(user_output):
    assert Path(user_output["library"]) == Path(user_output["folder"]) / libdir.NAMES.get(sys.platform, "libllama.so")
    assert re.search(r"llama_model_loader: - type +itq3_t: +\d+ tensors", user_output["log"])


def assert_greedy(model: Path, prompt: str, text: str) -> None:
    """Check that llama-completion gives the same text. Flash attention, off by default in llama-cpp-python, sums in another order."""
    options = ("-n", N_TOKENS, "--temp", 0, "-no-cnv", "-sp", "-c", 512, "-t", 1, "-fa", "off")
    log = run_tool("llama-completion", "-m", model, "-p", prompt, *options)
    assert text.strip() and prompt + text in log, (prompt + text, log)


def test_completion_matches_llama_completion(user_output, quantized):
    assert user_output["completion"]["usage"]["completion_tokens"] == N_TOKENS
    text = user_output["completion"]["choices"][0]["text"]
    assert_greedy(quantized, PROMPT, text)
    assert user_output["streamed"] == text


def test_chat_completion_matches_llama_completion(user_output, quantized):
    message = user_output["chat"]["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert "import os" in user_output["prompt"]
    assert_greedy(quantized, user_output["prompt"], message["content"])


@pytest.mark.nightly  # compiles llama.cpp
def test_upstream_types_run_in_unmodified_package(model, tmp_path):
    """PyPI's own libraries run files in upstream types that were encoded with Hessians."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--target", tmp_path / "site"]
    done = subprocess.run([*install, f"llama-cpp-python=={PIN['version']}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("q4_k_m", "iq3_s"):
        quantized = tmp_path / f"model-{name}.gguf"
        quantize(model, quantized, "--type", name, "--effort", "fast")
        user_output = run_user(quantized, PYTHONPATH=str(tmp_path / "site"))
        assert Path(user_output["library"]).is_relative_to(tmp_path / "site")
        assert "ggml_ext" not in user_output["log"]
        assert_greedy(quantized, PROMPT, user_output["completion"]["choices"][0]["text"])


# --- the directory ---


def test_build_without_libllama_is_refused(tmp_path, monkeypatch, lib):
    (tmp_path / lib.path.name).symlink_to(lib.path)
    monkeypatch.setattr("ggml_ext._native.library.load", lambda: type(lib)(tmp_path / lib.path.name))
    with pytest.raises(UserError, match=f"{tmp_path} has no libllama.so, only the libraries of ggml"):
        libdir.find_library_directory()


def test_missing_libraries_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr("ggml_ext._native.library.load", lambda: None)
    assert libdir.main([]) == 1
    assert capsys.readouterr().err == (
        "error: libllama.so was not built with this package: reinstall ggml-ext with a C++ compiler, or from a wheel\n"
    )
