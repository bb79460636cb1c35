"""Speed of llama.cpp's matrix products on this machine, for time estimates."""

from __future__ import annotations

import functools

from . import backend

N_EXPERTS = 4  # of the timed product
N = 4096  # rows of all experts, and columns
N_RUNS = 5
LIMIT_SECONDS = 300.0


@functools.cache
def product_rate(type_id: int, n_threads: int, n_columns: int, is_expert: bool) -> float | None:
    """Measure, in about a second, the operations per second of a product of a matrix in a ggml type and columns of floats.

    is_expert: the matrix is one of a mixture of experts, whose products ggml computes by other code. Each expert has n_columns columns.

    A multiplication and an addition are two operations. None if libggml is missing or fails.
    """
    if not backend.can_run():
        return None
    n_experts = N_EXPERTS if is_expert else 1
    n_tokens = n_columns * n_experts
    case: backend.Case = {"name": "", "op": "MUL_MAT", "type": type_id, "weights": [N, N, 1], "inputs": [N, n_tokens, 1], "min_runs": N_RUNS}
    if is_expert:
        case |= {
            "op": "MUL_MAT_ID", "weights": [N, N // n_experts, n_experts], "inputs": [N, 1, n_tokens],
            "ids": [[i % n_experts] for i in range(n_tokens)],
        }
    seconds = backend.run_cases("cpu", [case], n_threads, LIMIT_SECONDS).seconds().get("")
    # the first run starts threads and fills caches; others may be slowed by short activity of other programs
    return 2.0 * N * N * n_columns / min(seconds) if seconds else None
