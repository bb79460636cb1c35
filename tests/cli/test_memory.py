"""The quantizer's memory is independent of the model's size."""

import subprocess
import sys

import gguf
import pytest

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


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(lib, tmp_path):
    """Sparse rows of a 70B model's widest matrices: 117 million weights (235 MB) take no more memory than 29 million (58 MB).
    scripts/tools/quantize_cost.py measures 70B."""
    import quantize_cost

    peaks = []
    for n_rows in (1024, 4096):
        path = tmp_path / f"{n_rows}.gguf"
        ne = (28672, n_rows)
        tensor = gguf.GGMLQuantizationType.F16
        tensors = [quantize_cost.Tensor("blk.0.ffn_down.weight", ne, tensor, 0, 2 * ne[0] * ne[1])]
        quantize_cost.write_model(path, tensors)
        flags = ("--type", "itq3_s", "--tensor-type", "down=q8_0", "-t", "2")
        peaks.append(measure_peak_memory(path, tmp_path / f"out-{n_rows}.gguf", *flags))
    grown = peaks[1] - peaks[0]
    # The input grows by 176 MB, the output by 94 MB. Allocators and the order of threads vary by some MB.
    print(f"peak memory {peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB")
    assert grown < 50e6 and peaks[1] < 300e6


def test_70b_model_is_planned_in_little_memory(lib, tmp_path):
    """All 722 tensors, 141 GB of sparse zeros; the complete size is known before writing."""
    import quantize_cost

    model = quantize_cost.tensors("llama-3.1-70b")
    assert len(model) == 80 * 9 + 2 and 69.5e9 < sum(t.n_elements for t in model) < 71e9
    quantize_cost.write_model(tmp_path / "in.gguf", model)
    assert (tmp_path / "in.gguf").stat().st_blocks * 512 < 1e6 < 140e9 < (tmp_path / "in.gguf").stat().st_size
    peak = measure_peak_memory(tmp_path / "in.gguf", tmp_path / "out.gguf", "--type", "itq3_t", "--dry-run")
    print(f"peak memory {peak / 1e6:.0f} MB")
    assert peak < 300e6
