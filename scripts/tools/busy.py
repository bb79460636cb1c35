#!/usr/bin/env python3
"""How fast do programs generate while others use the CPU? Median tokens/s, and each program's share of its own speed on the quiet machine.

    busy.py MODEL.gguf [MODEL.gguf ...] [--competitors 0,1,2,4,bursts,server] [--threads 2] [--rounds 5] [--with NAME=LLAMA-BENCH ...] [-- LLAMA-BENCH OPTIONS]

Competitors are endless loops, or `bursts`: two programs that compute for 3 ms and sleep for 7, or `server`: a llama-server that generates
from the same model with as many threads. The programs take turns in each round. --with adds another build's llama-bench: --with "passive=env
OMP_WAIT_POLICY=passive /usr/bin/llama-bench".
"""
from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shlex
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ggml_ext._base.errors import UserError
from ggml_ext._console.cli import run_script
from ggml_ext._native.programs import require_tool
from server import running_server

N_TOKENS = 24
SECONDS = 20  # per run: spinning threads may need minutes for one token

LOOP = "while True: pass"
BURSTS = """
import time
while True:
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end: pass
    time.sleep(0.007)
"""


@contextlib.contextmanager
def running(commands: list[list[str]]) -> Iterator[None]:
    """Run programs during the block."""
    programs = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def wait_for_answer(request: urllib.request.Request) -> None:
    """Wait until the server answers or is stopped."""
    with contextlib.suppress(OSError, http.client.HTTPException), urllib.request.urlopen(request) as answer:
        answer.read()


@contextlib.contextmanager
def generating_server(model: Path, n_threads: int) -> Iterator[None]:
    """Run a llama-server that generates without end during the block."""
    with running_server(model, "--threads", n_threads, "--ctx-size", 4096) as url:
        body = json.dumps({"prompt": "Once upon a time", "n_predict": -1, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/completion", body, {"Content-Type": "application/json"})
        threading.Thread(target=wait_for_answer, args=[request], daemon=True).start()
        yield


def competing(kind: str, model: Path, n_threads: int) -> contextlib.AbstractContextManager[None]:
    """Run the competitors of --competitors during the block."""
    if kind == "server":
        return generating_server(model, n_threads)
    script, n = (BURSTS, 2) if kind == "bursts" else (LOOP, int(kind))
    return running([[sys.executable, "-c", script]] * n)


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
    parser.add_argument("--competitors", type=lambda text: text.split(","), default=["0", "1", "2"])
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
        for kind in args.competitors:
            speeds: dict[str, list[float]] = {name: [] for name in commands}
            for _ in range(args.rounds):
                for name, command in commands.items():
                    with competing(kind, model, args.threads):
                        speeds[name].append(tokens_per_second(command, model, args.threads, options))
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            quiet = quiet or medians
            cells = [f"{value:.1f}, {100*value/quiet[name]:.0f} %" if quiet[name] else f"{value:.1f}" for name, value in medians.items()]
            print(f"| {model.name} | {kind} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
