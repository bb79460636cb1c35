"""KL divergence by position in the context, from two files of logits, because llama-perplexity prints means over all positions only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._base.errors import UserError
from .logits import BaseLogits, to_log_probabilities

ROWS = 64  # positions per read: 32 MiB of numbers for a vocabulary of 128,000
LEAST_LOG = -16.0  # llama-perplexity leaves out tokens that the base thinks less probable


def position_ranges(n_ctx: int, n_ranges: int) -> list[tuple[int, int]]:
    """Split the scored positions, the second half of a chunk, into ranges of about equal length: first position and end. UserError if they are too few."""
    first, end = n_ctx // 2, n_ctx - 1
    if n_ranges > end - first:
        raise UserError(f"--positions: got {n_ranges}, chunks of {n_ctx} tokens have {end - first} scored positions: pass at most that")
    edges = [first + (end - first) * i // n_ranges for i in range(n_ranges + 1)]
    return list(zip(edges, edges[1:], strict=False))


def kld_by_position(base: BaseLogits, other: BaseLogits, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the mean KL divergence of `other` from `base`, in nats per token: float64 (n_chunks, n_ranges).

    Both files must be of the same text. Each log-probability has 16 bits, so a mean is exact to 1.3e-4.
    """
    klds = np.stack([_token_klds(base.read_chunk(i), other.read_chunk(i), base.n_vocab) for i in range(base.n_chunks)])
    first = base.n_ctx // 2
    return np.stack([klds[:, start - first : end - first].mean(1) for start, end in ranges], 1)


def _token_klds(base: np.ndarray, other: np.ndarray, n_vocab: int) -> np.ndarray:
    """Return the KL divergence of each row of a chunk: float64 (n_scored,)."""
    klds = []
    for start in range(0, len(base), ROWS):
        p_log, q_log = (to_log_probabilities(rows[start : start + ROWS], n_vocab) for rows in (base, other))
        klds.append(np.where(p_log > LEAST_LOG, np.exp(p_log) * (p_log - q_log), 0).sum(1, dtype=np.float64))
    return np.concatenate(klds)
