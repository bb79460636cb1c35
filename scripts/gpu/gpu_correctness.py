"""The part `checks` of gpu_check.py: whether the kernels are right. Device code against references, operations and perplexities
against the CPU, compute-sanitizer."""
from __future__ import annotations

import concurrent.futures
import math
import re
from pathlib import Path

from check_run import LOG_TOLERANCE, N_CHUNKS, OF_64, ROOT, Failed, Run
from gpu_check import LARGE_MB, N_CHUNKS_FEW, SAME_TOLERANCE, beside_nvcc, few, json_lines, shape_of


def reported(run: Run, *command, timeout: float) -> dict:
    """The checks that a program of tests/gpu/ reports; Failed with the first one that went wrong."""
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


def kernels(run: Run) -> dict:
    """Device code against the scalar references; launches that overlap; more than 2^32 bytes."""
    return reported(run, run.tool("ggml-ext-gpu-kernels"), "--no-timings", *few(run), timeout=120)


def large(run: Run) -> dict:
    """Products and look-ups in a matrix of more than 2^32 bytes, of a block of 256 and of 64."""
    types = [name for name in ("itq3_t", "itq3_t64") if name in run.types] or run.types[:1]
    megabytes = 1 if run.rehearsal else LARGE_MB
    return reported(run, run.tool("ggml-ext-gpu-bench"), run.device, ",".join(types), "--large", megabytes, timeout=120)


def cases(output: str, op: str) -> int:
    """Cases of an operation that test-backend-ops has passed."""
    return len(re.findall(rf"^\s*{op}\(.*(?:OK|SUPPORTED)", re.sub(r"\x1b\[[\d;]*m", "", output), re.M))


def backend_ops(run: Run, name: str) -> dict:
    """Upstream's test-backend-ops, every case of one type on the GPU against the CPU."""
    # the CPU is what it compares with: rehearsed, whether cases are found
    mode = ["support"] if run.rehearsal else ["test", "-j", 4]
    out = run.command(run.tool("test-backend-ops"), *mode, "-b", run.device, "-p", f"={name}[,)]", timeout=240,
                      env={"OMP_WAIT_POLICY": "passive"})  # several programs share the processors
    fused = [] if run.rehearsal else ["MUL_MAT_VEC_FUSION"]  # which it does not list
    counts = {op: cases(out, op) for op in ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "CPY", *fused)}
    if missing := [op for op, n in counts.items() if not n]:
        raise Failed(f"no case of {', '.join(missing)} was run")
    return counts


def sanitizer(run: Run, tool: str) -> None:
    """compute-sanitizer on the device code's own test and on products of every type: vector kernels, tiles, experts."""
    program = [] if run.rehearsal else [beside_nvcc("compute-sanitizer"), "--tool", tool, "--error-exitcode", 9]

    run.command(*program, run.tool("ggml-ext-gpu-kernels"), "--few", "--no-timings", timeout=120)
    types = "|".join(run.types)
    for op, pattern in (("MUL_MAT", f"type_a=({types}),type_b=f32,m=33,n=(1|5|8|33),k=(576|768),bs=.1,1.,nr=.1,1.,per=.0,1,2,3.,k_v=0"),
                        ("MUL_MAT_ID", f"type_a=({types}),type_b=f32,n_mats=16,n_used=4,b=0,m=33,n=(1|3|33),k=(576|768)")):
        out = run.command(*program, run.tool("test-backend-ops"), "support" if run.rehearsal else "test", "-b", run.device, "-p", pattern,
                          timeout=120)
        if not cases(out, op):
            raise Failed(f"no case of {op} was run")


def quantized_files(run: Run, folder: Path) -> dict[str, str]:
    """The embedded model in every type of ours and Q3_K; matrices of the blocks in that type, embeddings Q8_0."""
    model, files = ROOT / "data" / "model-f16.gguf", {}
    for name in [*run.types, "q3_k"]:
        files[name] = str(folder / f"{name}.gguf")
        run.command(run.tool("llama-quantize"), "--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0", model,
                    files[name], "Q3_K_S" if name == "q3_k" else name.upper())
    return files


def perplexity(run: Run, file: Path, device: str, ubatch: int, n_chunks: int = N_CHUNKS, env: tuple[str, ...] = ()) -> float:
    from perplexity_run import perplexity as measure  # imports gguf

    seconds = max(1, math.ceil(run.seconds_left()))
    # llama.cpp's tools read options from such variables
    program = ["timeout", str(seconds), "env", f"LLAMA_ARG_DEVICE={'none' if device == 'CPU' else device}", "LLAMA_ARG_N_GPU_LAYERS=99",
               f"LLAMA_ARG_UBATCH={ubatch}", *env, str(run.tool("llama-perplexity"))]
    return measure(file, ROOT / "data" / "heldout.txt", n_chunks=2 if run.rehearsal else n_chunks, threads=4, program=program).value


def compare(name: str, path: str, gpu: float, cpu: float, tolerance: float) -> float:
    """ln of the ratio of two perplexities; Failed if it is too large."""
    difference = math.log(gpu / cpu)
    if not abs(difference) <= tolerance:
        raise Failed(f"{name}: {path} {gpu:.4f}, expected {cpu:.4f}; |ln| is {abs(difference):.5f}, at most {tolerance:.5f}")
    return difference


def whole_graph(run: Run, name: str, file: Path, n_chunks: int = N_CHUNKS, ubatches: tuple[int, ...] = (8, 512),
                env: tuple[str, ...] = ()) -> dict:
    """Perplexity on the GPU equals that on the CPU, with vector kernels (8 tokens at once) and with tiles (512)."""
    found = {"cpu": perplexity(run, file, "CPU", 512, n_chunks, env)}
    for n in ubatches:
        gpu = perplexity(run, file, run.device, n, n_chunks, env)
        found |= {f"gpu_ubatch_{n}": gpu, f"ln_gpu_ubatch_{n}_over_cpu": math.log(gpu / found["cpu"])}
        compare(name, f"gpu_ubatch_{n}", gpu, found["cpu"], LOG_TOLERANCE * math.sqrt(N_CHUNKS / n_chunks))
    return found


def one_at_a_time(run: Run, name: str, file: Path) -> dict:
    """A token at a time, as decode does, out of graphs: as the CPU; and the same with launches that wait and without graphs."""
    found = whole_graph(run, name, file, N_CHUNKS_FEW, (1,))
    plain = perplexity(run, file, run.device, 1, N_CHUNKS_FEW, ("GGML_CUDA_PDL=0", "GGML_CUDA_DISABLE_GRAPHS=1"))
    return found | {"plain": plain, "ln_over_plain": compare(name, "overlapped in graphs", found["gpu_ubatch_1"], plain, SAME_TOLERANCE)}


def precise_activations(run: Run, name: str, file: Path) -> dict:
    """The same with --act-prec f16: vector kernels with two columns a token (4 tokens at once), tiles."""
    return whole_graph(run, name, file, N_CHUNKS_FEW, (4, 512), ("LLAMA_ARG_ACT_PREC=f16",))


def synthetic_graph(run: Run, name: str, folder: Path, shape: str) -> dict:
    """The same of a model with random weights; and with weights that lie in the computer's memory and are copied to the GPU for
    each batch, where what lies behind them is not cleared when they are loaded."""
    from synth_model import write_model

    shape = shape_of(run, shape)
    file = folder / f"graph-{shape}-{name}.gguf"
    write_model(name, file, shape, 1)
    try:
        found = whole_graph(run, name, file, N_CHUNKS_FEW, (1, 8, 512))
        copied = perplexity(run, file, run.device, 512, N_CHUNKS_FEW, ("LLAMA_ARG_N_GPU_LAYERS=0",))
        return found | {"copied": copied, "ln_copied": compare(name, "copied", copied, found["gpu_ubatch_512"], LOG_TOLERANCE)}
    finally:
        file.unlink()


def run_checks(run: Run, folder: Path) -> None:
    """Several at once: what takes the time is the CPU that results are compared with."""
    run.check("device code equals the scalar references", kernels)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for name in run.types:
            pool.submit(run.check, f"test-backend-ops {name}", backend_ops, name)
        pool.submit(run.check, "matrices of more than 2^32 bytes", large)
        pool.submit(run.check, "compute-sanitizer memcheck", sanitizer, "memcheck")
        names = {name: f"perplexity {name}" for name in [*run.types, "q3_k"]}
        some = [name for name in ("itq3_s", "itq3_t", "itq2_t64") if name in run.types] or run.types[:1]
        single = {name: f"perplexity a token at a time {name}" for name in some}
        precise = {name: f"perplexity with precise activations {name}" for name in [*some, "q3_k"]}
        if run.wants(*names.values(), *single.values(), *precise.values()):
            files = run.check("quantized files", quantized_files, folder, again=True) or {}
            for name, file in files.items():
                pool.submit(run.check, names[name], whole_graph, name, Path(file))
            for name in single.keys() & files.keys():
                pool.submit(run.check, single[name], one_at_a_time, name, Path(files[name]))
            for name in precise.keys() & files.keys():
                pool.submit(run.check, precise[name], precise_activations, name, Path(files[name]))
        for name in [n for n in ("itq3_t", "ccq2", "itq3_t64") if n in run.types] or run.types[:1]:
            pool.submit(run.check, f"perplexity of experts {name}", synthetic_graph, name, folder, "olmoe-1b-7b")
        for name in [n for n in OF_64 if n in run.types]:
            pool.submit(run.check, f"perplexity of ragged rows {name}", synthetic_graph, name, folder, "qwen2.5-0.5b")
        for tool in ("racecheck", "synccheck"):  # last, since they are slow
            pool.submit(run.check, f"compute-sanitizer {tool}", sanitizer, tool)
