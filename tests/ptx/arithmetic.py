"""Instructions without side effects, one line per opcode: arithmetic, bits, comparisons, conversions."""

from __future__ import annotations

import itertools

import numpy as np

from .memory import LOCAL, SHARED
from .parser import Vector, type_bytes
from .table import KINDS, UNSIGNED, dtype, entry

SMALLEST_NORMAL = np.float32(2.0**-126)


def flush_subnormals(x: np.ndarray) -> np.ndarray:
    """Replace subnormal numbers by zeros of their sign (.ftz)."""
    tiny = np.abs(x) < SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), x), x) if tiny.any() else x


def define(pattern: str, types: str, function) -> None:
    """Register a function of values. types: those of the operands; T stands for the opcode's last part."""
    def build(launch, instruction, parts):
        names = [parts[-1] if name == "T" else name for name in types.split()]
        put = launch.store(instruction.operands[0])
        values = [launch.value(x, name) for x, name in zip(instruction.operands[1:], names, strict=True)]
        if "ftz" in parts:
            def run(mask, full):
                result = function(*(flush_subnormals(v()) if v().dtype == np.float32 else v() for v in values))
                put(flush_subnormals(result) if result.dtype == np.float32 else result, mask, full)
        else:
            def run(mask, full):
                put(function(*(v() for v in values)), mask, full)
        return run
    entry(pattern)(build)


# --- arithmetic

def define_approximate(pattern: str, types: str, function) -> None:
    """Register an instruction that may err in the last bit, as the launch requests (`approximation`)."""
    def build(launch, instruction, parts):
        put = launch.store(instruction.operands[0])
        values = [launch.value(x, parts[-1]) for x in instruction.operands[1:]]
        assert len(values) == len(types.split())
        flush = flush_subnormals if "ftz" in parts else (lambda x: x)
        return lambda mask, full: put(flush(launch.off_by_one(function(*(flush(v()) for v in values)).astype(np.float32))), mask, full)
    entry(pattern)(build)


def add_rounding_to_odd(a, b):
    """Add in double so that rounding the sum to float rounds the exact sum correctly, in any direction.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact (Knuth's two-sum)
    inexact = (error != 0) & np.isfinite(total) & (total.view(np.int64) & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, (total.view(np.int64) + step).view(np.float64), total)


def fma(a, b, c):
    """Compute a*b + c with one rounding; the product is exact in double."""
    return add_rounding_to_odd(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)


def add_toward_zero(a, b):
    total = add_rounding_to_odd(a.astype(np.float64), b.astype(np.float64))
    return (total.view(np.int64) & ~np.int64((1 << 29) - 1)).view(np.float64).astype(np.float32)  # double has 29 more mantissa bits than float


def on_half_pairs(function):
    """Apply a function to both halves of each word and round each result."""
    def apply(a, b):
        a, b = (np.ascontiguousarray(x).view(np.float16).astype(np.float32) for x in (a, b))
        return function(a, b).astype(np.float16).view(np.uint32)
    return apply


def divide(a, b):
    safe = np.where(b == 0, b.dtype.type(1), b)
    q = a // safe
    return q + ((q < 0) & (q * safe != a)).astype(q.dtype) if a.dtype.kind == "i" else q


def multiply_wide(a, b):
    wide_type = KINDS[a.dtype.kind.replace("i", "s")][16 * a.dtype.itemsize]
    return a.astype(wide_type) * b.astype(wide_type)


def multiply_high(a, b):
    wide = multiply_wide(a, b)
    return (wide >> wide.dtype.type(8 * a.dtype.itemsize)).astype(a.dtype)


define("add.{s16,u16,s32,u32,s64,u64}", "T T", np.add)
define("sub.{s16,u16,s32,u32,s64,u64}", "T T", np.subtract)
define("mul.lo.{s16,u16,s32,u32,s64,u64}", "T T", np.multiply)
define("mul.wide.{s16,u16,s32,u32}", "T T", multiply_wide)
define("mul.hi.{s32,u32}", "T T", multiply_high)
define("mad.lo.{s16,u16,s32,u32,s64,u64}", "T T T", lambda a, b, c: a * b + c)
define("mad.wide.{s32,u32}", "T T T", lambda a, b, c: multiply_wide(a, b) + c)
define("div.{s32,u32,s64,u64}", "T T", divide)
define("rem.{s32,u32,s64,u64}", "T T", lambda a, b: a - divide(a, b) * b)
define("neg.{s16,s32,s64}", "T", np.negative)
define("abs.{s32,s64}", "T", np.abs)
define("min.{s16,u16,s32,u32,s64,u64}", "T T", np.minimum)
define("max.{s16,u16,s32,u32,s64,u64}", "T T", np.maximum)

define("add{,.rn}{,.ftz}.f32", "T T", np.add)
define("add.rz{,.ftz}.f32", "T T", add_toward_zero)
define("sub{,.rn}{,.ftz}.f32", "T T", np.subtract)
define("mul{,.rn}{,.ftz}.f32", "T T", np.multiply)
define("fma.rn{,.ftz}.f32", "T T T", fma)
define("min{,.ftz}.f32", "T T", np.fmin)
define("max{,.ftz}.f32", "T T", np.fmax)
define("neg{,.ftz}.{f32,f64}", "T", np.negative)
define("abs{,.ftz}.{f32,f64}", "T", np.abs)
define("copysign.f32", "T T", lambda sign, magnitude: np.copysign(magnitude, sign))
define("rcp.rn{,.ftz}.f32", "T", lambda a: np.float32(1) / a)
define("div.rn{,.ftz}.f32", "T T", np.divide)
define("mul{,.rn}.f16x2", "b32 b32", on_half_pairs(np.multiply))
define("add{,.rn}.f16x2", "b32 b32", on_half_pairs(np.add))
define_approximate("div.approx{,.ftz}.f32", "T T", np.divide)
define_approximate("rcp.approx{,.ftz}.f32", "T", lambda a: np.float32(1) / a)
define_approximate("ex2.approx{,.ftz}.f32", "T", np.exp2)
define_approximate("lg2.approx{,.ftz}.f32", "T", np.log2)
define_approximate("tanh.approx.f32", "T", np.tanh)
define_approximate("sqrt.approx{,.ftz}.f32", "T", np.sqrt)
define_approximate("rsqrt.approx{,.ftz}.f32", "T", lambda a: 1 / np.sqrt(a))

# --- bits

def shift_right(a, n):
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), shifted)


def shift_left(a, n):
    bits = 8 * a.dtype.itemsize
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def funnel_shift(low, high_word, n, left):
    joined = high_word.astype(np.uint64) << np.uint64(32) | low
    n = (n & np.uint32(31)).astype(np.uint64)
    return (joined << n >> np.uint64(32) if left else joined >> n).astype(np.uint32)


def permute_bytes(a, b, selector):
    source, out = b.astype(np.uint64) << np.uint64(32) | a, np.zeros_like(a)
    for j in range(4):
        n = selector >> np.uint32(4 * j) & np.uint32(15)
        byte = (source >> (n & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        out |= np.where(n & np.uint32(8), sign, byte) << np.uint32(8 * j)
    return out


def insert_bits(a, b, position, length):
    position, length = np.minimum(position & 255, 32).astype(np.uint64), np.minimum(length & 255, 32).astype(np.uint64)
    mask = ((np.uint64(1) << length) - np.uint64(1) << position).astype(np.uint32)
    return b & ~mask | (a.astype(np.uint64) << position).astype(np.uint32) & mask


def extract_bits(a, position, length):
    position, length = np.minimum(position & 255, 32).astype(np.uint64), np.minimum(length & 255, 32).astype(np.uint64)
    return (a.astype(np.uint64) >> position & (np.uint64(1) << length) - np.uint64(1)).astype(np.uint32)


def count_bits(a):
    return np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4), axis=1).sum(1, dtype=np.uint32)


def dot_bytes(kind_a, kind_b):
    def dp4a(a, b, c):
        a, b = (np.ascontiguousarray(x).view(kind).reshape(-1, 4).astype(np.int32) for x, kind in ((a, kind_a), (b, kind_b)))
        return c + (a * b).sum(1, dtype=np.int32)
    return dp4a


define("and.{b16,b32,b64,pred}", "T T", np.bitwise_and)
define("or.{b16,b32,b64,pred}", "T T", np.bitwise_or)
define("xor.{b16,b32,b64,pred}", "T T", np.bitwise_xor)
define("not.{b16,b32,b64,pred}", "T", np.invert)
define("shl.{b16,b32,b64}", "T u32", shift_left)
define("shr.{s16,u16,b16,s32,u32,b32,s64,u64,b64}", "T u32", shift_right)
define("shf.l.wrap.b32", "T T u32", lambda low, high_word, n: funnel_shift(low, high_word, n, True))
define("shf.r.wrap.b32", "T T u32", lambda low, high_word, n: funnel_shift(low, high_word, n, False))
define("prmt.b32", "T T T", permute_bytes)
define("bfi.b32", "T T u32 u32", insert_bits)
define("bfe.u32", "T u32 u32", extract_bits)
define("popc.b32", "T", count_bits)
define("dp4a.s32.s32", "b32 b32 s32", dot_bytes(np.int8, np.int8))
define("dp4a.u32.s32", "b32 b32 s32", dot_bytes(np.uint8, np.int8))


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


# --- comparisons and selection

def define_comparison(pattern: str, function, unordered: bool = False) -> None:
    """Register a comparison; an unordered one is true where an operand is NaN."""
    def compared(a, b):
        result = function(a, b)
        if a.dtype.kind != "f":
            return result
        nan = np.isnan(a) | np.isnan(b)
        return result | nan if unordered else result & ~nan
    define(pattern, "T T", compared)


INTEGERS = "{s16,u16,b16,s32,u32,b32,s64,u64,b64}"
define_comparison(f"setp.eq.{INTEGERS}", np.equal)
define_comparison(f"setp.ne.{INTEGERS}", np.not_equal)
define_comparison(f"setp.lt.{INTEGERS}", np.less)
define_comparison(f"setp.le.{INTEGERS}", np.less_equal)
define_comparison(f"setp.gt.{INTEGERS}", np.greater)
define_comparison(f"setp.ge.{INTEGERS}", np.greater_equal)
define_comparison("setp.eq{,.ftz}.f32", np.equal)
define_comparison("setp.ne{,.ftz}.f32", np.not_equal)
define_comparison("setp.lt{,.ftz}.f32", np.less)
define_comparison("setp.le{,.ftz}.f32", np.less_equal)
define_comparison("setp.gt{,.ftz}.f32", np.greater)
define_comparison("setp.ge{,.ftz}.f32", np.greater_equal)
define_comparison("setp.equ{,.ftz}.f32", np.equal, True)
define_comparison("setp.neu{,.ftz}.f32", np.not_equal, True)
define_comparison("setp.ltu{,.ftz}.f32", np.less, True)
define_comparison("setp.leu{,.ftz}.f32", np.less_equal, True)
define_comparison("setp.gtu{,.ftz}.f32", np.greater, True)
define_comparison("setp.geu{,.ftz}.f32", np.greater_equal, True)
define("selp.{b16,u16,s16,b32,u32,s32,b64,u64,s64,f32}", "T T pred", lambda a, b, c: np.where(c, a, b))

# --- conversions

def round_to_integer(rounded, result):
    """Round and clamp to an integer type; NaN gives zero."""
    limits = np.iinfo(result)

    def convert(a):
        x = rounded(a.astype(np.float64))
        return np.where(np.isnan(x), 0, np.clip(x, limits.min, limits.max)).astype(np.int64).astype(result)
    return convert


def round_up_to_half(a):
    """Round up to half (.rp)."""
    h = a.astype(np.float16)
    return np.where(h.astype(np.float32) < a, np.nextafter(h, np.float16(np.inf)), h)


def round_to_bfloat16(a):
    bits = a.view(np.uint32).astype(np.uint64)
    even = bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)
    return np.where(np.isnan(a), np.uint64(0x7FFF), even).astype(np.uint16)


def convert_integers(launch, instruction, parts):
    put, value, destination = launch.store(instruction.operands[0]), launch.value(instruction.operands[1], parts[2]), dtype(parts[1])
    return lambda mask, full: put(value().astype(destination), mask, full)


for _destination, _source in itertools.product(("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"), repeat=2):
    if _destination != _source:
        entry(f"cvt.{_destination}.{_source}")(convert_integers)
define("cvt.rn.f32.{s8,u8,s16,u16,s32,u32}", "T", lambda a: a.astype(np.float32))
define("cvt.rni{,.ftz}.s32.f32", "T", round_to_integer(np.rint, np.int32))
define("cvt.rzi{,.ftz}.s32.f32", "T", round_to_integer(np.trunc, np.int32))
define("cvt.rzi{,.ftz}.u32.f32", "T", round_to_integer(np.trunc, np.uint32))
define("cvt.rzi{,.ftz}.f32.f32", "T", np.trunc)
define("cvt{,.ftz}.f64.f32", "T", lambda a: a.astype(np.float64))
define("cvt.rn{,.ftz}.f32.f64", "T", lambda a: a.astype(np.float32))
define("cvt.f32.f16", "T", lambda a: a.astype(np.float32))
define("cvt.rn.f16.f32", "T", lambda a: a.astype(np.float16))
define("cvt.rn.f16.{s16,u16,s32,u32}", "T", lambda a: a.astype(np.float16))
define("cvt.rp.f16.f32", "T", round_up_to_half)
define("cvt.f32.bf16", "b16", lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32))
define("cvt.rn.bf16.f32", "T", round_to_bfloat16)
define("cvta.to.{global,local,const}.u64", "T", lambda a: a)
define("cvta.{global,const}.u64", "T", lambda a: a)
define("cvta.shared.u64", "T", lambda a: a + np.uint64(SHARED))
define("cvta.to.shared.u64", "T", lambda a: a - np.uint64(SHARED))
define("cvta.local.u64", "T", lambda a: a + np.uint64(LOCAL))


@entry("mov.{pred,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}")
def _(launch, instruction, parts):
    destination, source = instruction.operands
    if isinstance(source, Vector):
        return pack_vector(launch, destination, source.items, parts[1])
    if isinstance(destination, Vector):
        return unpack_vector(launch, destination.items, source, parts[1])
    put, value = launch.store(destination), launch.value(source, parts[1])
    return lambda mask, full: put(value(), mask, full)


def pack_vector(launch, destination, items, type_name):
    bits = 8 * type_bytes(type_name) // len(items)
    put, values = launch.store(destination), [launch.value(x, f"b{bits}") for x in items]
    return lambda mask, full: put(np.stack([v() for v in values], 1).view(UNSIGNED[bits * len(items)])[:, 0], mask, full)


def unpack_vector(launch, items, source, type_name):
    bits = 8 * type_bytes(type_name) // len(items)
    puts, value = [launch.store(x) for x in items], launch.value(source, type_name)

    def run(mask, full):
        parts = np.ascontiguousarray(value()).view(UNSIGNED[bits]).reshape(-1, len(items))
        for j, put in enumerate(puts):
            put(parts[:, j], mask, full)
    return run
