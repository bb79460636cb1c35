"""scripts/gpu/gpu_check.py with programs that stand for the GPU's: what it runs, what it makes of failures, what it keeps; and
tests/gpu/kernels.cu as host code. So both have run before a GPU is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from helpers import native
from helpers.native import ROOT

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
elif name in ("ggml-ext-gpu-kernels", "ggml-ext-cuda-host-kernels"):
    if "--only-timings" in args:
        for n in (256, 512):
            print(json.dumps(dict(timing="quantize", n=n, plain_us=1.0, rotated_us=99.0 if broken == "rotation" else 1.1)))
        print(json.dumps(dict(timing="copy", gb_per_s=1000.0)))
    elif broken != "silent":
        print(json.dumps(dict(check="unpack itq3_s", n=3, wrong=int(broken == "kernels"), first="block 1 77")))
    sys.exit(broken in ("kernels", "crash"))
elif name == "test-backend-ops":
    ops = ["MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "CPY"] + ["MUL_MAT_VEC_FUSION"] * (args[0] == "test")
    ops = ops[broken == "ops":]
    print("\n".join(f"  {{op}}(type_a=itq3_s): \x1b[1;32m{{'SUPPORTED' if args[0] == 'support' else 'OK'}}\x1b[0m" for op in ops))
elif name == "llama-quantize":
    open(args[-2], "w").close()
elif name == "llama-perplexity":
    gpu = os.environ["LLAMA_ARG_DEVICE"] == "CUDA0"
    race = broken == "race" and "GGML_CUDA_PDL" not in os.environ and os.environ["LLAMA_ARG_UBATCH"] == "1"
    print("Final estimate: PPL =", 12.1 if gpu and broken == "perplexity" else 12.01 if gpu and race else 12.001 if gpu else 12.0, "+/- 0.5")
elif name == "llama-bench":
    slow = broken.startswith("slow ") and broken.split()[1] in args[args.index("-m") + 1]
    prompts = [int(p) for p in args[args.index("-p") + 1].split(",")] + [0]
    print(json.dumps([dict(n_prompt=p, avg_ts=50.0 if slow else 100.0) for p in prompts]))
elif name == "llama-batched-bench":
    for n in (8, 32, 64):
        print(json.dumps(dict(pl=n, speed_tg=100.0 * n)))
elif name == "ggml-ext-gpu-bench" and "--large" in args:
    print(json.dumps(dict(check="large", n=3, bytes=3, wrong=int(broken == "large"), first=-1)))
    sys.exit(broken == "large")
elif name == "ggml-ext-gpu-bench":
    for of in args[1].split(","):
        for shape in args[2:]:
            rows, cols, tokens, *experts = map(int, shape.split("x"))
            print(json.dumps(dict(type=of, rows=rows, cols=cols, tokens=tokens, experts=0, us=9.0, bytes=6553600)))
'''
NAMES = ["nvidia-smi", "nvcc", "compute-sanitizer", "ggml-ext-gpu-kernels", "test-backend-ops", "llama-quantize", "llama-perplexity",
         "llama-bench", "llama-batched-bench", "ggml-ext-gpu-bench", "ggml-ext-cuda-host-kernels"]
FEW = ("--types", "itq3_s,itq3_t,itq2_t64")  # a check of one type is that of another


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
        log.unlink(missing_ok=True)
        env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "BROKEN": broken, "CUDACXX": str(bin_folder / "nvcc")}
        done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu" / "gpu_check.py"), "--out", str(out), "--build", str(tmp_path / "build"),
                               "--layers", "1", "--shape", "tiny", "--models", str(tmp_path), "--minutes", "30", *args], capture_output=True, text=True, env=env, timeout=600)
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(out.read_text()), log.read_text().splitlines() if log.exists() else []

    return run


def failures(report: dict) -> list[str]:
    return [c["name"] for c in report["checks"] if not c["passed"]]


def test_everything_passes_and_is_kept(check):
    code, report, log = check("--only", "checks,speed")
    assert (code, report["passed"], failures(report)) == (0, True, [])
    assert {"decode", "prefill", "parallel", "experts", "gemv", "ragged", "grouped", "kernels"} <= report["figures"].keys()
    assert WEIGHT_TYPES.keys() <= report["figures"]["decode"].keys()
    assert {"q4_K", "q5_K", "ditto5"} <= report["figures"]["parallel"].keys()
    assert report["environment"]["compute_capability"] == "9.0" and report["seconds"].keys() == {"checks", "speed"}
    for tool in ("memcheck", "racecheck", "synccheck"):
        assert sum(line.startswith(f"compute-sanitizer --tool {tool}") for line in log) == 3

    # again: nothing but what tells the machines apart; what failed or was not asked for runs
    again, same, log = check("--only", "checks,speed")
    assert again == 0 and same["figures"] == report["figures"] and {line.split()[0] for line in log} == {"nvidia-smi", "nvcc"}
    code, report, log = check(*FEW, "--only", "checks", "--again", broken="ops")
    assert code == 1 and "test-backend-ops itq3_t" in failures(report) and "perplexity itq3_t" not in failures(report)
    code, report, log = check(*FEW, "--only", "checks")
    of_sanitizers = {"compute-sanitizer", "ggml-ext-gpu-kernels"}  # which run test-backend-ops too
    assert (code, failures(report)) == (0, [])
    assert {line.split()[0] for line in log} == {"nvidia-smi", "nvcc", "test-backend-ops"} | of_sanitizers


@pytest.mark.parametrize("broken, expected", [
    ("kernels", "device code equals the scalar references"), ("silent", "device code equals the scalar references"),
    ("crash", "device code equals the scalar references"), ("large", "matrices of more than 2^32 bytes"),
    ("perplexity", "perplexity itq3_t"), ("race", "perplexity a token at a time itq3_t"),
    *((f"{tool}check", f"compute-sanitizer {tool}check") for tool in ("mem", "race", "sync")),
])
def test_a_failing_check_fails_the_run(check, broken, expected):
    code, report, _ = check(*FEW, "--only", "checks", broken=broken)
    assert code == 1 and not report["passed"] and expected in failures(report)


@pytest.mark.parametrize("broken, expected", [("slow itq3_t", ["decode", "prefill"]), ("slow ditto5", ["decode", "prefill"]),
                                              ("rotation", ["share of the rotation"])])
def test_a_slow_type_fails_the_run(check, broken, expected):
    code, report, _ = check("--types", "itq3_s,itq3_t,ditto5", "--only", "speed", broken=broken)
    assert code == 1 and failures(report) == expected
    assert "gemv" in report["figures"]  # the rest was still measured


def test_the_rehearsal_runs_all_of_it(check):
    """As on the GPU, but for what is not there; slow types pass, wrong ones do not."""
    code, report, log = check(*FEW, "--rehearse", "--only", "checks,speed", broken="slow itq3_t")
    assert (code, failures(report)) == (0, []) and "rehearsal" in report["environment"]["gpu"]
    assert {line.split()[0] for line in log} == {"ggml-ext-cuda-host-kernels", "ggml-ext-gpu-bench", "test-backend-ops", "llama-quantize",
                                                 "llama-perplexity", "llama-bench", "llama-batched-bench"}
    assert any(line.startswith("test-backend-ops support -b CPU") for line in log)
    code, report, _ = check(*FEW, "--rehearse", "--only", "checks", "--again", broken="kernels")
    of_its_program = ["device code equals the scalar references", *(f"compute-sanitizer {tool}check" for tool in ("mem", "race", "sync"))]
    assert (code, sorted(failures(report))) == (1, sorted(of_its_program))  # in the order in which they end


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    sys.path.append(str(ROOT / "scripts" / "gpu"))
    from check_run import Failed, Run

    run = Run(tmp_path / "out.json", tmp_path, 1, "CUDA0", "", 1)
    start = time.monotonic()
    with pytest.raises(Failed, match="sh took longer than 1 s"):
        run.command("sh", "-c", "sleep 100 & echo $! > %s/child; wait" % tmp_path, timeout=1)  # noqa: UP031  # which holds the pipe open
    assert time.monotonic() - start < 60
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")

    def runs() -> bool:
        try:
            return state.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            return False

    while runs() and time.monotonic() - start < 60:  # a signal takes its time to end a process
        time.sleep(0.05)
    assert not runs()


def test_the_program_of_the_gpu_as_host_code(lib):
    """tests/gpu/kernels.cu itself: each check counts something and finds nothing wrong; two seconds."""
    done = subprocess.run([str(native.built(native.BUILD, "ggml-ext-cuda-host-kernels")), "--few"], capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    checks = {line["check"]: line for line in lines if "check" in line}
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line["n"] > 0 and line["wrong"] == 0 for line in checks.values())
    weights = [name for name, info in TYPES.items() if f"unpack {name}" in checks]
    assert weights == list(WEIGHT_TYPES) and sum("timing" in line for line in lines) == 3
    for name in weights:
        assert (f"unpack {name}, shifted" in checks) == (TYPES[name].block_bytes % 4 != 0)
        assert {f"dequantize {name} to bf16", f"dequantize {name} behind a kernel, graph", f"last of many rows of {name}"} <= checks.keys()


def test_no_time_left_is_no_pass(check):
    code, report, _ = check("--only", "checks", "--minutes", "0")
    assert code == 1 and "not run: the time is over" in report["checks"][0]["error"]


def test_without_a_gpu_one_line_says_so(tmp_path):
    env = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu" / "gpu_check.py"), "--out", str(tmp_path / "out.json")], capture_output=True,
                          text=True, env=env, timeout=60)
    assert done.returncode == 1 and "nvidia-smi is missing" in done.stdout and "Traceback" not in done.stderr
    assert not json.loads((tmp_path / "out.json").read_text())["passed"]
