"""Times a matrix product of ggml's CPU backend: python -I product_rate.py LIBGGML DIRECTORY TYPE N_THREADS prints "flops X" (per second).

This is a separate program that needs only the standard library, because ggml aborts on errors.
"""

import ctypes
import os
import sys
import time
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint8, c_void_p

N, N_TOKENS = 4096, 512  # rows and columns of the matrix; a batch, as in calibration
F32, CPU = 0, 0  # GGML_TYPE_F32, GGML_BACKEND_DEVICE_TYPE_CPU
N_RUNS = 5
SIGNATURES = {
    "ggml_init": (c_void_p, None),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_backend_tensor_memset": (None, [c_void_p, c_uint8, c_size_t, c_size_t]),
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


def measure(library: str, directory: str, type_id: int, n_threads: int) -> float:
    """Return the operations per second of the fastest of N_RUNS products.

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
    weights = ggml.ggml_new_tensor_2d(context, type_id, N, N)
    inputs = ggml.ggml_new_tensor_2d(context, F32, N, N_TOKENS)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, ggml.ggml_mul_mat(context, weights, inputs))
    ggml.ggml_backend_alloc_ctx_tensors(context, backend)
    for tensor in (weights, inputs):
        ggml.ggml_backend_tensor_memset(tensor, 0, 0, ggml.ggml_nbytes(tensor))
    seconds = []
    for _ in range(N_RUNS):
        start = time.perf_counter()
        if ggml.ggml_backend_graph_compute(backend, graph):
            raise RuntimeError("the product failed")
        seconds.append(time.perf_counter() - start)
    return 2.0 * N * N * N_TOKENS / min(seconds)


if __name__ == "__main__":
    print(f"\nflops {measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))}", flush=True)
