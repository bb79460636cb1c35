"""The PTX interpreter (tests/ptx) on small kernels: what it refuses, what it reports, and arithmetic that is easy to get wrong."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptx import arithmetic
from ptx.machine import Grid, Launch
from ptx.memory import Fault, GlobalMemory
from ptx.parser import parse

HEAD = """
.version 9.0
.target sm_90
.address_size 64
.entry k(.param .u64 k_param_0, .param .u64 k_param_1)
.maxntid 64
{
    .reg .pred %p<8>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %rd<8>;
    .shared .align 4 .b8 room[256];
    ld.param.u64 %rd0, [k_param_0];
    ld.param.u64 %rd1, [k_param_1];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd2, %r0, 4;
    add.s64 %rd3, %rd0, %rd2;
    add.s64 %rd4, %rd1, %rd2;
    shl.b32 %r1, %r0, 2;
    mov.u32 %r2, room;
    add.s32 %r3, %r2, %r1;
"""


def run_kernel(code: str, n: int = 64, n_bytes: int = 256, blocks: int = 1, **grid) -> tuple[np.ndarray, Launch]:
    """Run code with %rd3 at this thread's word of the input 0, 1, 2, ..., %rd4 at its word of the output, %r3 at that of shared memory."""
    memory = GlobalMemory(1 << 14)
    x, y = memory.alloc(n_bytes, np.arange(n_bytes // 4, dtype=np.uint32)), memory.alloc(n_bytes)
    launch = Launch(parse(HEAD + code + "\n}\n").kernels["k"], memory, Grid((blocks, 1, 1), (n, 1, 1), **grid), struct.pack("<QQ", x, y), {})
    launch.run()
    return memory.read(y, np.uint32, n), launch


COPY = "ld.global.u32 %r4, [%rd3]; st.global.u32 [%rd4], %r4; ret;"


def test_copy_kernel():
    y, launch = run_kernel(COPY)
    assert np.array_equal(y, np.arange(64)) and not launch.problems
    assert launch.executed["ld.global.u32"] == 2  # counts warps


def test_threads_diverge_and_reconverge():
    y, _ = run_kernel("""
        and.b32 %r5, %r0, 3;
        mov.u32 %r6, 0;
    $loop:
        setp.ge.u32 %p0, %r6, %r5;
        @%p0 bra $end;
        add.s32 %r6, %r6, 1;
        bra.uni $loop;
    $end:
        shfl.sync.bfly.b32 %r7|%p1, %r6, 1, 31, -1;
        st.global.u32 [%rd4], %r7;
        ret;""")
    assert np.array_equal(y, (np.arange(64) & 3) ^ 1)


@pytest.mark.parametrize("code,what", [
    ("ld.global.u32 %r4, [%rd3+256]; ret;", "outside of all buffers"),
    ("ld.global.u32 %r4, [%rd3+2]; ret;", "misaligned for 4 bytes"),
    ("ld.shared.u32 %r4, [%r3+256]; ret;", "outside of shared memory"),
    ("setp.eq.u32 %p0, %r0, 5; @%p0 ret; shfl.sync.bfly.b32 %r4|%p1, %r0, 1, 31, -1; ret;", "have exited"),
    ("setp.lt.u32 %p0, %r0, 5; @%p0 bra $a; bar.sync 0; ret; $a: shfl.sync.bfly.b32 %r4|%p1, %r0, 1, 31, -1; ret;", "deadlock"),
    ("trap;", "trap"),
])
def test_illegal_instructions_are_refused(code, what):
    with pytest.raises(Fault, match=what):
        run_kernel(code)


@pytest.mark.parametrize("code,what", [
    ("st.shared.u32 [%r3], %r0; xor.b32 %r5, %r3, 128; ld.shared.u32 %r4, [%r5]; ret;", "race, read after write"),
    ("st.shared.u32 [%r3], %r0; bar.sync 0; xor.b32 %r5, %r3, 128; ld.shared.u32 %r4, [%r5]; st.shared.u32 [%r3], %r4; ret;",
     "race, write after read"),
    ("ld.shared.u32 %r4, [%r3]; ret;", "reads bytes that nobody wrote"),
    ("st.global.u32 [%rd1], %r0; ret;", "two threads write one place"),
    ("st.global.u32 [%rd4], %r0; ld.global.nc.u32 %r4, [%rd4]; ret;", "ld.global.nc of what this launch wrote"),
])
def test_undefined_behaviour_is_reported(code, what):
    _, launch = run_kernel(code)
    assert list(launch.problems) == [what]


@pytest.mark.parametrize("fence", ["bar.sync 0;", "bar.warp.sync -1;"])
def test_barriers_order_memory(fence):
    """Within a warp either barrier suffices."""
    _, launch = run_kernel(f"st.shared.u32 [%r3], %r0; {fence} xor.b32 %r5, %r3, 4; ld.shared.u32 %r4, [%r5]; ret;")
    assert not launch.problems


def test_warp_barrier_does_not_order_warps():
    _, launch = run_kernel("st.shared.u32 [%r3], %r0; bar.warp.sync -1; xor.b32 %r5, %r3, 128; ld.shared.u32 %r4, [%r5]; ret;")
    assert list(launch.problems) == ["race, read after write"]


@pytest.mark.parametrize("code,problems", [
    (COPY, ["global memory before griddepcontrol.wait"]),
    ("griddepcontrol.wait; " + COPY, []),
])
def test_dependent_launch_must_wait(code, problems):
    assert list(run_kernel(code, programmatic=True)[1].problems) == problems


def test_blocks_may_not_read_each_other():
    """The second block reads what the first one wrote, which is right only in this order."""
    _, launch = run_kernel("""
        mov.u32 %r5, %ctaid.x; setp.eq.u32 %p0, %r5, 1; @%p0 bra $b;
        st.global.u32 [%rd4], %r0; ret;
    $b: ld.global.u32 %r4, [%rd4]; ret;""", blocks=2)
    assert list(launch.problems) == ["reads what another block wrote"]


@pytest.mark.parametrize("code", ["bfind.u32 %r4, %r0; ret;", "add.sat.s32 %r4, %r0, 1; ret;", "barrier.cluster.arrive; ret;"])
def test_unknown_instruction_is_refused(code):
    with pytest.raises(NotImplementedError, match="no instruction"):
        run_kernel(code)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


def exactly(*terms) -> Fraction:
    return sum((Fraction(float(t)) for t in terms), Fraction(0))


@settings(max_examples=500)
@given(floats, floats, floats)
def test_fused_multiply_add_rounds_once(a, b, c):
    result = arithmetic.fma(*(np.array([x], np.float32) for x in (a, b, c)))[0]
    want = Fraction(a) * Fraction(b) + Fraction(c)
    spacing = Fraction(float(np.spacing(np.abs(result))))
    error = abs(Fraction(float(result)) - want)
    assert error * 2 <= spacing, (result, float(want))


@settings(max_examples=500)
@given(floats, floats)
def test_addition_rounds_toward_zero(a, b):
    result = float(arithmetic.add_toward_zero(np.array([a], np.float32), np.array([b], np.float32))[0])
    want = exactly(a, b)
    assert abs(exactly(result)) <= abs(want) and (abs(want) - abs(exactly(result))) < exactly(np.spacing(np.float32(abs(result))))
