"""Run the quantizers, llama-imatrix and llama-perplexity for scripts and tests."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ggml_ext import WEIGHT_TYPES
from ggml_ext._evaluation.figures import Figure, parse_perplexity
from ggml_ext._evaluation.logits import BaseLogits
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._native.programs import tool_path
from ggml_ext._plan.file_types import FP4_FILES
from ggml_ext._plan.recipes import RECIPES

Result = TypeVar("Result")

# Upstream type -> file type that makes it with --pure. IQ2_S would make IQ2_XS, and Q2_K_S, which makes Q2_K too, needs an imatrix.
UPSTREAM_TYPES = {name: name.upper() for name in (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs",
    "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "q1_0", "q2_0", *FP4_FILES,
)} | {"iq2_s": "IQ2_M"}
EXT_TYPES = (*WEIGHT_TYPES, *RECIPES)
MADE_BY_GGML_EXT = (*EXT_TYPES, *FP4_FILES)  # llama-quantize has no --type for them
# llama-quantize refuses them without an imatrix, or they are poor
NEEDS_IMATRIX = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")
# one type for all block weights, so that files differ in nothing else
UNIFORM = ("--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0")
SCORED = 0.83  # share of a text that is scored, from its beginning; the rest is for calibration


def last_lines(log: str) -> str:
    return " / ".join(log.strip().splitlines()[-3:])


def run_logged(title: str, *command) -> str:
    """Return standard output and error of a command; RuntimeError with its last lines if it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        log.seek(0)
        text = log.read()
    if done.returncode:
        raise RuntimeError(f"{title} exited with {done.returncode}: " + last_lines(text))
    return text


def run_tool(program: str | list, *args) -> str:
    """Run a program of the package, or another command, with run_logged()."""
    command = [tool_path(program)] if isinstance(program, str) else program
    return run_logged(Path(command[-1]).name, *command, *args)


def run_perplexity(what: str, parse: Callable[[str], Result | None], model: Path, n_ctx: int, threads: int, *args,
                   program: list | None = None) -> Result:
    """Run llama-perplexity and parse its log; RuntimeError if parse() returns None or the log has an error.

    program: command that starts llama-perplexity (default: the package's).
    """
    log = run_tool(program or "llama-perplexity", "-m", model, "-c", n_ctx, "-t", threads, *args)
    # the exit code is 0 after these errors
    if errors := re.findall(r"^\S+ E ((?:perplexity|kl_divergence)\s*: .*)", log, re.M):
        raise RuntimeError(f"llama-perplexity on {model}: " + " / ".join(errors))
    if (result := parse(log)) is None:
        raise RuntimeError(f"llama-perplexity gave no {what} for {model}; it ends with " + last_lines(log))
    return result


def perplexity(model: Path, text: Path, n_ctx: int = 256, n_chunks: int = 600, threads: int = 2,
               program: list | None = None) -> Figure:
    """Measure the perplexity of a model on a text; RuntimeError if llama-perplexity fails or gives no final estimate."""
    return run_perplexity("final estimate", parse_perplexity, model, n_ctx, threads, "-f", text, "--chunks", n_chunks, program=program)


def save_base_logits(model: Path, text: Path, out: Path, n_ctx: int, n_chunks: int, threads: int, *args) -> BaseLogits:
    """Run the model on the text and write its log-probabilities to `out`, completely or not at all. args: further options."""
    part = out.with_name(out.name + ".part")

    def has_header(_: str) -> bool | None:
        return (part.exists() and part.stat().st_size >= BaseLogits.HEADER.size) or None

    try:
        run_perplexity("logits", has_header, model, n_ctx, threads, "-f", text, "--chunks", n_chunks,
                       "--kl-divergence-base", part, *args)
        BaseLogits.read(part)
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    return BaseLogits.read(out)


def split_text(text: Path, directory: Path) -> tuple[Path, Path]:
    """Split a text into the part to score and the part for calibration, as files in `directory`."""
    content = text.read_bytes().decode("utf-8", "surrogateescape")
    cut = int(len(content) * SCORED)
    scored, rest = directory / "scored.txt", directory / "rest.txt"
    for path, part in (scored, content[:cut]), (rest, content[cut:]):
        path.write_bytes(part.encode("utf-8", "surrogateescape"))
    return scored, rest


# suffix of TYPE+suffix -> --importance
IMPORTANCE = {"imatrix": "diagonal", "block": "block", "full": "full"}


def imatrix(model: Path, text: Path, out: Path, n_ctx: int = 256, n_chunks: int = 100, threads: int = 2,
            kinds: Iterable[str | None] = ()) -> Path:
    """Compute the imatrix of a text, with the Hessian that these keys of IMPORTANCE need."""
    moments = next((["--moments", kind] for kind in ("full", "block") if kind in kinds), [])
    run_tool("llama-imatrix", "-m", model, "-f", text, "-o", out, "-c", n_ctx, "--chunks", n_chunks, "-t", threads, *moments)
    return out


def quantize_with_ggml_ext(model: Path, out: Path, type_name: str, *options: str, echo: bool = False) -> None:
    """Run python -m ggml_ext.quantize; with `echo` show its command line and messages."""
    args = ["-m", "ggml_ext.quantize", str(model), str(out), "--type", type_name, "--force", *options]
    if echo:
        print(" ".join(["$ python", *args]).replace(f"{Path.cwd()}{os.sep}", ""), flush=True)
        subprocess.run([sys.executable, *args], check=True)
    else:
        run_logged("ggml_ext.quantize", sys.executable, *args)


def quantize_uniform(model: Path, out: Path, type_name: str, *options: str, imatrix_file: Path | None = None,
                     kind: str = "imatrix", echo: bool = False) -> Path:
    """Quantize all block weights to one type, embeddings and output matrix to Q8_0.

    Args:
        options: further options of ggml-ext quantize.
        kind: key of IMPORTANCE; with block and full, ggml-ext makes upstream types too, otherwise llama-quantize.
    """
    importance = ["--imatrix", str(imatrix_file)] if imatrix_file else []
    if type_name in MADE_BY_GGML_EXT or kind != "imatrix":
        importance += ["--importance", IMPORTANCE[kind]] if imatrix_file else ["--importance", "none"]
        quantize_with_ggml_ext(model, out, UPSTREAM_TYPES.get(type_name, type_name), *UNIFORM, "--quiet", *importance, *options, echo=echo)
    else:
        run_tool("llama-quantize", *UNIFORM, *importance, model, out, UPSTREAM_TYPES.get(type_name, type_name.upper()))
    return out


def block_types(path: Path) -> tuple[Counter[str], float]:
    """Count the block weights of a GGUF file by type, and compute their bits per weight."""
    matrices = [t for t in GGUFFile(path).tensors if t.name.startswith("blk.") and t.n_rows > 1]
    weights: Counter[str] = Counter()
    for t in matrices:
        weights[t.type.name.lower()] += t.n_elements
    return weights, 8 * sum(t.n_bytes for t in matrices) / max(1, weights.total())
