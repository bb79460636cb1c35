"""Loops in the assembly that RADV prints, as scripts/gpu/vulkan_instructions.py finds and counts them."""

import pytest

import vulkan_instructions

ASSEMBLY = """BB0:
\ts_mov_b32 s0, 0                       ; be800080
BB1:
\tv_fma_f32 v0, v1, v2, v0              ; d6130000
BB2:
\tds_load_u16 v3, v3                    ; d8f00000
\tv_fma_mix_f32 v0, v3, v1, v0          ; cc200000
\tv_fmac_f32_e32 v0, v1, v2             ; 56000000
\ts_cbranch_scc0 BB2                    ; bfa10000
\tv_add_f32_e32 v0, v1, v0              ; 06000000
\ts_branch BB1                          ; bfa00000
BB3:
\tv_cmp_ne_i32_e32 vcc_lo, 0, v10       ; 7c8a1480
\tbuffer_load_u16 v3, v3, s[0:3], 0     ; e0900000
\tv_fmac_f32_e32 v0, v1, v2             ; 56000000
\tv_fmac_f32_e32 v0, v1, v2             ; 56000000
\tv_mov_b32_e32 v0, v1                  ; 7e000000
\ts_cbranch_execnz BB3                  ; bfa60000
\ts_cbranch_scc0 BB9                    ; bfa10000
BB9:
\ts_endpgm                              ; bfb00000
"""


def test_loops_that_have_others_in_them_are_left_out():
    first, second = vulkan_instructions.innermost_loops(ASSEMBLY)
    assert first == ["ds_load_u16", "v_fma_mix_f32", "v_fmac_f32_e32", "s_cbranch_scc0"]
    assert second[0] == "v_cmp_ne_i32_e32" and len(second) == 6


def test_of_loops_with_as_many_products_the_shortest_counts():
    assert vulkan_instructions.counts(vulkan_instructions.hot_loop(ASSEMBLY)) == {"VALU": 2, "look-ups": 1, "loads": 0}


def test_code_without_a_loop():
    assert vulkan_instructions.hot_loop("BB0:\n\ts_endpgm ; bfb00000\n") == []


@pytest.mark.parametrize(("name", "n_columns", "expected"), [("itq3_t", 4, ((128, 4, 4), 128)), ("itq3_t", 8, ((128, 2, 8), 64)),
                                                              ("q3_k", 1, ((32, 2, 1), 32)), ("iq3_s", 8, ((32, 4, 8), 64))])
def test_constants_are_those_of_the_backend(name, n_columns, expected):
    kernel = vulkan_instructions.product(name, n_columns)
    assert (kernel.constants, kernel.n_weights) == expected
