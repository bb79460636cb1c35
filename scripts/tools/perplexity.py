#!/usr/bin/env python3
"""Measure perplexity, KL divergence and top-1 agreement of weight types against the original model.

    perplexity.py [-m MODEL] [-f TEXT] [--types itq3_s,itq3_t+block,q3_k+imatrix,q3_k+full,...] [-c 256] [--chunks 600] [-t N]
                  [--calibration TEXT] [--calibration-chunks 100] [--out DIR] [--baseline FILE] [--update-baseline]

Quantize the model to each type (block weights in the type, embeddings and output matrix Q8_0), score it with llama-perplexity
--kl-divergence and remove it. TYPE+imatrix, TYPE+block and TYPE+full calibrate with a diagonal, block-diagonal or full Hessian of the end of
the text, which is not scored. With another text for that (--calibration, "built-in" for the package's own), the full text is scored. Print a table and write perplexity.json to --out. `ggml-ext evaluate` measures files.

If the baseline has a run of the same model, text, context, chunks and imatrix, every recorded figure must be met within its standard error
(see compare()), else the exit code is 1. A --baseline that lacks the run or a type is an error too.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType

from ggml_ext import WEIGHT_TYPES, __version__
from ggml_ext._base.console import Console
from ggml_ext._base.errors import UserError
from ggml_ext._base.threads import usable_cores
from ggml_ext._calibration import calibration
from ggml_ext._calibration.importance import BUILT_IN
from ggml_ext._console.cli import Parser, run_script
from ggml_ext._evaluation.logits import BaseLogits
from ggml_ext._evaluation.perplexity import PerplexityRunner
from ggml_ext._formats.tensor_types import uses_metric
from ggml_ext._native.programs import require_tool
from ggml_ext._plan.recipes import RECIPES
from perplexity_run import (
    EXT_TYPES,
    IMPORTANCE,
    NEEDS_IMATRIX,
    UPSTREAM_TYPES,
    block_types,
    imatrix,
    quantize_uniform,
    split_text,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL, TEXT = ROOT / "data" / "model-f16.gguf", ROOT / "data" / "heldout.txt"
BASELINE = ROOT / "tests" / "data" / "perplexity_baseline.json"
DEFAULT_TYPES = ",".join(["iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "q4_k", *WEIGHT_TYPES])
END_OF_TEXT = "from the end of the text"
BATCH = 2048  # tokens, as llama-perplexity by default
MIN_TOKENS = 100  # below, llama-perplexity prints no statistics
# figure -> its name in llama-perplexity's log
FIGURES = {"ppl": "Mean PPL(Q)", "ln_ratio": "Mean ln(PPL(Q)/PPL(base))", "kld": "Mean KLD", "same_top": "Same top p"}
TITLES = ["perplexity", "over the base", "ln(PPL / PPL of the base)", "KL divergence", "top-1 agreement, %"]
# by key of IMPORTANCE
IMPORTANCE_TITLES = {None: "", "imatrix": ", with imatrix", "block": ", with block-diagonal Hessians", "full": ", with full Hessians"}
DIGITS = {"ppl": 3, "ln_ratio": 5, "kld": 5, "same_top": 2}  # decimals in the table


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


@dataclass(frozen=True)
class Entry:
    """An entry of --types: a type to quantize to."""

    label: str
    type_name: str
    importance: str | None  # key of IMPORTANCE

    @property
    def title(self) -> str:
        """The name in the table."""
        return self.type_name.upper() + IMPORTANCE_TITLES[self.importance]


def parse_types(text: str) -> list[Entry]:
    entries = []
    for word in text.split(","):
        name, plus, suffix = word.lower().partition("+")
        if name not in (*EXT_TYPES, *UPSTREAM_TYPES) or (plus and suffix not in IMPORTANCE):
            known = ", ".join([*EXT_TYPES, *sorted(UPSTREAM_TYPES)])
            kinds = ", ".join(f"TYPE+{kind}" for kind in IMPORTANCE)
            raise UserError(f"--types: unknown type '{word}'; needed TYPE or {kinds}, with TYPE one of {known}")
        elif plus and suffix != "imatrix" and name not in EXT_TYPES and not uses_metric(GGMLQuantizationType[name.upper()]):
            raise UserError(f"--types: {word}: {name} cannot use a Hessian; needed {name}+imatrix")
        else:
            entries.append(Entry(word.lower(), name, suffix or ("imatrix" if name in NEEDS_IMATRIX else None)))
    labels = [e.label for e in entries]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise UserError(f"--types names {twice[0]} more than once; leave one")
    return entries


def calibration_text(name: str) -> Path:
    """Return the path of a --calibration text."""
    return calibration.TEXT if name == BUILT_IN else Path(name)


def require_file(flag: str, path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{flag} {path}: no such file; name one that exists")


def base_type(model: Path) -> str:
    """Return the type of the block weights of the original model. UserError if it is quantized."""
    weights, _ = block_types(model)
    if not weights:
        raise UserError(f"--model {model}: has no block weights (blk.*); needed a language model in F16, BF16 or F32")
    if quantized := sorted(weights.keys() - {"f16", "bf16", "f32"}):
        raise UserError(f"--model {model}: has block weights in {', '.join(quantized)}; needed F16, BF16 or F32: name its "
                        "source, and measure this file with ggml-ext evaluate")
    return weights.most_common(1)[0][0]


def measure(args: argparse.Namespace, entries: list[Entry]) -> dict:
    """Measure all entries and return the content of perplexity.json.

    A figure is [value, standard error]: `ppl` and `kld` of llama-perplexity, `ln_ratio` = ln(PPL / PPL of the base) with the paired
    standard error, and `same_top` in percent.
    """
    base_name = base_type(args.model)
    model_sha256 = digest(args.model)
    types: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(dir=args.out) as tmp:
        directory = Path(tmp)
        scored, text = (args.file, args.calibration) if args.calibration else split_text(args.file, directory)
        log(f"base: scoring {args.model}")
        runner = PerplexityRunner(program=require_tool("llama-perplexity"), n_ctx=args.ctx_size, n_batch=BATCH, n_threads=args.threads, options=(),
                                  console=Console(), on_estimate=lambda _: None)
        logits = directory / "logits.bin"
        runner.save_logits(args.model, scored, args.chunks, logits)
        base = BaseLogits.read(logits)
        importance, kinds = None, {e.importance for e in entries}
        if kinds != {None}:
            log(f"imatrix {f'from {text}' if args.calibration else END_OF_TEXT}")
            importance = imatrix(args.model, text, directory / "imatrix.gguf", args.ctx_size, args.calibration_chunks, args.threads, kinds)
        for i, entry in enumerate(entries):
            progress = f"[{i + 1}/{len(entries)}] {entry.label}"
            path = directory / "quantized.gguf"
            log(f"{progress}: quantizing")
            quantize_uniform(args.model, path, entry.type_name, imatrix_file=importance if entry.importance else None,
                             kind=entry.importance or "imatrix")
            weights, bpw = block_types(path)
            if entry.type_name not in RECIPES and (others := sorted(weights.keys() - {entry.type_name, base_name, "f32"})):
                log(f"warning: {entry.label}: some block weights are in {', '.join(others)}")
            statistics, _ = runner.compare(path, base)
            types[entry.label] = {
                "title": entry.title, "bpw": bpw, "file_bytes": path.stat().st_size,
                "weights": dict(weights), **{figure: statistics[name] for figure, name in FIGURES.items()}, "statistics": statistics,
            }
            log(f"{progress}: perplexity {statistics['Mean PPL(Q)'].value:.3f}, KL divergence {statistics['Mean KLD'].value:.5f}")
        return {
            "ggml_ext": __version__,
            "flags": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
            "run": {"model_sha256": model_sha256, "text_sha256": digest(args.file), "ctx_size": base.n_ctx,
                    "chunks": base.n_chunks, "imatrix": identify_imatrix(args)},
            "base": {"type": base_name, "bpw": block_types(args.model)[1], "ppl": statistics["Mean PPL(base)"]},
            "types": types,
        }


def identify_imatrix(args: argparse.Namespace) -> str:
    """Identify the imatrix among those of the same model."""
    return f"{args.calibration_chunks} chunks of {digest(args.calibration)}" if args.calibration else END_OF_TEXT


def read_baseline(path: Path) -> list[dict]:
    """The recorded runs: {"run": what the figures depend on, "base": {"ppl": figure}, "types": {label: figures}}."""
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
        assert all({"run", "base", "types"} <= run.keys() for run in runs)
    except (ValueError, TypeError, AttributeError, AssertionError) as e:
        raise UserError(f"--baseline {path}: not a list of recorded runs; name another file, or remove it and pass "
                        "--update-baseline") from e
    return runs


def find_run(runs: list[dict], run: dict) -> dict | None:
    """Return the recorded run with the same inputs; None if there is none."""
    return next((r for r in runs if r["run"] == run), None)


def compare(results: dict, recorded: dict) -> list[str]:
    """Return a line for every figure that differs from the baseline by more than the recorded standard error.

    Better figures count too: left unrecorded they would hide a later loss. The text is the same and the quantizers are deterministic, so
    only the order of float sums differs. Tiled GEMM against vec_dot changes figures by at most 0.27 standard errors, a lost rotation by dozens.
    """
    lines = []
    for label, baseline in [("base", recorded["base"]), *recorded["types"].items()]:
        measured = results["base"] if label == "base" else results["types"].get(label)
        if measured is None:
            continue
        for figure in baseline:
            value, (expected, error) = measured[figure][0], baseline[figure]
            if abs(value - expected) > error:
                lines.append(f"{label}: {figure} is {value:.6g}, recorded {expected:.6g} +- {error:.2g}; find out what changed "
                             "it, or record it with --update-baseline")
    return lines


def update_baseline(path: Path, runs: list[dict], results: dict) -> None:
    """Record the figures of the run. Types that it did not measure stay."""
    recorded = find_run(runs, results["run"])
    if recorded is None:
        recorded = {"run": results["run"], "base": {}, "types": {}}
        runs.append(recorded)
    recorded["base"] = {"ppl": results["base"]["ppl"]}
    for label, row in results["types"].items():
        recorded["types"][label] = {figure: row[figure] for figure in FIGURES}
    recorded["types"] = dict(sorted(recorded["types"].items()))
    write_json(path, runs)


def write_json(path: Path, content: list | dict) -> None:
    """Replace a file in one step, with each figure on one line."""
    text = json.dumps(content, indent=1, allow_nan=False)
    part = path.with_name(path.name + ".part")
    part.write_text(re.sub(r"\[\s+([^\s,\[{]+),\s+([^\s\]]+)\s+\]", r"[\1, \2]", text) + "\n", "utf-8")
    os.replace(part, path)


def markdown(results: dict) -> str:
    """Format a table with a row for the base and each type, every figure with its standard error."""
    def line(name: str, row: dict) -> list[str]:
        over = f"{100 * (row['ppl'][0] / base['ppl'][0] - 1):.1f} %"
        figures = [f"{row[f][0]:.{n}f} +- {row[f][1]:.{n}f}" if f in row else "" for f, n in DIGITS.items()]
        return [name, f"{row['bpw']:.4g}", figures[0], over, *figures[1:]]

    run, base = results["run"], results["base"]
    lines = [["type", "bpw of the blocks", *TITLES], ["---"] * (2 + len(TITLES)), line(base["type"].upper(), base)]
    lines += [line(row["title"], row) for row in results["types"].values()]
    heading = (f"{Path(results['flags']['model']).name}, {Path(results['flags']['file']).name}: {run['chunks']} chunks of "
               f"{run['ctx_size']} tokens; ggml-ext {results['ggml_ext']}; figures with llama-perplexity's standard errors; those "
               "after the perplexity are paired.")
    return heading + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="perplexity.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", type=Path, default=MODEL, help="GGUF file in F16, BF16 or F32 (default: the reference model)")
    add("-f", "--file", type=Path, default=TEXT, help="text to score (default: data/heldout.txt)")
    add("--types", default=DEFAULT_TYPES,
        help=f"comma-separated TYPE, TYPE+imatrix, TYPE+block or TYPE+full (default: {DEFAULT_TYPES})")
    add("-c", "--ctx-size", type=int, default=256, help="tokens per chunk, of which the second half is scored (default: 256)")
    add("--chunks", type=int, default=600, help="maximum number of chunks to score, -1 for all (default: 600)")
    add("-t", "--threads", type=int, default=usable_cores(), help="default: all usable cores")
    add("--calibration", type=calibration_text, metavar="TEXT", help='text to compute the imatrix from; "built-in": the text in the package')
    add("--calibration-chunks", type=int, default=100, metavar="N", help="maximum number of chunks for the imatrix (default: 100)")
    add("--out", type=Path, default=ROOT / "build" / "perplexity", help="directory for the results (default: build/perplexity)")
    add("--baseline", type=Path, help="file of recorded runs, which must have this run and all its types (default: "
        "tests/data/perplexity_baseline.json, where both may be missing)")
    add("--update-baseline", action="store_true", help="record this run in the baseline file instead of comparing")
    return parser


def check(args: argparse.Namespace) -> list[Entry]:
    """Return the entries to measure; UserError for everything that would fail only after hours."""
    for flag, path in (("--model", args.model), ("--file", args.file), ("--calibration", args.calibration)):
        if path is not None:
            require_file(flag, path)
    if args.baseline and not args.update_baseline:
        require_file("--baseline", args.baseline)
    if args.ctx_size < 2:
        raise UserError(f"--ctx-size {args.ctx_size}: needed at least 2 tokens")
    # a token has at least one byte, except for the special ones at both ends
    if (size := args.file.stat().st_size) < 2 * args.ctx_size - 2:
        raise UserError(f"--file {args.file}: has {size} bytes, needed at least {2 * args.ctx_size} tokens: name a longer text or "
                        "a smaller --ctx-size")
    least = -(-MIN_TOKENS // max(1, args.ctx_size - 1 - args.ctx_size // 2))
    if args.chunks != -1 and args.chunks < least:
        raise UserError(f"--chunks {args.chunks}: needed at least {least} chunks of {args.ctx_size} tokens, or -1 for all: "
                        f"llama-perplexity gives no statistics on fewer than {MIN_TOKENS} scored tokens")
    if args.threads < 1:
        raise UserError(f"--threads {args.threads}: needed at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    return parse_types(args.types)


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    entries = check(args)
    baseline = args.baseline or BASELINE
    runs = read_baseline(baseline) if baseline.exists() else []
    results = measure(args, entries)
    write_json(args.out / "perplexity.json", results)
    print(markdown(results), end="", flush=True)
    log(f"results: {args.out / 'perplexity.json'}")
    recorded = find_run(runs, results["run"])
    if args.update_baseline:
        update_baseline(baseline, runs, results)
        log(f"recorded in {baseline}")
        return
    if recorded is None:
        finding = f"--baseline {baseline}: has no run of {results['run']}"
    else:
        if lines := compare(results, recorded):
            raise UserError("\nerror: ".join(lines))
        missing = ", ".join(sorted(results["types"].keys() - recorded["types"].keys()))
        finding = f"--baseline {baseline}: has no figures of {missing}" if missing else None
        log(f"all recorded figures agree with {baseline}")
    if finding:
        finding += "; record with --update-baseline"
        if args.baseline:
            raise UserError(finding)
        log(f"not compared: {finding}")


if __name__ == "__main__":
    sys.exit(run_script(main))
