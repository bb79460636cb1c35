#!/usr/bin/env python3
"""Measure files of ggml-ext by the protocol of a table that others published, unattended: download, quantize, evaluate, write a page.

    peers.py llama31-8b --out DIR [-ngl 99]     Llama-3.1-8B-Instruct, perplexity of wikitext-2 in windows of 8,192 (QTIP, EvoPress)
    peers.py qwen3-8b --out DIR                 Qwen3-8B, the same in windows of 2,048
    peers.py qwen38-27b --out DIR               Qwen3.8-27B, KL divergence on 8 x 8,192 tokens of OpenWebText (qbench of exllamav3)
    peers.py NAME --out DIR --model FILE.gguf --text FILE -c 512 --chunks 8     the same steps with another model and text, without network

Model and text come from the Hugging Face hub (HF_TOKEN for gated models; the text needs pyarrow). The model is converted to a 16-bit GGUF file and
quantized to each type with --propagate; for perplexity embeddings and output matrix keep 16 bits, as in those tables. Each file is measured and removed.
results.json and results.md in --out have all figures. To resume an interrupted run, repeat the command: finished types are skipped.

docs/results/peers.md has the published figures, and what differs between the protocols.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggml_ext import __version__
from ggml_ext._base.errors import UserError
from ggml_ext._base.files import check_free_space
from ggml_ext._base.threads import usable_cores
from ggml_ext._base.units import GIB
from ggml_ext._console.cli import Parser, run_script
from ggml_ext._evaluation.figures import Figure, chunk_sums, compare_paired, kld_sums, parse_statistics, top_sums
from ggml_ext._evaluation.labels import disk_bytes, model_bpw
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._native.text_file import count_tokens
from ggml_ext._source.hub import Repo, explain_errors
from perplexity import digest, log, require_file, write_json
from perplexity_run import BaseLogits, block_types, run_perplexity, save_base_logits

ORIGINAL = "original"
TOKENS = "tokenizer.ggml.tokens"
SIXTEEN_BITS = ("--token-embedding-type", "bf16", "--output-tensor-type", "bf16")
TYPES = "itq2_t,q2_k,itq3_t,q3_k_m,itq4_t,q4_k_m"
SHARE = 0.35  # of the original's size: a file of at most five bits


@dataclass(frozen=True)
class HubText:
    """A data set of the hub, whose rows are joined by two newlines. revision: None for main. keeps_empty: rows without text count too."""

    repo: str
    file: str
    revision: str | None
    keeps_empty: bool


@dataclass(frozen=True)
class Protocol:
    """What is measured.

    Attributes:
        repo: model on the hub.
        n_ctx: tokens per window; a multiple of 256, to which llama.cpp rounds contexts.
        n_chunks: windows; None for the complete text.
        is_kld: KL divergence in the second half of each window, else perplexity of all tokens.
        options: of quantize, for what the others leave in 16 bits.
    """

    repo: str
    text: HubText
    n_ctx: int
    n_chunks: int | None
    is_kld: bool
    options: Sequence[str]


WIKITEXT = HubText("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet", None, True)
OPENWEBTEXT = HubText("stas/openwebtext-10k", "plain_text/train/0000.parquet", "refs/convert/parquet", False)
PROTOCOLS = {
    "llama31-8b": Protocol("meta-llama/Llama-3.1-8B-Instruct", WIKITEXT, 8192, None, False, SIXTEEN_BITS),
    "qwen3-8b": Protocol("Qwen/Qwen3-8B", WIKITEXT, 2048, None, False, SIXTEEN_BITS),
    "qwen38-27b": Protocol("Qwen/Qwen3.8-27B", OPENWEBTEXT, 8192, 8, True, ()),
}


def fetch_text(text: HubText, path: Path) -> Path:
    """Download a data set and write its rows as one text. UserError if a package is missing."""
    if missing := [name for name in ("huggingface_hub", "pyarrow") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{text.repo} needs {' and '.join(missing)}: pip install huggingface-hub pyarrow, or pass --text FILE")
    from huggingface_hub import hf_hub_download
    from pyarrow import parquet

    with explain_errors(Repo(text.repo, text.revision, None)):
        file = hf_hub_download(text.repo, text.file, repo_type="dataset", revision=text.revision)
    rows = parquet.read_table(file, columns=["text"]).column("text").to_pylist()
    part = path.with_name(path.name + ".part")
    part.write_text("\n\n".join(row for row in rows if text.keeps_empty or row.strip()), encoding="utf-8", newline="\n")
    os.replace(part, path)
    return path


def hub_bytes(repo: str) -> int:
    """Return the size of a repository's safetensors."""
    from huggingface_hub import HfApi

    with explain_errors(Repo(repo, None, None)):
        files = HfApi().model_info(repo, files_metadata=True).siblings or ()
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))


def run_quantize(*args: object) -> None:
    """Run ggml-ext quantize and show its messages; it resumes what an interrupted run left."""
    command = ["quantize", *map(str, args)]
    log("$ ggml-ext " + shlex.join(command))
    subprocess.run([sys.executable, "-m", "ggml_ext", *command], check=True)


@dataclass(frozen=True)
class Measurement:
    """The settings of the runs of llama-perplexity. n_chunks: windows to score; logits: of the original, for the KL divergence."""

    protocol: Protocol
    text: Path
    n_chunks: int
    logits: BaseLogits | None
    threads: int
    devices: Sequence[str]

    def measure(self, model: Path) -> dict[str, Any]:
        """Return the cumulative sums over windows of a model's figures, and its sizes."""
        file = GGUFFile(model)
        weights, layer_bpw = block_types(model)
        without_embeddings = sum(t.n_bytes for t in file.tensors if t.name != "token_embd.weight")
        sizes = {"bytes": disk_bytes(file), "bytes_without_embeddings": without_embeddings, "bpw": model_bpw(file), "layers_bpw": layer_bpw, "weights": dict(weights)}
        return sizes | (self._all_tokens(model) if self.logits is None else self._divergence(model, self.logits))

    def _all_tokens(self, model: Path) -> dict[str, Any]:
        """Score each token of each window but the first.

        llama-perplexity's strided mode with a stride of a window without one token does this; it adds half of the stride to the context, and
        its windows overlap by one token.
        """
        n, stride = self.protocol.n_ctx, self.protocol.n_ctx - 1

        def parse(output: str) -> list[float] | None:
            return sums if len(sums := chunk_sums(output)) == self.n_chunks else None

        more = ["-f", self.text, "--chunks", self.n_chunks, "--ppl-stride", stride, "-b", min(2048, n // 2), *self.devices]
        return {"ppl": run_perplexity("perplexity of all windows", parse, model, n - stride // 2, self.threads, *more)}

    def _divergence(self, model: Path, logits: BaseLogits) -> dict[str, Any]:
        def parse(output: str) -> dict[str, Any] | None:
            if (statistics := parse_statistics(output)) is None:
                return None
            sums = {"ln_ratio": chunk_sums(output), "kld": kld_sums(output), "top": top_sums(output)}
            return {**sums, "statistics": {name: list(figure) for name, figure in statistics.items()}}

        return run_perplexity("statistics", parse, model, logits.n_ctx, self.threads, "--kl-divergence", "--kl-divergence-base", logits.path, *self.devices)


def mean(sums: Sequence[float]) -> Figure:
    """Return mean and standard error over windows of a figure's cumulative sums."""
    return compare_paired(sums, [0.0] * len(sums)) or Figure(sums[-1])


def page(name: str, results: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    run, files = results["run"], results["files"]
    scored = "the second half of each scored" if run["is_kld"] else "all tokens but the first of each scored"
    titles = ["KL divergence", "median", "top-1 agreement, %"] if run["is_kld"] else ["perplexity", f"ln(PPL / PPL of the {ORIGINAL})"]
    lines = [
        f"# {name}", "",
        f"{run['model']} on {run['text']} (SHA-256 `{run['text_sha256']}`): {run['chunks']} windows of {run['n_ctx']:,} tokens, {scored}. ggml-ext {results['ggml_ext']}. "
        f"Standard errors over windows; differences from the {ORIGINAL} are paired. Options of all files: `{shlex.join(run['options'])}`.", "",
        "| file | GiB | without embeddings | bits per weight, layers | all tensors | " + " | ".join(titles) + " |", "| --- " * (5 + len(titles)) + "|",
    ]
    for label, row in files.items():
        if run["is_kld"]:
            kld, top = mean(row["kld"]), mean(row["top"])
            figures = [f"{kld.value:.5f} +- {kld.error or 0:.5f}", f"{row['statistics']['Median KLD'][0]:.5f}", f"{top.value:.2f} +- {top.error or 0:.2f}"]
        else:
            ln_ppl = mean(row["ppl"])
            figures = [f"{math.exp(ln_ppl.value):.4f} +- {math.exp(ln_ppl.value) * (ln_ppl.error or 0):.4f}", ""]
            if label != ORIGINAL and ORIGINAL in files and (ratio := compare_paired(row["ppl"], files[ORIGINAL]["ppl"])):
                figures[1] = f"{ratio.value:+.5f} +- {ratio.error:.5f}"
        sizes = " | ".join(f"{row[key] / GIB:.3f}" for key in ("bytes", "bytes_without_embeddings"))
        lines.append(f"| {label} | {sizes} | {row['layers_bpw']:.3f} | {row['bpw']:.3f} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def check_disk(args: argparse.Namespace, original_bytes: int, made: bool, logits_bytes: int) -> None:
    """Raise UserError if --out has no room for the 16-bit file (if it is to be made), two quantized files and the logits; quantize checks the rest."""
    needed = original_bytes * (made + 2 * SHARE) + logits_bytes
    check_free_space(args.out, needed, f"{args.name} in --out", "", "name another --out")


def read_results(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Return the results of an interrupted run, or empty ones. UserError if they are of other settings."""
    if not path.exists():
        return {"ggml_ext": __version__, "run": run, "files": {}}
    results = json.loads(path.read_text())
    if changed := [key for key in run if results["run"].get(key) != run[key]]:
        raise UserError(f"{path} has results with {changed[0]} {results['run'].get(changed[0])}, now {run[changed[0]]}: name another --out, or remove it")
    return results


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("name", choices=PROTOCOLS, help="protocol")
    add("--out", type=Path, required=True, help="directory for files and results")
    add("--model", type=Path, help="16-bit GGUF file, in place of the model of the hub")
    add("--text", type=Path, help="text, in place of the data set of the hub")
    add("-c", "--ctx-size", type=int, help="tokens per window, a multiple of 256")
    add("--chunks", type=int, help="windows to score")
    add("--types", default=TYPES, help=f"types to quantize to (default: {TYPES})")
    add("--options", default="--propagate", help="options of ggml-ext quantize for all files: --options=... (default: --propagate)")
    add("--keep", action="store_true", help="keep the quantized files")
    add("-t", "--threads", type=int, default=usable_cores())
    add("-ngl", "--n-gpu-layers", help="layers to keep in GPU memory")
    return parser


def check(args: argparse.Namespace) -> Protocol:
    """Return the protocol with the settings of the command line; UserError for what would fail only after hours."""
    for flag, path in (("--model", args.model), ("--text", args.text)):
        if path is not None:
            require_file(flag, path)
    protocol = PROTOCOLS[args.name]
    protocol = replace(protocol, n_ctx=args.ctx_size or protocol.n_ctx, n_chunks=args.chunks or protocol.n_chunks)
    if protocol.n_ctx % 256 or protocol.n_ctx < 256:
        raise UserError(f"--ctx-size {protocol.n_ctx}: needed a multiple of 256")
    if protocol.n_chunks is not None and protocol.n_chunks < 2:
        raise UserError(f"--chunks {protocol.n_chunks}: needed at least 2 for a standard error")
    args.out.mkdir(parents=True, exist_ok=True)
    return protocol


def count_windows(protocol: Protocol, model: Path, text: Path) -> int:
    """Return the number of complete windows of the text, at most n_chunks. UserError if there are fewer."""
    n_tokens = count_tokens(model, text, sys.maxsize // 32)
    if n_tokens is None:
        raise UserError(f"{model}: libllama cannot read its vocabulary")
    n, wanted = n_tokens // protocol.n_ctx, protocol.n_chunks or 2
    if n < wanted:
        raise UserError(f"--text {text}: has {n_tokens:,} tokens, {wanted} windows of {protocol.n_ctx:,} need {wanted * protocol.n_ctx:,}")
    return protocol.n_chunks or n


def prepare(args: argparse.Namespace, protocol: Protocol) -> tuple[Path, Path]:
    """Return the 16-bit model and the text, after downloading them."""
    text, model = args.text or args.out / "text.txt", args.model or args.out / "original.gguf"
    if not text.exists():
        fetch_text(protocol.text, text)
    if not model.exists():
        check_disk(args, hub_bytes(protocol.repo), True, 0)
        run_quantize("--hf-repo", protocol.repo, model, "--type", "bf16")
    return model, text


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    protocol, out = check(args), args.out / "results.json"
    model, text = prepare(args, protocol)
    devices = ["-ngl", args.n_gpu_layers] if args.n_gpu_layers else []
    options = [*protocol.options, *shlex.split(args.options)]
    n_chunks = count_windows(protocol, model, text)
    results = read_results(out, {
        "model": protocol.repo if args.model is None else model.name, "text": protocol.text.repo if args.text is None else text.name,
        "text_sha256": digest(text), "n_ctx": protocol.n_ctx, "chunks": n_chunks, "is_kld": protocol.is_kld, "options": options,
    })
    logits = args.out / "logits.bin"
    n_bytes = BaseLogits(logits, protocol.n_ctx, len(GGUFFile(model).strings(TOKENS) or []), n_chunks).n_bytes() if protocol.is_kld else 0
    check_disk(args, model.stat().st_size, False, 0 if logits.exists() else n_bytes)
    write_json(out, results)  # before the logits, so that they are not reused with other settings
    base = None
    if protocol.is_kld:
        base = BaseLogits.read(logits) if logits.exists() else save_base_logits(model, text, logits, protocol.n_ctx, n_chunks, args.threads, *devices)
    measurement = Measurement(protocol, text, n_chunks, base, args.threads, devices)
    for label in [*([] if protocol.is_kld else [ORIGINAL]), *args.types.split(",")]:
        if label in results["files"]:
            log(f"{label}: finished in an earlier run")
            continue
        file = model if label == ORIGINAL else args.out / f"{label}.gguf"
        if not file.exists():
            run_quantize(model, file, "--type", label, "-t", args.threads, *devices, *options)
        log(f"{label}: measuring {n_chunks} windows of {protocol.n_ctx} tokens")
        results["files"][label] = measurement.measure(file)
        write_json(out, results)
        (args.out / "results.md").write_text(page(args.name, results), encoding="utf-8")
        if label != ORIGINAL and not args.keep:
            file.unlink()
    print(page(args.name, results), end="")


if __name__ == "__main__":
    sys.exit(run_script(main))
