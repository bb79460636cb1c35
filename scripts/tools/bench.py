#!/usr/bin/env python3
"""Compare decode and prefill speed of ggml-ext and upstream types on a synthetic model with Llama-3.2-1B's block shape.

    bench.py [--types itq3_s,q3_k,...] [--baseline q3_k] [--rounds 5] [--threads 2] [--json FILE]

llama-bench runs once per type and round. Types alternate, so that drift of the machine's speed affects all of them. Print the median tokens/s
over the rounds and the median of the ratios to each baseline in the same round. Ratios hold on other machines, tokens/s do not. A type takes
about 10 s per round; the models take 2 GB.
"""
from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

from ggml_ext._base.threads import usable_cores
from ggml_ext._console.cli import run_script
from ggml_ext._evaluation.speed import BenchRunner, measure_speed, summarize_speed
from ggml_ext._native.programs import tool_path
from synth_model import SHAPES, write_model

DEFAULT_TYPES = "itq4_t,itq3_t,itq2_t,itq1h_t,itq1_t,itq3_s,ccq2,ditto3,ditto5,q3_k,iq3_s,iq3_xxs,q2_k,iq2_xxs,q4_k,q5_k,f16"


def print_table(rows: list[dict], baselines: list[str], n_prompt: int) -> None:
    heads = ["type", "decode t/s"] + [f"x {b.upper()}" for b in baselines] + [f"prefill {n_prompt} t/s"] + [f"x {b.upper()}" for b in baselines]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for row in rows:
        cells = [row["type"].upper()]
        for phase in ("decode", "prefill"):
            cells += [f"{row[phase]:.1f}"] + [f"{row[f'{phase}/{b}']:.2f}" for b in baselines]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=DEFAULT_TYPES, help=f"default: {DEFAULT_TYPES}")
    parser.add_argument("--baseline", default="q3_k,iq3_s,q2_k,iq2_xxs",
                        help="types to compute ratios to (default: q3_k,iq3_s,q2_k,iq2_xxs)")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="runs per type (default: 5)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="default: all usable cores")
    parser.add_argument("--prompt", type=int, default=128, help="tokens to prefill (default: 128)")
    parser.add_argument("--gen", type=int, default=32, help="tokens to decode (default: 32)")
    parser.add_argument("--bin", type=Path, help="directory of llama-bench, to compare builds (default: the package's)")
    parser.add_argument("--models", type=Path, help="directory to keep the models in (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write every sample and the summary to this file")
    args = parser.parse_args()
    types, baselines = args.types.lower().split(","), args.baseline.lower().split(",")
    if missing := [b for b in baselines if b not in types]:
        parser.error(f"--baseline {','.join(missing)} is not among --types {args.types}")

    with tempfile.TemporaryDirectory() as tmp:
        directory = args.models or Path(tmp)
        directory.mkdir(parents=True, exist_ok=True)
        models = {}
        for name in types:
            models[name] = directory / f"{args.shape}-{args.layers}-{name}.gguf"
            if not models[name].exists():
                print(f"writing {models[name].name}", file=sys.stderr)
                write_model(name, models[name], args.shape, args.layers)
        program = args.bin / "llama-bench" if args.bin else tool_path("llama-bench")
        bench = BenchRunner(program, args.prompt, args.gen, args.threads)
        samples = measure_speed(models, bench, args.rounds, lambda n: print(f"round {n}/{args.rounds}", file=sys.stderr),
                                warn=lambda text: print(f"warning: {text}", file=sys.stderr))
    rows = summarize_speed(samples, baselines)
    print_table(rows, baselines, args.prompt)
    if args.json:
        args.json.write_text(json.dumps({"machine": platform.processor() or platform.machine(), "threads": args.threads,
                                         "shape": args.shape, "layers": args.layers, "samples": samples,
                                         "summary": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(run_script(main))
