"""The native libraries of a build: kernels per instruction set, called by ctypes or under an emulator, ggml graphs and block layouts."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import struct
import subprocess
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import gguf
import numpy as np
import pytest

import ggml_graph
from ggml_ext import TYPES

ROOT = Path(__file__).resolve().parents[2]

BUILD = Path(os.environ.get("GGML_EXT_TEST_BUILD", ROOT / "build" / "package"))
ASAN = Path(os.environ.get("GGML_EXT_TEST_ASAN", ROOT / "build" / "asan"))
TSAN = Path(os.environ.get("GGML_EXT_TEST_TSAN", ROOT / "build" / "tsan"))
STOCK = Path(os.environ.get("GGML_EXT_TEST_STOCK", ROOT / "build" / "stock"))
AARCH64 = Path(os.environ.get("GGML_EXT_TEST_AARCH64", ROOT / "build" / "aarch64"))

Q8_KR = np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)])
Q8_KR64 = np.dtype([("d", "<f4", 4), ("sum", "<f4", 4), ("qs", "i1", (8, 4, 8))])  # a group of four blocks
Q8_KR32 = np.dtype([("d", "<f4", 4), ("sum", "<f4", 8), ("qs", "i1", (8, 8, 4))])  # a group of eight blocks
ACTIVATIONS = {"q8_kr": Q8_KR, "q8_k": Q8_KR, "q8_kr64": Q8_KR64, "q8_kr32": Q8_KR32}
assert all(dtype.itemsize == TYPES[name].block_bytes for name, dtype in ACTIVATIONS.items() if name in TYPES)
F32_U = 2.0**-24  # unit roundoff of float32


def require_built(folder: Path, name: str) -> Path:
    """Return a file of a build directory, or skip the test if `make test` has not built it."""
    path = folder / "bin" / name
    if not path.exists():
        pytest.skip(f"{path} is not built: run make test, or scripts/build/build_tests.py")
    return path


def run_upstream(model: Path, *, libraries: Path | None = None) -> subprocess.CompletedProcess:
    """Run 24 tokens of unpatched llama.cpp's llama-simple, with its own libraries or with those of a directory."""
    env = {**os.environ, **({"LD_LIBRARY_PATH": str(libraries)} if libraries else {})}
    command = [require_built(STOCK, "llama-simple"), "-m", model, "-n", "24", "import os"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def cpu_flags() -> set[str]:
    if platform.machine() == "arm64":  # macOS
        has_i8mm = subprocess.run(["sysctl", "-n", "hw.optional.arm.FEAT_I8MM"], capture_output=True, text=True).stdout.strip() == "1"
        return {"asimd", "asimddp"} | ({"i8mm"} if has_i8mm else set())
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return set(line.split(":")[1].split())
    return set()


# instruction set -> the name that its kernels report; below, the CPU flags that it needs
ISA_NAMES = {"scalar": "scalar", "avx2": "avx2", "vnni": "avx2+vnni", "avx512": "avx512", "amx": "avx512+amx", "neon": "neon", "dotprod": "neon+dotprod", "i8mm": "neon+i8mm"}
_NEEDS = {"scalar": set(), "avx2": {"avx2", "fma", "f16c"}, "vnni": {"avx2", "fma", "f16c", "avx_vnni"},
          "avx512": {"avx2", "fma", "f16c", "avx512bw", "avx512vl", "avx512vbmi", "avx512_vnni"}, "neon": {"asimd"},
          "dotprod": {"asimd", "asimddp"}, "i8mm": {"asimd", "asimddp", "i8mm"}}
_NEEDS["amx"] = _NEEDS["avx512"] | {"amx_tile", "amx_int8"}
LOCAL_ISAS = [isa for isa, needs in _NEEDS.items() if needs <= cpu_flags()]

# 64-bit ARM on other machines: instruction set -> CPU to emulate. A Cortex-A72 has no dot product instructions, a Neoverse N1 no i8mm.
EMULATED_ISAS = {} if "asimd" in cpu_flags() else {"arm64-scalar": "max", "neon": "cortex-a72", "dotprod": "neoverse-n1", "i8mm": "max"}
# x86 instruction sets that this CPU may lack, run with the intrinsics of tests/simd_host
HOST_ISAS = ["vnni-host", "avx512-host", "amx-host"] if "avx2" in LOCAL_ISAS else []
ISAS = [*LOCAL_ISAS, *HOST_ISAS, *EMULATED_ISAS]


def emulator_command(name: str, cpu: str) -> list[str | Path]:
    """Return the start of a command that runs a program of the cross build, or skip if it or the emulator is missing."""
    qemu = shutil.which("qemu-aarch64")
    if not qemu:
        pytest.skip("qemu-aarch64 is missing: scripts/build/build_tests.py names the package")
    return [qemu, "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu, require_built(AARCH64, name)]


def n_groups(n: int) -> int:
    """Return the number of blocks of 256 in a row, counting a partial last one."""
    return -(-n // 256)


def quantize_rows(from_float, x: np.ndarray, activation: str) -> np.ndarray:
    """Quantize float32 (..., n) row by row to an activation type, shape (..., n/256 rounded up)."""
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty((*x.shape[:-1], n_groups(x.shape[-1])), ACTIVATIONS[activation])
    for index in np.ndindex(x.shape[:-1]):
        from_float(c_void_p(x[index].ctypes.data), c_void_p(out[index].ctypes.data), c_int64(x.shape[-1]))
    return out


GROUPS_AT = [0, 2, 4, 6, 1, 3, 5, 7]  # positions of the groups of 32 in rotated activations: ggml_ext_group_offset()


def codes_and_scales(activations: np.ndarray, n: int, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes, in the order of the values, and scales of quantized activations (..., n_groups), float64 (..., n) each."""
    if activation in ("q8_kr64", "q8_kr32"):
        codes = np.swapaxes(activations["qs"][..., GROUPS_AT, :, :], -2, -3)  # block, group, eight or four values
        scales = np.repeat(activations["d"], 64, axis=-1)
    else:
        codes, scales = activations["qs"], np.repeat(activations["d"][..., None], 256, axis=-1)
        if activation == "q8_kr":
            codes = codes.reshape(*codes.shape[:-1], 8, 32)[..., GROUPS_AT, :]
    shape = (*activations.shape[:-1], -1)
    return tuple(a.reshape(shape)[..., :n].astype(np.float64) for a in (codes, scales))


class Kernels:
    """The CPU kernels compiled for one instruction set, or those inside ggml-cpu ("native")."""

    def __init__(self, isa: str):
        # load ggml-base of the same build first: the kernels need its symbols
        ctypes.CDLL(str(require_built(BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
        name = "libggml-cpu.so" if isa == "native" else f"libggml-ext-kernels-{isa}.so"
        self.dll = ctypes.CDLL(str(require_built(BUILD, name)))
        self.dll.ggml_ext_cpu_isa.restype = c_char_p
        self.dll.ggml_ext_to_float.restype = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
        self.dll.ggml_ext_cpu_unpack_block.argtypes = [c_int, c_void_p, c_void_p]
        self.dll.ggml_ext_cpu_unpack_block.restype = c_bool
        self.dll.ggml_ext_dot_columns.restype = self.dll.ggml_ext_gemm.restype = c_bool
        self.dll.ggml_ext_cpu_gemm_columns.restype = c_int64
        if isa == "native":
            self.dll.ggml_ext_cpu_n_panels.restype = c_int64
        self.isa = self.dll.ggml_ext_cpu_isa().decode()

    def unpack(self, type_name: str, blocks: np.ndarray) -> np.ndarray:
        """Unpack uint8 (n_blocks, block_bytes) to codes uint8 (n_blocks, block_size)."""
        out = np.empty((len(blocks), TYPES[type_name].block_size), np.uint8)
        for block, codes in zip(np.ascontiguousarray(blocks), out, strict=True):
            assert self.dll.ggml_ext_cpu_unpack_block(TYPES[type_name].id, block.ctypes.data, codes.ctypes.data)
        return out

    def dequantize_row(self, type_name: str, blocks: np.ndarray) -> np.ndarray:
        """Dequantize a row, uint8 (n_blocks, block_bytes), as GET_ROWS does: float32 (n,)."""
        blocks, out = np.ascontiguousarray(blocks), np.empty(len(blocks) * TYPES[type_name].block_size, np.float32)
        self.dll.ggml_ext_to_float(TYPES[type_name].id)(blocks.ctypes.data, out.ctypes.data, out.size)
        return out

    def quantize_rotated(self, x: np.ndarray, activation: str = "q8_kr") -> np.ndarray:
        """Rotate and quantize float32 (..., n) to Q8_KR, Q8_KR64 or Q8_KR32 (..., n/256 rounded up)."""
        return quantize_rows(getattr(self.dll, f"ggml_ext_quantize_row_{activation}"), x, activation)

    def quantize_for(self, type_name: str, x: np.ndarray) -> np.ndarray:
        """Quantize float32 (..., n) to the activation type of a weight type; for "native" only."""
        class Traits(ctypes.Structure):
            _fields_ = [("from_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)), ("vec_dot", c_void_p),
                        ("vec_dot_type", c_int), ("nrows", c_int64)]

        traits = self.dll.ggml_get_type_traits_cpu
        traits.restype = ctypes.POINTER(Traits)
        self.dll.ggml_cpu_init()
        from_float = traits(traits(int(TYPES[type_name].id)).contents.vec_dot_type).contents.from_float
        return quantize_rows(from_float, x, TYPES[type_name].activation)

    def vec_dot(self, type_name: str, row: np.ndarray, activations: np.ndarray) -> float:
        """Multiply a row uint8 (n_blocks, block_bytes) by quantized activations."""
        result = c_float(np.nan)
        getattr(self.dll, f"ggml_ext_vec_dot_{type_name}")(
            c_int(TYPES[type_name].block_size * len(row)), ctypes.byref(result), c_size_t(0), c_void_p(row.ctypes.data), c_size_t(0),
            c_void_p(activations.ctypes.data), c_size_t(0), c_int(1))
        return result.value

    def dot_columns(self, type_name: str, rows: np.ndarray, activations: np.ndarray) -> np.ndarray:
        """Multiply rows uint8 (n_rows, n_blocks, block_bytes) by several columns (n_cols, n_groups) at once: float32 (n_cols, n_rows)."""
        return self._products(self.dll.ggml_ext_dot_columns, type_name, rows, activations)

    def gemm(self, type_name: str, rows: np.ndarray, activations: np.ndarray) -> np.ndarray:
        """Multiply as dot_columns(), with the kernels for many columns."""
        return self._products(self.dll.ggml_ext_gemm, type_name, rows, activations)

    @staticmethod
    def _products(function, type_name: str, rows: np.ndarray, activations: np.ndarray) -> np.ndarray:
        rows, activations = np.ascontiguousarray(rows), np.ascontiguousarray(activations)
        n_rows, n_blocks, block_bytes = rows.shape
        out = np.full((len(activations), n_rows), np.nan, np.float32)
        addresses = lambda a: (c_void_p * len(a))(*(row.ctypes.data for row in a))  # noqa: E731
        assert function(
            c_int(TYPES[type_name].id), c_int64(TYPES[type_name].block_size * n_blocks), addresses(out), c_void_p(rows.ctypes.data),
            c_size_t(n_blocks * block_bytes), c_int64(n_rows), addresses(activations), c_int(len(activations)))
        return out


def gemm_columns(type_name: str) -> int:
    """Return the smallest number of columns that the GEMM takes."""
    return kernels("native").dll.ggml_ext_cpu_gemm_columns(TYPES[type_name].id)


def pack_request(op: str, type_name: str, n_blocks: int, *operands: bytes) -> bytes:
    """Pack a request as kernels_driver.cpp reads it."""
    return b"".join([struct.pack("<iiq", ord(op), TYPES[type_name].id, n_blocks), *operands])


class EmulatedKernels:
    """Kernels of another CPU: a program under an emulator that answers the requests of kernels_driver.cpp."""

    def __init__(self, isa: str):
        command = emulator_command(f"ggml-ext-kernels-{isa.removeprefix('arm64-')}", EMULATED_ISAS[isa])
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.isa = self._request("i", "q8_kr", 0, 16).rstrip(b"\0").decode()

    def _request(self, op: str, type_name: str, n_blocks: int, n_bytes: int, *operands: np.ndarray) -> bytes:
        assert self.process.poll() is None, f"{self.process.args} exited with {self.process.returncode}"
        self.process.stdin.write(pack_request(op, type_name, n_blocks, *(operand.tobytes() for operand in operands)))
        self.process.stdin.flush()
        answer = self.process.stdout.read(n_bytes)
        assert len(answer) == n_bytes, f"{self.process.args} exited with {self.process.wait()}"
        return answer

    def unpack(self, type_name: str, blocks: np.ndarray) -> np.ndarray:
        codes = self._request("u", type_name, len(blocks), TYPES[type_name].block_size * len(blocks), blocks)
        return np.frombuffer(codes, np.uint8).reshape(len(blocks), -1)

    def quantize_rotated(self, x: np.ndarray, activation: str = "q8_kr") -> np.ndarray:
        dtype, n = ACTIVATIONS[activation], x.shape[-1]
        row = lambda v: np.frombuffer(self._request("q", activation, n // TYPES[activation].block_size,  # noqa: E731
                                                dtype.itemsize * n_groups(n), v), dtype)
        return np.stack([row(v) for v in x.astype("<f4").reshape(-1, n)]).reshape(*x.shape[:-1], -1)

    def vec_dot(self, type_name: str, row: np.ndarray, activations: np.ndarray) -> float:
        return struct.unpack("<f", self._request("v", type_name, len(row), 4, row, activations))[0]

    def dot_columns(self, type_name: str, rows: np.ndarray, activations: np.ndarray) -> np.ndarray:
        return self._products("c", type_name, rows, activations)

    def gemm(self, type_name: str, rows: np.ndarray, activations: np.ndarray) -> np.ndarray:
        return self._products("g", type_name, rows, activations)

    def _products(self, op: str, type_name: str, rows: np.ndarray, activations: np.ndarray) -> np.ndarray:
        shape = (len(activations), len(rows))
        products = self._request(op, type_name, rows.shape[1], 4 * shape[0] * shape[1], np.array(shape[::-1], "<i8"), rows, activations)
        return np.frombuffer(products, "<f4").reshape(shape)

    def dequantize_row(self, type_name: str, blocks: np.ndarray) -> np.ndarray:
        """Dequantize a row, uint8 (n_blocks, block_bytes), as GET_ROWS does: float32 (n,)."""
        return np.frombuffer(self._request("r", type_name, len(blocks), 4 * TYPES[type_name].block_size * len(blocks), blocks), "<f4")

    def dequantize(self, type_name: str, blocks: np.ndarray) -> np.ndarray:
        """Dequantize uint8 (n_blocks, block_bytes) to float32 (n_blocks, block_size)."""
        values = self._request("d", type_name, len(blocks), 4 * TYPES[type_name].block_size * len(blocks), blocks)
        return np.frombuffer(values, "<f4").reshape(len(blocks), -1)


@functools.cache
def kernels(isa: str) -> Kernels | EmulatedKernels:
    return EmulatedKernels(isa) if isa in EMULATED_ISAS else Kernels(isa)


def quantize_reference(x: np.ndarray, activation: str = "q8_kr") -> np.ndarray:
    """Quantize float32 (..., n) to Q8_KR, Q8_KR64 or Q8_KR32 with the scalar reference of libggml-base."""
    dll = ctypes.CDLL(str(require_built(BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    return quantize_rows(getattr(dll, f"ggml_ext_quantize_row_{activation}_ref"), x, activation)


class Graph(ggml_graph.Graph):
    """A ggml graph on the libraries of the build directory."""

    def __init__(self, mem_bytes: int = 64 << 20):
        base = ctypes.CDLL(str(require_built(BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
        super().__init__(base, kernels("native").dll, mem_bytes)


F32 = int(gguf.GGMLQuantizationType.F32)
I32 = int(gguf.GGMLQuantizationType.I32)


def unpack_reference(lib, type_name: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unpack uint8 (n_blocks, block_bytes) with the scalar reference.

    Returns: float64 (n_blocks, block_size) each: d * scale of each weight, q - offset, and its bound |q| + |offset|.
    """
    info = TYPES[type_name]
    parts = [lib.unpack_block(info.id, b) for b in np.ascontiguousarray(blocks)]
    scale = np.stack([np.repeat(p[1][: info.block_size // info.group], info.group) for p in parts]).astype(np.float64)
    q = np.stack([p[0] for p in parts]).astype(np.float64)
    d, offset = (np.array([[p[i]] for p in parts], np.float64) for i in (2, 3))
    return d * scale, q - offset, np.abs(q) + np.abs(offset)


def dot_reference(lib, type_name: str, rows: np.ndarray, activations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute exact products and the error bound of float32 kernels.

    Args:
        rows: uint8 (n_rows, n_blocks, block_bytes).
        activations: (n_cols, n_groups) of the type's activation type.

    Returns:
        Two float64 (n_cols, n_rows): dequantized weights times quantized activations, and the largest error of a kernel.

    All sums inside a block are integers. Per block a kernel rounds five times: the integer converted to float32 (above 2^24: group scales),
    d_w*d_y, that times the offset, and two accumulations; with G scales per block, the GEMM
    rounds 4 + G times. Reducing the lanes and scaling the result add at most six roundings. Each is at
    most u = 2^-24 of a partial sum, itself at most M = sum |d_w scale d_y| (|q| + |offset|) |y|. Hence the bound ((4 + G) n_blocks + 6) u M.
    """
    info = TYPES[type_name]
    n_rows, n_blocks, _ = rows.shape
    s, v, magnitude = (a.reshape(n_rows, n_blocks, -1)
                       for a in unpack_reference(lib, type_name, rows.reshape(n_rows * n_blocks, -1)))
    flat = lambda a: a.reshape(n_rows, -1)  # noqa: E731
    codes, scales = codes_and_scales(activations, n_blocks * v.shape[-1], TYPES[type_name].activation)
    y = codes * scales
    exact = y @ flat(s * v).T
    m = np.abs(y) @ flat(np.abs(s) * magnitude).T
    return exact, ((4 + info.block_size // info.group) * n_blocks + 6) * F32_U * m


def random_blocks(lib, type_name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Encode Gaussian weights of a logical shape (rows last) to uint8 (*shape[:-1], n_blocks, block_bytes)."""
    info = TYPES[type_name]
    w = np.random.default_rng(seed).standard_normal((int(np.prod(shape[:-1])), shape[-1])).astype(np.float32)
    return lib.quantize(int(info.id), w).reshape(*shape[:-1], shape[-1] // info.block_size, info.block_bytes)
