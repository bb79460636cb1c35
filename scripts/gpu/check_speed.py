"""Speed of the kernels against upstream types: token generation and prompts of synthetic models, several sequences, single products."""
from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from check_run import EXT_TYPES, FIVE_BITS, FOUR_BITS, N_CORES, ROOT, SHORT_BLOCKS, THREE_BITS, TWO_BITS, Failed, Run, TooSlow, json_lines

BASES = ["q2_K", "q3_K", "q4_K", "q5_K", "iq2_xxs", "iq3_s"]  # ggml's names
N_ROUNDS = 2
N_SEQUENCES = (2, 4, 8, 16, 64)
PROMPTS, N_GENERATED = (512, 2048), 64
N_WRITERS = max(1, min(8, N_CORES // 2))  # programs that write synthetic models
MODEL_GB = 0.9  # more than a synthetic model of eight layers takes in most types
GEMV = ["4096x4096x1", "14336x4096x1", "4096x14336x1"]  # rows x columns x tokens
RAGGED = ["2880x2880x1", "2880x2880x512"]  # rows that 256 does not divide, as in gpt-oss
RAGGED_TYPES = [*SHORT_BLOCKS, "iq4_nl", "q8_0"]
# rows x columns x tokens x experts x experts per token: table 5 of the CCQ paper (000), whose kernel takes 0.48 to 0.58 of the
# time of 8 bits and 0.70 to 0.85 of that of 4 bits
GROUPED = [f"{shape}x{tokens}x256x8" for shape in ("7168x512", "1024x7168") for tokens in (1, 4, 16, 64)]
# required ratios of speeds to an upstream type: token generation, prompts, several sequences
REQUIRED_GENERATION = {name: ("q3_K", 1.0) for name in THREE_BITS} | {name: ("iq2_xxs", 1.0) for name in TWO_BITS} | {
    name: ("q5_K", 1.0) for name in FIVE_BITS} | {name: ("q4_K", 1.0) for name in FOUR_BITS}
REQUIRED_PROMPT = {name: ("q4_K", 0.95) for name in THREE_BITS + FOUR_BITS} | {name: ("iq2_xxs", 1.0) for name in TWO_BITS} | {
    name: ("q5_K", 0.95) for name in FIVE_BITS}
REQUIRED_SEQUENCES = {name: ("q4_K", 0.95) for name in THREE_BITS + TWO_BITS + FOUR_BITS} | {name: ("q5_K", 0.95) for name in FIVE_BITS}
FEW = 3  # types in a rehearsal on a driver for CPUs
MAX_ROTATION = 0.03  # limit of the rotation's share of a decoding step
Speeds = dict[str, dict[str, float]]  # type -> measurement -> tokens per second


class SyntheticModels:
    """Models of every type with random weights, written by idle cores while the device checks correctness."""

    def __init__(self, run: Run, directory: Path, *, in_advance: bool):
        """Prepare a directory. in_advance: start writing the models of check_speed()."""
        self.directory = directory
        self.pool = concurrent.futures.ThreadPoolExecutor(N_WRITERS)
        names = [*BASES, *run.types] if in_advance and run.pending("generation and prompts", "sequences") else []
        self.files = {name: self.pool.submit(self.write, run, name) for name in names}

    def write(self, run: Run, name: str, shape: str | None = None, n_layers: int | None = None) -> Path:
        run.current.deadline = run.end  # the run's, not the part's: the device's checks do not need these cores
        shape = shape or run.shape
        file = self.directory / f"{shape}-{name}.gguf"
        needed = 0 if shape.startswith("tiny") else MODEL_GB * 1e9
        if shutil.disk_usage(self.directory).free < needed:
            raise Failed(f"{self.directory} has no {MODEL_GB} GB left for each synthetic model: name another directory with --models")
        run.command(sys.executable, ROOT / "scripts" / "tools" / "synth_model.py", name, file, "--shape", shape,
                    "--layers", n_layers or run.n_layers)
        return file

    def finished(self, run: Run) -> dict[str, str]:
        """Wait for the files of all types; a check."""
        return {name: str(file.result()) for name, file in self.files.items()}

    @contextlib.contextmanager
    def of_experts(self, run: Run, types: list[str]) -> Iterator[dict[str, Path]]:
        """Yield models with experts, which are removed at the end."""
        shape = run.tiny_shape("olmoe-1b-7b")
        files = {name: self.pool.submit(self.write, run, name, shape, min(run.n_layers, 4)) for name in types}
        try:
            yield {name: file.result() for name, file in files.items()}
        finally:
            for file in files.values():
                with contextlib.suppress(Failed, OSError):
                    file.result().unlink()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        for file in self.files.values():
            with contextlib.suppress(Failed, OSError, concurrent.futures.CancelledError):
                file.result().unlink()


def llama_bench(run: Run, model: Path) -> dict[str, float]:
    """Tokens per second of token generation (tg) and of prompts (pp) of several lengths."""
    prompts, n_generated, repetitions = (("32",), 4, 1) if run.rehearsal else (PROMPTS, N_GENERATED, 2)
    rows = json.loads(run.command(run.program("llama-bench"), "-m", model, "-ngl", 99, "-dev", "none" if run.device == "CPU" else run.device,
                                  "-p", ",".join(map(str, prompts)), "-n", n_generated, "-r", repetitions, "-o", "json", timeout=120))
    return {f"pp{row['n_prompt']}" if row["n_prompt"] else "tg": row["avg_ts"] for row in rows}


def missed(speeds: Speeds, required: dict[str, tuple[str, float]], columns: tuple[str, ...] | None = None) -> list[str]:
    """What is slower than required. columns: prefixes of those that count."""
    return [f"{name} {column} {value / speeds[base][column]:.2f} x {base}, required {least}" for name, (base, least) in required.items()
            if name in speeds and base in speeds for column, value in speeds[name].items()
            if column in speeds[base] and value < least * speeds[base][column] and (not columns or column.startswith(columns))]


def require(run: Run, slow: list[str]) -> None:
    if slow and not run.rehearsal:
        raise TooSlow("; ".join(slow))


def copy_bandwidth(run: Run) -> dict:
    """Measure the gigabytes per second that a copy on the device reads and writes."""
    rows = json_lines(run.command(run.program("ggml-ext-gpu-bench"), run.device, "--copy", 16 if run.rehearsal else 1024, timeout=60))
    run.report["figures"]["copy_gb_per_s"] = rows[0]["copy_gb_per_s"]
    return rows[0]


def generation_and_prompts(run: Run, files: dict[str, Path]) -> dict:
    """Measure medians over rounds in which the types take turns, ratios to upstream types, and the share of a copy's bandwidth."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in files}
    try:
        for _ in range(1 if run.rehearsal else N_ROUNDS):
            for name, file in files.items():
                rounds[name].append(llama_bench(run, file))
    finally:  # if the time is over, the results so far count
        speeds = {name: {column: statistics.median(r[column] for r in results) for column in results[0]}
                  for name, results in rounds.items() if results}
        run.report["figures"]["speeds"] = speeds
        if copy := run.report["figures"].get("copy_gb_per_s"):
            run.report["figures"]["bandwidth_share"] = {name: row["tg"] * files[name].stat().st_size / 1e9 / copy
                                                        for name, row in speeds.items() if "tg" in row}
    require(run, [*missed(speeds, REQUIRED_GENERATION, ("tg",)), *missed(speeds, REQUIRED_PROMPT, ("pp",))])
    return {}


def sequences(run: Run, files: dict[str, Path]) -> dict:
    """Measure token generation with several sequences at once."""
    table: Speeds = {}
    run.report["figures"]["sequences"] = table
    n_tokens, counts = (4, (2,)) if run.rehearsal else (64, N_SEQUENCES)
    device = "none" if run.device == "CPU" else run.device
    for name, file in [*files.items()][: FEW if run.has_slow_driver else None]:
        rows = json_lines(run.command(run.program("llama-batched-bench"), "-m", file, "-c", 2 * n_tokens * max(counts), "-b", 2048, "-npp", n_tokens,
                                      "-ntg", n_tokens, "-npl", ",".join(map(str, counts)), "-ngl", 99, "-dev", device,
                                      "--output-format", "jsonl", timeout=120))
        table[name] = {f"{row['pl']} sequences": row["speed_tg"] for row in rows}
    require(run, missed(table, REQUIRED_SEQUENCES))
    return {}


def rotation_share(run: Run) -> dict:
    """Measure the time that the rotation adds to quantizing activations, as a share of a decoding step of ITQ3_S."""
    from synth_model import SHAPES

    speed = run.report["figures"].get("speeds", {}).get("itq3_s")
    if not speed:
        raise Failed("ITQ3_S was not measured")
    lines = json_lines(run.command(run.program("ggml-ext-gpu-kernels"), "--only-timings", *(["--few"] if run.rehearsal else []), timeout=60))
    us = {line["n"]: line["rotated_us"] - line["plain_us"] for line in lines if line.get("timing") == "quantize"}
    d, ff = SHAPES[run.shape][:2]
    if missing := {d, ff} - us.keys():
        raise Failed(f"no quantization of {', '.join(map(str, sorted(missing)))} values was timed")
    share = run.n_layers * (6 * us[d] + us[ff]) / (1e6 / speed["tg"])  # a layer has six products with d columns and one with ff
    if share > MAX_ROTATION:
        require(run, [f"the rotation takes {100 * share:.1f} % of a step, at most {100 * MAX_ROTATION:.0f} %"])
    return {"share_of_step": share}


def check_speed(run: Run, models: SyntheticModels) -> None:
    run.check("bandwidth of a copy", copy_bandwidth)
    if run.pending("generation and prompts", "sequences"):
        files = {name: Path(file) for name, file in (run.check("synthetic models", models.finished, again=True) or {}).items()}
        if files:
            run.check("generation and prompts", generation_and_prompts, files)
            run.check("sequences", sequences, files)
    if run.backend == "cuda" and "itq3_s" in run.types:
        run.check("share of the rotation", rotation_share)


# --- optional, if there is time -------------------------------------------------------------------------------------------------


def products(run: Run, figure: str, types: list[str], shapes: list[str]) -> list[dict]:
    """Measure microseconds of single products, type by type; the report keeps partial results."""
    rows = run.report["figures"][figure] = []
    for name in types[: FEW if run.has_slow_driver else None]:
        rows += json_lines(run.command(run.program("ggml-ext-gpu-bench"), run.device, name, *shapes, timeout=60))
    return rows


def vector_products(run: Run) -> dict:
    """Compare single products with the time that a copy of the weights takes."""
    shapes, ragged = (["512x512x1"], ["576x576x1"]) if run.rehearsal else (GEMV, RAGGED)
    rows = products(run, "products", [*run.types, *BASES], shapes)
    rows = rows + products(run, "ragged_products", [name for name in RAGGED_TYPES if name in run.types or name not in EXT_TYPES], ragged)
    if copy := run.report["figures"].get("copy_gb_per_s"):
        for row in rows:
            row["bandwidth_us"] = row["bytes"] / copy / 1e3
    return {}


def expert_products(run: Run) -> dict:
    """Compare products of experts with 8 and 4 bits."""
    shapes = ["256x512x1x4x2", "256x512x4x4x2"] if run.rehearsal else GROUPED
    rows = products(run, "expert_products", ["q8_0", "q4_K", *(name for name in run.types if name not in SHORT_BLOCKS)], shapes)
    times = {(r["type"], r["rows"], r["cols"], r["tokens"]): r["us"] for r in rows}
    for row in rows:
        for base in ("q8_0", "q4_K"):
            row[f"x {base}"] = row["us"] / times[base, row["rows"], row["cols"], row["tokens"]]
    return {}


def expert_models(run: Run, models: SyntheticModels) -> dict:
    """Measure a mixture of 64 experts; no ratio is required."""
    table: Speeds = {}
    run.report["figures"]["experts"] = table
    with models.of_experts(run, ["q3_K", "q4_K", *(name for name in run.types if name not in SHORT_BLOCKS)]) as files:
        for name, file in files.items():
            table[name] = llama_bench(run, file)
    return {}


def check_more_speed(run: Run, models: SyntheticModels) -> None:
    run.check("single products", vector_products)
    run.check("products of experts", expert_products)
    run.check("mixture of experts", expert_models, models)
