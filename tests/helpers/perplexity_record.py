"""Recorded perplexities that tests must repeat."""

from __future__ import annotations

import json
import math

from helpers.models import ROOT

BASELINE = ROOT / "tests" / "data" / "perplexity_baseline.json"
N_CHUNKS = 60  # of 256 tokens: the recorded run that tests repeat
# The same ITQ3_S file gives 12.848 with vec_dot and 12.853 with the GEMM at 60 chunks (Q3_K: 12.625, 12.626): another order of
# float sums changes roundings of activations. The tolerance is five times that, for other instruction sets. IQ3_XXS and ITQ3_S
# differ by 0.1; a missing rotation or zero point costs whole units.
PERPLEXITY_TOLERANCE = 0.025
# Standard deviation of a chunk's mean log-likelihood between vec_dot and the GEMM (60 chunks, ITQ3_S and DITTO3; largest
# difference 0.0049, no bias).
CHUNK_DEVIATION = 0.0018


def recorded_run() -> dict:
    """Return the run that tests repeat from the baseline of scripts/tools/perplexity.py."""
    return next(r for r in json.loads(BASELINE.read_text()) if r["run"]["chunks"] == N_CHUNKS)


def assert_recorded_perplexity(name: str, value: float) -> None:
    """Compare a perplexity with the recorded one of a type, or of the reference model ("f16")."""
    run = recorded_run()
    recorded = (run["base"] if name == "f16" else run["types"][name])["ppl"][0]
    print(f"{name}: perplexity {value:.4f}, recorded {recorded:.4f}")
    assert abs(value - recorded) <= PERPLEXITY_TOLERANCE, f"{name}: perplexity {value}, recorded {recorded}"


def perplexity_tolerance(n_chunks: int) -> float:
    """Return the tolerance of ln(perplexity) between instruction sets: five standard deviations of the mean over the chunks."""
    return 5 * CHUNK_DEVIATION / math.sqrt(n_chunks)
