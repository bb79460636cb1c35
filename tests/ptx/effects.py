"""Instructions of more than values: memory, the way through the code, barriers, warps, tensor cores."""

from __future__ import annotations

import re

import numpy as np

from .memory import SHARED, Fault
from .parser import Vector, bytes_of
from .table import ALL_LANES, dtype, entry

MEMORY_TYPES = "{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}"


def shape(parts) -> tuple[int, int]:
    """Bytes of an element, and elements."""
    return bytes_of(parts[-1]), next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)


def items(operand) -> tuple[str, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


@entry(f"ld.param{{,.v2,.v4}}.{MEMORY_TYPES}")
def _(launch, instruction, parts):
    size, n = shape(parts)
    to, of = instruction.operands
    if of.base not in launch.kernel.parameters:  # what a call returns, and calls are not done
        return lambda mask, full: None
    at = launch.kernel.parameters[of.base][0] + of.offset
    values = launch.parameters[at:at + n * size].view(dtype(parts[-1]))
    puts = [launch.store(x) for x in items(to)]

    def run(mask, full):
        for put, value in zip(puts, values, strict=True):
            put(np.broadcast_to(value, launch.n), mask, full)
    return run


@entry(f"ld.{{global,global.nc,shared,local}}{{,.v2,.v4,.v8}}.{MEMORY_TYPES}")
def _(launch, instruction, parts):
    size, n = shape(parts)
    to, of = instruction.operands
    puts, address, result = [launch.store(x) for x in items(to)], launch.address(of), dtype(parts[-1])

    def run(mask, full):
        if not mask.any():
            return
        raw = np.ascontiguousarray(launch.load(parts[1], address(), mask, size * n, "nc" in parts, instruction.text))
        fields = raw.view(result).reshape(-1, n)
        for j, put in enumerate(puts):
            all_threads = np.zeros(launch.n, result)
            all_threads[mask] = fields[:, j]
            put(all_threads, mask, full)
    return run


@entry(f"st.{{global,shared,local}}{{,.v2,.v4}}.{MEMORY_TYPES}")
def _(launch, instruction, parts):
    size, _ = shape(parts)
    to, of = instruction.operands
    values, address = [launch.value(x, parts[-1]) for x in items(of)], launch.address(to)

    def run(mask, full):
        if mask.any():
            raw = np.stack([v()[mask] for v in values], 1)
            launch.save(parts[1], address(), mask, size * len(values), raw.view(np.uint8).reshape(len(raw), -1), instruction.text)
    return run


@entry("prefetch.global.L2")
def _(launch, instruction, parts):
    return lambda mask, full: None


# --- the way through the code

@entry("bra{,.uni}")
def _(launch, instruction, parts):
    target = launch.labels[instruction.operands[0]]

    def run(mask, full):
        launch.pc[mask] = target
    return run


@entry("{ret,exit}")
def _(launch, instruction, parts):
    def run(mask, full):
        launch.done |= mask
    return run


@entry("{trap,call.uni}")
def _(launch, instruction, parts):
    def run(mask, full):
        if mask.any():
            raise Fault(f"{launch.kernel.name}: {instruction.text}")
    return run


@entry("st.param.{b32,b64}")
def _(launch, instruction, parts):
    return lambda mask, full: None  # arguments of calls that are not done


# --- barriers and warps

@entry("bar.sync")
def _(launch, instruction, parts):
    def run(mask, full):
        launch.shared.epoch[mask] += 1
    return run


@entry("bar.warp.sync")
def _(launch, instruction, parts):
    def run(mask, full):
        launch.shared.warp_epoch[mask] += 1
    return run


@entry("griddepcontrol.{wait,launch_dependents}")
def _(launch, instruction, parts):
    def run(mask, full):
        if parts[1] == "wait":
            launch.waited |= mask
    return run


SHUFFLES = {"bfly": lambda lane, b, first, last: (lane ^ b, np.less_equal, last),
            "idx": lambda lane, b, first, last: (first | b, np.less_equal, last),
            "down": lambda lane, b, first, last: (lane + b, np.less_equal, last),
            "up": lambda lane, b, first, last: (lane - b, np.greater_equal, last)}


@entry("shfl.sync.{bfly,idx,down,up}.b32")
def _(launch, instruction, parts):
    operands = instruction.operands
    put, put_inside = launch.store(operands[0]), launch.store(operands[1]) if len(operands) == 6 else None
    a, b, c = (launch.value(x, "b32") for x in operands[-4:-1])
    lane, first_thread = np.arange(launch.n) % 32, np.arange(launch.n) // 32 * 32

    def run(mask, full):
        segment, clamp = (c() >> np.uint32(8) & np.uint32(31)).astype(int), (c() & np.uint32(31)).astype(int)
        shift = (b() & np.uint32(31)).astype(int)
        first, last = lane & segment, lane & segment | clamp & ~segment
        source, inside, limit = SHUFFLES[parts[2]](lane, shift & ~segment if parts[2] == "idx" else shift, first, last)
        ok = inside(source, limit)
        source = np.where(ok, source, lane)
        if not mask[first_thread + source][mask].all():
            raise Fault(f"{launch.kernel.name}: {instruction.text}: a value of a lane that is not there")
        put(a()[first_thread + source], mask, full)
        if put_inside:
            put_inside(ok, mask, full)
    return run


def of_warps(launch, instruction, function, put, value):
    """A value for a whole warp from those of its lanes; with partial masks this is not known."""
    members = launch.value(instruction.operands[2], "u32")

    def run(mask, full):
        if (members()[mask] != ALL_LANES).any():
            raise NotImplementedError(f"lanes left out: {instruction.text}")
        put(np.repeat(function(value().reshape(-1, 32)), 32), mask, full)
    return run


@entry("redux.sync.{add,min,max}.{s32,u32}")
def _(launch, instruction, parts):
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[parts[2]]
    to, of, _ = instruction.operands
    return of_warps(launch, instruction, lambda x: function.reduce(x, axis=1, dtype=x.dtype), launch.store(to), launch.value(of, parts[3]))


@entry("vote.sync.{any,all}.pred")
def _(launch, instruction, parts):
    to, of, _ = instruction.operands
    return of_warps(launch, instruction, lambda x: getattr(x, parts[2])(axis=1), launch.store(to), launch.value(of, "pred"))


# --- tensor cores

@entry("ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{,.shared}.b16")
def _(launch, instruction, parts):
    n = int(next(p for p in parts if re.fullmatch(r"x[124]", p))[1:])
    puts, address = [launch.store(x) for x in items(instruction.operands[0])], launch.address(instruction.operands[1])
    generic, names_row = "shared" not in parts, np.arange(launch.n) % 32 < 8 * n

    def run(mask, full):
        rows = np.zeros((launch.n, 2), np.uint64)
        use = mask & names_row
        rows[use] = launch.load("shared", address() - (SHARED if generic else 0), use, 16, False, instruction.text)
        warps = rows.view(np.uint32).reshape(-1, 32, 4)  # of a warp, of a row: four words of eight halves
        for j, put in enumerate(puts):
            put(warps[:, 8 * j:8 * j + 8].reshape(-1), mask, full)
    return run


@entry("mma.sync.aligned.{m16n8k32,m16n8k16,m8n8k16}.row.col.s32.s8.s8.s32")
def _(launch, instruction, parts):
    m, n, k = map(int, re.match(r"m(\d+)n(\d+)k(\d+)", parts[3]).groups())
    puts = [launch.store(x) for x in items(instruction.operands[0])]
    a, b, c = ([launch.value(x, "b32") for x in items(operand)] for operand in instruction.operands[1:])
    lane, byte = np.arange(32)[:, None], np.arange(4)
    # register r of a lane: its row, and the columns of its four bytes, of A; of C, one number
    a_at = [(lane // 4 + 8 * (r % (m // 8)), 4 * (lane % 4) + 16 * (r // (m // 8)) + byte) for r in range(len(a))]
    b_at = [(4 * (lane % 4) + 16 * r + byte, lane // 4) for r in range(len(b))]
    c_at = [(lane[:, 0] // 4 + 8 * (r // 2), 2 * (lane[:, 0] % 4) + r % 2) for r in range(len(c))]

    def matrix(registers, places, rows, columns):
        out = np.zeros((launch.n // 32, rows, columns), np.float32)  # holds sums of k products of bytes exactly
        for (row, column), value in zip(places, registers, strict=True):
            out[:, row, column] = np.ascontiguousarray(value()).view(np.int8).reshape(-1, 32, 4)
        return out

    def run(mask, full):
        products = np.matmul(matrix(a, a_at, m, k), matrix(b, b_at, k, n)).astype(np.int32)
        results = [products[:, row, column].reshape(-1) + value().view(np.int32) for (row, column), value in zip(c_at, c, strict=True)]
        for put, result in zip(puts, results, strict=True):
            put(result, mask, full)
    return run
