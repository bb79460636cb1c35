#!/usr/bin/env python3
"""How fast do programs generate while others use the CPU? Median tokens/s, and each program's share of its own speed on the quiet machine.

    busy.py MODEL.gguf [MODEL.gguf ...] [--competitors 0,1,2] [--threads 2] [--rounds 5] [--with NAME=LLAMA-BENCH ...] [-- LLAMA-BENCH OPTIONS]

A competitor is an endless loop. The programs take turns in each round. --with adds another build's llama-bench: --with "passive=env
OMP_WAIT_POLICY=passive /usr/bin/llama-bench".
"""
from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ggml_ext._base.errors import UserError
from ggml_ext._console.cli import run_script
from ggml_ext._native.programs import require_tool

N_TOKENS = 24
SECONDS = 60  # per run: spinning threads may need minutes for one token


@contextlib.contextmanager
def competitors(n: int) -> Iterator[None]:
    """Keep n CPUs busy during the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def tokens_per_second(command: list[str], model: Path, n_threads: int, options: list[str]) -> float:
    """Run llama-bench once; 0 if it takes longer than SECONDS."""
    try:
        done = subprocess.run([*command, "-m", model, "-t", str(n_threads), "-r", "1", "-o", "json", *options], capture_output=True, text=True,
                              timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 0.0
    if done.returncode:
        raise UserError(f"{shlex.join(command)} failed for {model}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)[-1]["avg_ts"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--competitors", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="NAME=LLAMA-BENCH")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:split])
    options = arguments[split + 1 :] or ["-p", "0", "-n", str(N_TOKENS)]
    commands = {"ggml-ext": [str(require_tool("llama-bench"))]}
    commands |= {name: shlex.split(command) for name, _, command in (text.partition("=") for text in args.others)}
    print("| model | competitors |", " | ".join(commands), "|")
    print("| --- " * (2 + len(commands)) + "|")
    for model in args.models:
        quiet: dict[str, float] = {}
        for n in args.competitors:
            speeds: dict[str, list[float]] = {name: [] for name in commands}
            for _ in range(args.rounds):
                for name, command in commands.items():
                    with competitors(n):
                        speeds[name].append(tokens_per_second(command, model, args.threads, options))
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            quiet = quiet or medians
            cells = [f"{value:.1f}, {100*value/quiet[name]:.0f} %" if quiet[name] else f"{value:.1f}" for name, value in medians.items()]
            print(f"| {model.name} | {n} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
