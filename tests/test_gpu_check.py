"""scripts/gpu/gpu_check.py with programs that stand for the GPU's: what it runs, what it makes of failures. No kernel runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native import ROOT

PROGRAM = r'''#!{python}
import json, os, sys
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
broken = os.environ.get("BROKEN", "")
with open({log!r}, "a") as log:
    print(name, *args, file=log)
if name == "nvidia-smi":
    print("Some GPU, 1.2, 9.0, 81559 MiB")
elif name == "nvcc":
    print("Cuda compilation tools, release 13.0, V13.0.88")
elif name == "compute-sanitizer":
    if broken == args[1]:
        sys.exit(9)
    os.execv(args[4], args[4:])
elif name == "ggml-ext-gpu-kernels":
    print(json.dumps(dict(check="unpack itq3_s", n=3, wrong=0, first="")))
    for n in (2048, 4096, 8192, 14336):
        print(json.dumps(dict(timing="quantize", n=n, plain_us=1.0, rotated_us=99.0 if broken == "rotation" else 1.1)))
    print(json.dumps(dict(timing="copy", gb_per_s=1000.0)))
    sys.exit(broken == "kernels")
elif name == "test-backend-ops":
    ops = ["MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "CPY", "MUL_MAT_VEC_FUSION"][broken == "ops":]
    print("\n".join(f"  {{op}}(type_a=itq3_s): \x1b[1;32mOK\x1b[0m" for op in ops))
elif name == "llama-quantize":
    open(args[-2], "w").close()
elif name == "llama-perplexity":
    gpu = os.environ["LLAMA_ARG_DEVICE"] == "CUDA0"
    print("Final estimate: PPL =", 12.1 if gpu and broken == "perplexity" else 12.001 if gpu else 12.0, "+/- 0.5")
elif name == "llama-bench":
    slow = broken == "slow" and "itq3_t" in args[args.index("-m") + 1]
    prompts = [int(p) for p in args[args.index("-p") + 1].split(",")] + [0]
    print(json.dumps([dict(n_prompt=p, avg_ts=50.0 if slow else 100.0) for p in prompts]))
elif name == "llama-batched-bench":
    for n in (8, 32, 64):
        print(json.dumps(dict(pl=n, speed_tg=100.0 * n)))
elif name == "ggml-ext-gpu-bench":
    for of in args[1].split(","):
        for shape in args[2:]:
            rows, cols, tokens, *experts = map(int, shape.split("x"))
            print(json.dumps(dict(type=of, rows=rows, cols=cols, tokens=tokens, experts=0, us=9.0, bytes=6553600)))
'''
NAMES = ["nvidia-smi", "nvcc", "compute-sanitizer", "ggml-ext-gpu-kernels", "test-backend-ops", "llama-quantize", "llama-perplexity",
         "llama-bench", "llama-batched-bench", "ggml-ext-gpu-bench"]


@pytest.fixture
def check(tmp_path, lib):
    """Runs the script with such programs; returns exit code, report and the commands that were run."""
    bin_folder, log = tmp_path / "build" / "bin", tmp_path / "log"
    bin_folder.mkdir(parents=True)
    for name in NAMES:
        (bin_folder / name).write_text(PROGRAM.format(python=sys.executable, log=str(log)))
        (bin_folder / name).chmod(0o755)
    (bin_folder / "libggml-base.so").symlink_to(lib.path)

    def run(*args, broken: str = "") -> tuple[int, dict, list[str]]:
        out = tmp_path / "report.json"
        env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "BROKEN": broken, "CUDACXX": str(bin_folder / "nvcc")}
        done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu" / "gpu_check.py"), "--out", str(out), "--build", str(tmp_path / "build"),
                               "--layers", "1", "--shape", "llama-3.2-1b", "--models", str(tmp_path), *args], capture_output=True, text=True, env=env, timeout=300)
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(out.read_text()), log.read_text().splitlines() if log.exists() else []

    return run


def failures(report: dict) -> list[str]:
    return [c["name"] for c in report["checks"] if not c["passed"]]


def test_everything_passes(check):
    code, report, log = check("--only", "checks,speed")
    assert (code, report["passed"], failures(report)) == (0, True, [])
    assert {"decode", "prefill", "parallel", "experts", "gemv", "grouped", "kernels"} <= report["figures"].keys()
    assert report["environment"]["compute_capability"] == "9.0"
    for tool in ("memcheck", "racecheck"):
        assert sum(line.startswith(f"compute-sanitizer --tool {tool}") for line in log) == 3


@pytest.mark.parametrize("broken, expected", [
    ("kernels", "device code equals the scalar references"), ("ops", "test-backend-ops itq3_s"), ("perplexity", "perplexity itq3_t"),
    ("memcheck", "compute-sanitizer memcheck"), ("racecheck", "compute-sanitizer racecheck"),
])
def test_a_failing_check_fails_the_run(check, broken, expected):
    code, report, _ = check("--only", "checks", broken=broken)
    assert code == 1 and not report["passed"] and expected in failures(report)


@pytest.mark.parametrize("broken, expected", [("slow", ["decode", "prefill"]), ("rotation", ["share of the rotation"])])
def test_a_slow_type_fails_the_run(check, broken, expected):
    code, report, _ = check("--only", "speed", broken=broken)
    assert code == 1 and failures(report) == expected
    assert "gemv" in report["figures"]  # the rest was still measured


def test_no_time_left_is_no_pass(check):
    code, report, _ = check("--only", "checks", "--minutes", "0")
    assert code == 1 and "not run: the time is over" in report["checks"][0]["error"]


def test_without_a_gpu_one_line_says_so(tmp_path):
    env = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu" / "gpu_check.py"), "--out", str(tmp_path / "out.json")], capture_output=True,
                          text=True, env=env, timeout=60)
    assert done.returncode == 1 and "nvidia-smi is missing" in done.stdout and "Traceback" not in done.stderr
    assert not json.loads((tmp_path / "out.json").read_text())["passed"]
