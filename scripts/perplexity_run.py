"""Runs llama-quantize and llama-perplexity for scripts and tests."""
from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ggml_ext._tools import tool_path

# With --pure, the name of a file type is not that of its tensors: Q3_K_S makes Q3_K.
FILE_TYPES = {"q3_k": "Q3_K_S", "q2_k": "Q2_K_S", "q4_k": "Q4_K_S"}
# refused, or poor, without an importance matrix
NEEDS_IMATRIX = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")


@dataclass
class Perplexity:
    value: float
    error: float  # the tool's standard error


def run_tool(name: str | list, *args, timeout: float = 3600) -> str:
    """Standard output and error of a program of the package, or of another command; RuntimeError with its last lines if
    it fails.

    Output goes to a file: through a pipe llama-perplexity sometimes loses its last lines.
    """
    with tempfile.TemporaryFile("w+") as log:
        command = [tool_path(name)] if isinstance(name, str) else name
        done = subprocess.run([*map(str, command), *map(str, args)], stdout=log, stderr=subprocess.STDOUT, timeout=timeout)
        log.seek(0)
        text = log.read()
    if done.returncode:
        raise RuntimeError(f"{Path(command[-1]).name} exited with {done.returncode}: " + " / ".join(text.strip().splitlines()[-3:]))
    return text


ATTEMPTS = 3  # llama-perplexity now and then exits with 0 before its log thread has written the last lines


def perplexity(model: Path, text: Path, n_ctx: int = 256, n_chunks: int = 600, threads: int = 2,
               program: str | list = "llama-perplexity") -> Perplexity:
    """llama-perplexity of a model on a text; RuntimeError if it fails or gives no final estimate."""
    for _ in range(ATTEMPTS):
        log = run_tool(program, "-m", model, "-f", text, "-c", n_ctx, "--chunks", n_chunks, "-t", threads)
        if found := re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", log):
            return Perplexity(float(found[1]), float(found[2]))
    raise RuntimeError(f"llama-perplexity gave no final estimate for {model} in {ATTEMPTS} runs")


def imatrix(model: Path, text: Path, out: Path, n_chunks: int = 100) -> Path:
    """Importance matrix from the end of a text of which the beginning is scored."""
    tail = out.with_suffix(".txt")
    content = text.read_text(encoding="utf-8")
    tail.write_text(content[int(len(content) * 0.83):], encoding="utf-8")
    run_tool("llama-imatrix", "-m", model, "-f", tail, "-o", out, "-c", 256, "--chunks", n_chunks)
    return out


def quantize_stock(model: Path, out: Path, type_name: str, imatrix_file: Path | None = None) -> Path:
    """A file whose block matrices are all of one stock type, embeddings Q8_0."""
    options = ["--imatrix", imatrix_file] if imatrix_file else []
    run_tool("llama-quantize", "--pure", "--token-embedding-type", "q8_0", *options, model, out,
             FILE_TYPES.get(type_name, type_name).upper())
    return out
