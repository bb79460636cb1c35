"""Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.

The ggml-ext types: ids, sizes and options of the quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_BLOCK_SIZE = 256  # weights of the largest block
# signs of the rotation: bit j % 8 of byte j / 8 is set where sign j flips
ROTATION_SIGNS = bytes.fromhex("c5e08ae1feb789a2c6d0401eaf1b209630ceb4d5c7ed65d74317ec989fa4456e")


class ExtType(IntEnum):
    """Ids of the types in GGUF files, for tensors and for general.file_type."""

    ITQ3_S = 160
    CCQ2 = 161
    DITTO3 = 162
    ITQ4_T = 172
    ITQ3_T = 168
    ITQ2_T = 169
    ITQ1H_T = 174
    ITQ1_T = 175
    ITQ4_T64 = 173
    ITQ3_T64 = 170
    ITQ2_T64 = 171
    ITQ1H_T64 = 176
    ITQ1_T64 = 177
    ITQ4_T32 = 178
    ITQ3_T32 = 179
    ITQ2_T32 = 180
    DITTO5 = 167
    Q8_KR32 = 189
    Q8_KR64 = 190
    Q8_KR = 191


@dataclass(frozen=True)
class TypeInfo:
    """Properties of a type. Activation types have None from `activation` on."""

    name: str                  # lower case, as for --type
    id: ExtType
    kind: str                  # "weight" or "activation"
    block_size: int            # weights per block
    block_bytes: int           # bytes per block
    bpw: float                 # bits per weight
    rotated: bool              # blocks hold the Walsh-Hadamard transform of the weights
    about: str
    activation: str | None = None
    unpack_min: int | None = None      # range of the codes
    unpack_max: int | None = None
    group: int | None = None           # weights per integer scale: value = d * scale * (q - offset)
    fallback: str | None = None        # type for rows that are not a multiple of block_size
    token_embd: str | None = None      # type of the token embeddings in files of this type
    short_token_embd: str | None = None  # the same for rows that token_embd does not fit, before its own fallback
    output: str | None = None          # type of the output matrix in files of this type
    title: str | None = None
    usual_rel_mse: float | None = None  # NMSE of Gaussian weights
    fixture_rel_mse: float | None = None  # upper bound of the NMSE of the fixture of real weights
    student_t4_rel_mse: float | None = None  # the same for Student's t distribution with 4 degrees of freedom
    hessian_gain: float | None = None     # upper bound of the output error with full Hessians relative to diagonal ones
    fns_limits: str | None = None         # upstream type whose limits apply in test-quantize-fns
    fns_dot_error: float | None = None    # limit for products, if different
    trellis_bits: int | None = None     # bits per symbol (ggml_ext/types/trellis.h)
    trellis_weights: int | None = None  # weights per symbol
    trellis_states: int | None = None
    trellis_values: list[list[int]] | None = None  # two tables of 16 values for each of the weights
    trellis_offset: float | None = None
    trellis_gain: float | None = None  # first scale candidate relative to the one that gives the code the block's energy
    trellis_feedback_gain: float | None = None  # the same with a block-diagonal or full Hessian
    trellis_unit: float | None = None  # fixed-point steps per unit of the scale in the encoder's search
    codebook: list[int] | None = None     # upper half of the codebook (ggml_ext/types/ditto5.h)
    codebook_offset: float | None = None


TYPES: dict[str, TypeInfo] = {
    "itq3_s": TypeInfo(
        name="itq3_s", id=ExtType.ITQ3_S, kind="weight", block_size=256, block_bytes=100, bpw=3.125, rotated=True,
        about="rotated, 3-bit codes, `d` and `z` per block", activation="q8_kr", unpack_min=0, unpack_max=7, group=256,
        fallback="itq3_t64", token_embd="q3_k", output="q6_k", title="ITQ3_S - 3.125 bpw", usual_rel_mse=0.034, fixture_rel_mse=0.0339,
        student_t4_rel_mse=0.037, hessian_gain=0.645, fns_limits="iq3_s", short_token_embd="itq3_t64",
    ),
    "ccq2": TypeInfo(
        name="ccq2", id=ExtType.CCQ2, kind="weight", block_size=256, block_bytes=66, bpw=2.0625, rotated=False,
        about="convolutional code, four weights in eight bits, a scale per 64 weights", activation="q8_k", unpack_min=0, unpack_max=63,
        group=64, fallback="itq2_t64", token_embd="q2_k", output="q5_k", title="CCQ2 - 2.0625 bpw", usual_rel_mse=0.1055,
        fixture_rel_mse=0.121, student_t4_rel_mse=0.182, hessian_gain=0.495, fns_limits="iq2_s", short_token_embd="itq2_t64",
        fns_dot_error=0.06,
    ),
    "ditto3": TypeInfo(
        name="ditto3", id=ExtType.DITTO3, kind="weight", block_size=256, block_bytes=106, bpw=3.3125, rotated=False,
        about="index into a codebook of eight 7-bit values per block", activation="q8_k", unpack_min=0, unpack_max=127, group=256,
        fallback="itq3_t64", token_embd="q3_k", output="q6_k", title="DITTO3 - 3.3125 bpw", usual_rel_mse=0.0294, fixture_rel_mse=0.0333,
        student_t4_rel_mse=0.0408, hessian_gain=0.415, fns_limits="iq3_s", short_token_embd="itq3_t64",
    ),
    "itq4_t": TypeInfo(
        name="itq4_t", id=ExtType.ITQ4_T, kind="weight", block_size=256, block_bytes=130, bpw=4.0625, rotated=True,
        about="rotated, 4-bit trellis of 4096 states", activation="q8_kr", unpack_min=0, unpack_max=127, group=256, fallback="itq4_t64",
        token_embd="q4_k", output="q6_k", title="ITQ4_T - 4.0625 bpw", usual_rel_mse=0.00459, fixture_rel_mse=0.0047,
        student_t4_rel_mse=0.0047, hessian_gain=0.595, fns_limits="q5_k", short_token_embd="itq4_t64", trellis_bits=4, trellis_weights=1,
        trellis_states=4096,
        trellis_values=[[25, 31, 37, 47, 14, 0, 9, 51, 34, 57, 43, 18, 28, 71, 40, 22], [24, 45, 33, 29, 37, 30, 54, 35, 26, 40, 0, 20, 32, 29, 27, 35]],
        trellis_offset=64.0, trellis_gain=1.07, trellis_feedback_gain=1.07, trellis_unit=220.0,
    ),
    "itq3_t": TypeInfo(
        name="itq3_t", id=ExtType.ITQ3_T, kind="weight", block_size=256, block_bytes=98, bpw=3.0625, rotated=True,
        about="rotated, 3-bit trellis of 4096 states", activation="q8_kr", unpack_min=0, unpack_max=127, group=256, fallback="itq3_t64",
        token_embd="q3_k", output="q6_k", title="ITQ3_T - 3.0625 bpw", usual_rel_mse=0.01755, fixture_rel_mse=0.018,
        student_t4_rel_mse=0.018, hessian_gain=0.655, fns_limits="iq3_s", short_token_embd="itq3_t64", trellis_bits=3, trellis_weights=1,
        trellis_states=4096,
        trellis_values=[[16, 39, 0, 27, 40, 13, 23, 29, 31, 14, 24, 54, 20, 34, 46, 6], [34, 41, 36, 15, 32, 45, 21, 53, 24, 31, 26, 46, 41, 0, 66, 32]],
        trellis_offset=60.0, trellis_gain=1.07, trellis_feedback_gain=1.07, trellis_unit=204.0,
    ),
    "itq2_t": TypeInfo(
        name="itq2_t", id=ExtType.ITQ2_T, kind="weight", block_size=256, block_bytes=66, bpw=2.0625, rotated=True,
        about="rotated, 2-bit trellis of 4096 states", activation="q8_kr", unpack_min=0, unpack_max=127, group=256, fallback="itq2_t64",
        token_embd="q2_k", output="q5_k", title="ITQ2_T - 2.0625 bpw", usual_rel_mse=0.0683, fixture_rel_mse=0.07,
        student_t4_rel_mse=0.069, hessian_gain=0.765, fns_limits="iq2_s", short_token_embd="itq2_t64", fns_dot_error=0.079,
        trellis_bits=2, trellis_weights=1, trellis_states=4096,
        trellis_values=[[38, 23, 78, 52, 22, 48, 0, 37, 48, 36, 21, 65, 57, 64, 40, 21], [22, 10, 32, 14, 14, 28, 0, 22, 44, 22, 23, 12, 31, 14, 22, 28]],
        trellis_offset=62.0, trellis_gain=1.03, trellis_feedback_gain=1.03, trellis_unit=174.0,
    ),
    "itq1h_t": TypeInfo(
        name="itq1h_t", id=ExtType.ITQ1H_T, kind="weight", block_size=256, block_bytes=50, bpw=1.5625, rotated=True,
        about="rotated, trellis of 4096 states with three bits per two weights", activation="q8_kr", unpack_min=0, unpack_max=127,
        group=256, fallback="itq1h_t64", token_embd="q2_k", output="q5_k", title="ITQ1H_T - 1.5625 bpw", usual_rel_mse=0.1357,
        fixture_rel_mse=0.1357, student_t4_rel_mse=0.1354, hessian_gain=0.94, fns_limits="tq2_0", short_token_embd="itq2_t64",
        trellis_bits=3, trellis_weights=2, trellis_states=4096,
        trellis_values=[[42, 38, 66, 15, 16, 20, 46, 33, 34, 31, 15, 54, 28, 23, 1, 44], [19, 45, 11, 43, 45, 6, 33, 29, 54, 11, 39, 21, 20, 35, 41, 0], [36, 17, 57, 36, 59, 23, 0, 36, 44, 58, 37, 14, 17, 47, 31, 71], [29, 17, 20, 21, 22, 14, 4, 39, 31, 23, 10, 48, 0, 33, 38, 35]],
        trellis_offset=60.0, trellis_gain=0.98, trellis_feedback_gain=1.15, trellis_unit=156.0,
    ),
    "itq1_t": TypeInfo(
        name="itq1_t", id=ExtType.ITQ1_T, kind="weight", block_size=256, block_bytes=34, bpw=1.0625, rotated=True,
        about="rotated, trellis of 4096 states with two bits per two weights", activation="q8_kr", unpack_min=0, unpack_max=127,
        group=256, fallback="itq1_t64", token_embd="q2_k", output="q5_k", title="ITQ1_T - 1.0625 bpw", usual_rel_mse=0.262,
        fixture_rel_mse=0.2619, student_t4_rel_mse=0.2612, hessian_gain=1.125, fns_limits="q1_0", short_token_embd="itq2_t64",
        trellis_bits=2, trellis_weights=2, trellis_states=4096,
        trellis_values=[[30, 52, 25, 78, 99, 43, 72, 37, 61, 71, 37, 0, 32, 11, 59, 63], [1, 22, 16, 9, 15, 0, 6, 14, 17, 19, 16, 6, 7, 8, 16, 17], [12, 16, 11, 1, 23, 3, 5, 3, 8, 9, 7, 5, 5, 3, 11, 7], [24, 63, 59, 42, 39, 50, 79, 23, 79, 28, 38, 61, 56, 103, 0, 76]],
        trellis_offset=60.0, trellis_gain=0.89, trellis_feedback_gain=1.15, trellis_unit=128.0,
    ),
    "itq4_t64": TypeInfo(
        name="itq4_t64", id=ExtType.ITQ4_T64, kind="weight", block_size=64, block_bytes=34, bpw=4.25, rotated=True,
        about="ITQ4_T in blocks of 64, for rows of any multiple of 64", activation="q8_kr64", unpack_min=0, unpack_max=127, group=64,
        fallback="itq4_t32", token_embd="q4_k", output="q6_k", title="ITQ4_T64 - 4.25 bpw", usual_rel_mse=0.00394,
        fixture_rel_mse=0.00405, student_t4_rel_mse=0.00405, hessian_gain=0.505, fns_limits="q5_k", short_token_embd="itq4_t64",
        trellis_bits=4, trellis_weights=1, trellis_states=4096,
        trellis_values=[[25, 31, 37, 47, 14, 0, 9, 51, 34, 57, 43, 18, 28, 71, 40, 22], [24, 45, 33, 29, 37, 30, 54, 35, 26, 40, 0, 20, 32, 29, 27, 35]],
        trellis_offset=64.0, trellis_gain=1.07, trellis_feedback_gain=1.07, trellis_unit=220.0,
    ),
    "itq3_t64": TypeInfo(
        name="itq3_t64", id=ExtType.ITQ3_T64, kind="weight", block_size=64, block_bytes=26, bpw=3.25, rotated=True,
        about="ITQ3_T in blocks of 64, for rows of any multiple of 64", activation="q8_kr64", unpack_min=0, unpack_max=127, group=64,
        fallback="itq3_t32", token_embd="q3_k", output="q6_k", title="ITQ3_T64 - 3.25 bpw", usual_rel_mse=0.01535, fixture_rel_mse=0.0158,
        student_t4_rel_mse=0.0158, hessian_gain=0.525, fns_limits="iq3_s", short_token_embd="itq3_t64", trellis_bits=3, trellis_weights=1,
        trellis_states=4096,
        trellis_values=[[16, 39, 0, 27, 40, 13, 23, 29, 31, 14, 24, 54, 20, 34, 46, 6], [34, 41, 36, 15, 32, 45, 21, 53, 24, 31, 26, 46, 41, 0, 66, 32]],
        trellis_offset=60.0, trellis_gain=1.07, trellis_feedback_gain=1.07, trellis_unit=204.0,
    ),
    "itq2_t64": TypeInfo(
        name="itq2_t64", id=ExtType.ITQ2_T64, kind="weight", block_size=64, block_bytes=18, bpw=2.25, rotated=True,
        about="ITQ2_T in blocks of 64, for rows of any multiple of 64", activation="q8_kr64", unpack_min=0, unpack_max=127, group=64,
        fallback="itq2_t32", token_embd="q2_k", output="q5_k", title="ITQ2_T64 - 2.25 bpw", usual_rel_mse=0.0602, fixture_rel_mse=0.0617,
        student_t4_rel_mse=0.0613, hessian_gain=0.78, fns_limits="iq2_s", short_token_embd="itq2_t64", fns_dot_error=0.07, trellis_bits=2,
        trellis_weights=1, trellis_states=4096,
        trellis_values=[[38, 23, 78, 52, 22, 48, 0, 37, 48, 36, 21, 65, 57, 64, 40, 21], [22, 10, 32, 14, 14, 28, 0, 22, 44, 22, 23, 12, 31, 14, 22, 28]],
        trellis_offset=62.0, trellis_gain=1.03, trellis_feedback_gain=1.03, trellis_unit=174.0,
    ),
    "itq1h_t64": TypeInfo(
        name="itq1h_t64", id=ExtType.ITQ1H_T64, kind="weight", block_size=64, block_bytes=14, bpw=1.75, rotated=True,
        about="ITQ1H_T in blocks of 64, for rows of any multiple of 64", activation="q8_kr64", unpack_min=0, unpack_max=127, group=64,
        fallback="itq2_t32", token_embd="q2_k", output="q5_k", title="ITQ1H_T64 - 1.75 bpw", usual_rel_mse=0.1209, fixture_rel_mse=0.1211,
        student_t4_rel_mse=0.1204, hessian_gain=1.125, fns_limits="tq2_0", short_token_embd="itq2_t64", trellis_bits=3, trellis_weights=2,
        trellis_states=4096,
        trellis_values=[[42, 38, 66, 15, 16, 20, 46, 33, 34, 31, 15, 54, 28, 23, 1, 44], [19, 45, 11, 43, 45, 6, 33, 29, 54, 11, 39, 21, 20, 35, 41, 0], [36, 17, 57, 36, 59, 23, 0, 36, 44, 58, 37, 14, 17, 47, 31, 71], [29, 17, 20, 21, 22, 14, 4, 39, 31, 23, 10, 48, 0, 33, 38, 35]],
        trellis_offset=60.0, trellis_gain=0.98, trellis_feedback_gain=1.15, trellis_unit=156.0,
    ),
    "itq1_t64": TypeInfo(
        name="itq1_t64", id=ExtType.ITQ1_T64, kind="weight", block_size=64, block_bytes=10, bpw=1.25, rotated=True,
        about="ITQ1_T in blocks of 64, for rows of any multiple of 64", activation="q8_kr64", unpack_min=0, unpack_max=127, group=64,
        fallback="itq2_t32", token_embd="q2_k", output="q5_k", title="ITQ1_T64 - 1.25 bpw", usual_rel_mse=0.2351, fixture_rel_mse=0.2353,
        student_t4_rel_mse=0.2337, hessian_gain=1.25, fns_limits="q1_0", short_token_embd="itq2_t64", trellis_bits=2, trellis_weights=2,
        trellis_states=4096,
        trellis_values=[[30, 52, 25, 78, 99, 43, 72, 37, 61, 71, 37, 0, 32, 11, 59, 63], [1, 22, 16, 9, 15, 0, 6, 14, 17, 19, 16, 6, 7, 8, 16, 17], [12, 16, 11, 1, 23, 3, 5, 3, 8, 9, 7, 5, 5, 3, 11, 7], [24, 63, 59, 42, 39, 50, 79, 23, 79, 28, 38, 61, 56, 103, 0, 76]],
        trellis_offset=60.0, trellis_gain=0.89, trellis_feedback_gain=1.15, trellis_unit=128.0,
    ),
    "itq4_t32": TypeInfo(
        name="itq4_t32", id=ExtType.ITQ4_T32, kind="weight", block_size=32, block_bytes=18, bpw=4.5, rotated=True,
        about="ITQ4_T in blocks of 32, for rows of any multiple of 32", activation="q8_kr32", unpack_min=0, unpack_max=127, group=32,
        fallback="q5_0", token_embd="q4_k", output="q6_k", title="ITQ4_T32 - 4.5 bpw", usual_rel_mse=0.00328, fixture_rel_mse=0.00335,
        student_t4_rel_mse=0.00334, hessian_gain=0.53, fns_limits="q5_k", short_token_embd="itq4_t64", trellis_bits=4, trellis_weights=1,
        trellis_states=4096,
        trellis_values=[[25, 31, 37, 47, 14, 0, 9, 51, 34, 57, 43, 18, 28, 71, 40, 22], [24, 45, 33, 29, 37, 30, 54, 35, 26, 40, 0, 20, 32, 29, 27, 35]],
        trellis_offset=64.0, trellis_gain=1.07, trellis_feedback_gain=1.07, trellis_unit=220.0,
    ),
    "itq3_t32": TypeInfo(
        name="itq3_t32", id=ExtType.ITQ3_T32, kind="weight", block_size=32, block_bytes=14, bpw=3.5, rotated=True,
        about="ITQ3_T in blocks of 32, for rows of any multiple of 32", activation="q8_kr32", unpack_min=0, unpack_max=127, group=32,
        fallback="iq4_nl", token_embd="q3_k", output="q6_k", title="ITQ3_T32 - 3.5 bpw", usual_rel_mse=0.01294, fixture_rel_mse=0.0132,
        student_t4_rel_mse=0.0132, hessian_gain=0.595, fns_limits="iq3_s", short_token_embd="itq3_t64", trellis_bits=3, trellis_weights=1,
        trellis_states=4096,
        trellis_values=[[16, 39, 0, 27, 40, 13, 23, 29, 31, 14, 24, 54, 20, 34, 46, 6], [34, 41, 36, 15, 32, 45, 21, 53, 24, 31, 26, 46, 41, 0, 66, 32]],
        trellis_offset=60.0, trellis_gain=1.07, trellis_feedback_gain=1.07, trellis_unit=204.0,
    ),
    "itq2_t32": TypeInfo(
        name="itq2_t32", id=ExtType.ITQ2_T32, kind="weight", block_size=32, block_bytes=10, bpw=2.5, rotated=True,
        about="ITQ2_T in blocks of 32, for rows of any multiple of 32", activation="q8_kr32", unpack_min=0, unpack_max=127, group=32,
        fallback="iq4_nl", token_embd="q2_k", output="q5_k", title="ITQ2_T32 - 2.5 bpw", usual_rel_mse=0.0507, fixture_rel_mse=0.0516,
        student_t4_rel_mse=0.0513, hessian_gain=0.85, fns_limits="iq2_s", short_token_embd="itq2_t64", fns_dot_error=0.07, trellis_bits=2,
        trellis_weights=1, trellis_states=4096,
        trellis_values=[[38, 23, 78, 52, 22, 48, 0, 37, 48, 36, 21, 65, 57, 64, 40, 21], [22, 10, 32, 14, 14, 28, 0, 22, 44, 22, 23, 12, 31, 14, 22, 28]],
        trellis_offset=62.0, trellis_gain=1.03, trellis_feedback_gain=1.03, trellis_unit=174.0,
    ),
    "ditto5": TypeInfo(
        name="ditto5", id=ExtType.DITTO5, kind="weight", block_size=256, block_bytes=162, bpw=5.0625, rotated=True,
        about="rotated, index into one codebook of 32 7-bit values for all blocks", activation="q8_kr", unpack_min=0, unpack_max=127,
        group=256, fallback="q5_0", token_embd="q5_k", output="q6_k", title="DITTO5 - 5.0625 bpw", usual_rel_mse=0.00211,
        fixture_rel_mse=0.00213, student_t4_rel_mse=0.00213, hessian_gain=0.6, fns_limits="q5_k", short_token_embd="q5_k",
        codebook=[65, 67, 70, 73, 76, 79, 82, 85, 88, 91, 95, 99, 104, 110, 117, 127], codebook_offset=63.5,
    ),
    "q8_kr32": TypeInfo(
        name="q8_kr32", id=ExtType.Q8_KR32, kind="activation", block_size=32, block_bytes=304, bpw=9.5, rotated=True,
        about="activations rotated in blocks of 32, bytes of a group of eight",
    ),
    "q8_kr64": TypeInfo(
        name="q8_kr64", id=ExtType.Q8_KR64, kind="activation", block_size=64, block_bytes=288, bpw=9.0, rotated=True,
        about="activations rotated in blocks of 64, bytes of a group of four",
    ),
    "q8_kr": TypeInfo(
        name="q8_kr", id=ExtType.Q8_KR, kind="activation", block_size=256, block_bytes=292, bpw=9.125, rotated=True,
        about="`block_q8_K` of the rotated activations",
    ),
}

WEIGHT_TYPES: dict[str, TypeInfo] = {n: t for n, t in TYPES.items() if t.kind == "weight"}
RETIRED_TYPES: dict[int, str] = {163: "itq3_t", 164: "itq2_t", 165: "itq3_t64", 166: "itq2_t64"}  # ids in files of earlier versions
