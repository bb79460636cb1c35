"""The GPU check with fake programs: what it runs, how it reports failures, what it stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from check_run import EXT_TYPES
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
    if broken == "no driver":
        sys.exit("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    print("Some GPU, 1.2, 9.0, 81559 MiB")
elif name == "compute-sanitizer":
    if broken == args[1]:
        sys.exit(9)
    os.execv(args[4], args[4:])
elif name == "ncu":
    metrics = args[args.index("--metrics") + 1].split(",")
    print('==PROF== Connected')
    for row in (["ID", *metrics], [""] + ["us"] * len(metrics), ["0"] + ["1.5"] * len(metrics)) if broken != "ncu" else ():
        print(",".join(f'"{{cell}}"' for cell in row))
elif name in ("ggml-ext-gpu-kernels", "ggml-ext-cuda-host-kernels"):
    if "--only-timings" in args:
        for n in (256, 512):
            print(json.dumps(dict(timing="quantize", n=n, plain_us=1.0, rotated_us=9999.0 if broken == "rotation" else 1.1)))
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
    option = dict(zip(args[::2], args[1::2]))
    gpu = option["-dev"] == "CUDA0"
    race = broken == "race" and "GGML_CUDA_PDL" not in os.environ and option.get("-ub") == "1"
    offload = broken == "offload" and option["-ngl"] == "4"
    attention = broken == "attention" and option.get("-fa") == "off"
    print("Final estimate: PPL =", 12.1 if gpu and broken == "perplexity" or offload or attention else 12.01 if gpu and race else 12.001 if gpu else 12.0, "+/- 0.5")
elif name == "llama-bench" and args == ["--list-devices"]:
    print("Available devices:" + ("" if broken == "no device" else "\n  CUDA0: Some GPU (81559 MiB, 80000 MiB free)"))
elif name == "llama-bench":
    slow = broken.startswith("slow ") and broken.split()[1] in args[args.index("-m") + 1]
    prompts = [int(p) for p in args[args.index("-p") + 1].split(",")] + [0]
    print(json.dumps([dict(n_prompt=p, avg_ts=50.0 if slow else 100.0) for p in prompts]))
elif name == "llama-batched-bench":
    for n in (2, 4, 8, 16, 64):
        print(json.dumps(dict(pl=n, speed_tg=100.0 * n)))
elif name == "ggml-ext-gpu-bench" and "--copy" in args:
    print(json.dumps(dict(copy_gb_per_s=1000.0, bytes=1)))
elif name == "ggml-ext-gpu-bench" and "--large" in args:
    print(json.dumps(dict(check="large", n=3, bytes=3, wrong=int(broken == "large"), first=-1)))
    sys.exit(broken == "large")
elif name == "ggml-ext-gpu-bench":
    for type_name in args[1].split(","):
        for shape in args[2:]:
            rows, cols, tokens, *experts = map(int, shape.split("x"))
            print(json.dumps(dict(type=type_name, rows=rows, cols=cols, tokens=tokens, experts=0, us=9.0, bytes=6553600)))
'''
NAMES = ["nvidia-smi", "compute-sanitizer", "ncu", "ggml-ext-gpu-kernels", "test-backend-ops", "llama-quantize", "llama-perplexity",
         "llama-bench", "llama-batched-bench", "ggml-ext-gpu-bench", "ggml-ext-cuda-host-kernels"]
FEW_TYPES = ("--types", "itq3_s,itq3_t,itq2_t64")  # checks of other types are alike
SCRIPT = ROOT / "scripts" / "gpu" / "gpu_check.py"
ALWAYS_RUN = {"nvidia-smi", "llama-bench"}  # programs that identify the machine and the GPU
CORRECTNESS = "correctness,perplexity,sanitizer,more"


@pytest.fixture
def check(tmp_path, lib):
    '''A function that runs the script with fake programs: returns exit code, report, commands and the page.'''
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir(parents=True)
    for name in NAMES:
        (programs / name).write_text(PROGRAM.format(python=sys.executable, log=str(log)))
        (programs / name).chmod(0o755)
    (programs / "libggml-base.so").symlink_to(lib.path)

    def run(*args, broken: str = "", backend: str = "cuda") -> tuple[int, dict, list[str], str]:
        out = tmp_path / "report.json"
        log.unlink(missing_ok=True)
        env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "BROKEN": broken}
        done = subprocess.run([sys.executable, str(SCRIPT), "--backend", backend, "--out", str(out), "--programs", str(programs), "--layers", "1",
                               "--shape", "tiny", "--models", str(tmp_path), "--minutes", "60", *args], capture_output=True, text=True, env=env, timeout=600)
        assert "Traceback" not in done.stderr, done.stderr
        page = out.with_suffix(".md").read_text()
        assert done.stdout.rstrip().splitlines()[-1].startswith("figures: ") and page[page.index("## Summary") :].strip() in done.stdout
        return done.returncode, json.loads(out.read_text())[backend], log.read_text().splitlines() if log.exists() else [], page

    return run


def failures(report: dict, *statuses: str) -> list[str]:
    return [c["name"] for c in report["checks"] if c["status"] in (statuses or ("failed",))]


def programs_run(log: list[str]) -> set[str]:
    return {line.split()[0] for line in log}


def test_all_types_are_checked_by_default():
    assert {*EXT_TYPES} == {*WEIGHT_TYPES}


def test_results_are_kept_and_reused(check):
    code, report, log, page = check(*FEW_TYPES)
    assert (code, report["passed"], failures(report, "failed", "slow", "not run", "unavailable")) == (0, True, [])
    figures = report["figures"]
    assert {"speeds", "sequences", "experts", "products", "ragged_products", "expert_products", "copy_gb_per_s"} <= figures.keys()
    assert {"itq3_s", "itq3_t", "itq2_t64", "q2_K", "q3_K", "q4_K", "iq2_xxs", "iq3_s"} <= figures["speeds"].keys()
    assert set(figures["sequences"]["itq3_t"]) == {f"{n} sequences" for n in (2, 4, 8, 16, 64)}
    assert report["environment"]["compute_capability"] == "9.0"
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        assert sum(line.startswith(f"compute-sanitizer --tool {tool}") for line in log) == 3
    assert "test-backend-ops itq2_t64" in {c["name"] for c in report["checks"]}
    for words in ("Some GPU", "itq3_t", "x q3_K", "share of bandwidth", "64 sequences", "occupancy %", "checks passed"):
        assert words in page
    # the most valuable parts come first
    order = [c["part"] for c in report["checks"]]
    assert list(dict.fromkeys(order)) == ["machine", "correctness", "perplexity", "speed", "sanitizer", "counters", "more"]

    # repeated, only the machine is identified again; failed and new checks run
    code_again, repeated, log, _ = check(*FEW_TYPES)
    assert code_again == 0 and repeated["figures"] == figures and programs_run(log) == ALWAYS_RUN
    code, report, log, _ = check(*FEW_TYPES, "--only", CORRECTNESS, "--again", broken="ops")
    assert code == 1 and "test-backend-ops itq3_t" in failures(report) and "perplexity itq3_t" not in failures(report)
    code, report, log, _ = check(*FEW_TYPES, "--only", CORRECTNESS)
    sanitizer_programs = {"compute-sanitizer", "ggml-ext-gpu-kernels"}  # they run test-backend-ops too
    assert (code, failures(report)) == (0, []) and programs_run(log) == ALWAYS_RUN | {"test-backend-ops"} | sanitizer_programs


@pytest.mark.parametrize("broken, part, expected", [
    *((broken, "correctness", "device code equals the scalar references") for broken in ("kernels", "silent", "crash")),
    *((broken, "perplexity", "perplexity itq3_t") for broken in ("perplexity", "offload", "attention")),
    ("large", "more", "matrices of more than 2^32 bytes"), ("race", "more", "perplexity a token at a time itq3_t"),
    *((f"{tool}check", "sanitizer", f"compute-sanitizer {tool}check") for tool in ("mem", "race", "init", "sync")),
    ("ncu", "counters", "counters itq3_t"), ("no driver", "correctness", "machine"), ("no device", "correctness", "device"),
])
def test_failing_check_fails_the_run(check, broken, part, expected):
    code, report, _, page = check(*FEW_TYPES, "--only", part, broken=broken)
    assert code == 1 and not report["passed"] and expected in failures(report)
    assert f"failed: {expected}: " in page


@pytest.mark.parametrize("broken, expected", [pytest.param("slow itq3_t", ["generation and prompts"], marks=pytest.mark.nightly),
                                              ("slow ditto5", ["generation and prompts"]), ("rotation", ["share of the rotation"])])
def test_slow_type_is_named(check, broken, expected):
    code, report, _, page = check("--types", "itq3_s,itq3_t,ditto5", "--only", "speed", broken=broken)
    assert (code, failures(report), failures(report, "slow")) == (1, [], expected)
    assert f"slow: {expected[0]}: " in page and "sequences" in report["figures"]  # the rest was measured


def test_rehearsal_runs_everything(check):
    """Everything but what needs the GPU runs; slow types pass, wrong ones fail."""
    code, report, log, page = check(*FEW_TYPES, "--rehearse", broken="slow itq3_t")
    assert (code, failures(report, "failed", "slow", "not run")) == (0, []) and "rehearsal" in report["environment"]["gpu"]
    assert programs_run(log) == {"ggml-ext-cuda-host-kernels", "ggml-ext-gpu-bench", "test-backend-ops", "llama-quantize", "llama-perplexity",
                                "llama-bench", "llama-batched-bench"}
    assert any(line.startswith("test-backend-ops support -b CPU") for line in log) and "a rehearsal" in page
    code, report, _, _ = check(*FEW_TYPES, "--rehearse", "--only", "correctness,sanitizer", "--again", broken="kernels")
    kernel_checks = ["device code equals the scalar references", *(f"compute-sanitizer {tool}check" for tool in ("mem", "race", "init", "sync"))]
    assert (code, failures(report)) == (1, kernel_checks)


def test_timeout_kills_the_process_tree(tmp_path):
    from check_run import Failed, Run

    run = Run("cuda", "CUDA0", tmp_path, tmp_path / "out.json", types=[], shape="", n_layers=1)
    start = time.monotonic()
    with pytest.raises(Failed, match="sh took longer than 1 s"):
        run.command("/bin/sh", "-c", "sleep 100 & echo $! > %s/child; wait" % tmp_path, timeout=1)  # noqa: UP031
    assert time.monotonic() - start < 60
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")

    def is_running() -> bool:
        try:
            return state.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            return False

    while is_running() and time.monotonic() - start < 60:  # a signal takes time to end a process
        time.sleep(0.05)
    assert not is_running()


def test_gpu_program_passes_as_host_code(lib):
    """tests/gpu/kernels.cu finds nothing wrong, and every check counts something; two seconds."""
    done = subprocess.run([str(native.require_built(native.BUILD, "ggml-ext-cuda-host-kernels")), "--few"], capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    checks = {line["check"]: line for line in lines if "check" in line}
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line["n"] > 0 and line["wrong"] == 0 for line in checks.values())
    weights = [name for name, info in TYPES.items() if f"unpack {name}" in checks]
    assert weights == list(WEIGHT_TYPES) and sum("timing" in line for line in lines) == 2
    for name in weights:
        assert (f"unpack {name}, shifted" in checks) == (TYPES[name].block_bytes % 4 != 0)
        assert {f"dequantize {name} to bf16", f"dequantize {name} behind a kernel, graph", f"last of many rows of {name}"} <= checks.keys()


def test_exhausted_time_fails_the_run(check):
    code, report, _, page = check("--only", "correctness", "--minutes", "0")
    assert code == 1 and failures(report, "not run") == ["machine"] and "the time is over" in page and "repeat the command" in page


def test_missing_optional_tools_are_reported(check, tmp_path):
    for name in ("compute-sanitizer", "ncu"):
        (tmp_path / "bin" / name).unlink()
    code, report, _, page = check(*FEW_TYPES, "--only", "sanitizer,counters")
    assert code == 0 and "compute-sanitizer is not on this machine" in page and "counters itq3_t" in failures(report, "unavailable")


@pytest.mark.parametrize("args, message", [
    (("--only", "build"), "--only: unknown build; choose from correctness"), (("--types", "q4_k"), "--types: unknown q4_k"),
    (("--backend", "rocm"), "--backend: unknown rocm"), (("--inject", "hang"), "--inject needs --rehearse"),
])
def test_wrong_arguments_are_refused(args, message):
    done = subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_library_that_does_not_load_is_named(check, tmp_path):
    (tmp_path / "bin" / "libggml-cuda.so").write_text("no library")
    code, report, _, _ = check(*FEW_TYPES, "--only", "correctness")
    (error,) = (c["error"] for c in report["checks"] if c["name"] == "device")
    assert code == 1 and "libggml-cuda.so cannot be loaded: " in error


def test_missing_gpu_gives_one_line(tmp_path):
    env = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path / "out.json")], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1 and "error: nvidia-smi names no GPU" in done.stderr and "Traceback" not in done.stderr
