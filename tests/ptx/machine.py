"""One launch of a kernel: every register is an array over all threads of the launch, each thread has its own place in the code.

The threads at the least place run until a branch or a synchronisation, so that ways that part meet again by themselves. At a barrier
threads wait for their block, at an instruction of a warp for the lanes that its mask names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from . import arithmetic, effects, table  # noqa: F401 the first two fill the third
from .memory import LOCAL, Fault, GlobalMemory, SharedMemory
from .parser import Address, Instruction, Kernel, Variable, load

OF_BLOCK = ("bar.sync",)
OF_WARP = ("shfl.", "redux.", "vote.", "bar.warp.", "ldmatrix.", "mma.")
NOWHERE = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Grid:
    """What a launch asks for. shared: bytes beside those the kernel declares. programmatic: it may begin before the one ahead of it
    has ended. approximation: instructions that may be off in the last bit are, at random. seed: of that, and of unwritten memory."""
    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int = 0
    programmatic: bool = False
    approximation: bool = False
    seed: int = 0


def placed(variables: dict[str, Variable], space: str) -> tuple[dict[str, int], int]:
    """Offsets of the variables of that space, those without a size last, and the bytes of all."""
    out, at = {}, 0
    for name, v in sorted(variables.items(), key=lambda item: item[1].size == 0):
        if v.space == space:
            align = v.align if v.size else max(v.align, 16)
            at = (at + align - 1) // align * align
            out[name] = at
            at += v.size
    return out, at


class Launch:
    """problems: what is wrong although the result may be right, and the first instruction of it. executed: opcodes, in warps."""

    def __init__(self, kernel: Kernel, memory: GlobalMemory, grid: Grid, parameters: bytes, symbols: dict[str, int]):
        self.kernel, self.memory, self.grid = load(kernel), memory, grid
        self.problems: dict[str, str] = {}
        self.executed = Counter()
        self.block_size, n_blocks = int(np.prod(grid.threads)), int(np.prod(grid.blocks))
        if self.block_size % 32:
            raise NotImplementedError(f"{kernel.name}: blocks of {self.block_size} threads, which is no multiple of 32")
        self.n = n_blocks * self.block_size
        self.block = np.arange(self.n) // self.block_size
        self.parameters = np.frombuffer(parameters, np.uint8)
        self.symbols = {**symbols, **self.place_variables()}
        self.shared = SharedMemory(self.shared_size, n_blocks, self.n, grid.seed)
        self.local = np.zeros((self.n, max(self.local_size, 8)), np.uint8)
        self.register = {name: np.zeros(self.n, bool if t == "pred" else table.UNSIGNED[int(t[1:])]) for name, t in kernel.registers.items()}
        self.special = self.special_registers()
        self.constants: dict = {}
        self.random = np.random.default_rng(grid.seed)
        self.pc, self.done = np.zeros(self.n, np.int32), np.zeros(self.n, bool)
        self.waited = np.full(self.n, not grid.programmatic)
        self.cut_code()

    def place_variables(self) -> dict[str, int]:
        """Offsets of the variables in shared and in local memory; what the launch adds to shared memory comes last."""
        shared, declared = placed({**self.kernel.module.variables, **self.kernel.variables}, "shared")
        local, self.local_size = placed(self.kernel.variables, "local")
        self.shared_size = declared + self.grid.shared
        return {**shared, **local}

    def special_registers(self) -> dict[str, np.ndarray]:
        thread, block, out = np.arange(self.n) % self.block_size, self.block, {}
        for i, c in enumerate("xyz"):
            out[f"%tid.{c}"] = thread // int(np.prod(self.grid.threads[:i])) % self.grid.threads[i]
            out[f"%ctaid.{c}"] = block // int(np.prod(self.grid.blocks[:i])) % self.grid.blocks[i]
            out[f"%ntid.{c}"] = np.full(self.n, self.grid.threads[i])
            out[f"%nctaid.{c}"] = np.full(self.n, self.grid.blocks[i])
        out["%laneid"] = np.arange(self.n) % 32
        return {name: value.astype(np.uint32) for name, value in out.items()}

    # --- code: a label, what follows a branch, and every synchronisation begin a segment

    def cut_code(self) -> None:
        self.segments: list[list[Instruction]] = [[]]
        self.labels: dict[str, int] = {}
        for item in self.kernel.code:
            if isinstance(item, str):
                self.begin_segment()
                self.labels[item] = len(self.segments) - 1
                continue
            if item.opcode.startswith(OF_BLOCK + OF_WARP):
                self.begin_segment()
            self.segments[-1].append(item)
            if item.opcode.startswith(OF_BLOCK + OF_WARP) or item.opcode.split(".")[0] in ("bra", "ret", "exit"):
                self.begin_segment()
        self.made: list = [None] * len(self.segments)

    def begin_segment(self) -> None:
        if self.segments[-1]:
            self.segments.append([])

    def run(self, max_steps: int = 10_000_000) -> Launch:
        self.memory.begin_launch()
        with np.errstate(all="ignore"):
            waiting = np.zeros(self.n, bool)
            for _ in range(max_steps):
                if self.done.all():
                    return self
                here = np.where(self.done | waiting, NOWHERE, self.pc)
                at = int(here.min())
                if at == NOWHERE:
                    places = sorted({self.segments[p][0].text for p in self.pc[~self.done]})
                    raise Fault(f"{self.kernel.name}: deadlock at {' and '.join(places)}")
                mask = here == at
                if not self.segments[at]:  # behind the last instruction
                    self.done |= mask
                    continue
                ready = self.ready(self.segments[at][0], mask)
                waiting |= mask & ~ready
                if ready.any():
                    waiting[:] = False
                    self.step(at, ready)
        raise Fault(f"{self.kernel.name}: not at an end after {max_steps} steps")

    def ready(self, first: Instruction, mask: np.ndarray) -> np.ndarray:
        """Which of the threads may do that instruction now."""
        if first.opcode.startswith(OF_BLOCK):
            return mask & (mask | self.done).reshape(-1, self.block_size).all(1)[self.block]
        if not first.opcode.startswith(OF_WARP):
            return mask
        named = self.lanes_named(first)
        bits = lambda flags: np.packbits(flags.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).repeat(32)  # noqa: E731
        if (named & bits(self.done))[mask].any():
            raise Fault(f"{self.kernel.name}: {first.text}: lanes that the mask names have left")
        return mask & (named & ~bits(mask) == 0)

    def lanes_named(self, instruction: Instruction) -> np.ndarray:
        if instruction.opcode.startswith(("ldmatrix.", "mma.")):
            return np.full(self.n, table.ALL_LANES, np.uint32)
        return self.value(instruction.operands[-1], "u32")()

    def step(self, at: int, mask: np.ndarray) -> None:
        if self.made[at] is None:
            self.made[at] = [(table.made(self, instruction), instruction) for instruction in self.segments[at]]
        full, n_warps = bool(mask.all()), int(mask.reshape(-1, 32).any(1).sum())
        self.pc[mask] = at + 1
        for run, instruction in self.made[at]:
            self.executed[instruction.opcode] += n_warps
            if instruction.guard is None:
                run(mask, full)
            else:
                name, negated = instruction.guard
                run(mask & (self.register[name] ^ negated), False)

    # --- operands

    def value(self, operand: str, type_name: str):
        """A function that gives the operand's values, an array over all threads; of a register that is wider, its low part."""
        wanted = table.dtype(type_name)
        if operand.startswith("!"):
            inner = self.value(operand[1:], type_name)
            return lambda: ~inner()
        if operand in self.register:
            register = self.register[operand]
            size, room = np.dtype(wanted).itemsize, register.dtype.itemsize
            if wanted is np.bool_ or size == room:
                view = register.view(wanted)
                return lambda: view
            if room < size:
                raise NotImplementedError(f"{operand} as {type_name}")
            return lambda: register.astype(table.UNSIGNED[8 * size]).view(wanted)
        array = self.constant(operand, type_name, wanted)
        return lambda: array

    def constant(self, operand: str, type_name: str, wanted) -> np.ndarray:
        if (operand, type_name) not in self.constants:
            if operand in self.special:
                found = self.special[operand].astype(table.UNSIGNED[8 * np.dtype(wanted).itemsize]).view(wanted)
            else:
                found = np.full(self.n, self.number(operand, wanted))
            self.constants[operand, type_name] = found
        return self.constants[operand, type_name]

    def number(self, operand: str, wanted):
        if operand.startswith(("0f", "0F")):
            return np.array(int(operand[2:], 16), np.uint32).view(np.float32).astype(wanted)
        if operand.startswith(("0d", "0D")):
            return np.array(int(operand[2:], 16), np.uint64).view(np.float64).astype(wanted)
        number = self.symbols[operand] if operand in self.symbols else 32 if operand == "WARP_SZ" else int(operand.rstrip("U"), 0)
        if wanted is np.bool_:
            return np.bool_(number)
        bits = 8 * np.dtype(wanted).itemsize
        return np.array(number & (1 << bits) - 1, table.UNSIGNED[bits]).view(wanted)

    def store(self, operand: str):
        """A function of (values, mask, full) that keeps them; narrower ones are widened by their sign."""
        if operand == "_":
            return lambda values, mask, full: None
        register = self.register[operand]
        size = register.dtype.itemsize

        def put(values, mask, full):
            if values.dtype.itemsize != size:
                values = values.astype((table.SIGNED if values.dtype.kind == "i" else table.UNSIGNED)[8 * size])
            np.copyto(register, values if register.dtype == np.bool_ else np.ascontiguousarray(values).view(register.dtype), where=True if full else mask)
        return put

    def address(self, operand: Address):
        if operand.base in self.register:
            register = self.register[operand.base]
            return lambda: register.astype(np.int64) + operand.offset
        fixed = np.full(self.n, self.symbols[operand.base] + operand.offset, np.int64)
        return lambda: fixed

    def off_by_one(self, x: np.ndarray) -> np.ndarray:
        if not self.grid.approximation:
            return x
        step = self.random.integers(-1, 2, len(x), dtype=np.int32) * (np.isfinite(x) & (x != 0))
        return (x.view(np.int32) + step.astype(np.int32)).view(np.float32)

    # --- memory

    def fault(self, what: str, text: str, bad: np.ndarray, address: np.ndarray) -> None:
        i = int(np.flatnonzero(bad)[0])
        where = ", ".join(f"{name} {int(self.special[f'%{name}'][i])}" for name in ("tid.x", "tid.y", "ctaid.x", "ctaid.y"))
        raise Fault(f"{self.kernel.name}: {what}: {text} at {int(address[i]):#x}, {where}")

    def locate(self, space: str, address: np.ndarray, mask: np.ndarray, size: int, text: str) -> np.ndarray:
        """Indices into that memory of the threads of the mask."""
        if (bad := mask & (address % size != 0)).any():
            self.fault(f"misaligned for {size} bytes", text, bad, address)
        if space == "shared":
            if (bad := mask & ((address < 0) | (address + size > self.shared_size))).any():
                self.fault("outside of shared memory", text, bad, address)
            return (address + self.block * self.shared.size)[mask]
        if (mask & ~self.waited).any():
            self.problems.setdefault("global memory before griddepcontrol.wait", text)
        at, bad = self.memory.locate(address, size)
        if (bad := mask & bad).any():
            self.fault("outside of all buffers", text, bad, address)
        return at[mask]

    def local_span(self, address: np.ndarray, mask: np.ndarray, size: int, text: str) -> tuple[np.ndarray, np.ndarray]:
        at = np.where(address >= LOCAL, address - LOCAL, address)
        if (bad := mask & ((at < 0) | (at + size > self.local_size) | (at % size != 0))).any():
            self.fault("outside of local memory, or misaligned", text, bad, address)
        return np.flatnonzero(mask)[:, None], at[mask][:, None] + np.arange(size)

    def load(self, space: str, address: np.ndarray, mask: np.ndarray, size: int, no_coherence: bool, text: str) -> np.ndarray:
        if space == "local":
            return self.local[self.local_span(address, mask, size, text)]
        at, threads = self.locate(space, address, mask, size, text), np.flatnonzero(mask)
        if space == "shared":
            return self.shared.load(at, size, threads, self.problems, text)
        return self.memory.load(at, size, threads, self.block_size, no_coherence, self.problems, text)

    def save(self, space: str, address: np.ndarray, mask: np.ndarray, size: int, raw: np.ndarray, text: str) -> None:
        if space == "local":
            self.local[self.local_span(address, mask, size, text)] = raw
            return
        at, threads = self.locate(space, address, mask, size, text), np.flatnonzero(mask)
        memory = self.shared if space == "shared" else self.memory
        memory.store(at, size, threads, raw, self.problems, text)
