"""Checks with NVIDIA's tools: compute-sanitizer for races and memory errors, ncu for counters of one kernel per type."""
from __future__ import annotations

import csv
import shutil

import cuda_tools
from check_run import Failed, Run, Unavailable, count_cases

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
PRODUCTS = "type_a=({types}),type_b=f32,m=33,n=({columns}),k=(256|576|768),bs=.1,1.,nr=.1,1.,per=.0,1,2,3.,k_v=0"
EXPERTS = "type_a=({types}),type_b=f32,n_mats=16,n_used=4,b=0,m=33,n=({columns}),k=(256|576|768)"
VECTORS, TILES = "1|5|8", "33"
PRODUCT_OF_COUNTERS = "4096x4096x1"
# name in the report -> ncu's name
COUNTERS = {
    "microseconds": "gpu__time_duration.sum", "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread", "bytes read": "dram__bytes_read.sum", "bytes written": "dram__bytes_write.sum",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed", "issue slots %": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "ALU pipe %": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "FMA pipe %": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
} | {f"stall {reason}": f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
     for reason in ("long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "lg_throttle", "mio_throttle", "not_selected", "barrier")}


def nvidia_tool(name: str) -> str:
    """Find a tool on the PATH or next to nvcc. Unavailable if it is missing."""
    nvcc = cuda_tools.nvcc()
    path = shutil.which(name) or (shutil.which(str(nvcc.resolve().parent / name)) if nvcc else None)
    if not path:
        raise Unavailable(f"{name} is not on this machine")
    return path


def sanitizer(run: Run, tool: str) -> dict:
    """Run compute-sanitizer on the device code's own test and on few products of every type: vector kernels, tiles, experts."""
    on_cpu = run.device == "CPU"
    prefix = [] if on_cpu else [nvidia_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", 9]
    run.command(*prefix, run.program("ggml-ext-gpu-kernels"), "--few", "--no-timings", timeout=120)
    # tile kernels read complete tiles of activations, uninitialized bytes included, and discard those results
    columns = VECTORS if tool == "initcheck" else f"{VECTORS}|{TILES}"
    counts = {}
    for op, pattern in (("MUL_MAT", PRODUCTS), ("MUL_MAT_ID", EXPERTS)):
        out = run.command(*prefix, run.program("test-backend-ops"), "support" if on_cpu else "test", "-b", run.device,
                          "-p", pattern.format(types="|".join(run.types), columns=columns), timeout=120)
        counts[op] = count_cases(out, op)
        if not counts[op]:
            raise Failed(f"no case of {op} was run")
    return counts


def counters(run: Run, name: str) -> dict:
    """Occupancy, stall reasons and bytes of one vector product of a type."""
    program = [run.program("ggml-ext-gpu-bench"), run.device, name, "256x512x1" if run.rehearsal else PRODUCT_OF_COUNTERS]
    if run.device == "CPU":
        run.command(*program)
        return {}
    # not the first launch, which finds nothing in the instruction cache; clocks stay as they are
    out = run.command(nvidia_tool("ncu"), "--clock-control", "none", "--kernel-name", "regex:mul_mat_vec_q", "--launch-skip", 8,
                      "--launch-count", 1, "--metrics", ",".join(COUNTERS.values()), "--csv", "--page", "raw", *program, timeout=60)
    return parse_counters(out)


def parse_counters(output: str) -> dict:
    """The counters in ncu's CSV: a row of names, a row of units, and a row for each launch."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    rows = [] if start is None else list(csv.DictReader(lines[start:]))
    if len(rows) < 2:
        raise Failed("ncu counted no kernel: " + " / ".join(lines[-3:]))
    units, values = rows[0], rows[1]
    return {label: f"{values[metric]} {units[metric] or ''}".strip() for label, metric in COUNTERS.items() if values.get(metric)}


def check_sanitizers(run: Run) -> None:
    for tool in SANITIZERS:
        run.check(f"compute-sanitizer {tool}", sanitizer, tool)


def check_counters(run: Run) -> None:
    for name in [*run.types, "q3_K", "q4_K"]:
        run.check(f"counters {name}", counters, name)
