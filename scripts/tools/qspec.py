#!/usr/bin/env python3
"""What --act-prec, --spec-type qspec and the draft-free methods cost and gain on one file, beside the paper QSPEC's figures.

    qspec.py -m MODEL.gguf --code FILE --prose FILE [--json OUT.json] [--markdown OUT.md] [--only columns,acceptance,speed,quality]

columns     the time of a batch of 1 to 32 tokens against one of one token, for both precisions (llama-bench)
acceptance  of drafts by position, for 2 to 7 drafts: activations of 8 bits, and of 4 by GGML_EXT_ACT_BITS, which only rounds
speed       tokens a second with 1, 8, 16 and 32 busy slots (llama-server), greedily
quality     perplexity, and KL divergence from precise activations (llama-perplexity)

One thread, and processor time in place of the clock: both hold on a busy machine. Speeds are those of the
tokens after the first; prompts are excerpts of the texts. Takes some 15 minutes for a model of 135 million weights.
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
# Paper QSPEC, weights of 4 bits (Atom), drafts with activations of 4: Llama-3.2-3B for speeds (averages of table 4, A100, and of
# table 5, L20), Llama-3-8B-Instruct for perplexity (table 3), both for acceptance (section 4.3).
PAPER = {
    "speed-up of QSPEC over 16 bits": {"A100": {8: 1.50, 16: 1.24, 32: 1.23}, "L20": {8: 1.33, 16: 1.27, 32: 1.24}},
    "perplexity": {"16 bits": 7.87, "4 bits": 8.6},
    "acceptance at 7 drafts": 0.70,
}


@contextlib.contextmanager
def environment(**values) -> Iterator[None]:
    """For the programs started within it."""
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- batches -----------------------------------------------------------------------------------------------------------

def batch_costs(model: Path, rounds: int) -> dict[str, dict[int, float]]:
    """Microseconds of a batch of each of COLUMNS tokens at the beginning of a context, for each precision."""
    def seconds(kind: str, n: int, repetitions: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        with environment(LLAMA_ARG_ACT_PREC=kind):
            run_tool("llama-bench", "-m", model, "-p", n, "-n", 0, "-t", 1, "-r", repetitions, "-o", "json")
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    return {kind: {n: 1e6 * (seconds(kind, n, 1 + rounds) - seconds(kind, n, 1)) / rounds for n in COLUMNS} for kind in ("q8", "f16")}


# --- llama-server ------------------------------------------------------------------------------------------------------

def excerpts(text: Path, n: int, n_chars: int) -> list[str]:
    """n pieces of a text, from beginnings of lines at equal distances."""
    content = text.read_text(errors="replace")
    if len(content) < n * n_chars:
        raise UserError(f"{text}: {len(content)} characters, {n * n_chars} needed")
    starts = [content.find("\n", i * (len(content) - 2 * n_chars) // n) + 1 for i in range(n)]
    return [content[start : start + n_chars] for start in starts]


def complete(url: Address, prompts: list[str], n_tokens: int) -> int:
    """Completes all at once; the number of tokens made."""
    def ask(prompt: str) -> int:
        body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)["tokens_predicted"]

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return sum(pool.map(ask, prompts))


def processor_seconds(url: Address) -> float:
    """Of the server's process so far, all its threads."""
    fields = Path(f"/proc/{url.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(model: Path, slots: int, n_tokens: int, *args):
    """A server with room for prompts of excerpts() and n_tokens more in each slot."""
    return running_server(model, "--parallel", slots, "--ctx-size", slots * (512 + n_tokens), "--threads", 1, "--threads-batch", 1,
                          "--threads-http", 4, "--no-webui", "--metrics", "--no-warmup", *args, seconds=600)


def acceptance(model: Path, text: Path, gamma: int, n_prompts: int, n_tokens: int) -> dict:
    """Of each draft position the share of rounds in which it was accepted, and the mean of tokens a round; the text's greedy."""
    with serve(model, 4, n_tokens, "--spec-type", "qspec", "--spec-draft-n-max", gamma) as url:
        complete(url, excerpts(text, n_prompts, 600), n_tokens)
        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            found = dict(re.findall(r"^llamacpp:(spec_decode\S+) (\S+)$", answer.read().decode(), re.M))
    rounds = float(found["spec_decode_num_drafts_total"])
    by_position = [float(found.get(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}', 0)) / rounds for i in range(gamma)]
    return {"rounds": rounds, "by position": by_position, "tokens a round": 1 + sum(by_position),
            "rate": float(found["spec_decode_num_accepted_tokens_total"]) / float(found["spec_decode_num_draft_tokens_total"])}


def speed(model: Path, text: Path, slots: int, n_tokens: int, rounds: int, method: str) -> float:
    """Tokens a second of processor time after the first token; the median over the rounds."""
    prompts = excerpts(text, slots, 600)
    found = []
    with serve(model, slots, n_tokens, *METHODS[method]) as url:
        complete(url, prompts[:1], 2)  # loads what is read once
        for _ in range(rounds):
            at = [processor_seconds(url)]
            made = []
            for n in (1, n_tokens):
                made.append(complete(url, prompts, n))
                at.append(processor_seconds(url))
            found.append((made[1] - made[0]) / ((at[2] - at[1]) - (at[1] - at[0])))
    return statistics.median(found)


# --- quality -----------------------------------------------------------------------------------------------------------

def quality(model: Path, text: Path, n_chunks: int, threads: int) -> dict[str, dict[str, float]]:
    """Perplexity and mean KL divergence from precise activations, with each kind of activations."""
    kinds = {"f16": {"LLAMA_ARG_ACT_PREC": "f16"}, "q8": {"LLAMA_ARG_ACT_PREC": "q8"},
             "4 bits": {"LLAMA_ARG_ACT_PREC": "q8", "GGML_EXT_ACT_BITS": 4}}
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        with environment(**kinds["f16"]):
            base = save_base_logits(model, text, Path(folder) / "base.bin", 512, n_chunks, threads)
        for kind, variables in kinds.items():
            with environment(**variables):
                found = kl_divergence(model, base, threads)
            out[kind] = {name: found[name].value for name in ("Mean PPL(Q)", "Mean KLD", "Same top p")}
    return out


# --- tables ------------------------------------------------------------------------------------------------------------

def table(heads: list, rows: list[list]) -> str:
    text = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in (heads, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (text[0], ["---"] * len(heads), *text[1:])) + "\n"


def expected_gain(costs: dict[str, dict[int, float]], tokens_a_round: float, gamma: int) -> float:
    """QSPEC over plain decoding with precise activations, by the cost of its batches: a draft is one token with cheap ones."""
    draft, verify, plain = costs["q8"][1], costs["f16"][gamma + 1], costs["f16"][1]
    return plain * tokens_a_round / (gamma * draft + verify)


def markdown(found: dict) -> str:
    out = []
    if costs := found.get("columns"):
        out.append(f"Time of a batch against one token with 8 bits ({costs['q8'][1] / 1000:.2f} ms):\n\n" + table(
            ["activations", *(str(n) for n in COLUMNS)],
            [[kind, *(of[n] / costs["q8"][1] for n in COLUMNS)] for kind, of in costs.items()]))
    if accepted := found.get("acceptance"):
        rows = []
        for key, by_gamma in accepted.items():
            for gamma, a in by_gamma.items():
                gain = [expected_gain(found["columns"], a["tokens a round"], gamma)] if costs else []
                rows.append([key, gamma, " ".join(f"{x:.3f}" for x in a["by position"]), f"{a['rate']:.3f}", a["tokens a round"], *gain])
        out.append("Share of rounds in which a draft was accepted, by position; the paper has "
                   f"{PAPER['acceptance at 7 drafts']:.2f} of the drafts at 7 with 4 bits:\n\n" + table(
                       ["text, bits of drafts", "drafts", "by position", "of all", "tokens a round", *(["x f16 expected"] if costs else [])], rows))
    for text, methods in found.get("speed", {}).items():
        slots = list(next(iter(methods.values())))
        rows = [[name, *(f"{of[n]:.0f} ({of[n] / methods['q8'][n]:.2f})" for n in slots)] for name, of in methods.items()]
        rows += [[f"QSPEC over 16 bits, the paper's {gpu}", *(f"({of[n]:.2f})" if n in of else "" for n in slots)]
                 for gpu, of in PAPER["speed-up of QSPEC over 16 bits"].items()]
        if "QSPEC" in methods and "f16" in methods:
            rows.append(["QSPEC over f16, here", *(f"({methods['QSPEC'][n] / methods['f16'][n]:.2f})" for n in slots)])
        out.append(f"Tokens a second of processor time on {text}, and against q8, by busy slots:\n\n" + table(["method", *slots], rows))
    for text, kinds in found.get("quality", {}).items():
        paper = {"f16": PAPER["perplexity"]["16 bits"], "4 bits": PAPER["perplexity"]["4 bits"]}
        out.append(f"Activations on {text}:\n\n" + table(
            ["activations", "perplexity", "KL divergence from f16", "same top token", "the paper's perplexity"],
            [[kind, f"{q['Mean PPL(Q)']:.3f}", f"{q['Mean KLD']:.5f}", f"{q['Same top p']:.1f} %", paper.get(kind, "")] for kind, q in kinds.items()]))
    return "\n".join(out)


def check_study_build() -> None:
    """The 4-bit rows are of activations that only a build for tests rounds; any other would show 8 bits as 4."""
    found = [p for p in library.load().path.parent.glob("libggml-cpu*") if b"GGML_EXT_ACT_BITS" in p.read_bytes()]
    if not found:
        raise UserError("--only quality,acceptance: the installed build does not know GGML_EXT_ACT_BITS, which their 4-bit rows need; "
                        "build with -C cmake.define.GGML_EXT_TESTS=ON, or leave both parts out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True, help="a text of source code")
    parser.add_argument("--prose", type=Path, required=True, help="a text of another kind")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas (default: all)")
    parser.add_argument("--methods", default=",".join(METHODS), help="of speed (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=50, help="of columns (default: %(default)s)")
    parser.add_argument("--gammas", default=",".join(map(str, GAMMAS)), help="of acceptance (default: %(default)s)")
    parser.add_argument("--slots", default=",".join(map(str, SLOTS)), help="of speed (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="to make of each prompt (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="of acceptance, of each text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of speed (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=12, help="of quality, of 512 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of quality (default: all processors)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    parts = args.only.split(",")
    methods = args.methods.split(",")
    for name, known in [(p, PARTS) for p in parts] + [(m, METHODS) for m in methods]:
        if name not in known:
            raise UserError(f"{name}: unknown; there are {', '.join(known)}")
    for path in (args.model, args.code, args.prose):
        if not path.is_file():
            raise UserError(f"{path}: no such file")
    if {"quality", "acceptance"} & {*parts}:
        check_study_build()
    texts = {"code": args.code, "prose": args.prose}
    slots = [int(n) for n in args.slots.split(",")]
    gammas = [int(n) for n in args.gammas.split(",")]
    found: dict = {"model": args.model.name, "paper": PAPER}

    def keep(what: str) -> None:
        print(what, file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))

    if "columns" in parts:
        found["columns"] = batch_costs(args.model, args.batches)
        keep("columns")
    if "acceptance" in parts:
        found["acceptance"] = {}
        for text, path in texts.items():
            for bits, variables in {8: {}, 4: {"GGML_EXT_ACT_BITS": 4}}.items():
                of = found["acceptance"].setdefault(f"{text}, {bits}", {})
                for gamma in gammas:
                    with environment(**variables):
                        of[gamma] = acceptance(args.model, path, gamma, args.prompts, args.tokens)
                    keep(f"acceptance on {text}, {bits} bits, {gamma} drafts")
    if "speed" in parts:
        found["speed"] = {text: {method: {} for method in methods} for text in texts}
        for n in slots:
            for text, path in texts.items():
                for method in methods:
                    found["speed"][text][method][n] = speed(args.model, path, n, args.tokens, args.rounds, method)
                    keep(f"speed on {text}, {n} slots, {method}")
    if "quality" in parts:
        found["quality"] = {}
        for text, path in texts.items():
            found["quality"][text] = quality(args.model, path, args.chunks, args.threads)
            keep(f"quality on {text}")
    result = markdown(found)
    print(result)
    if args.markdown:
        args.markdown.write_text(result)


if __name__ == "__main__":
    sys.exit(run_script(main))
