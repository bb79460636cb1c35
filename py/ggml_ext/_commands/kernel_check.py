"""Check and time the kernels of one type on one device against a reference in double precision."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .._base.types import WEIGHT_TYPES
from .._formats.gguf_file import bits_per_weight
from .._native import backend
from .._native.backend import Case
from .._native.library import Library

T = GGMLQuantizationType
# Vectors, few columns and tiles have kernels of their own. The largest first: Mesa 22.3's driver for CPUs corrupts its heap when a buffer grows.
N_COLUMNS = (512, 64, 16, 8, 5, 2, 1)
ID_COLUMNS = (16, 1)
N_ROWS, N_EXPERTS, EXPERT_ROWS, N_USED = 130, 4, 32, 2  # 130: no multiple of a tile
ROW_IDS = (129, 0, 64, 64, 7)
LONG_ROW = 1024  # a multiple of every block size
SHORT_ROWS = {256: 768, 64: 576, 32: 416}  # by block size: odd numbers of blocks, which end within a tile or a block of activations
LOUD = 10.0  # an activation per long row, in standard deviations of the others
# The limit of test-backend-ops for products (test_mul_mat::max_nmse_err). It also holds for ggml-ext types, whose kernels round activations to
# 8 bits with one scale per 32 to 256 values. A step is 1/127 of the largest value A, its error A^2 / 127^2 / 12 per value. In blocks of 256
# standard normal values that is an NMSE of 5e-5 (A = 3), in one of four blocks with A = 10 an NMSE of 1.5e-4 over all four: a third of the limit.
MAX_NMSE = 5e-4
# Errors of GET_ROWS relative to the largest value of the row. Rotated types add 256 values in eight steps, in the order of the backend.
MAX_ROW_ERROR = 32 * float(np.finfo(np.float32).eps)

SPEED_ROWS, SPEED_ROW = 14336, 4096  # of the timed matrix, as ffn_up of an 8B model
SPEED_COLUMNS = {"tokens": 1, "prompt": 512}
SPEED_SECONDS = {"tokens": 0.5, "prompt": 1.0}  # of repetitions
COLD_BYTES = 256 << 20  # of the smallest type; more than the caches of any GPU
PROMPT_COPIES = 4
PROBE_ROWS, MIN_ROWS = 512, 64
PROBE_RUNS = 3
LOG_LINES = 20  # of a program that failed
SPEED_SHARE = 0.2  # least part of a type's time in which its speed is measured
MAX_CRASHES = 3  # of one type, after each of which the other cases go on


@dataclass(frozen=True)
class SpeedShape:
    """The matrices that are timed: rows and number of copies, for tokens and prompt."""

    rows: dict[str, int]
    copies: dict[str, int]


@dataclass
class TypeResult:
    """The result of a type on a device.

    Attributes:
        correct: yes, no, crashed, hung, not supported or not measured.
        nmse: of products and rows by case; None if a value is not finite.
        unsupported: cases that the device does not support.
        failures: one line each.
        seconds: per product of SPEED_ROWS rows, for tokens and prompt; shorter matrices are scaled.
        gb_per_s: bytes of weights per second, for tokens.
        log: the last lines of a program that failed.
    """

    type: str
    bpw: float
    is_standard: bool
    correct: str = "not measured"
    nmse: dict[str, float | None] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    gb_per_s: float | None = None
    log: list[str] = field(default_factory=list)

    def worst_nmse(self) -> float | None:
        """Return the largest NMSE of products; None without products or if a value is not finite."""
        products = [value for case, value in self.nmse.items() if case.startswith("MUL_MAT")]
        return None if not products or None in products else max(value for value in products if value is not None)


@dataclass(frozen=True)
class Check:
    """A case and its expected output, float64."""

    case: Case
    expected: np.ndarray

    @property
    def output(self) -> Path:
        return Path(self.case["output_file"])

    def problem(self) -> tuple[float | None, str]:
        """Return the NMSE of the output, and what is wrong with it, if anything."""
        values = np.fromfile(self.output, np.float32).astype(np.float64).reshape(self.expected.shape)
        if not np.isfinite(values).all():
            return None, f"{np.sum(~np.isfinite(values))} of {values.size} values are not finite"
        errors = values - self.expected
        nmse = float(np.sum(errors**2) / np.sum(self.expected**2))
        if self.case["op"] == "GET_ROWS":
            relative = float(np.max(np.abs(errors) / np.abs(self.expected).max(axis=-1, keepdims=True)))
            return nmse, f"error {relative:.1e} of the row's largest value, at most {MAX_ROW_ERROR:.1e}" if relative > MAX_ROW_ERROR else ""
        return nmse, f"NMSE {nmse:.1e}, at most {MAX_NMSE:.0e}" if nmse > MAX_NMSE else ""


@dataclass(frozen=True)
class Matrix:
    """Encoded random weights in a file, and their decoded values, float64 (N_ROWS, columns)."""

    path: Path
    values: np.ndarray


def encode_matrix(library: Library, type_: T, columns: int, directory: Path, rng: np.random.Generator) -> Matrix:
    """Encode random rows of a type and write them to a file."""
    rows = rng.standard_normal((N_ROWS, columns), np.float32) * np.float32(0.05)
    encoded = library.quantize(type_, rows, imatrix=np.ones(columns, np.float32))  # some standard types require one
    path = directory / f"weights-{columns}"
    encoded.tofile(path)
    return Matrix(path, library.dequantize(type_, encoded, columns).astype(np.float64))


def make_inputs(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return normal activations, float32, with one loud value per LONG_ROW of them."""
    inputs = rng.standard_normal(shape, np.float32)
    flat = inputs.reshape(-1)
    flat[rng.choice(flat.size, max(flat.size // LONG_ROW, 1), replace=False)] = LOUD
    return inputs


def count_columns(n: int) -> str:
    return f"{n} column{'s' * (n > 1)}"


def make_checks(type_: T, matrix: Matrix, with_experts: bool, directory: Path, rng: np.random.Generator) -> Iterator[Check]:
    """Yield the checks of a matrix. Their activations are written to files in the directory."""
    n_rows, columns = matrix.values.shape

    def check(name: str, expected: np.ndarray, activations: np.ndarray | None = None, **case: Any) -> Check:
        name = f"{name}, rows of {columns}"
        case |= {"name": name, "type": int(type_), "weights_file": str(matrix.path), "output_file": str(directory / f"{name}.out")}
        if activations is not None:
            case["inputs_file"] = str(directory / f"{name}.in")
            activations.tofile(case["inputs_file"])
        return Check(case, expected)

    for n in N_COLUMNS:
        inputs = make_inputs((n, columns), rng)
        yield check(
            f"MUL_MAT, {count_columns(n)}", inputs.astype(np.float64) @ matrix.values.T, inputs, op="MUL_MAT", weights=[columns, n_rows, 1],
            inputs=[columns, n, 1],
        )
    for n in ID_COLUMNS if with_experts else ():
        experts = matrix.values[: N_EXPERTS * EXPERT_ROWS].reshape(N_EXPERTS, EXPERT_ROWS, columns)
        ids = np.stack([rng.permutation(N_EXPERTS)[:N_USED] for _ in range(n)])
        inputs = make_inputs((n, N_USED, columns), rng)
        expected = np.einsum("tumk,tuk->tum", experts[ids], inputs.astype(np.float64))
        yield check(
            f"MUL_MAT_ID, {count_columns(n)}", expected, inputs, op="MUL_MAT_ID", weights=[columns, EXPERT_ROWS, N_EXPERTS],
            inputs=[columns, N_USED, n], ids=ids.tolist(),
        )
    yield check("GET_ROWS", matrix.values[list(ROW_IDS)], op="GET_ROWS", weights=[columns, n_rows, 1], ids=[list(ROW_IDS)])


def speed_cases(type_: T, shape: SpeedShape, **files: str) -> list[Case]:
    """Return the timed products. files: weights_file with encoded blocks, and inputs_file."""
    return [
        {
            "name": f"speed, {what}", "op": "MUL_MAT", "type": int(type_), "weights": [SPEED_ROW, shape.rows[what], 1],
            "inputs": [SPEED_ROW, n, 1], "copies": shape.copies[what], "min_runs": 2, "seconds": SPEED_SECONDS[what], **files,
        }
        for what, n in sorted(SPEED_COLUMNS.items(), key=lambda item: -item[1])
    ]


def choose_shape(device: backend.Device, n_threads: int, seconds: float) -> tuple[SpeedShape, str]:
    """Choose matrices that the device multiplies in reasonable time and that fit a quarter of its free memory.

    Small products of a standard type are timed first. On a GPU this also compiles and loads the kernels of the backend.

    Returns:
        The shape, and why the device does not multiply; empty if it does.
    """
    probe = SpeedShape(dict.fromkeys(SPEED_COLUMNS, PROBE_ROWS), dict.fromkeys(SPEED_COLUMNS, 1))
    cases = [case | {"min_runs": PROBE_RUNS, "seconds": 0} for case in speed_cases(T.Q4_K, probe)]
    run = backend.run_cases(device.name, cases, n_threads, seconds)
    if run.failure:
        return probe, f"a product in Q4_K: {run.failure}"
    rows, copies = {}, {}
    for what in SPEED_COLUMNS:
        times = run.seconds()[f"speed, {what}"]
        per_row = min(times) / PROBE_ROWS if times else 0.0  # unsupported: nothing is known
        n = SPEED_ROWS
        while n > MIN_ROWS and n * per_row > SPEED_SECONDS[what]:
            n //= 2
        smallest, largest = (n * SPEED_ROW * bpw / 8 for bpw in (min(info.bpw for info in WEIGHT_TYPES.values()), bits_per_weight(T.Q5_K)))
        limits = [COLD_BYTES / smallest if what == "tokens" else PROMPT_COPIES]
        if per_row:
            limits.append(SPEED_SECONDS[what] / (n * per_row))
        if device.free:
            limits.append(device.free / 4 / (largest + 4 * n * SPEED_COLUMNS[what]))
        rows[what], copies[what] = n, max(int(min(limits)), 1)
    return SpeedShape(rows, copies), ""


def check_type(
    library: Library, device: str, type_: T, shape: SpeedShape, directory: Path, n_threads: int, seconds: float, result: TypeResult
) -> None:
    """Check and time a type on a device, and fill the result.

    Args:
        library: the encoder and decoder.
        device: its name.
        type_: the type.
        shape: of the timed products.
        directory: for the files of the cases.
        n_threads: for backends that compute on the CPU.
        seconds: time limit.
        result: to fill.
    """
    rng = np.random.default_rng(int(type_))
    columns = [LONG_ROW, SHORT_ROWS[GGML_QUANT_SIZES[type_][0]]]
    matrices = [encode_matrix(library, type_, n, directory, rng) for n in columns]
    checks = [c for i, matrix in enumerate(matrices) for c in make_checks(type_, matrix, i == 1, directory, rng)]
    inputs = directory / "inputs"
    make_inputs((SPEED_ROW,), rng).tofile(inputs)
    end = time.monotonic() + seconds
    times, outcome = run_checks(device, [c.case for c in checks], n_threads, seconds, result)
    result.unsupported = [name for name, value in times.items() if value is None]
    n_failures = len(result.failures)
    add_errors(result, [c for c in checks if times.get(c.case["name"])])
    is_wrong = len(result.failures) > n_failures
    remaining = end - time.monotonic()
    if outcome != "hung" and remaining < SPEED_SHARE * seconds:
        result.failures.append("speed not measured: the checks took the time; pass a larger --minutes")
    elif outcome != "hung":
        cases = speed_cases(type_, shape, weights_file=str(matrices[0].path), inputs_file=str(inputs))
        run = backend.run_cases(device, cases, n_threads, remaining)
        add_failure(result, run)
        add_speed(result, shape, run.seconds())
        outcome = run.outcome if outcome == "ended" else outcome
    result.correct = "no" if is_wrong else outcome if outcome != "ended" else "not supported" if result.unsupported else "yes"


def run_checks(
    device: str, cases: Sequence[Case], n_threads: int, seconds: float, result: TypeResult
) -> tuple[dict[str, list[float] | None], str]:
    """Run the cases, after a crash those that follow it. Failures are added to the result.

    Returns:
        The seconds of each run by case, None for cases that the device does not support; and ended, crashed or hung.
    """
    end, outcome = time.monotonic() + seconds, "ended"
    times: dict[str, list[float] | None] = {}
    for _ in range(MAX_CRASHES):
        run = backend.run_cases(device, cases, n_threads, max(end - time.monotonic(), 1.0))
        times |= run.seconds()
        add_failure(result, run)
        outcome = run.outcome if run.failure else outcome
        names = [case["name"] for case in cases]
        cases = cases[names.index(run.stage()) + 1 :] if run.outcome == "crashed" and run.stage() in names else []
        if not cases:
            break
    return times, outcome


def add_failure(result: TypeResult, run: backend.BackendRun) -> None:
    if run.failure:
        result.failures.append(f"{run.stage()}: {run.failure}")
        result.log += run.log.splitlines()[-LOG_LINES:]


def add_errors(result: TypeResult, checks: Sequence[Check]) -> None:
    for check in checks:
        nmse, problem = check.problem()
        result.nmse[check.case["name"]] = nmse
        if problem:
            result.failures.append(f"{check.case['name']}: {problem}")


def add_speed(result: TypeResult, shape: SpeedShape, times: dict[str, list[float] | None]) -> None:
    for what in SPEED_COLUMNS:
        if runs := times.get(f"speed, {what}"):  # two at least
            median = statistics.median(runs[1:])  # the first run fills caches and starts threads
            result.seconds[what] = median / shape.copies[what] * SPEED_ROWS / shape.rows[what]
    if "tokens" in result.seconds:
        result.gb_per_s = SPEED_ROWS * SPEED_ROW * result.bpw / 8 / result.seconds["tokens"] / 1e9

