#!/usr/bin/env python3
"""The whole check of the CUDA kernels on one GPU, in three parts of at most five minutes on 16 cores; writes one JSON file.

    gpu_check.py [--only build,checks,speed] [--minutes 5] [--out gpu-check.json] [--build build/gpu] [--llama-cpp TREE]
                 [--types itq3_t,itq2_t] [--again] [--device CUDA0]
    gpu_check.py --rehearse --build build/package

Each part is of use alone: `build` compiles for this GPU, `checks` says whether the kernels are right, `speed` measures; the last
two need what `build` left. A part that runs out of its --minutes leaves its results and goes on where it stopped when it is
called again: what has passed with the same sources is kept, unless --again is given, and a build continues.

Needs an NVIDIA GPU, nvcc, cuBLAS (in the toolkit or as the Python package nvidia-cublas), compute-sanitizer, cmake, ninja, git,
numpy and PyYAML; no network and no installed package: gguf comes from the llama.cpp tree if it is not installed. TREE is a
llama.cpp folder or the archive that `llama_cpp.py pack` writes; by default what GGML_EXT_LLAMA_CPP_DIR names, or the pinned tree.

--rehearse runs all of it without a GPU, on the CPU and on little data, so that what fails on a GPU is a kernel: the build is
configured and its steps are listed (which takes nvcc), kernels run as host code, sanitizers and wanted ratios are left out. The
build folder needs the targets ggml-ext-cuda-host-kernels, ext-gpu, test-backend-ops and llama-batched-bench besides the package's.

Prints a line for each check, and tables. Every check passes or fails in the JSON, with its seconds and figures; what time did
not suffice for has failed. Exit code 1 if anything failed.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("build", "tools")]  # llama_cpp is also the name of llama-cpp-python
import cuda_tools
import llama_cpp
from check_run import FIVE_BITS, FOUR_BITS, OF_64, OURS, ROOT, THREE_BITS, TWO_BITS, Failed, Run

BASES = ["q3_K", "iq2_xxs", "q4_K", "q5_K"]  # as ggml names them: what ratios are asked of
STOCK = [*BASES, "iq3_s"]
PARTS = ["build", "checks", "speed"]
TARGETS = ["test-backend-ops", "llama-bench", "llama-batched-bench", "llama-perplexity", "llama-quantize", "ext-gpu"]
GEMV = ["4096x4096x1", "14336x4096x1", "4096x14336x1"]  # rows x columns x tokens
RAGGED = ["2880x2880x1", "2880x2880x512"]  # whose rows end in the middle of 256 weights, as gpt-oss's do
RAGGED_TYPES = [*OF_64, "iq4_nl", "q8_0"]
# rows x columns x tokens x experts x experts of a token: table 5 of the CCQ paper (000), whose kernel takes 0.48 to 0.58 of the
# time of 8 bits and 0.70 to 0.85 of that of 4 bits
GROUPED = [f"{shape}x{tokens}x256x8" for shape in ("7168x512", "1024x7168") for tokens in (1, 4, 16, 64)]
PARALLEL = "8,32,64"  # sequences
N_CHUNKS_FEW = 6  # a token at a time; experts
# Launches waited for or overlapped, out of a graph or not: the same kernels on the same numbers, but cuBLAS may choose another one.
SAME_TOLERANCE = 1e-4
LARGE_MB = 4300  # passes 2^32 bytes
# the least ratios of speeds that are asked for
WANTED_DECODE = {(name, "q3_K"): 1.0 for name in THREE_BITS} | {(name, "iq2_xxs"): 1.0 for name in TWO_BITS}
WANTED_PREFILL = {(name, "q4_K"): 0.95 for name in THREE_BITS} | {(name, "iq2_xxs"): 1.0 for name in TWO_BITS}
WANTED_PARALLEL = {(name, "q4_K"): 0.95 for name in THREE_BITS + TWO_BITS}
# five bits against Q5_K, which has 5.5
WANTED_DECODE |= {(name, "q5_K"): 1.0 for name in FIVE_BITS}
WANTED_DECODE |= {(name, "q4_K"): 1.0 for name in FOUR_BITS}
WANTED_PREFILL |= {(name, "q5_K"): 0.95 for name in FIVE_BITS} | {(name, "q4_K"): 0.95 for name in FOUR_BITS}
WANTED_PARALLEL |= {(name, "q5_K"): 0.95 for name in FIVE_BITS} | {(name, "q4_K"): 0.95 for name in FOUR_BITS}
WANTED_ROTATION = 0.03  # most of a decode step that the rotation may take


def environment(run: Run) -> dict:
    for module in ("numpy", "yaml"):
        if importlib.util.find_spec(module) is None:
            raise Failed(f"the Python package {module} is missing")
    if run.rehearsal:
        run.report["environment"] = {"gpu": "none: a rehearsal on the CPU", "compute_capability": "9.0", "cores": os.cpu_count()}
        return run.report["environment"]
    query = run.command("nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader").splitlines()
    if not query:
        raise Failed("nvidia-smi names no GPU")
    name, driver, capability, memory = [part.strip() for part in query[0].split(",")]
    found = {"gpu": name, "driver": driver, "compute_capability": capability, "memory": memory, "cores": os.cpu_count()}
    nvcc = cuda_tools.nvcc()
    if not nvcc:
        raise Failed("nvcc is missing: install the CUDA toolkit, or name it in CUDACXX")
    found["nvcc"] = re.search(r"release ([\d.]+)", run.command(nvcc, "--version"))[1]
    run.report["environment"] = found
    return found


def build(run: Run) -> dict:
    """For this machine's architecture alone; rehearsed, the steps that it would take."""
    architecture = run.report["environment"]["compute_capability"].replace(".", "") + "-real"
    folder = run.build.with_name(run.build.name + "-rehearsal") if run.rehearsal else run.build
    start = time.monotonic()
    if not cuda_tools.nvcc():
        raise Failed("nvcc is missing: install the CUDA toolkit, or name it in CUDACXX")
    run.command("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DGGML_CUDA=ON", "-DGGML_EXT_TESTS=ON", "-DGGML_RPC=OFF",
                f"-DCMAKE_CUDA_ARCHITECTURES={architecture}", f"-DCMAKE_CUDA_COMPILER={cuda_tools.nvcc()}",
                f"-DPython_EXECUTABLE={sys.executable}", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_OPENSSL=OFF", "-DGGML_EXT_UI=OFF",
                "-DGGML_CUDA_FA=OFF",  # a third of the time, and the same for every type
                "-DGGML_CUDA_COMPRESSION_MODE=none")
    dry = ["--", "-n"] if run.rehearsal else []
    steps = run.command("cmake", "--build", folder, "--parallel", os.cpu_count(), "--target", *TARGETS, *dry)
    found = {"architecture": architecture, "seconds": round(time.monotonic() - start, 1)}
    if run.rehearsal:
        found |= {"steps": len(re.findall(r"^\[\d+/\d+\]", steps, re.M)), "cuda_sources": steps.count("Building CUDA object")}
    return found


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def few(run: Run) -> list[str]:
    return ["--few"] if run.rehearsal else []


def kernel_timings(run: Run) -> dict:
    lines = json_lines(run.command(run.tool("ggml-ext-gpu-kernels"), "--only-timings", *few(run), timeout=60))
    run.report["figures"]["kernels"] = [line for line in lines if "timing" in line]
    return {}


def beside_nvcc(name: str) -> str:
    beside = cuda_tools.nvcc().resolve().parent / name
    return str(beside) if not shutil.which(name) and beside.exists() else name


def shape_of(run: Run, shape: str) -> str:
    """Of a model of experts or with ragged rows; a tiny one beside tiny others."""
    return {"olmoe-1b-7b": "tiny-experts", "qwen2.5-0.5b": "tiny-ragged"}[shape] if run.shape == "tiny" else shape


def bench(run: Run, *args) -> list[dict]:
    args = (*args, "-dev", "none" if run.device == "CPU" else run.device)
    return json.loads(run.command(run.tool("llama-bench"), "-ngl", 99, "-o", "json", *args))


def models(run: Run, folder: Path, shape: str, n_layers: int, types: list[str]) -> dict[str, str]:
    """A synthetic model of every type, several at once."""
    files = {name: str(folder / f"{shape}-{name}.gguf") for name in types}
    script = ROOT / "scripts" / "tools" / "synth_model.py"
    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() // 2))) as pool:
        for done in [pool.submit(run.command, sys.executable, script, name, file, "--shape", shape, "--layers", n_layers,
                                 env={"PYTHONPATH": os.pathsep.join(sys.path)}) for name, file in files.items()]:
            done.result()
    return files


@contextlib.contextmanager
def checked_models(run: Run, title: str, *args):
    """The files of models() while they are needed; none if that failed."""
    files = {name: Path(file) for name, file in (run.check(title, models, *args, again=True) or {}).items()}
    yield files
    for file in files.values():
        file.unlink()


def decode(run: Run, files: dict[str, Path]) -> dict:
    """Tokens a second at batch 1 and of prompts, the types in turn, two rounds; the ratios that are asked for at batch 1."""
    samples, prompts = {name: [] for name in files}, {name: {} for name in files}
    sizes = ("32", 4, 1) if run.rehearsal else ("512,2048", 128, 2)
    try:
        for _ in range(2):
            for name, file in files.items():
                for row in bench(run, "-m", file, "-p", sizes[0], "-n", sizes[1], "-r", sizes[2]):
                    values = prompts[name].setdefault(f"pp{row['n_prompt']}", []) if row["n_prompt"] else samples[name]
                    values.append(row["avg_ts"])
    finally:  # what has been measured counts if time was short
        run.report["figures"]["prefill"] = {name: {k: statistics.median(v) for k, v in row.items()} for name, row in prompts.items()
                                            if row}
        copy = next((k["gb_per_s"] for k in run.report["figures"].get("kernels", []) if k["timing"] == "copy"), None)
        run.report["figures"]["decode"] = table = {}
        for name, values in samples.items():
            if not values:
                continue
            speed = statistics.median(values)
            table[name] = {"tokens_per_s": speed, "min": min(values), "max": max(values)}
            for base in BASES:
                if samples.get(base):
                    table[name][f"x {base}"] = statistics.median(a / b for a, b in zip(values, samples[base], strict=False))
            if copy:  # the share of a device-to-device copy's bandwidth at which the file's bytes were read
                table[name]["bandwidth"] = speed * files[name].stat().st_size / 1e9 / copy
    slow = [f"{name} {table[name][f'x {base}']:.2f} x {base}, asked {least}"
            for (name, base), least in wanted(run, WANTED_DECODE).items() if table[name][f"x {base}"] < least]
    if slow:
        raise Failed("; ".join(slow))
    return {}


def wanted(run: Run, ratios: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Those of the types of this run; a rehearsal wants none."""
    return {} if run.rehearsal else {pair: least for pair, least in ratios.items() if pair[0] in run.types}


def rotation_share(run: Run) -> dict:
    """Time that the rotation adds to the quantisation of activations, as a share of a decode step of ITQ3_S."""
    from synth_model import SHAPES

    if not {"itq3_s"} <= run.report["figures"]["decode"].keys():
        raise Failed("ITQ3_S was not measured")
    us = {k["n"]: k["rotated_us"] - k["plain_us"] for k in run.report["figures"]["kernels"] if k["timing"] == "quantize"}
    step_us = 1e6 / run.report["figures"]["decode"]["itq3_s"]["tokens_per_s"]
    d, ff = SHAPES[run.shape][:2]
    if missing := {d, ff} - us.keys():
        raise Failed(f"no quantisation of {', '.join(map(str, sorted(missing)))} values was timed")
    share = run.n_layers * (6 * us[d] + us[ff]) / step_us  # six products of the one and one of the other in a layer
    if share > WANTED_ROTATION and not run.rehearsal:
        raise Failed(f"{100 * share:.1f} % of a step, at most {100 * WANTED_ROTATION:.0f} %")
    return {"share_of_step": share}


def products(run: Run, figure: str, types: list[str], shapes: list[str]) -> list[dict]:
    """Rows of the bench, kept as far as they came; a type at a time, with less of each in a rehearsal."""
    rows = run.report["figures"][figure] = []
    for name in types:
        rows += json_lines(run.command(run.tool("ggml-ext-gpu-bench"), run.device, name, *shapes, timeout=60))
    return rows


def gemv(run: Run) -> dict:
    """Microseconds of single products against the time that the copy's bandwidth allows for the weights alone."""
    shapes, ragged = (["512x512x1"], ["576x576x1"]) if run.rehearsal else (GEMV, RAGGED)
    rows = products(run, "gemv", [*run.types, *STOCK], shapes)
    rows = rows + products(run, "ragged", [name for name in RAGGED_TYPES if name in run.types or name not in OURS], ragged)
    copy = next(k["gb_per_s"] for k in run.report["figures"]["kernels"] if k["timing"] == "copy")
    for row in rows:
        row["bandwidth_us"] = row["bytes"] / copy / 1e3
    return {}


def too_slow(table: dict[str, dict[str, float]], wanted: dict[tuple[str, str], float]) -> str:
    """What of table[type][what], in tokens a second, is less than wanted times that of a stock type."""
    return "; ".join(f"{name} {what} {speed / table[base][what]:.2f} x {base}, asked {least}" for (name, base), least in wanted.items()
                     for what, speed in table[name].items() if speed < least * table[base][what])


def prefill(run: Run) -> dict:
    """The ratios that are asked for of what decode() measured."""
    if slow := too_slow(run.report["figures"]["prefill"], wanted(run, WANTED_PREFILL)):
        raise Failed(slow)
    return {}


def parallel(run: Run, files: dict[str, Path]) -> dict:
    """Decode with several sequences at once."""
    table = run.report["figures"]["parallel"] = {}
    tokens, sequences = (4, "2") if run.rehearsal else (64, PARALLEL)
    device = ["-dev", "none"] if run.device == "CPU" else ["-dev", run.device]
    bases = dict.fromkeys(base for name, base in WANTED_PARALLEL if name in run.types)
    for name in [*bases, *(name for name in run.types if name not in OF_64)]:
        rows = json_lines(run.command(run.tool("llama-batched-bench"), "-m", files[name], "-c", 64 * 256, "-b", 2048, "-npp", tokens,
                                      "-ntg", tokens, "-npl", sequences, "-ngl", 99, *device, "--output-format", "jsonl"))
        table[name] = {f"tg x {r['pl']}": r["speed_tg"] for r in rows}
    if slow := too_slow(table, wanted(run, WANTED_PARALLEL)):
        raise Failed(slow)
    return {}


def experts(run: Run, files: dict[str, Path]) -> dict:
    """The same speeds of a mixture of 64 experts, and decode; for the record, since no ratio is asked for."""
    table = run.report["figures"]["experts"] = {}
    sizes = ("32", 4, 1) if run.rehearsal else ("512,2048", 64, 2)
    for name, file in files.items():
        table[name] = {f"pp{r['n_prompt']}" if r["n_prompt"] else "tg": r["avg_ts"]
                       for r in bench(run, "-m", file, "-p", sizes[0], "-n", sizes[1], "-r", sizes[2])}
    return {}


def grouped(run: Run) -> dict:
    """Products of experts, relative to 8 and 4 bits."""
    shapes = ["256x512x1x4x2", "256x512x4x4x2"] if run.rehearsal else GROUPED
    rows = products(run, "grouped", ["q8_0", "q4_K", *(name for name in run.types if name not in OF_64)], shapes)
    times = {(r["type"], r["rows"], r["cols"], r["tokens"]): r["us"] for r in rows}
    for row in rows:
        for base in ("q8_0", "q4_K"):
            row[f"x {base}"] = row["us"] / times[base, row["rows"], row["cols"], row["tokens"]]
    return {}


def print_tables(figures: dict) -> None:
    if table := figures.get("decode"):
        keys = [*(f"x {base}" for base in BASES), "bandwidth"]
        print(f"\n| type | decode t/s | {' | '.join(keys[:-1])} | share of bandwidth |\n| --- | --- |{' --- |' * len(keys)}")
        for name, row in table.items():
            ratios = " | ".join(f"{row.get(key, math.nan):.2f}" for key in keys)
            print(f"| {name} | {row['tokens_per_s']:.1f} | {ratios} |")
    if rows := [*figures.get("gemv", []), *figures.get("ragged", [])]:
        print("\n| type | rows x columns x tokens | us | us by bandwidth |\n| --- | --- | --- | --- |")
        for row in rows:
            least = row.get("bandwidth_us", math.nan)
            print(f"| {row['type']} | {row['rows']}x{row['cols']}x{row['tokens']} | {row['us']:.2f} | {least:.2f} |")
    for figure in ("prefill", "parallel", "experts"):
        if not (table := figures.get(figure)):
            continue
        print(f"\n| {figure}, t/s | " + " | ".join(next(iter(table.values()))) + " |\n| --- |" + " --- |" * len(next(iter(table.values()))))
        for name, row in table.items():
            print(f"| {name} | " + " | ".join(f"{v:.0f}" for v in row.values()) + " |")
    if rows := figures.get("grouped"):
        print("\n| type | rows x columns | tokens | us | x q8_0 | x q4_K |\n| --- | --- | --- | --- | --- | --- |")
        for row in rows:
            print(f"| {row['type']} | {row['rows']}x{row['cols']} | {row['tokens']} | {row['us']:.1f} | {row.get('x q8_0', math.nan):.2f} | "
                  f"{row.get('x q4_K', math.nan):.2f} |")


def unpacked(tree: str | None, folder: Path) -> str | None:
    """A folder for what --llama-cpp names."""
    if tree and Path(tree).is_file():
        with tarfile.open(tree) as tar:
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        return str(next(p for p in folder.iterdir() if (p / "ggml").is_dir()))
    return tree


def run_speed(run: Run, folder: Path) -> None:
    """What says most in the least time first."""
    run.check("timings of the device code", kernel_timings)
    run.check("products", gemv)
    if run.wants("decode", "share of the rotation", "prefill", "parallel sequences"):
        with checked_models(run, "synthetic models", folder, run.shape, run.n_layers, [*STOCK, *run.types]) as files:
            if files:
                run.check("decode", decode, files)
                if "itq3_s" in run.types:
                    run.check("share of the rotation", rotation_share)
                run.check("prefill", prefill)
                run.check("parallel sequences", parallel, files)
    run.check("products of experts", grouped)
    if run.wants("mixture of experts"):
        types = ["q3_K", "q4_K", *(name for name in run.types if name not in OF_64)]
        shape = shape_of(run, "olmoe-1b-7b")
        with checked_models(run, "synthetic models of experts", folder, shape, min(run.n_layers, 4), types) as files:
            if files:
                run.check("mixture of experts", experts, files)


def main(run_checks) -> int:
    """run_checks(run, folder): the part `checks`, of gpu_correctness.py, which imports this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--llama-cpp", metavar="TREE")
    parser.add_argument("--minutes", type=float, default=5, help="for each part (default: %(default)s)")
    parser.add_argument("--device", help="as llama.cpp names it (default: CUDA0, rehearsed CPU)")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of the synthetic models, as in synth_model.py (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the synthetic models; Llama-3.1-8B has 32 (default: %(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, in their order (default: %(default)s)")
    parser.add_argument("--types", default=",".join(OURS), help="of ours (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="run what has passed already, too")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on little data")
    parser.add_argument("--models", type=Path, help="folder for about 15 GB of synthetic models (default: a temporary one)")
    args = parser.parse_args()
    parts, types = args.only.split(","), args.types.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: unknown part {', '.join(sorted(unknown))}")
    if unknown := set(types) - set(OURS):
        parser.error(f"--types: unknown type {', '.join(sorted(unknown))}; there are {', '.join(OURS)}")
    if args.rehearse:
        args.shape, args.layers = "tiny", 1
    run = Run(args.out.resolve(), args.build.resolve(), args.minutes, args.device or ("CPU" if args.rehearse else "CUDA0"), args.shape,
              args.layers, types=types, rehearsal=args.rehearse, resume=not args.again)
    signal.signal(signal.SIGTERM, run.stop)
    run.check("environment", environment, again=True)
    if not run.kept("environment"):
        return 1

    with tempfile.TemporaryDirectory() as tmp:
        tree = unpacked(args.llama_cpp, Path(tmp))
        if tree:
            os.environ["GGML_EXT_LLAMA_CPP_DIR"] = tree
        if importlib.util.find_spec("gguf") is None:
            sys.path.append(str(llama_cpp.pristine_tree() / "gguf-py"))
        sys.path.insert(0, str(ROOT / "py"))
        os.environ["GGML_EXT_LIB_DIR"] = str(run.build / "bin")
        # libraries that the build tree does not name: of the toolkit, of the Python package
        found = [*([nvcc.resolve().parent.parent / "lib64"] if (nvcc := cuda_tools.nvcc()) else []),
                 *([cublas[1].parent] if (cublas := cuda_tools.cublas()) else [])]
        os.environ["LD_LIBRARY_PATH"] = ":".join([*map(str, found), os.environ.get("LD_LIBRARY_PATH", "")])
        for part in [part for part in PARTS if part in parts]:
            run.start_part(part)
            start = time.monotonic()
            if part == "build":
                # ninja knows what is left to do
                if run.check("build", build, again=True) is None and not run.rehearsal:
                    break
            elif part == "checks":
                run_checks(run, Path(tmp))
            else:
                run_speed(run, args.models or Path(tmp))
            run.report.setdefault("seconds", {})[part] = round(time.monotonic() - start, 1)
            run.write()
    print_tables(run.report["figures"])
    of_parts = [c for c in run.report["checks"] if c["part"] in ("", *parts)]
    n_failed = sum(not c["passed"] for c in of_parts)
    print(f"\n{len(of_parts) - n_failed} of {len(of_parts)} checks passed; figures are in {run.out}")
    return 1 if n_failed else 0


if __name__ == "__main__":
    import gpu_check  # by its name, as gpu_correctness.py does: there is one Failed then
    from gpu_correctness import run_checks

    sys.exit(gpu_check.main(run_checks))
