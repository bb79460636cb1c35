#!/usr/bin/env python3
"""Measure the cost and gain of --act-prec, --spec-type qspec and n-gram drafts on a model, next to the QSPEC paper's figures.

    qspec.py -m MODEL.gguf --code FILE --prose FILE [--json OUT.json] [--markdown OUT.md] [--only columns,acceptance,speed,quality]

columns     time of a batch of 1 to 32 tokens relative to one token, for both precisions (llama-bench)
acceptance  acceptance rate by draft position for 2 to 7 drafts, with 8-bit activations and with 4-bit ones (GGML_EXT_ACT_BITS rounds them)
speed       tokens/s with 1, 8, 16 and 32 busy slots, greedy sampling (llama-server)
quality     perplexity, and KL divergence from precise activations (llama-perplexity)

Programs run with one thread and are measured in CPU time, which other load on the machine disturbs less. Speeds exclude the first token. Prompts
are excerpts of the texts. All parts take about 15 minutes for a model of 135 million weights.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import resource
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ggml_ext._base.errors import UserError
from ggml_ext._base.threads import usable_cores
from ggml_ext._console.cli import run_script
from ggml_ext._native import library
from perplexity_run import kl_divergence, run_tool, save_base_logits
from server import Address, running_server

PARTS = ("columns", "acceptance", "speed", "quality")
COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
GAMMAS = (2, 3, 4, 5, 6, 7)
SLOTS = (1, 8, 16, 32)
QSPEC_GAMMA = 3  # the paper's
METHODS = {
    "q8": ("--act-prec", "q8"),
    "f16": ("--act-prec", "f16"),
    "QSPEC": ("--spec-type", "qspec", "--spec-draft-n-max", QSPEC_GAMMA),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-simple-4-6": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", 4, "--spec-ngram-simple-size-m", 6),
    "ngram-map-k": ("--spec-type", "ngram-map-k"),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "ngram-cache": ("--spec-type", "ngram-cache"),
}
# The QSPEC paper with 4-bit weights (Atom) and 4-bit activations of drafts. Speeds: Llama-3.2-3B, means of table 4 (A100) and table 5 (L20).
# Perplexity: Llama-3-8B-Instruct, table 3. Acceptance: both models, section 4.3.
PAPER = {
    "speed-up of QSPEC over 16 bits": {"A100": {8: 1.50, 16: 1.24, 32: 1.23}, "L20": {8: 1.33, 16: 1.27, 32: 1.24}},
    "perplexity": {"16 bits": 7.87, "4 bits": 8.6},
    "acceptance at 7 drafts": 0.70,
}


@contextlib.contextmanager
def environment(**values) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
    saved = dict(os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


# --- batches -----------------------------------------------------------------------------------------------------------

def batch_costs(model: Path, rounds: int) -> dict[str, dict[int, float]]:
    """Measure the microseconds of a batch of each of COLUMNS tokens in an empty context, for each precision."""
    def cpu_seconds(kind: str, n: int, repetitions: int) -> float:
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        with environment(LLAMA_ARG_ACT_PREC=kind):
            run_tool("llama-bench", "-m", model, "-p", n, "-n", 0, "-t", 1, "-r", repetitions, "-o", "json")
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start

    return {kind: {n: 1e6 * (cpu_seconds(kind, n, 1 + rounds) - cpu_seconds(kind, n, 1)) / rounds for n in COLUMNS} for kind in ("q8", "f16")}


# --- llama-server ------------------------------------------------------------------------------------------------------

def excerpts(text: Path, n: int, n_chars: int) -> list[str]:
    """Cut n excerpts from a text at equal distances, each from the start of a line."""
    content = text.read_text(errors="replace")
    if len(content) < n * n_chars:
        raise UserError(f"{text}: has {len(content)} characters, needed {n * n_chars}; name a longer text")
    starts = [content.find("\n", i * (len(content) - 2 * n_chars) // n) + 1 for i in range(n)]
    return [content[start : start + n_chars] for start in starts]


def complete(url: Address, prompts: list[str], n_tokens: int) -> int:
    """Complete all prompts at the same time; return the number of generated tokens."""
    def ask(prompt: str) -> int:
        body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)["tokens_predicted"]

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return sum(pool.map(ask, prompts))


def server_cpu_seconds(url: Address) -> float:
    """Return the CPU time that all threads of the server have used."""
    fields = Path(f"/proc/{url.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(model: Path, slots: int, n_tokens: int, *args):
    """Start a server whose slots fit a prompt of excerpts() and n_tokens more."""
    return running_server(model, "--parallel", slots, "--ctx-size", slots * (512 + n_tokens), "--threads", 1, "--threads-batch", 1,
                          "--threads-http", 4, "--no-webui", "--metrics", "--no-warmup", *args, seconds=600)


def acceptance(model: Path, text: Path, gamma: int, n_prompts: int, n_tokens: int) -> dict:
    """Measure the acceptance rate by draft position and the mean number of tokens per round, with greedy sampling."""
    with serve(model, 4, n_tokens, "--spec-type", "qspec", "--spec-draft-n-max", gamma) as url:
        complete(url, excerpts(text, n_prompts, 600), n_tokens)
        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            metrics = dict(re.findall(r"^llamacpp:(spec_decode\S+) (\S+)$", answer.read().decode(), re.M))
    rounds = float(metrics["spec_decode_num_drafts_total"])
    by_position = [float(metrics.get(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}', 0)) / rounds for i in range(gamma)]
    return {"rounds": rounds, "by position": by_position, "tokens a round": 1 + sum(by_position),
            "rate": float(metrics["spec_decode_num_accepted_tokens_total"]) / float(metrics["spec_decode_num_draft_tokens_total"])}


def speed(model: Path, text: Path, slots: int, n_tokens: int, rounds: int, method: str) -> float:
    """Measure tokens per second of CPU time without each prompt's first token; the median over the rounds."""
    prompts = excerpts(text, slots, 600)
    speeds = []
    with serve(model, slots, n_tokens, *METHODS[method]) as url:
        complete(url, prompts[:1], 2)  # warm up
        for _ in range(rounds):
            times, counts = [server_cpu_seconds(url)], []
            for n in (1, n_tokens):
                counts.append(complete(url, prompts, n))
                times.append(server_cpu_seconds(url))
            speeds.append((counts[1] - counts[0]) / ((times[2] - times[1]) - (times[1] - times[0])))
    return statistics.median(speeds)


# --- quality -----------------------------------------------------------------------------------------------------------

def quality(model: Path, text: Path, n_chunks: int, threads: int) -> dict[str, dict[str, float]]:
    """Measure perplexity and the KL divergence from precise activations, for each precision of activations."""
    kinds = {"f16": {"LLAMA_ARG_ACT_PREC": "f16"}, "q8": {"LLAMA_ARG_ACT_PREC": "q8"},
             "4 bits": {"LLAMA_ARG_ACT_PREC": "q8", "GGML_EXT_ACT_BITS": 4}}
    results = {}
    with tempfile.TemporaryDirectory() as tmp:
        with environment(**kinds["f16"]):
            base = save_base_logits(model, text, Path(tmp) / "base.bin", 512, n_chunks, threads)
        for kind, variables in kinds.items():
            with environment(**variables):
                figures = kl_divergence(model, base, threads)
            results[kind] = {name: figures[name].value for name in ("Mean PPL(Q)", "Mean KLD", "Same top p")}
    return results


# --- tables ------------------------------------------------------------------------------------------------------------

def format_table(heads: list, rows: list[list]) -> str:
    text = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in (heads, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (text[0], ["---"] * len(heads), *text[1:])) + "\n"


def expected_gain(costs: dict[str, dict[int, float]], tokens_per_round: float, gamma: int) -> float:
    """Estimate QSPEC's speed relative to decoding with precise activations from the cost of its batches."""
    draft, verify, plain = costs["q8"][1], costs["f16"][gamma + 1], costs["f16"][1]
    return plain * tokens_per_round / (gamma * draft + verify)


def markdown(results: dict) -> str:
    sections = []
    if costs := results.get("columns"):
        sections.append(f"Time of a batch relative to one token with 8-bit activations ({costs['q8'][1] / 1000:.2f} ms):\n\n" + format_table(
            ["activations", *(str(n) for n in COLUMNS)],
            [[kind, *(times[n] / costs["q8"][1] for n in COLUMNS)] for kind, times in costs.items()]))
    if accepted := results.get("acceptance"):
        rows = []
        for key, by_gamma in accepted.items():
            for gamma, a in by_gamma.items():
                gain = [expected_gain(costs, a["tokens a round"], gamma)] if costs else []
                rows.append([key, gamma, " ".join(f"{x:.3f}" for x in a["by position"]), f"{a['rate']:.3f}", a["tokens a round"], *gain])
        sections.append("Share of rounds in which a draft was accepted, by position; the paper reports "
                        f"{PAPER['acceptance at 7 drafts']:.2f} of all drafts for 7 drafts with 4-bit activations:\n\n" + format_table(
                            ["text, bits of drafts", "drafts", "by position", "of all", "tokens per round",
                             *(["x f16 expected"] if costs else [])], rows))
    for text, methods in results.get("speed", {}).items():
        slots = list(next(iter(methods.values())))
        rows = [[name, *(f"{speeds[n]:.0f} ({speeds[n] / methods['q8'][n]:.2f})" for n in slots)] for name, speeds in methods.items()]
        rows += [[f"QSPEC over 16 bits, the paper's {gpu}", *(f"({ratios[n]:.2f})" if n in ratios else "" for n in slots)]
                 for gpu, ratios in PAPER["speed-up of QSPEC over 16 bits"].items()]
        if "QSPEC" in methods and "f16" in methods:
            rows.append(["QSPEC over f16, here", *(f"({methods['QSPEC'][n] / methods['f16'][n]:.2f})" for n in slots)])
        sections.append(f"Tokens per second of CPU time on {text} and the ratio to q8, by busy slots:\n\n" + format_table(["method", *slots], rows))
    for text, kinds in results.get("quality", {}).items():
        paper = {"f16": PAPER["perplexity"]["16 bits"], "4 bits": PAPER["perplexity"]["4 bits"]}
        sections.append(f"Activations on {text}:\n\n" + format_table(
            ["activations", "perplexity", "KL divergence from f16", "top-1 agreement", "the paper's perplexity"],
            [[kind, f"{q['Mean PPL(Q)']:.3f}", f"{q['Mean KLD']:.5f}", f"{q['Same top p']:.1f} %", paper.get(kind, "")] for kind, q in kinds.items()]))
    return "\n".join(sections)


def check_study_build() -> None:
    """Raise UserError unless the build has GGML_EXT_ACT_BITS: other builds ignore it, and the 4-bit rows would have 8 bits."""
    libraries = [p for p in library.load().path.parent.glob("libggml-cpu*") if b"GGML_EXT_ACT_BITS" in p.read_bytes()]
    if not libraries:
        raise UserError("--only quality,acceptance: the installed build lacks GGML_EXT_ACT_BITS, which the 4-bit rows need; "
                        "build with -C cmake.define.GGML_EXT_TESTS=ON, or measure the other parts only")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True, help="text of source code")
    parser.add_argument("--prose", type=Path, required=True, help="text of prose")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts (default: all)")
    parser.add_argument("--methods", default=",".join(METHODS), help="speed: methods (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=50, help="columns: batches per size (default: %(default)s)")
    parser.add_argument("--gammas", default=",".join(map(str, GAMMAS)), help="acceptance: numbers of drafts (default: %(default)s)")
    parser.add_argument("--slots", default=",".join(map(str, SLOTS)), help="speed: numbers of busy slots (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="acceptance and speed: tokens to generate per prompt (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="acceptance: prompts per text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="speed: rounds (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=12, help="quality: chunks of 512 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="quality: threads (default: all usable cores)")
    parser.add_argument("--json", type=Path, help="write the figures to this file, also while running")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    parts = args.only.split(",")
    methods = args.methods.split(",")
    for name, known in [(p, PARTS) for p in parts] + [(m, METHODS) for m in methods]:
        if name not in known:
            raise UserError(f"{name}: unknown; needed one of {', '.join(known)}")
    for path in (args.model, args.code, args.prose):
        if not path.is_file():
            raise UserError(f"{path}: no such file")
    if {"quality", "acceptance"} & {*parts}:
        check_study_build()
    texts = {"code": args.code, "prose": args.prose}
    slots = [int(n) for n in args.slots.split(",")]
    gammas = [int(n) for n in args.gammas.split(",")]
    results: dict = {"model": args.model.name, "paper": PAPER}

    def save(step: str) -> None:
        print(step, file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))

    if "columns" in parts:
        results["columns"] = batch_costs(args.model, args.batches)
        save("columns")
    if "acceptance" in parts:
        results["acceptance"] = {}
        for text, path in texts.items():
            for bits, variables in {8: {}, 4: {"GGML_EXT_ACT_BITS": 4}}.items():
                by_gamma = results["acceptance"].setdefault(f"{text}, {bits}", {})
                for gamma in gammas:
                    with environment(**variables):
                        by_gamma[gamma] = acceptance(args.model, path, gamma, args.prompts, args.tokens)
                    save(f"acceptance on {text}, {bits} bits, {gamma} drafts")
    if "speed" in parts:
        results["speed"] = {text: {method: {} for method in methods} for text in texts}
        for n in slots:
            for text, path in texts.items():
                for method in methods:
                    results["speed"][text][method][n] = speed(args.model, path, n, args.tokens, args.rounds, method)
                    save(f"speed on {text}, {n} slots, {method}")
    if "quality" in parts:
        results["quality"] = {}
        for text, path in texts.items():
            results["quality"][text] = quality(args.model, path, args.chunks, args.threads)
            save(f"quality on {text}")
    text = markdown(results)
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    sys.exit(run_script(main))
