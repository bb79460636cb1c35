"""The device code of metal/ compiled as host code (tests/metal_host)."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_bool, c_char_p, c_size_t

from helpers import native


@functools.cache
def device() -> ctypes.CDLL:
    ctypes.CDLL(str(native.require_built(native.BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    dll = ctypes.CDLL(str(native.require_built(native.BUILD, "libggml-ext-metal-host.so")))
    dll.metal_host_kernels.restype = c_char_p
    dll.metal_host_alloc_size.restype = c_size_t
    for name in ("metal_host_supports", "metal_host_compute"):
        getattr(dll, name).restype = c_bool
    return dll
