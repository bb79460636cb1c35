"""Compute ggml operations on the CPU backend through ctypes, for tests and benchmarks."""
from __future__ import annotations

import ctypes
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p

import numpy as np


class Graph:
    """A ggml context with tensors and operations. Shapes have numpy's order, as in gguf: the row size comes last.

    Args:
        base, cpu: the loaded libggml-base and libggml-cpu.
        mem_bytes: size of the context.
    """

    class _InitParams(ctypes.Structure):
        _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]

    class _Plan(ctypes.Structure):  # struct ggml_cplan
        _fields_ = [("work_size", c_size_t), ("work_data", c_void_p), ("n_threads", c_int), ("threadpool", c_void_p),
                    ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("use_ref", c_bool)]

    def __init__(self, base: ctypes.CDLL, cpu: ctypes.CDLL, mem_bytes: int = 64 << 20):
        self.base, self.cpu = base, cpu
        for name in ("ggml_init", "ggml_new_tensor", "ggml_mul_mat", "ggml_mul_mat_id", "ggml_get_rows", "ggml_cpy",
                     "ggml_get_data", "ggml_new_graph"):
            getattr(base, name).restype = c_void_p
        base.ggml_nbytes.restype = c_size_t
        cpu.ggml_graph_plan.restype = self._Plan
        cpu.ggml_cpu_init()
        self.work = np.empty(0, np.uint8)  # kept between runs, as programs do
        self.ctx = c_void_p(base.ggml_init(self._InitParams(mem_bytes, None, False)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.base.ggml_free(self.ctx)

    def tensor(self, type_id: int, data: np.ndarray, shape: tuple[int, ...]) -> c_void_p:
        """Create a tensor with a copy of the bytes of `data`."""
        ne = (c_int64 * len(shape))(*reversed(shape))
        t = c_void_p(self.base.ggml_new_tensor(self.ctx, c_int(type_id), c_int(len(shape)), ne))
        assert self.base.ggml_nbytes(t) == data.nbytes
        data = np.ascontiguousarray(data)
        ctypes.memmove(self.base.ggml_get_data(t), data.ctypes.data, data.nbytes)
        return t

    def node(self, op: str, *args: c_void_p) -> c_void_p:
        """Add the operation ggml_<op>(ctx, *args) and return its result tensor."""
        return c_void_p(getattr(self.base, f"ggml_{op}")(self.ctx, *args))

    def plan(self, *nodes: c_void_p) -> c_void_p:
        """Build a graph that computes the nodes in order."""
        graph = c_void_p(self.base.ggml_new_graph(self.ctx))
        for node in nodes:
            self.base.ggml_build_forward_expand(graph, node)
        return graph

    def run(self, graph: c_void_p, n_threads: int = 2) -> None:
        plan = self.cpu.ggml_graph_plan(graph, c_int(n_threads), None)
        if plan.work_size > self.work.nbytes:
            self.work = np.empty(plan.work_size, np.uint8)
        plan.work_data = self.work.ctypes.data
        assert self.cpu.ggml_graph_compute(graph, ctypes.byref(plan)) == 0

    def read(self, node: c_void_p, shape: tuple[int, ...]) -> np.ndarray:
        """Copy a float32 tensor into an array."""
        out = np.empty(shape, np.float32)
        assert self.base.ggml_nbytes(node) == out.nbytes
        ctypes.memmove(out.ctypes.data, self.base.ggml_get_data(node), out.nbytes)
        return out

    def compute(self, op: str, *args: c_void_p, shape: tuple[int, ...], n_threads: int = 2) -> np.ndarray:
        """Compute ggml_<op>(ctx, *args), which has float32 results."""
        node = self.node(op, *args)
        self.run(self.plan(node), n_threads)
        return self.read(node, shape)
