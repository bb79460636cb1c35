"""Generated from ggml_ext/types.toml by scripts/gen_types.py; do not edit.

The types of the extension: ids, sizes and the choices of the quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

BLOCK_SIZE = 256  # weights a block, of every type


class ExtType(IntEnum):
    """Ids as stored in GGUF tensor infos; general.file_type uses the same numbers."""

    ITQ3_S = 160
    CCQ2 = 161
    DITTO3 = 162
    Q8_KR = 191


@dataclass(frozen=True)
class TypeInfo:
    """One row of the table. The fields from `activation` on are None for activation types."""

    name: str                  # lower case, as on the command line and in log lines
    id: ExtType
    kind: str                  # "weight" or "activation"
    block_bytes: int           # bytes of one block of block_size weights
    bpw: float                 # bits per weight
    rotated: bool              # blocks hold the Walsh-Hadamard transform of the weights
    about: str
    block_size: int = BLOCK_SIZE
    activation: str | None = None
    unpack_min: int | None = None      # least and largest integer of the unpack contract
    unpack_max: int | None = None
    group: int | None = None           # weights that share one integer scale
    has_offset: bool | None = None     # value = d * scale * (q - offset)
    fallback: str | None = None        # type for rows that are no multiple of block_size
    token_embd: str | None = None      # type of the token embeddings in a file of this type
    output: str | None = None          # type of the output matrix in a file of this type
    title: str | None = None
    fixture_rel_mse: float | None = None  # bound for the encoder on the real-weight fixture
    fns_total_error: float | None = None  # bounds for the cosine of upstream's test-quantize-fns
    fns_dot_error: float | None = None


TYPES: dict[str, TypeInfo] = {
    "itq3_s": TypeInfo(
        name="itq3_s",
        id=ExtType.ITQ3_S,
        kind="weight",
        block_bytes=100,
        bpw=3.125,
        rotated=True,
        about="rotated, 3-bit codes, `d` and `z` per block",
        activation="q8_kr",
        unpack_min=0,
        unpack_max=7,
        group=256,
        has_offset=True,
        fallback="iq4_nl",
        token_embd="q3_k",
        output="q6_k",
        title="ITQ3_S - 3.125 bpw",
        fixture_rel_mse=0.0339,
        fns_total_error=0.0076,
        fns_dot_error=0.148,
    ),
    "ccq2": TypeInfo(
        name="ccq2",
        id=ExtType.CCQ2,
        kind="weight",
        block_bytes=66,
        bpw=2.0625,
        rotated=False,
        about="convolutional code, four weights in eight bits, a scale per 64 weights",
        activation="q8_k",
        unpack_min=0,
        unpack_max=63,
        group=64,
        has_offset=True,
        fallback="iq4_nl",
        token_embd="q2_k",
        output="q5_k",
        title="CCQ2 - 2.0625 bpw",
        fixture_rel_mse=0.121,
        fns_total_error=0.0075,
        fns_dot_error=0.06,
    ),
    "ditto3": TypeInfo(
        name="ditto3",
        id=ExtType.DITTO3,
        kind="weight",
        block_bytes=106,
        bpw=3.3125,
        rotated=False,
        about="index into a codebook of eight 7-bit values per block",
        activation="q8_k",
        unpack_min=0,
        unpack_max=127,
        group=256,
        has_offset=True,
        fallback="iq4_nl",
        token_embd="q3_k",
        output="q6_k",
        title="DITTO3 - 3.3125 bpw",
        fixture_rel_mse=0.0333,
        fns_total_error=0.005,
        fns_dot_error=0.04,
    ),
    "q8_kr": TypeInfo(
        name="q8_kr",
        id=ExtType.Q8_KR,
        kind="activation",
        block_bytes=292,
        bpw=9.125,
        rotated=True,
        about="`block_q8_K` of the rotated activation row; not a type of weights",
    ),
}

WEIGHT_TYPES: dict[str, TypeInfo] = {n: t for n, t in TYPES.items() if t.kind == "weight"}
