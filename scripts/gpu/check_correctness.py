"""Correctness of the kernels: device code against scalar references, operations and perplexities against the CPU."""
from __future__ import annotations

import concurrent.futures
import math
import re
from pathlib import Path

from check_run import N_CORES, ROOT, SHORT_BLOCKS, Failed, Run, count_cases, json_lines

CTX, N_CHUNKS, N_CHUNKS_FEW = 256, 60, 6  # of perplexities; few: one token at a time, experts
REHEARSAL_CTX = 64
# Activations have one scale per 256 values on the CPU and per 32 on the GPU. The CPU's rounding changes the mean log-likelihood of a chunk
# of 256 tokens by a standard deviation of up to 0.0028 (CCQ2), the GPU's by less; the tolerance is five times both together. A missing
# rotation changes it by several units.
LOG_TOLERANCE_OF_CHUNK = 5 * math.sqrt(2) * 0.0028
# Overlapping or waiting launches, with or without CUDA graphs: the same kernels on the same numbers, but cuBLAS may choose another algorithm.
SAME_TOLERANCE = 1e-4
LARGE_MB = 4300  # more than 2^32 bytes
N_PROGRAMS = 4  # at once, because the CPU's reference results take most of the time
OPERATIONS = ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "CPY", "MUL_MAT_VEC_FUSION")
# only CUDA has fused products and copies
REQUIRED = {"cuda": OPERATIONS, "vulkan": OPERATIONS[:3], "metal": OPERATIONS[:3]}
# cases of a rehearsal on lavapipe: vectors, tiles, experts, rows by index; a process each, because version 22.3 corrupts its heap when a
# buffer grows
FEW_CASES = (*(f"type_a={{name}},type_b=f32,m=33,n={n},k=(256|576),bs=.1,1.,nr=.1,1.,per=.0,1,2,3.,k_v=0" for n in (1, 5, 9)),
             *(f"type_a={{name}},type_b=f32,.*n_used=1,b=0,m=33,n={n},k" for n in (1, 9)), "type={name},.*r=5,be1=1")


def few(run: Run) -> list[str]:
    return ["--few"] if run.rehearsal else []


# --- device code and operations --------------------------------------------------------------------------------------------


def reported_checks(run: Run, *command, timeout: float) -> dict:
    """Run a program of tests/gpu/ and return its checks with their counts. Failed with the first wrong ones."""
    output: list[str] = []
    failed = None
    try:
        run.command(*command, timeout=timeout, keep=output)
    except Failed as e:
        failed = e
    checks = [line for line in json_lines("".join(output)) if "check" in line]
    if wrong := [line for line in checks if line["wrong"]]:
        raise Failed(f"{len(wrong)} of {len(checks)}: "
                     + "; ".join(f"{c['check']}: {c['wrong']} of {c['n']}, first {c['first']}" for c in wrong[:3]))
    if failed:
        raise failed
    if not checks:
        raise Failed("no check was reported")
    return {line["check"]: line["n"] for line in checks}


def device_code(run: Run) -> dict:
    """Compare device code with the scalar references, and overlapping launches with waiting ones."""
    return reported_checks(run, run.program("ggml-ext-gpu-kernels"), "--no-timings", *few(run), timeout=120)


def large_matrices(run: Run) -> dict:
    """Check products and rows by index of a matrix with more than 2^32 bytes, in blocks of 256 and of 64."""
    types = [name for name in ("itq3_t", "itq3_t64") if name in run.types] or run.types[:1]
    megabytes = 1 if run.rehearsal else LARGE_MB
    return reported_checks(run, run.program("ggml-ext-gpu-bench"), run.device, ",".join(types), "--large", megabytes, timeout=120)


def operations(run: Run, name: str) -> dict:
    """Run upstream's test-backend-ops for one type, the device against the CPU: all cases, or few in a rehearsal on a driver for CPUs."""
    on_cpu = run.device == "CPU"  # the reference itself: only check that there are cases
    mode = ["support"] if on_cpu else ["test"] if run.rehearsal else ["test", "-j", N_PROGRAMS]
    patterns = [case.format(name=name) for case in FEW_CASES] if run.rehearsal and not on_cpu else [f"={name}[,)]"]
    output = "".join(run.command(run.program("test-backend-ops"), *mode, "-b", run.device, "-p", pattern, timeout=240)
                     for pattern in patterns)
    counts = {op: count_cases(output, op) for op in OPERATIONS}
    # "support" does not list fused products, and FEW_CASES have neither them nor copies
    required = [op for op in REQUIRED[run.backend] if not run.rehearsal or op in OPERATIONS[:3]]
    if missing := [op for op in required if not counts[op]]:
        raise Failed(f"no case of {', '.join(missing)} was run")
    return {op: n for op, n in counts.items() if n}


def check_operations(run: Run) -> None:
    if run.backend == "cuda":
        run.check("device code equals the scalar references", device_code)
    with concurrent.futures.ThreadPoolExecutor(1 if run.rehearsal else N_PROGRAMS) as pool:
        for name in run.types:
            pool.submit(run.check, f"test-backend-ops {name}", operations, name)


# --- perplexities ----------------------------------------------------------------------------------------------------------


def quantized_files(run: Run, directory: Path) -> dict[str, Path]:
    """Quantize the reference model to every ggml-ext type and Q3_K, with embeddings in Q8_0."""
    model, files = ROOT / "data" / "model-f16.gguf", {}
    for name in [*run.types, "q3_k"]:
        files[name] = directory / f"{name}.gguf"
        run.command(run.program("llama-quantize"), "--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0", model,
                    files[name], "Q3_K_S" if name == "q3_k" else name.upper())
    return files


Options = dict[str, object]  # llama-perplexity's options


def perplexity(run: Run, file: Path, options: Options, n_chunks: int = N_CHUNKS, env: dict[str, str] | None = None) -> float:
    """Measure a model's perplexity with all layers on the device, unless the options say otherwise."""
    defaults = {"-dev": "none" if run.device == "CPU" else run.device, "-ngl": 99, "-c": REHEARSAL_CTX if run.rehearsal else CTX,
                "--chunks": 1 if run.rehearsal else n_chunks, "-t": max(1, N_CORES // N_PROGRAMS)}
    output: list[str] = []
    run.command(run.program("llama-perplexity"), "-m", file, "-f", ROOT / "data" / "heldout.txt",
                *(word for option in (defaults | options).items() for word in option), timeout=120, env=env, keep=output)
    estimate = re.search(r"Final estimate: PPL = ([\d.]+)", output[0])
    if not estimate:
        raise Failed(f"llama-perplexity gave no estimate for {file.name}: " + " / ".join(output[0].strip().splitlines()[-3:]))
    return float(estimate[1])


def log_tolerance(run: Run, n_chunks: int) -> float:
    n_tokens = REHEARSAL_CTX if run.rehearsal else CTX * n_chunks
    return LOG_TOLERANCE_OF_CHUNK * math.sqrt(CTX / n_tokens)


def compare(path: str, value: float, expected: float, tolerance: float) -> float:
    """Return the logarithm of the ratio of two perplexities. Failed if it is too large."""
    difference = math.log(value / expected)
    if not abs(difference) <= tolerance:
        raise Failed(f"{path}: {value:.4f}, expected {expected:.4f}; |ln| is {abs(difference):.5f}, at most {tolerance:.5f}")
    return difference


ON_CPU: Options = {"-dev": "none", "-ngl": 0}
# ways to run the model: tiles (512 tokens at once) with and without flash attention, vector kernels (8 tokens), half of the reference
# model's eight layers on the CPU
PATHS: dict[str, Options] = {
    "ubatch 512": {"-ub": 512, "-fa": "on"}, "-fa off": {"-ub": 512, "-fa": "off"}, "ubatch 8": {"-ub": 8, "-fa": "on"},
    "-ngl 4": {"-ub": 512, "-ngl": 4}}


def same_as_cpu(run: Run, file: Path, paths: dict[str, Options], n_chunks: int = N_CHUNKS, options: Options | None = None) -> dict:
    """Check that the perplexity on the device equals the CPU's on several paths. options: for all of them."""
    options = options or {}
    result = {"cpu": perplexity(run, file, options | ON_CPU, n_chunks)}
    for path, path_options in paths.items():
        result[path] = perplexity(run, file, options | path_options, n_chunks)
        compare(path, result[path], result["cpu"], log_tolerance(run, n_chunks))
    return result


def check_perplexities(run: Run, directory: Path) -> None:
    names = [*run.types, "q3_k"]
    if run.pending(*(f"perplexity {name}" for name in names)):
        files = run.check("quantized files", quantized_files, directory, again=True) or {}
        with concurrent.futures.ThreadPoolExecutor(1 if run.rehearsal else N_PROGRAMS) as pool:
            for i, (name, file) in enumerate(files.items()):
                paths = dict([*PATHS.items()][:1]) if run.has_slow_driver and i > 0 else PATHS
                pool.submit(run.check, f"perplexity {name}", same_as_cpu, file, paths)


# --- optional, if there is time -------------------------------------------------------------------------------------------------


def one_token_at_a_time(run: Run, file: Path) -> dict:
    """Compare one token at a time, as in decoding, with the CPU, and CUDA graphs with overlap against neither."""
    result = same_as_cpu(run, file, {"ubatch 1": {"-ub": 1}}, N_CHUNKS_FEW)
    plain = perplexity(run, file, {"-ub": 1}, N_CHUNKS_FEW, env={"GGML_CUDA_PDL": "0", "GGML_CUDA_DISABLE_GRAPHS": "1"})
    compare("overlapped in graphs", result["ubatch 1"], plain, SAME_TOLERANCE)
    return result | {"plain": plain}


def precise_activations(run: Run, file: Path) -> dict:
    """Check --act-prec f16: vector kernels with two columns per token (4 tokens at once), and tiles."""
    return same_as_cpu(run, file, {"ubatch 4": {"-ub": 4}, "ubatch 512": {"-ub": 512}}, N_CHUNKS_FEW, {"--act-prec": "f16"})


def synthetic_graph(run: Run, name: str, directory: Path, shape: str) -> dict:
    """Check a model with random weights; also with weights in host memory that are copied for each batch, so that the padding after them
    is not cleared."""
    from synth_model import write_model

    file = directory / f"graph-{shape}-{name}.gguf"
    write_model(name, file, run.tiny_shape(shape), 1)
    try:
        paths: dict[str, Options] = {f"ubatch {n}": {"-ub": n} for n in (1, 8, 512)}
        paths["copied weights"] = {"-ub": 512, "-ngl": 0}
        return same_as_cpu(run, file, paths, N_CHUNKS_FEW)
    finally:
        file.unlink()


def check_more(run: Run, directory: Path) -> None:
    """Check paths that fewer people use."""
    some = [name for name in ("itq3_s", "itq3_t", "itq2_t64") if name in run.types] or run.types[:1]
    files = {name: directory / f"{name}.gguf" for name in some}
    checks = {}
    if run.backend != "vulkan":  # Vulkan only has 8-bit activations
        checks |= {f"perplexity with precise activations {name}": (precise_activations, file) for name, file in files.items()}
    if run.backend == "cuda":
        checks |= {f"perplexity a token at a time {name}": (one_token_at_a_time, file) for name, file in files.items()}
    if run.pending(*checks) and not all(file.exists() for file in files.values()):
        run.check("quantized files", quantized_files, directory, again=True)
    checks["matrices of more than 2^32 bytes"] = (large_matrices,)
    experts = [n for n in ("itq3_t", "ccq2", "itq3_t64") if n in run.types] or run.types[:1]
    checks |= {f"perplexity of experts {name}": (synthetic_graph, name, directory, "olmoe-1b-7b") for name in experts}
    ragged = [n for n in SHORT_BLOCKS if n in run.types]
    checks |= {f"perplexity of ragged rows {name}": (synthetic_graph, name, directory, "qwen2.5-0.5b") for name in ragged}
    with concurrent.futures.ThreadPoolExecutor(1 if run.rehearsal else N_PROGRAMS) as pool:
        for name, (function, *args) in checks.items():
            pool.submit(run.check, name, function, *args)
