#!/usr/bin/env python3
"""The whole check of the Metal kernels on a Mac: build, correctness, speed. Ten minutes; writes one JSON file.

    metal_check.py [--out metal-check.json] [--build build/metal] [--minutes 20] [--only build,ops,graph,speed]

Needs the command line tools of Xcode, cmake, ninja, git and the Python packages numpy, gguf and PyYAML. Prints a line for each
check. Every check passes or fails in the JSON, with its seconds and figures; exit code 1 if anything failed. Speeds are reported,
not judged: nobody has measured them before.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check import LOG_TOLERANCE, N_CHUNKS, OURS, ROOT, Failed, Run

TARGETS = ["test-backend-ops", "llama-bench", "llama-perplexity", "llama-quantize"]
STOCK = ["q3_K", "iq3_s", "iq2_xxs", "q4_K", "q5_K"]
DEVICE = "MTL0"
N_ROUNDS = 3
BATCHES = [1, 2, 4, 8, 512]  # decoding, few columns at once, a prompt


def sysctl(name: str) -> str:
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True).stdout.strip()


def build(run: Run) -> dict:
    run.command("cmake", "-S", ROOT, "-B", run.build, "-G", "Ninja", "-DGGML_METAL=ON", "-DGGML_EXT_TESTS=ON", "-DGGML_RPC=OFF",
                "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_OPENSSL=OFF", "-DGGML_EXT_UI=OFF", f"-DPython_EXECUTABLE={sys.executable}")
    run.command("cmake", "--build", run.build, "--parallel", os.cpu_count(), "--target", *TARGETS)
    return {}


def library(run: Run) -> dict:
    """Whether Apple's compiler took our library: the log says why not."""
    done = subprocess.run([run.tool("llama-bench"), "--list-devices"], capture_output=True, text=True, timeout=300)
    log = done.stdout + done.stderr
    if "no kernels for the types of ggml-ext" in log or "failed to build" in log:
        at = log.find("no kernels for the types") if "no kernels for the types" in log else log.find("failed to build")
        raise Failed(log[at : at + 4000])
    if DEVICE not in log:
        raise Failed(f"no device {DEVICE}: {log[-1000:]}")
    return {"devices": done.stdout.strip()}


def backend_ops(run: Run, name: str) -> dict:
    """Upstream's test-backend-ops, every case of one type on the GPU against the CPU."""
    out = re.sub(r"\x1b\[[\d;]*m", "", run.command(run.tool("test-backend-ops"), "test", "-b", DEVICE, "-p", f"={name}[,)]"))
    counts = {op: len(re.findall(rf"^\s*{op}\(.*OK", out, re.M)) for op in ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS")}
    if missing := [op for op, n in counts.items() if not n]:
        raise Failed(f"no case of {', '.join(missing)} was run")
    return counts


def perplexity(run: Run, file: Path, device: str, ubatch: int) -> float:
    from perplexity_run import perplexity as measure

    # llama.cpp's tools read options from such variables
    program = ["env", f"LLAMA_ARG_DEVICE={device}", "LLAMA_ARG_N_GPU_LAYERS=99", f"LLAMA_ARG_UBATCH={ubatch}", str(run.tool("llama-perplexity"))]
    return measure(file, ROOT / "data" / "heldout.txt", n_chunks=N_CHUNKS, threads=4, program=program).value


def whole_graph(run: Run, name: str, folder: Path) -> dict:
    """Perplexity on the GPU equals that on the CPU, with mul_mv (4 tokens at once) and with mul_mm (512)."""
    file = folder / f"{name}.gguf"
    run.command(run.tool("llama-quantize"), "--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0",
                ROOT / "data" / "model-f16.gguf", file, name.upper())
    found = {"cpu": perplexity(run, file, "none", 512), "gpu_ubatch_4": perplexity(run, file, DEVICE, 4), "gpu_ubatch_512": perplexity(run, file, DEVICE, 512)}
    file.unlink()
    for path in ("gpu_ubatch_4", "gpu_ubatch_512"):
        difference = math.log(found[path] / found["cpu"])
        if not abs(difference) <= LOG_TOLERANCE:
            raise Failed(f"{path} {found[path]:.4f}, CPU {found['cpu']:.4f}; |ln| is {abs(difference):.5f}, at most {LOG_TOLERANCE:.5f}")
    return found


def speed(run: Run, folder: Path) -> dict:
    """Tokens a second of a synthetic model of Llama-3.2-1B's shape, 8 layers, types in turn; medians of three rounds."""
    from synth_model import write_model

    samples: dict[str, dict[int, list[float]]] = {name: {n: [] for n in BATCHES} for name in [*OURS, *STOCK]}
    for name in samples:
        write_model(name, folder / f"{name}.gguf")
    for _ in range(N_ROUNDS):
        for name, by_batch in samples.items():
            rows = json.loads(run.command(run.tool("llama-bench"), "-m", folder / f"{name}.gguf", "-ngl", 99, "-dev", DEVICE, "-o", "json", "-r", 2,
                                          "-n", 32, "-p", ",".join(str(n) for n in BATCHES if n > 1)))
            for row in rows:
                by_batch[row["n_prompt"] or 1].append(row["avg_ts"])
    return {name: {str(n): round(statistics.median(values), 1) for n, values in by_batch.items()} for name, by_batch in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("metal-check.json"))
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "metal")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--only", default="build,ops,graph,speed")
    args = parser.parse_args()
    steps = args.only.split(",")
    if unknown := sorted(set(steps) - {"build", "ops", "graph", "speed"}):
        print(f"error: --only {','.join(unknown)}: choose from build, ops, graph, speed", file=sys.stderr)
        return 1
    if platform.system() != "Darwin":
        print(f"error: this system is {platform.system()}; the check needs a Mac. tests/gpu/test_metal_host.py is what runs elsewhere", file=sys.stderr)
        return 1

    run = Run(args.out.resolve(), args.build.resolve(), args.minutes, DEVICE, "llama-3.2-1b", 8)
    run.report["environment"] = {"chip": sysctl("machdep.cpu.brand_string"), "macos": platform.mac_ver()[0], "memory_bytes": sysctl("hw.memsize"),
                                 "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()}
    os.environ["GGML_EXT_LIB_DIR"] = str(run.build / "bin")
    sys.path.insert(0, str(ROOT / "py"))
    if "build" in steps:
        run.check("build", build)
    run.check("library", library)
    with tempfile.TemporaryDirectory() as folder:
        for name in OURS:
            if "ops" in steps:
                run.check(f"test-backend-ops {name}", backend_ops, name)
            if "graph" in steps:
                run.check(f"whole graph {name}", whole_graph, name, Path(folder))
        if "speed" in steps:
            run.report["figures"]["tokens_per_second"] = run.check("speed", speed, Path(folder))
    run.write()
    print(f"{'passed' if run.report['passed'] else 'FAILED'}; figures in {run.out}")
    return 0 if run.report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
