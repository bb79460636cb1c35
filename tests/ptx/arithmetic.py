"""Instructions of values alone: numbers, bits, choices, conversions. A line for each opcode."""

from __future__ import annotations

import itertools

import numpy as np

from .memory import LOCAL, SHARED
from .parser import Vector, bytes_of
from .table import KINDS, UNSIGNED, dtype, entry

SMALLEST_NORMAL = np.float32(2.0**-126)


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers are zeros of their sign (.ftz)."""
    tiny = np.abs(x) < SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), x), x) if tiny.any() else x


def compute(pattern: str, types: str, function) -> None:
    """A function of values alone. types: those of the operands, T for the opcode's last part."""
    def maker(launch, instruction, parts):
        names = [parts[-1] if name == "T" else name for name in types.split()]
        put = launch.store(instruction.operands[0])
        values = [launch.value(x, name) for x, name in zip(instruction.operands[1:], names, strict=True)]
        if "ftz" in parts:
            def run(mask, full):
                result = function(*(flushed(v()) if v().dtype == np.float32 else v() for v in values))
                put(flushed(result) if result.dtype == np.float32 else result, mask, full)
        else:
            def run(mask, full):
                put(function(*(v() for v in values)), mask, full)
        return run
    entry(pattern)(maker)


# --- numbers

def approximate(pattern: str, types: str, function) -> None:
    """Instructions that may be off in the last bit: by what the launch asks for (`approximation`)."""
    def maker(launch, instruction, parts):
        put = launch.store(instruction.operands[0])
        values = [launch.value(x, parts[-1]) for x in instruction.operands[1:]]
        assert len(values) == len(types.split())
        flush = flushed if "ftz" in parts else (lambda x: x)
        return lambda mask, full: put(flush(launch.off_by_one(function(*(flush(v()) for v in values)).astype(np.float32))), mask, full)
    entry(pattern)(maker)


def rounded_to_odd(a, b):
    """The sum in double such that rounding it to float in any way is that rounding of the exact sum (Boldo and Melquiond, "Emulation of
    FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008)."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact (Knuth)
    inexact = (error != 0) & np.isfinite(total) & (total.view(np.int64) & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, (total.view(np.int64) + toward).view(np.float64), total)


def fused(a, b, c):
    """a*b + c with one rounding: the product is exact in double."""
    return rounded_to_odd(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)


def added_toward_zero(a, b):
    total = rounded_to_odd(a.astype(np.float64), b.astype(np.float64))
    return (total.view(np.int64) & ~np.int64((1 << 29) - 1)).view(np.float64).astype(np.float32)  # 29 bits more than float


def of_halves(function):
    """Of pairs of halves in words, each result rounded by itself."""
    def both(a, b):
        a, b = (np.ascontiguousarray(x).view(np.float16).astype(np.float32) for x in (a, b))
        return function(a, b).astype(np.float16).view(np.uint32)
    return both


def quotient(a, b):
    safe = np.where(b == 0, b.dtype.type(1), b)
    q = a // safe
    return q + ((q < 0) & (q * safe != a)).astype(q.dtype) if a.dtype.kind == "i" else q


def product(a, b):
    wide = KINDS[a.dtype.kind.replace("i", "s")][16 * a.dtype.itemsize]
    return a.astype(wide) * b.astype(wide)


def high(a, b):
    both = product(a, b)
    return (both >> both.dtype.type(8 * a.dtype.itemsize)).astype(a.dtype)


compute("add.{s16,u16,s32,u32,s64,u64}", "T T", np.add)
compute("sub.{s16,u16,s32,u32,s64,u64}", "T T", np.subtract)
compute("mul.lo.{s16,u16,s32,u32,s64,u64}", "T T", np.multiply)
compute("mul.wide.{s16,u16,s32,u32}", "T T", product)
compute("mul.hi.{s32,u32}", "T T", high)
compute("mad.lo.{s16,u16,s32,u32,s64,u64}", "T T T", lambda a, b, c: a * b + c)
compute("mad.wide.{s32,u32}", "T T T", lambda a, b, c: product(a, b) + c)
compute("div.{s32,u32,s64,u64}", "T T", quotient)
compute("rem.{s32,u32,s64,u64}", "T T", lambda a, b: a - quotient(a, b) * b)
compute("neg.{s16,s32,s64}", "T", np.negative)
compute("abs.{s32,s64}", "T", np.abs)
compute("min.{s16,u16,s32,u32,s64,u64}", "T T", np.minimum)
compute("max.{s16,u16,s32,u32,s64,u64}", "T T", np.maximum)

compute("add{,.rn}{,.ftz}.f32", "T T", np.add)
compute("add.rz{,.ftz}.f32", "T T", added_toward_zero)
compute("sub{,.rn}{,.ftz}.f32", "T T", np.subtract)
compute("mul{,.rn}{,.ftz}.f32", "T T", np.multiply)
compute("fma.rn{,.ftz}.f32", "T T T", fused)
compute("min{,.ftz}.f32", "T T", np.fmin)
compute("max{,.ftz}.f32", "T T", np.fmax)
compute("neg{,.ftz}.{f32,f64}", "T", np.negative)
compute("abs{,.ftz}.{f32,f64}", "T", np.abs)
compute("copysign.f32", "T T", lambda sign, magnitude: np.copysign(magnitude, sign))
compute("rcp.rn{,.ftz}.f32", "T", lambda a: np.float32(1) / a)
compute("div.rn{,.ftz}.f32", "T T", np.divide)
compute("mul{,.rn}.f16x2", "b32 b32", of_halves(np.multiply))
compute("add{,.rn}.f16x2", "b32 b32", of_halves(np.add))
approximate("div.approx{,.ftz}.f32", "T T", np.divide)
approximate("rcp.approx{,.ftz}.f32", "T", lambda a: np.float32(1) / a)
approximate("ex2.approx{,.ftz}.f32", "T", np.exp2)
approximate("lg2.approx{,.ftz}.f32", "T", np.log2)
approximate("tanh.approx.f32", "T", np.tanh)
approximate("sqrt.approx{,.ftz}.f32", "T", np.sqrt)
approximate("rsqrt.approx{,.ftz}.f32", "T", lambda a: 1 / np.sqrt(a))

# --- bits

def shifted_right(a, n):
    bits = 8 * a.dtype.itemsize
    inside = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return inside if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), inside)


def shifted_left(a, n):
    bits = 8 * a.dtype.itemsize
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def funnel(low, high_word, n, left):
    both = high_word.astype(np.uint64) << np.uint64(32) | low
    n = (n & np.uint32(31)).astype(np.uint64)
    return (both << n >> np.uint64(32) if left else both >> n).astype(np.uint32)


def permuted(a, b, selector):
    source, out = b.astype(np.uint64) << np.uint64(32) | a, np.zeros_like(a)
    for j in range(4):
        n = selector >> np.uint32(4 * j) & np.uint32(15)
        byte = (source >> (n & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        out |= np.where(n & np.uint32(8), sign, byte) << np.uint32(8 * j)
    return out


def inserted(a, b, position, length):
    position, length = np.minimum(position & 255, 32).astype(np.uint64), np.minimum(length & 255, 32).astype(np.uint64)
    mask = ((np.uint64(1) << length) - np.uint64(1) << position).astype(np.uint32)
    return b & ~mask | (a.astype(np.uint64) << position).astype(np.uint32) & mask


def extracted(a, position, length):
    position, length = np.minimum(position & 255, 32).astype(np.uint64), np.minimum(length & 255, 32).astype(np.uint64)
    return (a.astype(np.uint64) >> position & (np.uint64(1) << length) - np.uint64(1)).astype(np.uint32)


def bit_count(a):
    return np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4), axis=1).sum(1, dtype=np.uint32)


def dot_bytes(kind_a, kind_b):
    def dp4a(a, b, c):
        a, b = (np.ascontiguousarray(x).view(kind).reshape(-1, 4).astype(np.int32) for x, kind in ((a, kind_a), (b, kind_b)))
        return c + (a * b).sum(1, dtype=np.int32)
    return dp4a


compute("and.{b16,b32,b64,pred}", "T T", np.bitwise_and)
compute("or.{b16,b32,b64,pred}", "T T", np.bitwise_or)
compute("xor.{b16,b32,b64,pred}", "T T", np.bitwise_xor)
compute("not.{b16,b32,b64,pred}", "T", np.invert)
compute("shl.{b16,b32,b64}", "T u32", shifted_left)
compute("shr.{s16,u16,b16,s32,u32,b32,s64,u64,b64}", "T u32", shifted_right)
compute("shf.l.wrap.b32", "T T u32", lambda low, high_word, n: funnel(low, high_word, n, True))
compute("shf.r.wrap.b32", "T T u32", lambda low, high_word, n: funnel(low, high_word, n, False))
compute("prmt.b32", "T T T", permuted)
compute("bfi.b32", "T T u32 u32", inserted)
compute("bfe.u32", "T u32 u32", extracted)
compute("popc.b32", "T", bit_count)
compute("dp4a.s32.s32", "b32 b32 s32", dot_bytes(np.int8, np.int8))
compute("dp4a.u32.s32", "b32 b32 s32", dot_bytes(np.uint8, np.int8))


@entry("lop3.b32")
def _(launch, instruction, parts):
    put, values, table = launch.store(instruction.operands[0]), [launch.value(x, "b32") for x in instruction.operands[1:4]], int(instruction.operands[4], 0)

    def run(mask, full):
        a, b, c = (v() for v in values)
        out = np.zeros_like(a)
        for j in range(8):
            if table >> j & 1:
                out |= (a if j & 4 else ~a) & (b if j & 2 else ~b) & (c if j & 1 else ~c)
        put(out, mask, full)
    return run


# --- choices

def compare(pattern: str, function, unordered: bool = False) -> None:
    """unordered: true where one of the two is not a number."""
    def compared(a, b):
        result = function(a, b)
        if a.dtype.kind != "f":
            return result
        nan = np.isnan(a) | np.isnan(b)
        return result | nan if unordered else result & ~nan
    compute(pattern, "T T", compared)


INTEGERS = "{s16,u16,b16,s32,u32,b32,s64,u64,b64}"
compare(f"setp.eq.{INTEGERS}", np.equal)
compare(f"setp.ne.{INTEGERS}", np.not_equal)
compare(f"setp.lt.{INTEGERS}", np.less)
compare(f"setp.le.{INTEGERS}", np.less_equal)
compare(f"setp.gt.{INTEGERS}", np.greater)
compare(f"setp.ge.{INTEGERS}", np.greater_equal)
compare("setp.eq{,.ftz}.f32", np.equal)
compare("setp.ne{,.ftz}.f32", np.not_equal)
compare("setp.lt{,.ftz}.f32", np.less)
compare("setp.le{,.ftz}.f32", np.less_equal)
compare("setp.gt{,.ftz}.f32", np.greater)
compare("setp.ge{,.ftz}.f32", np.greater_equal)
compare("setp.equ{,.ftz}.f32", np.equal, True)
compare("setp.neu{,.ftz}.f32", np.not_equal, True)
compare("setp.ltu{,.ftz}.f32", np.less, True)
compare("setp.leu{,.ftz}.f32", np.less_equal, True)
compare("setp.gtu{,.ftz}.f32", np.greater, True)
compare("setp.geu{,.ftz}.f32", np.greater_equal, True)
compute("selp.{b16,u16,s16,b32,u32,s32,b64,u64,s64,f32}", "T T pred", lambda a, b, c: np.where(c, a, b))

# --- conversions

def to_integer(rounded, result):
    """Clamped to the type; no number gives zero."""
    limits = np.iinfo(result)

    def convert(a):
        x = rounded(a.astype(np.float64))
        return np.where(np.isnan(x), 0, np.clip(x, limits.min, limits.max)).astype(np.int64).astype(result)
    return convert


def half_above(a):
    """The least half that is not below (.rp)."""
    h = a.astype(np.float16)
    return np.where(h.astype(np.float32) < a, np.nextafter(h, np.float16(np.inf)), h)


def bfloat16(a):
    bits = a.view(np.uint32).astype(np.uint64)
    even = bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)
    return np.where(np.isnan(a), np.uint64(0x7FFF), even).astype(np.uint16)


def convert_integers(launch, instruction, parts):
    put, value, to = launch.store(instruction.operands[0]), launch.value(instruction.operands[1], parts[2]), dtype(parts[1])
    return lambda mask, full: put(value().astype(to), mask, full)


for _to, _of in itertools.product(("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"), repeat=2):
    if _to != _of:
        entry(f"cvt.{_to}.{_of}")(convert_integers)
compute("cvt.rn.f32.{s8,u8,s16,u16,s32,u32}", "T", lambda a: a.astype(np.float32))
compute("cvt.rni{,.ftz}.s32.f32", "T", to_integer(np.rint, np.int32))
compute("cvt.rzi{,.ftz}.s32.f32", "T", to_integer(np.trunc, np.int32))
compute("cvt.rzi{,.ftz}.u32.f32", "T", to_integer(np.trunc, np.uint32))
compute("cvt.rzi{,.ftz}.f32.f32", "T", np.trunc)
compute("cvt{,.ftz}.f64.f32", "T", lambda a: a.astype(np.float64))
compute("cvt.rn{,.ftz}.f32.f64", "T", lambda a: a.astype(np.float32))
compute("cvt.f32.f16", "T", lambda a: a.astype(np.float32))
compute("cvt.rn.f16.f32", "T", lambda a: a.astype(np.float16))
compute("cvt.rn.f16.{s16,u16,s32,u32}", "T", lambda a: a.astype(np.float16))
compute("cvt.rp.f16.f32", "T", half_above)
compute("cvt.f32.bf16", "b16", lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32))
compute("cvt.rn.bf16.f32", "T", bfloat16)
compute("cvta.to.{global,local,const}.u64", "T", lambda a: a)
compute("cvta.{global,const}.u64", "T", lambda a: a)
compute("cvta.shared.u64", "T", lambda a: a + np.uint64(SHARED))
compute("cvta.to.shared.u64", "T", lambda a: a - np.uint64(SHARED))
compute("cvta.local.u64", "T", lambda a: a + np.uint64(LOCAL))


@entry("mov.{pred,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}")
def _(launch, instruction, parts):
    to, of = instruction.operands
    if isinstance(of, Vector):
        return packed(launch, to, of.items, parts[1])
    if isinstance(to, Vector):
        return unpacked(launch, to.items, of, parts[1])
    put, value = launch.store(to), launch.value(of, parts[1])
    return lambda mask, full: put(value(), mask, full)


def packed(launch, to, items, type_name):
    bits = 8 * bytes_of(type_name) // len(items)
    put, values = launch.store(to), [launch.value(x, f"b{bits}") for x in items]
    return lambda mask, full: put(np.stack([v() for v in values], 1).view(UNSIGNED[bits * len(items)])[:, 0], mask, full)


def unpacked(launch, items, of, type_name):
    bits = 8 * bytes_of(type_name) // len(items)
    puts, value = [launch.store(x) for x in items], launch.value(of, type_name)

    def run(mask, full):
        parts = np.ascontiguousarray(value()).view(UNSIGNED[bits]).reshape(-1, len(items))
        for j, put in enumerate(puts):
            put(parts[:, j], mask, full)
    return run
