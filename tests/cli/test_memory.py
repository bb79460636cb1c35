"""Memory of the quantizer, whatever the size of the model."""

import subprocess
import sys

import gguf
import pytest

from helpers.commands import quantize_command


def peak_memory(*args) -> int:
    """Bytes of a quantizer's process. A child's peak starts at that of the process that starts it: a small one stands between."""
    between = (
        "import resource, subprocess, sys; subprocess.check_call(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", between, *quantize_command(*args, "-q")]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(result.stdout) * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(lib, tmp_path):
    """Rows of a 70B model's widest matrices, sparse: from 29 to 117 million weights (58 to 235 MB) it takes no more memory,
    and 70B do not either (scripts/tools/quantize_cost.py)."""
    import quantize_cost

    peaks = []
    for n_rows in (1024, 4096):
        path = tmp_path / f"{n_rows}.gguf"
        ne = (28672, n_rows)
        tensor = gguf.GGMLQuantizationType.F16
        of = [quantize_cost.Tensor("blk.0.ffn_down.weight", ne, tensor, 0, 2 * ne[0] * ne[1])]
        quantize_cost.write_model(path, of)
        flags = ("--type", "itq3_s", "--tensor-type", "down=q8_0", "-t", "2")
        peaks.append(peak_memory(path, tmp_path / f"out-{n_rows}.gguf", *flags))
    grown = peaks[1] - peaks[0]
    # Of 176 MB more in the input and 94 MB more in the output. Allocators and the order of threads make some MB.
    print(f"peak memory {peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB")
    assert grown < 50e6 and peaks[1] < 300e6


def test_a_70b_model_is_planned_within_a_small_memory(lib, tmp_path):
    """All 722 tensors, 141 GB of zeros that take no room; the whole size is known before anything is written."""
    import quantize_cost

    model = quantize_cost.tensors("llama-3.1-70b")
    assert len(model) == 80 * 9 + 2 and 69.5e9 < sum(t.n_elements for t in model) < 71e9
    quantize_cost.write_model(tmp_path / "in.gguf", model)
    assert (tmp_path / "in.gguf").stat().st_blocks * 512 < 1e6 < 140e9 < (tmp_path / "in.gguf").stat().st_size
    peak = peak_memory(tmp_path / "in.gguf", tmp_path / "out.gguf", "--type", "itq3_t", "--dry-run")
    print(f"peak memory {peak / 1e6:.0f} MB")
    assert peak < 300e6
