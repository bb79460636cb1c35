"""The CUDA runtime that upstream's host code sees. runtime.cpp forwards memory and launches to this module, which interprets the kernels.

    device = Device("90", folder, unit)                     # a library that build.py compiled
    x, y = device.buffer(data), device.allocate(n_bytes)
    device.call("ptx_dequantize", ...)                      # a function of host.cu or others.cu
    device.memory.read(y, dtype, shape), device.launches    # results and finished launches
    """

from __future__ import annotations

import ctypes
import functools
import os
import re
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .compiled import ARCHITECTURES, SHARED_LIMIT
from .machine import Grid, Launch
from .memory import Fault, GlobalMemory
from .parser import Kernel, Module, parse

MAX_THREADS, MAX_GRID = 1024, (2**31 - 1, 65535, 65535)

LAUNCH = ctypes.CFUNCTYPE(c_int, c_char_p, POINTER(c_uint), POINTER(c_uint), c_size_t, c_int, c_int, POINTER(c_void_p))
ALLOC, FREE, WRITTEN = ctypes.CFUNCTYPE(c_void_p, c_size_t), ctypes.CFUNCTYPE(None, c_void_p), ctypes.CFUNCTYPE(None, c_void_p, c_size_t)


class Callbacks(ctypes.Structure):
    _fields_ = [("launch", LAUNCH), ("alloc", ALLOC), ("free", FREE), ("written", WRITTEN)]


class Tensor(ctypes.Structure):
    """struct ptx_tensor of host.cu."""
    _fields_ = [("type", c_int64), ("ne", c_int64 * 4), ("nb", c_size_t * 4), ("data", c_void_p)]


class Fusion(ctypes.Structure):
    """struct ptx_fusion of host.cu."""
    _fields_ = [("gate", POINTER(Tensor)), ("bias", POINTER(Tensor)), ("gate_bias", POINTER(Tensor)), ("glu_op", c_int64)]


@dataclass
class FinishedLaunch:
    """A finished launch: kernel name, parameter values, configuration, warp instructions by opcode."""
    name: str
    parameters: list[int | bytes]
    grid: Grid
    executed: dict[str, int]
    problems: dict[str, str]


def plain_name(mangled: str) -> str:
    """Return a function's name without namespaces and parameters."""
    position, name = re.match(r"_ZN?", mangled).end(), ""
    while length := re.match(r"\d+", mangled[position:]):
        position += length.end()
        name = mangled[position:position + int(length[0])]
        position += int(length[0])
    return name


@functools.cache
def kernel_files(folder: Path) -> dict[str, Path]:
    """Map each kernel of an architecture to its file."""
    out = {}
    for path in sorted(folder.glob("*.ptx")):
        with open(path) as lines:
            out.update((line.split()[1].rstrip("("), path) for line in lines if line.startswith((".entry", ".visible .entry", ".weak .entry")))
    return out


@functools.cache
def load_module(path: Path) -> Module:
    return parse(path.read_text())


@functools.cache
def library(path: Path) -> ctypes.CDLL:
    """Load a library lazily: products of other types stay undefined."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = c_void_p, [c_char_p, c_int]
    handle = dlopen(os.fsencode(path), os.RTLD_LAZY | os.RTLD_LOCAL)
    if not handle:
        raise OSError(f"cannot load {path}")
    return ctypes.CDLL(str(path), handle=handle)


class Device:
    """A GPU of one architecture with its memory.

    n_sm: multiprocessors, by which upstream splits products of tiles.
    mutate: a function that edits a module's PTX, for mutation tests.
    """

    def __init__(self, architecture: str, folder: Path, name: str, n_sm: int = 4, approximation: bool = False, seed: int = 0, mutate=None):
        self.architecture, self.folder, self.approximation, self.seed, self.mutate = architecture, folder, approximation, seed, mutate
        self.memory, self.launches, self.error = GlobalMemory(seed=seed), [], None
        self.symbols: dict[Path, dict[str, int]] = {}
        self.mutated: dict[Path, Module] = {}
        self.library = library(folder / f"{name}.so")
        self.callbacks = Callbacks(LAUNCH(self.launch), ALLOC(self.memory.alloc), FREE(lambda p: None), WRITTEN(self.memory.mark_written))
        self.n_sm = n_sm
        self.runtime = ctypes.CDLL(str(folder / "libptx-runtime.so"))

    # --- called by the runtime

    def launch(self, name, blocks, threads, shared, shared_limit, programmatic, arguments) -> int:
        try:
            grid = Grid(tuple(blocks[:3]), tuple(threads[:3]), shared, bool(programmatic), self.approximation, self.seed)
            self.run(name.decode(), grid, shared_limit, arguments)
            return 0
        except BaseException as error:  # call() raises it again
            self.error = error
            return 1

    def kernel(self, name: str) -> tuple[Kernel, Path]:
        path = kernel_files(self.folder / self.architecture)[name]
        if self.mutate is None:
            return load_module(path).kernels[name], path
        if path not in self.mutated:
            self.mutated[path] = parse(self.mutate(path.read_text()))
        return self.mutated[path].kernels[name], path

    def constants(self, path: Path, module: Module) -> dict[str, int]:
        """Return the addresses of the module's tables, which are copied to global memory on first use."""
        if path not in self.symbols:
            self.symbols[path] = {name: self.memory.alloc(v.size, v.data or bytes(v.size)) for name, v in module.variables.items()
                                  if v.space in ("global", "const")}
        return self.symbols[path]

    def run(self, name: str, grid: Grid, shared_limit: int, arguments) -> None:
        kernel, path = self.kernel(name)
        n_threads = int(np.prod(grid.threads))
        if n_threads > min(MAX_THREADS, kernel.max_threads or MAX_THREADS):
            raise Fault(f"{name}: {n_threads} threads exceed the launch bounds of {kernel.max_threads}")
        if any(n > most for n, most in zip(grid.blocks, MAX_GRID, strict=True)) or 0 in grid.blocks:
            raise Fault(f"{name}: invalid grid {grid.blocks}")
        if grid.shared > shared_limit:
            raise Fault(f"{name}: {grid.shared} bytes of shared memory exceed the limit of {shared_limit}")
        values = [ctypes.string_at(arguments[i], size) for i, (_, size) in enumerate(kernel.parameters.values())]
        parameters = bytearray(max((offset + size for offset, size in kernel.parameters.values()), default=0) + 8)
        for value, (offset, size) in zip(values, kernel.parameters.values(), strict=True):
            parameters[offset:offset + size] = value
        launch = Launch(kernel, self.memory, grid, bytes(parameters), self.constants(path, kernel.module))
        if launch.shared_size > SHARED_LIMIT[self.architecture]:
            raise Fault(f"{name}: {launch.shared_size} bytes of shared memory, sm_{self.architecture} has {SHARED_LIMIT[self.architecture]}")
        launch.run()
        plain = [int.from_bytes(value, "little") if len(value) <= 8 else value for value in values]
        self.launches.append(FinishedLaunch(name, plain, grid, dict(launch.executed), dict(launch.problems)))

    # --- called by tests

    def buffer(self, data: np.ndarray, padding: int = 0) -> int:
        """Copy data to the device and append `padding` bytes of noise that belong to the buffer; return the address."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return self.memory.alloc(len(raw) + padding, np.concatenate([raw, np.full(padding, 0xA5, np.uint8)]))

    def allocate(self, n_bytes: int) -> int:
        return self.memory.alloc(n_bytes)

    def call(self, function: str, *arguments) -> None:
        """Call a function of the library with ctypes arguments; raise the error of a failed launch."""
        # the runtime knows one device at a time
        self.runtime.ptx_runtime(ctypes.byref(self.callbacks), c_int(int(self.architecture)))
        self.library.ptx_device(c_int(ARCHITECTURES.index(self.architecture)), c_int(10 * int(self.architecture)), c_int(self.n_sm),
                                c_size_t(SHARED_LIMIT[self.architecture]))
        failed = getattr(self.library, function)(*arguments)
        error, self.error = self.error, None
        if error is not None:
            raise error
        assert failed == 0, function

    def problems(self) -> dict[tuple[str, str], str]:
        """Map (kernel, problem) to the first instruction that caused it."""
        return {(plain_name(launch.name), problem): text for launch in self.launches for problem, text in launch.problems.items()}
