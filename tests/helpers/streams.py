"""ggml-ext-streams, and llama-imatrix to compare it with."""

import subprocess

import numpy as np

from ggml_ext._native.streams import LayerStreams
from helpers.commands import tool
from helpers.models import ROOT, read_tensors

HELDOUT = ROOT / "data" / "heldout.txt"
# Tolerance between float32 sums of squares of two programs: another order, and some units in the last place for each product.
SAME = 1e-4


def sums_of_squares(model, text, context, folder) -> dict[str, np.ndarray]:
    """Return llama-imatrix's sums of squares by weight matrix."""
    out = folder / "imatrix.gguf"
    command = [tool("llama-imatrix"), "-m", model, "-f", text, "-c", context, "-b", context, "-t", 2, "--process-output", "-o", out]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=300)
    return {n.removesuffix(".in_sum2"): t.data.reshape(-1, t.shape[0]) for n, t in read_tensors(out).items() if n.endswith(".in_sum2")}


def start_streams(model, text, context, folder) -> LayerStreams:
    command = [tool("ggml-ext-streams"), "-m", model, "-f", text, "-c", context, "-b", context, "-t", 2]
    return LayerStreams(list(map(str, command)), folder)
