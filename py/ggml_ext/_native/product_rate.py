"""Times a matrix product of ggml's CPU backend: python -I product_rate.py LIBGGML DIRECTORY TYPE N_COLUMNS N_EXPERTS N_THREADS prints "flops X" (per second).

This is a separate program that needs only the standard library, because ggml aborts on errors.
"""

import ctypes
import os
import sys
import time
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint8, c_void_p

N = 4096  # rows of all experts, and columns
F32, I32, CPU = 0, 26, 0  # GGML_TYPE_F32, GGML_TYPE_I32, GGML_BACKEND_DEVICE_TYPE_CPU
N_RUNS = 5
SIGNATURES = {
    "ggml_init": (c_void_p, None),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_new_tensor_3d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_mul_mat_id": (c_void_p, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_backend_tensor_memset": (None, [c_void_p, c_uint8, c_size_t, c_size_t]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
    "ggml_backend_init_by_type": (c_void_p, [c_int, c_char_p]),
    "ggml_backend_get_device": (c_void_p, [c_void_p]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
}


class InitParams(ctypes.Structure):
    """struct ggml_init_params of ggml.h."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def measure(library: str, directory: str, type_id: int, n_columns: int, n_experts: int, n_threads: int) -> float:
    """Return the operations per second of the fastest of N_RUNS products.

    With n_experts > 1 it is the product of a mixture of experts, where each has n_columns columns.

    The first one starts threads and fills caches; others may be slowed by short activity of other programs.
    """
    ggml = ctypes.CDLL(library)  # symbols of linked libraries are found too
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments or [InitParams]
    ggml.ggml_backend_load_all_from_path(os.fsencode(directory))
    backend = ggml.ggml_backend_init_by_type(CPU, None)
    registry = ggml.ggml_backend_dev_backend_reg(ggml.ggml_backend_get_device(backend))
    set_threads = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
    ctypes.CFUNCTYPE(None, c_void_p, c_int)(set_threads)(backend, n_threads)
    context = ggml.ggml_init(InitParams(1 << 20, None, True))
    is_dense, n_tokens = n_experts == 1, n_columns * n_experts
    weights = ggml.ggml_new_tensor_3d(context, type_id, N, N // n_experts, n_experts)
    inputs = ggml.ggml_new_tensor_3d(context, F32, N, *((n_tokens, 1) if is_dense else (1, n_tokens)))
    ids = ggml.ggml_new_tensor_2d(context, I32, 1, n_tokens)
    product = ggml.ggml_mul_mat(context, weights, inputs) if is_dense else ggml.ggml_mul_mat_id(context, weights, inputs, ids)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, product)
    ggml.ggml_backend_alloc_ctx_tensors(context, backend)
    for tensor in (weights, inputs):
        ggml.ggml_backend_tensor_memset(tensor, 0, 0, ggml.ggml_nbytes(tensor))
    experts = (ctypes.c_int32 * n_tokens)(*(i % n_experts for i in range(n_tokens)))
    ggml.ggml_backend_tensor_set(ids, experts, 0, ctypes.sizeof(experts))
    seconds = []
    for _ in range(N_RUNS):
        start = time.perf_counter()
        if ggml.ggml_backend_graph_compute(backend, graph):
            raise RuntimeError("the product failed")
        seconds.append(time.perf_counter() - start)
    return 2.0 * N * N * n_columns / min(seconds)


if __name__ == "__main__":
    print(f"\nflops {measure(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))}", flush=True)
