"""The quantizer's memory is independent of the model's size."""

import math
import subprocess
import sys

import pytest
from gguf import GGMLQuantizationType as T

from ggml_ext._formats.gguf_file import Tensor, pack_header, string_value
from helpers.commands import quantize_command


def measure_peak_memory(*args) -> int:
    """Return the peak memory of a quantizer process. A small process starts it: a child's peak begins at its parent's."""
    between = (
        "import resource, subprocess, sys; subprocess.check_call(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", between, *quantize_command(*args, "-q")]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(result.stdout) * (1 if sys.platform == "darwin" else 1024)


def write_zeros(path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Write a sparse GGUF file of zeros in F16 and return its number of weights. shapes: by name, columns first."""
    tensors = [Tensor(name, ne, T.F16, 0, 2 * math.prod(ne)) for name, ne in shapes.items()]
    with open(path, "wb") as f:
        f.write(pack_header({"general.architecture": string_value("general.architecture", "llama")}, tensors, [T.F16] * len(tensors), 32))
        f.truncate(f.tell() + sum(t.n_bytes for t in tensors))
    return sum(t.n_elements for t in tensors)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(lib, tmp_path):
    """Sparse rows of a 70B model's widest matrices: 117 million weights (235 MB) take no more memory than 29 million (58 MB)."""
    peaks = []
    for n_rows in (1024, 4096):
        path = tmp_path / f"{n_rows}.gguf"
        write_zeros(path, {"blk.0.ffn_down.weight": (28672, n_rows)})
        flags = ("--type", "itq3_s", "--tensor-type", "down=q8_0", "-t", "2")
        peaks.append(measure_peak_memory(path, tmp_path / f"out-{n_rows}.gguf", *flags))
    grown = peaks[1] - peaks[0]
    # The input grows by 176 MB, the output by 94 MB. Allocators and the order of threads vary by some MB.
    print(f"peak memory {peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB")
    assert grown < 50e6 and peaks[1] < 300e6


def test_70b_model_is_planned_in_little_memory(lib, tmp_path):
    """560 matrices, 141 GB of sparse zeros; the complete size is known before writing."""
    d, ff, kv, path = 8192, 28672, 1024, tmp_path / "in.gguf"
    matrices = {"attn_q": (d, d), "attn_k": (d, kv), "attn_v": (d, kv), "attn_output": (d, d), "ffn_gate": (d, ff), "ffn_up": (d, ff), "ffn_down": (ff, d)}
    layers = {f"blk.{i}.{name}.weight": ne for i in range(80) for name, ne in matrices.items()}
    assert 69.5e9 < write_zeros(path, layers | {"token_embd.weight": (d, 128256), "output.weight": (d, 128256)}) < 71e9
    assert path.stat().st_blocks * 512 < 1e6 < 140e9 < path.stat().st_size
    peak = measure_peak_memory(path, tmp_path / "out.gguf", "--type", "itq3_t", "--dry-run")
    print(f"peak memory {peak / 1e6:.0f} MB")
    assert peak < 300e6
