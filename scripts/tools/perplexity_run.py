"""Runs the quantizers, llama-imatrix and llama-perplexity for scripts and tests."""
from __future__ import annotations

import math
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from ggml_ext import WEIGHT_TYPES
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._native.programs import tool_path
from ggml_ext._plan.recipes import RECIPES

Result = TypeVar("Result")

# Stock types -> name of the file type (ftype) that makes them with --pure: IQ2_S would make IQ2_XS. Q2_K_S, which makes Q2_K
# too, would ask for an importance matrix.
STOCK_TYPES = {name: name.upper() for name in (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs",
    "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0",
)} | {"iq2_s": "IQ2_M"}
OUR_TYPES = (*WEIGHT_TYPES, *RECIPES)
# refused, or poor, without an importance matrix
NEEDS_IMATRIX = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")
# One type for the matrices of the blocks, so that files differ in nothing else
UNIFORM = ("--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0")
SCORED = 0.83  # the part of a text that is scored: its beginning; the rest is for the importance matrix


class Figure(NamedTuple):
    """A figure of llama-perplexity."""

    value: float
    error: float | None = None  # the tool's standard error, if it gives one


def last_lines(log: str) -> str:
    return " / ".join(log.strip().splitlines()[-3:])


def run_logged(title: str, *command) -> str:
    """Standard output and error of a command; RuntimeError with its last lines if it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        log.seek(0)
        text = log.read()
    if done.returncode:
        raise RuntimeError(f"{title} exited with {done.returncode}: " + last_lines(text))
    return text


def run_tool(program: str | list, *args) -> str:
    """run_logged() of a program of the package, by its name, or of another command."""
    command = [tool_path(program)] if isinstance(program, str) else program
    return run_logged(Path(command[-1]).name, *command, *args)


def run_perplexity(what: str, parse: Callable[[str], Result | None], model: Path, n_ctx: int, threads: int, *args,
                   program: list | None = None) -> Result:
    """What parse() finds in the log of llama-perplexity; RuntimeError if that stays None, or the log tells of an error.

    program: the command that starts llama-perplexity, by default the package's.
    """
    log = run_tool(program or "llama-perplexity", "-m", model, "-c", n_ctx, "-t", threads, *args)
    # Such errors end it, or with another vocabulary not even that, and the exit code is 0.
    if errors := re.findall(r"^\S+ E ((?:perplexity|kl_divergence)\s*: .*)", log, re.M):
        raise RuntimeError(f"llama-perplexity on {model}: " + " / ".join(errors))
    if (found := parse(log)) is None:
        raise RuntimeError(f"llama-perplexity gave no {what} for {model}; it ends with " + last_lines(log))
    return found


def perplexity(model: Path, text: Path, n_ctx: int = 256, n_chunks: int = 600, threads: int = 2,
               program: list | None = None) -> Figure:
    """Perplexity of a model on a text; RuntimeError if llama-perplexity fails or gives no final estimate."""
    def parse(log: str) -> Figure | None:
        found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", log)
        return Figure(float(found[1]), float(found[2])) if found else None

    return run_perplexity("final estimate", parse, model, n_ctx, threads, "-f", text, "--chunks", n_chunks, program=program)


@dataclass(frozen=True)
class BaseLogits:
    """A file of llama-perplexity --kl-divergence-base: tokens of the text, and the model's log-probabilities in 16 bits."""

    path: Path
    n_ctx: int
    n_vocab: int
    n_chunks: int  # fewer than asked for where the text is short

    HEADER = struct.Struct("<8sIii")

    @classmethod
    def read(cls, path: Path) -> BaseLogits:
        """RuntimeError if the file is not complete: the program does not notice a full disk."""
        with path.open("rb") as file:
            header = file.read(cls.HEADER.size)
        if len(header) < cls.HEADER.size or not header.startswith(b"_logits_"):
            raise RuntimeError(f"{path} holds no logits: remove it and run again")
        logits = cls(path, *cls.HEADER.unpack(header)[1:])
        found, needed = path.stat().st_size, logits.n_bytes()
        if found != needed:
            raise RuntimeError(f"{path} has {found:,} bytes, needed {needed:,}: its disk is full or it is damaged; free space or "
                               "name another folder, and remove it")
        return logits

    def n_bytes(self) -> int:
        """Size of a complete file: a row is n_vocab values, padded to an even count, and two floats."""
        row = 2 * (2 * ((self.n_vocab + 1) // 2) + 4)
        return self.HEADER.size + self.n_chunks * (4 * self.n_ctx + (self.n_ctx - 1 - self.n_ctx // 2) * row)


def save_base_logits(model: Path, text: Path, out: Path, n_ctx: int, n_chunks: int, threads: int) -> BaseLogits:
    """Runs the model on the text and keeps its log-probabilities in `out`, which is complete or not there."""
    part = out.with_name(out.name + ".part")

    def started(_: str) -> bool | None:
        return (part.exists() and part.stat().st_size >= BaseLogits.HEADER.size) or None

    try:
        run_perplexity("logits", started, model, n_ctx, threads, "-f", text, "--chunks", n_chunks,
                       "--kl-divergence-base", part)
        BaseLogits.read(part)
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    return BaseLogits.read(out)


def parse_statistics(log: str) -> dict[str, Figure] | None:
    """All lines of the statistics by their names, such as "Mean KLD", shares in percent; None if the last one is missing."""
    body = log.partition("====== Perplexity statistics ======")[2]
    lines = re.findall(r"^ *(\S.*?) *: +(-?[\w.]+)(?: ± +(-?[\w.]+))? ?%?$", body, re.M)
    found = {" ".join(name.split()): Figure(float(value), float(error) if error else None) for name, value, error in lines}
    return found if "Same top p" in found else None


def kl_divergence(model: Path, base: BaseLogits, threads: int) -> dict[str, Figure]:
    """llama-perplexity --kl-divergence: parse_statistics() of a model against the base.

    RuntimeError if a figure is missing or no number, as it is for a model whose logits are NaN.
    """
    found = run_perplexity("statistics", parse_statistics, model, base.n_ctx, threads, "--kl-divergence",
                           "--kl-divergence-base", base.path)
    for name, figure in found.items():
        if not math.isfinite(figure.value):
            raise RuntimeError(f"llama-perplexity on {model}: {name} is {figure.value}")
        # A model against itself: the variance of the difference is 0, or by rounding less, and its root then NaN.
        if figure.error is not None and math.isnan(figure.error):
            found[name] = Figure(figure.value, 0.0)
    return found


def split_text(text: Path, folder: Path) -> tuple[Path, Path]:
    """The part of a text to score and the one for the importance matrix, as files in folder."""
    content = text.read_bytes().decode("utf-8", "surrogateescape")
    cut = int(len(content) * SCORED)
    scored, rest = folder / "scored.txt", folder / "rest.txt"
    for path, part in (scored, content[:cut]), (rest, content[cut:]):
        path.write_bytes(part.encode("utf-8", "surrogateescape"))
    return scored, rest


# What a type is made with, as in TYPE+imatrix -> --importance: llama-imatrix's diagonal, second moments of blocks of 256 inputs or
# of whole inputs
IMPORTANCE = {"imatrix": "diagonal", "block": "block", "full": "full"}


def imatrix(model: Path, text: Path, out: Path, n_ctx: int = 256, n_chunks: int = 100, threads: int = 2,
            kinds: Iterable[str | None] = ()) -> Path:
    """Importance matrix of a model on a text that is not scored, with the moments that some of these keys of IMPORTANCE need."""
    moments = next((["--moments", kind] for kind in ("full", "block") if kind in kinds), [])
    run_tool("llama-imatrix", "-m", model, "-f", text, "-o", out, "-c", n_ctx, "--chunks", n_chunks, "-t", threads, *moments)
    return out


def quantize_ours(model: Path, out: Path, type_name: str, *options: str, echo: bool = False) -> None:
    """python -m ggml_ext.quantize; with echo it shows its command line and its messages."""
    args = ["-m", "ggml_ext.quantize", str(model), str(out), "--type", type_name, "--force", *options]
    if echo:
        print(" ".join(["$ python", *args]).replace(f"{Path.cwd()}{os.sep}", ""), flush=True)
        subprocess.run([sys.executable, *args], check=True)
    else:
        run_logged("ggml_ext.quantize", sys.executable, *args)


def quantize_uniform(model: Path, out: Path, type_name: str, *options: str, imatrix_file: Path | None = None,
                     kind: str = "imatrix", echo: bool = False) -> Path:
    """A file whose block matrices are all of one type, embeddings and output matrix Q8_0. options: of our quantizer.

    kind: key of IMPORTANCE, what is used of the importance matrix; with block and full our quantizer makes stock types too.
    """
    importance = ["--imatrix", str(imatrix_file)] if imatrix_file else []
    if type_name in OUR_TYPES or kind != "imatrix":
        importance += ["--importance", IMPORTANCE[kind]] if imatrix_file else ["--importance", "none"]
        quantize_ours(model, out, STOCK_TYPES.get(type_name, type_name), *UNIFORM, "--quiet", *importance, *options, echo=echo)
    else:
        run_tool("llama-quantize", *UNIFORM, *importance, model, out, STOCK_TYPES.get(type_name, type_name.upper()))
    return out


def block_types(path: Path) -> tuple[Counter[str], float]:
    """Matrices of the blocks of a GGUF file: number of weights per type, and bits a weight. UserError if it is no GGUF file."""
    matrices = [t for t in GGUFFile(path).tensors if t.name.startswith("blk.") and t.n_rows > 1]
    weights: Counter[str] = Counter()
    for t in matrices:
        weights[t.type.name.lower()] += t.n_elements
    return weights, 8 * sum(t.n_bytes for t in matrices) / max(1, weights.total())
