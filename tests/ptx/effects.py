"""Instructions with effects: memory, control flow, barriers, warps, tensor cores."""

from __future__ import annotations

import re

import numpy as np

from .memory import SHARED, Fault
from .parser import Vector, type_bytes
from .table import ALL_LANES, dtype, entry

MEMORY_TYPES = "{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}"


def shape(parts) -> tuple[int, int]:
    """Return the bytes of an element and the number of elements."""
    return type_bytes(parts[-1]), next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)


def items(operand) -> tuple[str, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


@entry(f"ld.param{{,.v2,.v4}}.{MEMORY_TYPES}")
def _(launch, instruction, parts):
    size, n = shape(parts)
    destination, source = instruction.operands
    if source.base not in launch.kernel.parameters:  # the result of a call; calls are not executed
        return lambda mask, full: None
    offset = launch.kernel.parameters[source.base][0] + source.offset
    values = launch.parameters[offset:offset + n * size].view(dtype(parts[-1]))
    puts = [launch.store(x) for x in items(destination)]

    def run(mask, full):
        for put, value in zip(puts, values, strict=True):
            put(np.broadcast_to(value, launch.n), mask, full)
    return run


@entry(f"ld.{{global,global.nc,shared,local}}{{,.v2,.v4,.v8}}.{MEMORY_TYPES}")
def _(launch, instruction, parts):
    size, n = shape(parts)
    destination, source = instruction.operands
    puts, address, result = [launch.store(x) for x in items(destination)], launch.address(source), dtype(parts[-1])

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
    destination, source = instruction.operands
    values, address = [launch.value(x, parts[-1]) for x in items(source)], launch.address(destination)

    def run(mask, full):
        if mask.any():
            raw = np.stack([v()[mask] for v in values], 1)
            launch.save(parts[1], address(), mask, size * len(values), raw.view(np.uint8).reshape(len(raw), -1), instruction.text)
    return run


@entry("prefetch.global.L2")
def _(launch, instruction, parts):
    return lambda mask, full: None


# --- control flow

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
    return lambda mask, full: None  # arguments of calls, which are not executed


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
    put, put_is_inside = launch.store(operands[0]), launch.store(operands[1]) if len(operands) == 6 else None
    a, b, c = (launch.value(x, "b32") for x in operands[-4:-1])
    lane, first_thread = np.arange(launch.n) % 32, np.arange(launch.n) // 32 * 32

    def run(mask, full):
        segment, clamp = (c() >> np.uint32(8) & np.uint32(31)).astype(int), (c() & np.uint32(31)).astype(int)
        shift = (b() & np.uint32(31)).astype(int)
        first, last = lane & segment, lane & segment | clamp & ~segment
        source, compare_lane, limit = SHUFFLES[parts[2]](lane, shift & ~segment if parts[2] == "idx" else shift, first, last)
        is_inside = compare_lane(source, limit)
        source = np.where(is_inside, source, lane)
        if not mask[first_thread + source][mask].all():
            raise Fault(f"{launch.kernel.name}: {instruction.text}: reads an inactive lane")
        put(a()[first_thread + source], mask, full)
        if put_is_inside:
            put_is_inside(is_inside, mask, full)
    return run


def reduce_warps(launch, instruction, function, put, value):
    """Reduce the lanes of a full warp to one value; partial masks are not supported."""
    members = launch.value(instruction.operands[2], "u32")

    def run(mask, full):
        if (members()[mask] != ALL_LANES).any():
            raise NotImplementedError(f"partial warp: {instruction.text}")
        put(np.repeat(function(value().reshape(-1, 32)), 32), mask, full)
    return run


@entry("redux.sync.{add,min,max}.{s32,u32}")
def _(launch, instruction, parts):
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[parts[2]]
    destination, source, _ = instruction.operands
    return reduce_warps(launch, instruction, lambda x: function.reduce(x, axis=1, dtype=x.dtype), launch.store(destination), launch.value(source, parts[3]))


@entry("vote.sync.{any,all}.pred")
def _(launch, instruction, parts):
    destination, source, _ = instruction.operands
    return reduce_warps(launch, instruction, lambda x: getattr(x, parts[2])(axis=1), launch.store(destination), launch.value(source, "pred"))


# --- tensor cores

@entry("ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{,.shared}.b16")
def _(launch, instruction, parts):
    n = int(next(p for p in parts if re.fullmatch(r"x[124]", p))[1:])
    puts, address = [launch.store(x) for x in items(instruction.operands[0])], launch.address(instruction.operands[1])
    generic, has_row_address = "shared" not in parts, np.arange(launch.n) % 32 < 8 * n

    def run(mask, full):
        rows = np.zeros((launch.n, 2), np.uint64)
        loads_row = mask & has_row_address
        rows[loads_row] = launch.load("shared", address() - (SHARED if generic else 0), loads_row, 16, False, instruction.text)
        warps = rows.view(np.uint32).reshape(-1, 32, 4)  # each row has four words of two halves
        for j, put in enumerate(puts):
            put(warps[:, 8 * j:8 * j + 8].reshape(-1), mask, full)
    return run


@entry("mma.sync.aligned.{m16n8k32,m16n8k16,m8n8k16}.row.col.s32.s8.s8.s32")
def _(launch, instruction, parts):
    m, n, k = map(int, re.match(r"m(\d+)n(\d+)k(\d+)", parts[3]).groups())
    puts = [launch.store(x) for x in items(instruction.operands[0])]
    a, b, c = ([launch.value(x, "b32") for x in items(operand)] for operand in instruction.operands[1:])
    lane, byte = np.arange(32)[:, None], np.arange(4)
    # each register of a lane holds four bytes of a row of A, or one number of C
    a_places = [(lane // 4 + 8 * (r % (m // 8)), 4 * (lane % 4) + 16 * (r // (m // 8)) + byte) for r in range(len(a))]
    b_places = [(4 * (lane % 4) + 16 * r + byte, lane // 4) for r in range(len(b))]
    c_places = [(lane[:, 0] // 4 + 8 * (r // 2), 2 * (lane[:, 0] % 4) + r % 2) for r in range(len(c))]

    def matrix(registers, places, rows, columns):
        out = np.zeros((launch.n // 32, rows, columns), np.float32)  # holds sums of k products of bytes exactly
        for (row, column), value in zip(places, registers, strict=True):
            out[:, row, column] = np.ascontiguousarray(value()).view(np.int8).reshape(-1, 32, 4)
        return out

    def run(mask, full):
        products = np.matmul(matrix(a, a_places, m, k), matrix(b, b_places, k, n)).astype(np.int32)
        results = [products[:, row, column].reshape(-1) + value().view(np.int32) for (row, column), value in zip(c_places, c, strict=True)]
        for put, result in zip(puts, results, strict=True):
            put(result, mask, full)
    return run
