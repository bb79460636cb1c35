"""Runs operations on one of ggml's devices: python -I backend_program.py JOB. JOB is the JSON object that backend.py describes.

It prints "result " and a JSON value per line. This is a separate program that needs only the standard library, because ggml aborts on errors.
"""

import ctypes
import json
import os
import sys
import time
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

F32, I32 = 0, 26  # GGML_TYPE_F32, GGML_TYPE_I32
KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # enum ggml_backend_dev_type
SIGNATURES = {
    "ggml_init": (c_void_p, None),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_new_tensor_3d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_mul_mat_id": (c_void_p, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "ggml_get_rows": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_backend_dev_type": (c_int, [c_void_p]),
    "ggml_backend_dev_memory": (None, [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_dev_init": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_reg_name": (c_char_p, [c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
}


class InitParams(ctypes.Structure):
    """struct ggml_init_params of ggml.h."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def load(library: str, directory: str) -> Any:
    """Load libggml and the backends of a directory."""
    ggml = ctypes.CDLL(library)  # symbols of linked libraries are found too
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, [InitParams] if arguments is None else arguments
    ggml.ggml_backend_load_all_from_path(os.fsencode(directory))
    return ggml


def print_result(value: Any) -> None:
    print(f"\nresult {json.dumps(value)}", flush=True)  # a new line, because ggml logs dots without one


def describe(ggml: Any, device: int) -> dict[str, Any]:
    """Return the properties of a device. Memory is in bytes, 0 if unknown."""
    free, total = c_size_t(), c_size_t()
    ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return {
        "name": ggml.ggml_backend_dev_name(device).decode(errors="replace"),
        "description": ggml.ggml_backend_dev_description(device).decode(errors="replace"),
        "backend": ggml.ggml_backend_reg_name(ggml.ggml_backend_dev_backend_reg(device)).decode(errors="replace"),
        "kind": KINDS[ggml.ggml_backend_dev_type(device)], "free": free.value, "total": total.value,
    }


def start_backend(ggml: Any, device: int, n_threads: int) -> int:
    """Start a device's backend. n_threads: for backends that compute on the CPU."""
    backend = ggml.ggml_backend_dev_init(device, None)
    if not backend:
        raise RuntimeError("the device does not start")
    set_threads = ggml.ggml_backend_reg_get_proc_address(ggml.ggml_backend_dev_backend_reg(device), b"ggml_backend_set_n_threads")
    if set_threads:
        ctypes.CFUNCTYPE(None, c_void_p, c_int)(set_threads)(backend, n_threads)
    return backend


def fill(ggml: Any, tensor: int, path: str | None) -> None:
    """Fill a tensor with the bytes of a file, repeated as needed; with zeros if there is none."""
    data, size = b"\0", ggml.ggml_nbytes(tensor)
    if path:
        with open(path, "rb") as f:
            data = f.read()
    ggml.ggml_backend_tensor_set(tensor, (data * (size // len(data) + 1))[:size], 0, size)


def build(ggml: Any, context: int, case: dict[str, Any]) -> tuple[list[int], int | None, int | None, list[int]]:
    """Build the operations of a case, one per copy of the weights. Return weights, inputs or None, ids or None, and outputs."""
    op = case["op"]
    weights = [ggml.ggml_new_tensor_3d(context, case["type"], *case["weights"]) for _ in range(case.get("copies", 1))]
    inputs = ggml.ggml_new_tensor_3d(context, F32, *case["inputs"]) if op != "GET_ROWS" else None
    ids = ggml.ggml_new_tensor_2d(context, I32, len(case["ids"][0]), len(case["ids"])) if op != "MUL_MAT" else None
    sources = [source for source in (inputs, ids) if source]
    return weights, inputs, ids, [getattr(ggml, f"ggml_{op.lower()}")(context, matrix, *sources) for matrix in weights]


def run_case(ggml: Any, device: int, backend: int, case: dict[str, Any]) -> list[float] | None:
    """Run a case. Return the seconds of each run; None if the device does not support the operation.

    The end of the program frees all memory: Mesa 22.3's driver for CPUs reads buffers of earlier operations.
    """
    context = ggml.ggml_init(InitParams(1 << 20, None, True))
    weights, inputs, ids, outputs = build(ggml, context, case)
    if not ggml.ggml_backend_dev_supports_op(device, outputs[0]):
        return None
    graph = ggml.ggml_new_graph(context)
    for output in outputs:
        ggml.ggml_build_forward_expand(graph, output)
    if not ggml.ggml_backend_alloc_ctx_tensors(context, backend):
        raise RuntimeError("the device's memory does not hold the tensors")
    for matrix in weights:
        fill(ggml, matrix, case.get("weights_file"))
    if inputs:
        fill(ggml, inputs, case.get("inputs_file"))
    if ids:
        flat = [i for row in case["ids"] for i in row]
        ggml.ggml_backend_tensor_set(ids, (ctypes.c_int32 * len(flat))(*flat), 0, 4 * len(flat))
    seconds: list[float] = []
    while len(seconds) < case.get("min_runs", 1) or sum(seconds) < case.get("seconds", 0):
        start = time.perf_counter()
        if ggml.ggml_backend_graph_compute(backend, graph):  # waits for the device
            raise RuntimeError("the operation failed")
        seconds.append(time.perf_counter() - start)
    if "output_file" in case:
        result = ctypes.create_string_buffer(ggml.ggml_nbytes(outputs[0]))
        ggml.ggml_backend_tensor_get(outputs[0], result, 0, len(result))
        with open(case["output_file"], "wb") as f:
            f.write(result)
    return seconds


def main(job: dict[str, Any]) -> None:
    ggml = load(job["library"], job["directory"])
    devices = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    described = [describe(ggml, device) for device in devices]
    if "device" not in job:
        print_result(described)
        return
    device = next(d for d, about in zip(devices, described, strict=True) if job["device"] in (about["name"], about["kind"]))
    backend = start_backend(ggml, device, job["n_threads"])
    for case in job["cases"]:
        print_result({"starts": case["name"]})
        print_result({"ends": case["name"], "seconds": run_case(ggml, device, backend, case)})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
