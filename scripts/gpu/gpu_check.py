#!/usr/bin/env python3
"""The whole check of the CUDA kernels on one GPU: build, correctness, speed. Ten minutes on 16 cores; writes one JSON file.

    gpu_check.py [--out gpu-check.json] [--build build/gpu] [--llama-cpp TREE] [--minutes 10] [--only build,checks,speed]
                 [--device CUDA0]

Needs an NVIDIA GPU, nvcc, cuBLAS (in the toolkit or as the Python package nvidia-cublas), compute-sanitizer, cmake, ninja, git,
numpy and PyYAML; no network and no installed package: gguf comes from the llama.cpp tree if it is not installed. TREE is a
llama.cpp folder or the archive that `llama_cpp.py pack` writes; by default what GGML_EXT_LLAMA_CPP_DIR names, or the pinned tree.

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
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts" / room) for room in ("build", "tools")]
import cuda_tools
import llama_cpp

THREE_BITS, TWO_BITS = ["itq3_s", "ditto3", "itq3_t"], ["ccq2", "itq2_t"]
OF_64 = ["itq3_t64", "itq2_t64"]  # for rows that the others cannot have: measured, but no ratio is asked for
OURS = THREE_BITS + TWO_BITS + OF_64
STOCK = ["q3_K", "iq3_s", "iq3_xxs", "iq2_xxs", "q4_K", "f16"]  # as ggml names them
TARGETS = ["test-backend-ops", "llama-bench", "llama-batched-bench", "llama-perplexity", "llama-quantize", "ext-gpu"]
GEMV = ["4096x4096x1", "14336x4096x1", "4096x14336x1"]  # rows x columns x tokens
RAGGED = ["2880x2880x1", "2880x2880x512"]  # whose rows end in the middle of 256 weights, as gpt-oss's do
RAGGED_TYPES = [*OF_64, "iq4_nl", "q8_0"]
# rows x columns x tokens x experts x experts of a token: table 5 of the CCQ paper (000), whose kernel takes 0.48 to 0.58 of the
# time of 8 bits and 0.70 to 0.85 of that of 4 bits
GROUPED = [f"{shape}x{tokens}x256x8" for shape in ("7168x512", "1024x7168") for tokens in (1, 4, 16, 64)]
GROUPED_TYPES = [*OURS, "q8_0", "q4_K"]
PARALLEL = "8,32,64"  # sequences
N_CHUNKS = 60
# Activations have a scale for 256 values on the CPU and for 32 on the GPU. The first of these roundings changes the mean
# log-likelihood of a chunk by a standard deviation of up to 0.0028 (CCQ2; 60 chunks against the same weights in F32), the
# second by less: five times both together, of the mean over all chunks. A forgotten rotation costs whole units.
LOG_TOLERANCE = 5 * math.sqrt(2) * 0.0028 / math.sqrt(N_CHUNKS)
# the least ratios of speeds that are asked for
WANTED_DECODE = {(name, "q3_K"): 1.0 for name in THREE_BITS} | {(name, "iq2_xxs"): 1.0 for name in TWO_BITS}
WANTED_PREFILL = {(name, "q4_K"): 0.95 for name in THREE_BITS} | {(name, "iq2_xxs"): 1.0 for name in TWO_BITS}
WANTED_PARALLEL = {(name, "q4_K"): 0.95 for name in THREE_BITS + TWO_BITS}
WANTED_ROTATION = 0.03  # most of a decode step that the rotation may take


class Failed(Exception):
    """One line that says why."""


class Run:
    """What is known so far, and how much time is left."""

    def __init__(self, out: Path, build: Path, minutes: float, device: str, shape: str, n_layers: int):
        self.out, self.build, self.deadline = out, build, time.monotonic() + 60 * minutes
        self.device, self.shape, self.n_layers = device, shape, n_layers
        self.report = {"passed": False, "environment": {}, "checks": [], "figures": {}}

    def command(self, *command, timeout: float | None = None, keep: list | None = None) -> str:
        """Standard output; Failed with its last lines if it fails or the time is over. keep takes the output of both."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Failed("not run: the time is over")
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                                      errors="replace", timeout=min(left, timeout or left))
            except subprocess.TimeoutExpired:
                raise Failed(f"{Path(command[0]).name} took longer than {min(left, timeout or left):.0f} s") from None
            except FileNotFoundError:
                raise Failed(f"{command[0]} is missing") from None
            log.seek(0)
            errors = log.read()
        if keep is not None:
            keep.append(done.stdout)
        if done.returncode:
            last = (done.stdout + errors).strip().splitlines()[-6:]
            raise Failed(f"{Path(command[0]).name} ended with {done.returncode}: " + " / ".join(last))
        return done.stdout

    def check(self, name: str, function, *args) -> object:
        """Runs function(run, *args), whose result is the check's figures; None if it failed."""
        start = time.monotonic()
        try:
            found, error = function(self, *args), None
        except Failed as e:
            found, error = None, str(e)
        except Exception as e:  # noqa: BLE001  the other checks still have to run
            found, error = None, f"{type(e).__name__}: {e}"
        entry = {"name": name, "passed": error is None, "seconds": round(time.monotonic() - start, 1)}
        entry |= {"error": error} if error else {}
        entry |= {"figures": found} if found else {}
        self.report["checks"].append(entry)
        print(f"{'pass' if error is None else 'FAIL'}  {entry['seconds']:6.1f} s  {name}" + (f": {error}" if error else ""), flush=True)
        self.write()
        return found

    def write(self) -> None:
        self.report["passed"] = bool(self.report["checks"]) and all(c["passed"] for c in self.report["checks"])
        beside = self.out.with_name(self.out.name + ".part")
        beside.write_text(json.dumps(self.report, indent=1))
        os.replace(beside, self.out)

    def tool(self, name: str) -> Path:
        return self.build / "bin" / name


def environment(run: Run) -> dict:
    query = run.command("nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader").splitlines()
    if not query:
        raise Failed("nvidia-smi names no GPU")
    name, driver, capability, memory = [part.strip() for part in query[0].split(",")]
    found = {"gpu": name, "driver": driver, "compute_capability": capability, "memory": memory, "cores": os.cpu_count()}
    nvcc = cuda_tools.nvcc()
    if not nvcc:
        raise Failed("nvcc is missing: install the CUDA toolkit, or name it in CUDACXX")
    for module in ("numpy", "yaml"):
        if importlib.util.find_spec(module) is None:
            raise Failed(f"the Python package {module} is missing")
    found["nvcc"] = re.search(r"release ([\d.]+)", run.command(nvcc, "--version"))[1]
    run.report["environment"] = found
    return found


def build(run: Run) -> dict:
    """For this machine's architecture alone."""
    architecture = run.report["environment"]["compute_capability"].replace(".", "") + "-real"
    start = time.monotonic()
    run.command("cmake", "-S", ROOT, "-B", run.build, "-G", "Ninja", "-DGGML_CUDA=ON", "-DGGML_EXT_TESTS=ON", "-DGGML_RPC=OFF",
                f"-DCMAKE_CUDA_ARCHITECTURES={architecture}", f"-DCMAKE_CUDA_COMPILER={cuda_tools.nvcc()}",
                f"-DPython_EXECUTABLE={sys.executable}", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_OPENSSL=OFF",
                "-DGGML_CUDA_FA=OFF")  # a third of the time, and the same for every type
    run.command("cmake", "--build", run.build, "--parallel", os.cpu_count(), "--target", *TARGETS)
    return {"architecture": architecture, "seconds": round(time.monotonic() - start, 1)}


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def kernels(run: Run) -> dict:
    """Device code against the scalar references; also its timings."""
    output: list[str] = []
    try:
        run.command(run.tool("ggml-ext-gpu-kernels"), timeout=120, keep=output)
    finally:  # the timings count even if a check failed
        lines = json_lines("".join(output))
        run.report["figures"]["kernels"] = [line for line in lines if "timing" in line]
    checks = [line for line in lines if "check" in line]
    if not checks:
        raise Failed("no check was reported")
    return {line["check"]: line["n"] for line in checks}


def backend_ops(run: Run, name: str) -> dict:
    """Upstream's test-backend-ops, every case of one type on the GPU against the CPU."""
    out = run.command(run.tool("test-backend-ops"), "test", "-b", run.device, "-p", f"={name}[,)]", timeout=240)
    counts = {op: len(re.findall(rf"^\s*{op}\(.*OK", re.sub(r"\x1b\[[\d;]*m", "", out), re.M)) for op in
              ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "CPY", "MUL_MAT_VEC_FUSION")}
    if missing := [op for op, n in counts.items() if not n]:
        raise Failed(f"no case of {', '.join(missing)} was run")
    return counts


def beside_nvcc(name: str) -> str:
    beside = cuda_tools.nvcc().resolve().parent / name
    return str(beside) if not shutil.which(name) and beside.exists() else name


def sanitizer(run: Run, tool: str) -> None:
    """compute-sanitizer on the device code's own test and on products of every type: vector kernels, tiles, experts."""
    def sanitized(*command) -> None:
        run.command(beside_nvcc("compute-sanitizer"), "--tool", tool, "--error-exitcode", 9, *command, timeout=120)

    sanitized(run.tool("ggml-ext-gpu-kernels"), "--no-timings")
    types = "|".join(OURS)
    for pattern in (f"type_a=({types}),type_b=f32,m=33,n=(1|5|8|33),k=(576|768),bs=.1,1.,nr=.1,1.,per=.0,1,2,3.,k_v=0",
                    f"type_a=({types}),type_b=f32,n_mats=16,n_used=4,b=0,m=33,n=(1|3|33),k=(576|768)"):
        sanitized(run.tool("test-backend-ops"), "test", "-b", run.device, "-p", pattern)


def quantized_files(run: Run, folder: Path) -> dict[str, str]:
    """The embedded model in every type of ours and Q3_K; matrices of the blocks in that type, embeddings Q8_0."""
    model, files = ROOT / "data" / "model-f16.gguf", {}
    for name in [*OURS, "q3_k"]:
        files[name] = str(folder / f"{name}.gguf")
        run.command(run.tool("llama-quantize"), "--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0", model,
                    files[name], "Q3_K_S" if name == "q3_k" else name.upper())
    return files


def perplexity(run: Run, file: Path, device: str, ubatch: int) -> float:
    from perplexity_run import perplexity as measure  # imports gguf

    if time.monotonic() > run.deadline:
        raise Failed("not run: the time is over")
    # llama.cpp's tools read options from such variables
    seconds = max(1, math.ceil(run.deadline - time.monotonic()))
    program = ["timeout", str(seconds), "env", f"LLAMA_ARG_DEVICE={'none' if device == 'CPU' else device}", "LLAMA_ARG_N_GPU_LAYERS=99",
               f"LLAMA_ARG_UBATCH={ubatch}", str(run.tool("llama-perplexity"))]
    return measure(file, ROOT / "data" / "heldout.txt", n_chunks=N_CHUNKS, threads=4, program=program).value


def whole_graph(run: Run, name: str, file: Path, cpu: concurrent.futures.Future) -> dict:
    """Perplexity on the GPU equals that on the CPU, with vector kernels (8 tokens at once) and with the others (512)."""
    found = {"cpu": cpu.result(), "gpu_ubatch_8": perplexity(run, file, run.device, 8), "gpu_ubatch_512": perplexity(run, file, run.device, 512)}
    for path in ("gpu_ubatch_8", "gpu_ubatch_512"):
        difference = math.log(found[path] / found["cpu"])
        found[f"ln_{path}_over_cpu"] = difference
        if not abs(difference) <= LOG_TOLERANCE:
            raise Failed(f"{name}: {path} {found[path]:.4f}, CPU {found['cpu']:.4f}; |ln| is {abs(difference):.5f}, at most {LOG_TOLERANCE:.5f}")
    return found


def bench(run: Run, *args) -> list[dict]:
    args = (*args, "-dev", "none" if run.device == "CPU" else run.device)
    return json.loads(run.command(run.tool("llama-bench"), "-ngl", 99, "-o", "json", *args))


def models(run: Run, folder: Path, shape: str, n_layers: int) -> dict[str, str]:
    """A synthetic model of every type."""
    from synth_model import write_model  # imports gguf

    files = {}
    for name in [*OURS, *STOCK]:
        if time.monotonic() > run.deadline:
            raise Failed("not run: the time is over")
        files[name] = str(folder / f"{shape}-{name}.gguf")
        write_model(name, Path(files[name]), shape, n_layers)
    return files


@contextlib.contextmanager
def checked_models(run: Run, title: str, *args):
    """The files of models() while they are needed; none if that failed."""
    files = {name: Path(file) for name, file in (run.check(title, models, *args) or {}).items()}
    yield files
    for file in files.values():
        file.unlink()


def decode(run: Run, files: dict[str, Path]) -> dict:
    """Tokens a second at batch 1 and of prompts, the types in turn, two rounds; the ratios that are asked for at batch 1."""
    samples, prompts = {name: [] for name in files}, {name: {} for name in files}
    for _ in range(2):
        for name, file in files.items():
            for row in bench(run, "-m", file, "-p", "512,2048", "-n", 128, "-r", 2):
                values = prompts[name].setdefault(f"pp{row['n_prompt']}", []) if row["n_prompt"] else samples[name]
                values.append(row["avg_ts"])
    run.report["figures"]["prefill"] = {name: {k: statistics.median(v) for k, v in row.items()} for name, row in prompts.items()}
    copy = next((k["gb_per_s"] for k in run.report["figures"].get("kernels", []) if k["timing"] == "copy"), None)
    table = {}
    for name, values in samples.items():
        speed = statistics.median(values)
        table[name] = {"tokens_per_s": speed, "min": min(values), "max": max(values)}
        for base in ("q3_K", "iq2_xxs", "q4_K", "f16"):
            table[name][f"x {base}"] = statistics.median(a / b for a, b in zip(values, samples[base], strict=True))
        if copy:  # the share of a device-to-device copy's bandwidth at which the file's bytes were read
            table[name]["bandwidth"] = speed * files[name].stat().st_size / 1e9 / copy
    run.report["figures"]["decode"] = table
    slow = [f"{name} {table[name][f'x {base}']:.2f} x {base}, asked {least}" for (name, base), least in WANTED_DECODE.items()
            if table[name][f"x {base}"] < least]
    if slow:
        raise Failed("; ".join(slow))
    return {}


def rotation_share(run: Run) -> dict:
    """Time that the rotation adds to the quantisation of activations, as a share of a decode step of ITQ3_S."""
    from synth_model import SHAPES

    us = {k["n"]: k["rotated_us"] - k["plain_us"] for k in run.report["figures"]["kernels"] if k["timing"] == "quantize"}
    step_us = 1e6 / run.report["figures"]["decode"]["itq3_s"]["tokens_per_s"]
    d, ff = SHAPES[run.shape][:2]
    if missing := {d, ff} - us.keys():
        raise Failed(f"no quantisation of {', '.join(map(str, sorted(missing)))} values was timed")
    share = run.n_layers * (6 * us[d] + us[ff]) / step_us  # six products of the one and one of the other in a layer
    if share > WANTED_ROTATION:
        raise Failed(f"{100 * share:.1f} % of a step, at most {100 * WANTED_ROTATION:.0f} %")
    return {"share_of_step": share}


def gemv(run: Run) -> dict:
    """Microseconds of single products against the time that the copy's bandwidth allows for the weights alone."""
    rows = [row for types, shapes in (([*OURS, *STOCK], GEMV), (RAGGED_TYPES, RAGGED))
            for row in json_lines(run.command(run.tool("ggml-ext-gpu-bench"), run.device, ",".join(types), *shapes))]
    copy = next(k["gb_per_s"] for k in run.report["figures"]["kernels"] if k["timing"] == "copy")
    for row in rows:
        row["bandwidth_us"] = row["bytes"] / copy / 1e3
    run.report["figures"]["gemv"] = rows
    return {}


def too_slow(table: dict[str, dict[str, float]], wanted: dict[tuple[str, str], float]) -> str:
    """What of table[type][what], in tokens a second, is less than wanted times that of a stock type."""
    return "; ".join(f"{name} {what} {speed / table[base][what]:.2f} x {base}, asked {least}" for (name, base), least in wanted.items()
                     for what, speed in table[name].items() if speed < least * table[base][what])


def prefill(run: Run) -> dict:
    """The ratios that are asked for of what decode() measured."""
    if slow := too_slow(run.report["figures"]["prefill"], WANTED_PREFILL):
        raise Failed(slow)
    return {}


def parallel(run: Run, files: dict[str, Path]) -> dict:
    """Decode with several sequences at once."""
    table = {}
    for name, file in files.items():
        rows = json_lines(run.command(run.tool("llama-batched-bench"), "-m", file, "-c", 64 * 256, "-b", 2048, "-npp", 64, "-ntg", 64,
                                      "-npl", PARALLEL, "-ngl", 99, "--output-format", "jsonl"))
        table[name] = {f"tg x {r['pl']}": r["speed_tg"] for r in rows}
    run.report["figures"]["parallel"] = table
    if slow := too_slow(table, WANTED_PARALLEL):
        raise Failed(slow)
    return {}


def experts(run: Run, files: dict[str, Path]) -> dict:
    """The same speeds of a mixture of 64 experts, and decode; for the record, since no ratio is asked for."""
    table = {}
    for name, file in files.items():
        table[name] = {f"pp{r['n_prompt']}" if r["n_prompt"] else "tg": r["avg_ts"]
                       for r in bench(run, "-m", file, "-p", "512,2048", "-n", 64, "-r", 2)}
    run.report["figures"]["experts"] = table
    return {}


def grouped(run: Run) -> dict:
    """Products of experts, relative to 8 and 4 bits."""
    rows = json_lines(run.command(run.tool("ggml-ext-gpu-bench"), run.device, ",".join(GROUPED_TYPES), *GROUPED))
    times = {(r["type"], r["rows"], r["cols"], r["tokens"]): r["us"] for r in rows}
    for row in rows:
        for base in ("q8_0", "q4_K"):
            row[f"x {base}"] = row["us"] / times[base, row["rows"], row["cols"], row["tokens"]]
    run.report["figures"]["grouped"] = rows
    return {}


def print_tables(figures: dict) -> None:
    if table := figures.get("decode"):
        print("\n| type | decode t/s | x q3_K | x iq2_xxs | x q4_K | share of bandwidth |\n| --- | --- | --- | --- | --- | --- |")
        for name, row in table.items():
            print(f"| {name} | {row['tokens_per_s']:.1f} | {row['x q3_K']:.2f} | {row['x iq2_xxs']:.2f} | {row['x q4_K']:.2f} | {row.get('bandwidth', math.nan):.2f} |")
    if rows := figures.get("gemv"):
        print("\n| type | rows x columns x tokens | us | us by bandwidth |\n| --- | --- | --- | --- |")
        for row in rows:
            print(f"| {row['type']} | {row['rows']}x{row['cols']}x{row['tokens']} | {row['us']:.2f} | {row['bandwidth_us']:.2f} |")
    for figure in ("prefill", "parallel", "experts"):
        if not (table := figures.get(figure)):
            continue
        print(f"\n| {figure}, t/s | " + " | ".join(next(iter(table.values()))) + " |\n| --- |" + " --- |" * len(next(iter(table.values()))))
        for name, row in table.items():
            print(f"| {name} | " + " | ".join(f"{v:.0f}" for v in row.values()) + " |")
    if rows := figures.get("grouped"):
        print("\n| type | rows x columns | tokens | us | x q8_0 | x q4_K |\n| --- | --- | --- | --- | --- | --- |")
        for row in rows:
            print(f"| {row['type']} | {row['rows']}x{row['cols']} | {row['tokens']} | {row['us']:.1f} | {row['x q8_0']:.2f} | {row['x q4_K']:.2f} |")


def unpacked(tree: str | None, folder: Path) -> str | None:
    """A folder for what --llama-cpp names."""
    if tree and Path(tree).is_file():
        with tarfile.open(tree) as tar:
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        return str(next(p for p in folder.iterdir() if (p / "ggml").is_dir()))
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--llama-cpp", metavar="TREE")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--device", default="CUDA0", help="as llama.cpp names it")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of the synthetic models, as in synth_model.py (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the synthetic models; Llama-3.1-8B has 32 (default: %(default)s)")
    parser.add_argument("--only", default="build,checks,speed")
    parser.add_argument("--models", type=Path, help="folder for about 25 GB of synthetic models (default: a temporary one)")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - {"build", "checks", "speed"}:
        parser.error(f"--only: unknown part {', '.join(sorted(unknown))}")
    run = Run(args.out.resolve(), args.build.resolve(), args.minutes, args.device, args.shape, args.layers)
    run.check("environment", environment)
    if not run.report["environment"]:
        return 1

    with tempfile.TemporaryDirectory() as tmp:
        tree = unpacked(args.llama_cpp, Path(tmp))
        if tree:
            os.environ["GGML_EXT_LLAMA_CPP_DIR"] = tree
        if "build" in parts and run.check("build", build) is None:
            return 1
        if importlib.util.find_spec("gguf") is None:
            sys.path.append(str(llama_cpp.pristine_tree() / "gguf-py"))
        sys.path.insert(0, str(ROOT / "py"))
        os.environ["GGML_EXT_LIB_DIR"] = str(run.build / "bin")
        # libraries that the build tree does not name: of the toolkit, of the Python package
        found = [cuda_tools.nvcc().resolve().parent.parent / "lib64", *([cublas[1].parent] if (cublas := cuda_tools.cublas()) else [])]
        os.environ["LD_LIBRARY_PATH"] = ":".join([*map(str, found), os.environ.get("LD_LIBRARY_PATH", "")])

        run.check("device code equals the scalar references", kernels)
        if "checks" in parts:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                files = run.check("quantized files", quantized_files, Path(tmp)) or {}
                cpu = {name: pool.submit(perplexity, run, Path(file), "none", 512) for name, file in files.items()}
                for name in OURS:
                    run.check(f"test-backend-ops {name}", backend_ops, name)
                for name, file in files.items():
                    run.check(f"perplexity {name}", whole_graph, name, Path(file), cpu[name])
        if "speed" in parts:
            folder = args.models or Path(tmp)
            with checked_models(run, "synthetic models", folder, run.shape, run.n_layers) as files:
                if files:
                    run.check("decode", decode, files)
                    if "decode" in run.report["figures"]:
                        run.check("share of the rotation", rotation_share)
                        run.check("prefill", prefill)
                    run.check("parallel sequences", parallel, files)
            with checked_models(run, "synthetic models of experts", folder, "olmoe-1b-7b", min(run.n_layers, 4)) as files:
                if files:
                    run.check("mixture of experts", experts, files)
            run.check("products", gemv)
            run.check("products of experts", grouped)
        if "checks" in parts:  # last, since they are slow
            for tool in ("memcheck", "racecheck"):
                run.check(f"compute-sanitizer {tool}", sanitizer, tool)
    print_tables(run.report["figures"])
    n_failed = sum(not c["passed"] for c in run.report["checks"])
    print(f"\n{len(run.report['checks']) - n_failed} of {len(run.report['checks'])} checks passed; figures are in {run.out}")
    return 0 if run.report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
