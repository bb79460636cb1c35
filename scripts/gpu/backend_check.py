"""What metal_check.py and vulkan_check.py share: the whole check of a backend of llama.cpp's, but for what is special to one."""
from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from check_run import LOG_TOLERANCE, N_CHUNKS, OURS, ROOT, Failed, Run

TARGETS = ["test-backend-ops", "llama-bench", "llama-perplexity", "llama-quantize"]
STOCK = ["q3_K", "iq3_s", "iq2_xxs", "q4_K", "q5_K"]
STEPS = ["build", "ops", "graph", "speed"]
N_ROUNDS = 3
BATCHES = [1, 2, 4, 8, 512]  # decoding, few columns at once, a prompt


@dataclass(frozen=True)
class Backend:
    """name: in messages and file names; option: of CMake; device: as llama.cpp names the first one; check: Failed if the backend cannot
    be used at all, else figures; environment: what the report says of the machine."""

    name: str
    option: str
    device: str
    check: Callable[[Run], dict]
    environment: Callable[[], dict]


def build(run: Run, backend: Backend) -> dict:
    run.command("cmake", "-S", ROOT, "-B", run.build, "-G", "Ninja", f"-D{backend.option}=ON", "-DGGML_EXT_TESTS=ON", "-DGGML_RPC=OFF",
                "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_OPENSSL=OFF", "-DGGML_EXT_UI=OFF", f"-DPython_EXECUTABLE={sys.executable}")
    run.command("cmake", "--build", run.build, "--parallel", os.cpu_count(), "--target", *TARGETS)
    return {}


def list_devices(run: Run) -> tuple[str, str]:
    """What llama-bench lists, and its log. Failed if the device is not among it."""
    done = subprocess.run([run.tool("llama-bench"), "--list-devices"], capture_output=True, text=True, timeout=300)
    if run.device not in done.stdout:
        raise Failed(f"no device {run.device}: {(done.stdout + done.stderr)[-1000:]}")
    return done.stdout.strip(), done.stderr


def backend_ops(run: Run, name: str) -> dict:
    """Upstream's test-backend-ops, every case of one type on the GPU against the CPU."""
    out = re.sub(r"\x1b\[[\d;]*m", "", run.command(run.tool("test-backend-ops"), "test", "-b", run.device, "-p", f"={name}[,)]"))
    counts = {op: len(re.findall(rf"^\s*{op}\(.*OK", out, re.M)) for op in ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS")}
    if missing := [op for op, n in counts.items() if not n]:
        raise Failed(f"no case of {', '.join(missing)} was run")
    return counts


def perplexity(run: Run, file: Path, device: str, ubatch: int, n_chunks: int) -> float:
    from perplexity_run import perplexity as measure

    # llama.cpp's tools read options from such variables
    program = ["env", f"LLAMA_ARG_DEVICE={device}", "LLAMA_ARG_N_GPU_LAYERS=99", f"LLAMA_ARG_UBATCH={ubatch}", str(run.tool("llama-perplexity"))]
    return measure(file, ROOT / "data" / "heldout.txt", n_chunks=n_chunks, threads=os.cpu_count(), program=program).value


def whole_graph(run: Run, name: str, folder: Path, n_chunks: int) -> dict:
    """Perplexity on the GPU equals that on the CPU, with products of few columns (4 tokens at once) and of many (512)."""
    file = folder / f"{name}.gguf"
    run.command(run.tool("llama-quantize"), "--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0",
                ROOT / "data" / "model-f16.gguf", file, name.upper())
    found = {"cpu": perplexity(run, file, "none", 512, n_chunks)}
    found |= {f"gpu_ubatch_{n}": perplexity(run, file, run.device, n, n_chunks) for n in (4, 512)}
    file.unlink()
    tolerance = LOG_TOLERANCE * math.sqrt(N_CHUNKS / n_chunks)
    for path in ("gpu_ubatch_4", "gpu_ubatch_512"):
        difference = math.log(found[path] / found["cpu"])
        if not abs(difference) <= tolerance:
            raise Failed(f"{path} {found[path]:.4f}, CPU {found['cpu']:.4f}; |ln| is {abs(difference):.5f}, at most {tolerance:.5f}")
    return found


def speed(run: Run, folder: Path) -> dict:
    """Tokens a second of a synthetic model, types in turn: medians of the rounds, by tokens at once."""
    from synth_model import write_model

    samples: dict[str, dict[int, list[float]]] = {name: {n: [] for n in BATCHES} for name in [*run.types, *STOCK]}
    for name in samples:
        write_model(name, folder / f"{name}.gguf", run.shape, run.n_layers)
    for _ in range(N_ROUNDS):
        for name, by_batch in samples.items():
            rows = json.loads(run.command(run.tool("llama-bench"), "-m", folder / f"{name}.gguf", "-ngl", 99, "-dev", run.device, "-o", "json",
                                          "-r", 2, "-n", 32, "-p", ",".join(str(n) for n in BATCHES if n > 1)))
            for row in rows:
                by_batch[row["n_prompt"] or 1].append(row["avg_ts"])
    return {name: {str(n): round(statistics.median(values), 1) for n, values in by_batch.items()} for name, by_batch in samples.items()}


def print_speed(figures: dict) -> None:
    """Tokens a second of one token at once and of a prompt, and both over Q3_K's."""
    base = figures["q3_K"]
    print(f"\n| type | decode t/s | x Q3_K | prompt of {BATCHES[-1]} t/s | x Q3_K |\n| --- | --- | --- | --- | --- |")
    for name, found in figures.items():
        cells = [cell for n in (str(BATCHES[0]), str(BATCHES[-1])) for cell in (f"{found[n]:.1f}", f"{found[n] / base[n]:.2f}")]
        print(f"| {name.upper()} | " + " | ".join(cells) + " |")


def main(doc: str, backend: Backend) -> int:
    """The check from its command line: the exit code."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"{backend.name.lower()}-check.json"))
    parser.add_argument("--build", type=Path, default=ROOT / "build" / f"{backend.name.lower()}-check")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--device", default=backend.device, help=f"default: {backend.device}")
    parser.add_argument("--types", default=",".join(OURS), help="default: all of ours")
    parser.add_argument("--chunks", type=int, default=N_CHUNKS, help=f"of 256 tokens, for perplexities (default: {N_CHUNKS})")
    args = parser.parse_args()
    steps, types = args.only.split(","), args.types.lower().split(",")
    for flag, unknown, known in (("--only", set(steps) - set(STEPS), STEPS), ("--types", set(types) - set(OURS), OURS)):
        if unknown:
            print(f"error: {flag}: got {', '.join(sorted(unknown))}, choose from {', '.join(known)}", file=sys.stderr)
            return 1
    run = Run(args.out.resolve(), args.build.resolve(), args.minutes, args.device, "llama-3.2-1b", 8, types=types)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    run.report["environment"] = {**backend.environment(), "commit": commit}
    os.environ["GGML_EXT_LIB_DIR"] = str(run.build / "bin")
    sys.path[:0] = [str(ROOT / "py"), str(ROOT / "scripts" / "tools")]
    if "build" in steps:
        run.check("build", build, backend)
    run.check("device", backend.check)
    with tempfile.TemporaryDirectory() as folder:
        for name in types:
            if "ops" in steps:
                run.check(f"test-backend-ops {name}", backend_ops, name)
            if "graph" in steps:
                run.check(f"whole graph {name}", whole_graph, name, Path(folder), args.chunks)
        if "speed" in steps and (found := run.check("speed", speed, Path(folder))):
            run.report["figures"]["tokens_per_second"] = found
            print_speed(found)
    run.write()
    print(f"{'passed' if run.report['passed'] else 'FAILED'}; figures in {run.out}")
    return 0 if run.report["passed"] else 1
