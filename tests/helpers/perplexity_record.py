"""Perplexities that runs of the tests have to repeat."""

from __future__ import annotations

import json
import math

from helpers.models import ROOT

BASELINE = ROOT / "tests" / "data" / "perplexity_baseline.json"
N_CHUNKS = 60  # of 256 tokens: the run in the baseline that tests repeat
# The same ITQ3_S file gives 12.848 with vec_dot alone and 12.853 with the tiled GEMM at 60 chunks (Q3_K: 12.625, 12.626):
# float sums in another order change roundings of activations. Five times that difference, for instruction sets that
# were not at hand. Between IQ3_XXS and ITQ3_S lie 0.1; a forgotten rotation or zero point costs whole units.
PERPLEXITY_TOLERANCE = 0.025
# Roundings of activations differ where float sums do. Between vec_dot and the tiled GEMM of one machine that makes a
# standard deviation of 0.0018 in the mean log-likelihood of a chunk (60 chunks, ITQ3_S and DITTO3 alike; largest
# difference 0.0049) without a bias that shows.
CHUNK_DEVIATION = 0.0018


def recorded_run() -> dict:
    """The run of scripts/tools/perplexity.py in its baseline that tests repeat."""
    return next(r for r in json.loads(BASELINE.read_text()) if r["run"]["chunks"] == N_CHUNKS)


def assert_recorded_perplexity(name: str, found: float) -> None:
    """name: a type of the baseline, or "f16" for the model that the others were made from."""
    run = recorded_run()
    recorded = (run["base"] if name == "f16" else run["types"][name])["ppl"][0]
    print(f"{name}: perplexity {found:.4f}, recorded {recorded:.4f}")
    assert abs(found - recorded) <= PERPLEXITY_TOLERANCE, f"{name}: perplexity {found}, recorded {recorded}"


def perplexity_tolerance(n_chunks: int) -> float:
    """How far ln(perplexity) may differ between instruction sets: five standard deviations of the mean over the chunks."""
    return 5 * CHUNK_DEVIATION / math.sqrt(n_chunks)
