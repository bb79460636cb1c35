"""Execute one launch: a register is an array over all threads, and each thread has its own program counter.

The threads with the lowest program counter run until a branch or a synchronization, so that divergent paths reconverge. At a barrier threads
wait for their block; at a warp instruction they wait for the lanes in its mask.
    """

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from . import arithmetic, effects, table  # noqa: F401 the first two register their instructions in the table
from .memory import LOCAL, Fault, GlobalMemory, SharedMemory
from .parser import Address, Instruction, Kernel, Variable, load

BLOCK_INSTRUCTIONS = ("bar.sync",)
WARP_INSTRUCTIONS = ("shfl.", "redux.", "vote.", "bar.warp.", "ldmatrix.", "mma.")
NOWHERE = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Grid:
    """The configuration of a launch.

    shared: bytes of dynamic shared memory.
    programmatic: the launch may start before the previous one ends.
    approximation: approximate instructions err in the last bit, at random.
    seed: of those errors and of uninitialized memory.
    """
    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int = 0
    programmatic: bool = False
    approximation: bool = False
    seed: int = 0


def assign_offsets(variables: dict[str, Variable], space: str) -> tuple[dict[str, int], int]:
    """Assign offsets to the variables of a space, unsized ones last; return the offsets and the total size."""
    out, index = {}, 0
    for name, v in sorted(variables.items(), key=lambda item: item[1].size == 0):
        if v.space == space:
            align = v.align if v.size else max(v.align, 16)
            index = (index + align - 1) // align * align
            out[name] = index
            index += v.size
    return out, index


class Launch:
    """A launch in progress.

    problems: defects that may still give the right result, with the first instruction that caused each.
    executed: warp instructions by opcode.
    """

    def __init__(self, kernel: Kernel, memory: GlobalMemory, grid: Grid, parameters: bytes, symbols: dict[str, int]):
        self.kernel, self.memory, self.grid = load(kernel), memory, grid
        self.problems: dict[str, str] = {}
        self.executed = Counter()
        self.block_size, n_blocks = int(np.prod(grid.threads)), int(np.prod(grid.blocks))
        if self.block_size % 32:
            raise NotImplementedError(f"{kernel.name}: {self.block_size} threads per block is not a multiple of 32")
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
        """Assign offsets in shared and local memory; dynamic shared memory comes last."""
        shared, declared = assign_offsets({**self.kernel.module.variables, **self.kernel.variables}, "shared")
        local, self.local_size = assign_offsets(self.kernel.variables, "local")
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

    # --- code: labels, branches and synchronizations separate segments

    def cut_code(self) -> None:
        self.segments: list[list[Instruction]] = [[]]
        self.labels: dict[str, int] = {}
        for item in self.kernel.code:
            if isinstance(item, str):
                self.begin_segment()
                self.labels[item] = len(self.segments) - 1
                continue
            if item.opcode.startswith(BLOCK_INSTRUCTIONS + WARP_INSTRUCTIONS):
                self.begin_segment()
            self.segments[-1].append(item)
            if item.opcode.startswith(BLOCK_INSTRUCTIONS + WARP_INSTRUCTIONS) or item.opcode.split(".")[0] in ("bra", "ret", "exit"):
                self.begin_segment()
        self.compiled: list = [None] * len(self.segments)

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
                counters = np.where(self.done | waiting, NOWHERE, self.pc)
                index = int(counters.min())
                if index == NOWHERE:
                    positions = sorted({self.segments[p][0].text for p in self.pc[~self.done]})
                    raise Fault(f"{self.kernel.name}: deadlock at {' and '.join(positions)}")
                mask = counters == index
                if not self.segments[index]:  # after the last instruction
                    self.done |= mask
                    continue
                ready = self.select_ready(self.segments[index][0], mask)
                waiting |= mask & ~ready
                if ready.any():
                    waiting[:] = False
                    self.step(index, ready)
        raise Fault(f"{self.kernel.name}: did not end after {max_steps} steps")

    def select_ready(self, first: Instruction, mask: np.ndarray) -> np.ndarray:
        """Return the threads that can execute this instruction now."""
        if first.opcode.startswith(BLOCK_INSTRUCTIONS):
            return mask & (mask | self.done).reshape(-1, self.block_size).all(1)[self.block]
        if not first.opcode.startswith(WARP_INSTRUCTIONS):
            return mask
        mask_lanes = self.lanes_in_mask(first)
        bits = lambda flags: np.packbits(flags.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).repeat(32)  # noqa: E731
        if (mask_lanes & bits(self.done))[mask].any():
            raise Fault(f"{self.kernel.name}: {first.text}: lanes in the mask have exited")
        return mask & (mask_lanes & ~bits(mask) == 0)

    def lanes_in_mask(self, instruction: Instruction) -> np.ndarray:
        if instruction.opcode.startswith(("ldmatrix.", "mma.")):
            return np.full(self.n, table.ALL_LANES, np.uint32)
        return self.value(instruction.operands[-1], "u32")()

    def step(self, index: int, mask: np.ndarray) -> None:
        if self.compiled[index] is None:
            self.compiled[index] = [(table.compile_instruction(self, instruction), instruction) for instruction in self.segments[index]]
        full, n_warps = bool(mask.all()), int(mask.reshape(-1, 32).any(1).sum())
        self.pc[mask] = index + 1
        for run, instruction in self.compiled[index]:
            self.executed[instruction.opcode] += n_warps
            if instruction.guard is None:
                run(mask, full)
            else:
                name, negated = instruction.guard
                run(mask & (self.register[name] ^ negated), False)

    # --- operands

    def value(self, operand: str, type_name: str):
        """Return a function that reads an operand as an array over all threads; wider registers give their low part."""
        result_type = table.dtype(type_name)
        if operand.startswith("!"):
            inner = self.value(operand[1:], type_name)
            return lambda: ~inner()
        if operand in self.register:
            register = self.register[operand]
            size, width = np.dtype(result_type).itemsize, register.dtype.itemsize
            if result_type is np.bool_ or size == width:
                view = register.view(result_type)
                return lambda: view
            if width < size:
                raise NotImplementedError(f"{operand} as {type_name}")
            return lambda: register.astype(table.UNSIGNED[8 * size]).view(result_type)
        array = self.constant(operand, type_name, result_type)
        return lambda: array

    def constant(self, operand: str, type_name: str, result_type) -> np.ndarray:
        if (operand, type_name) not in self.constants:
            if operand in self.special:
                array = self.special[operand].astype(table.UNSIGNED[8 * np.dtype(result_type).itemsize]).view(result_type)
            else:
                array = np.full(self.n, self.number(operand, result_type))
            self.constants[operand, type_name] = array
        return self.constants[operand, type_name]

    def number(self, operand: str, result_type):
        if operand.startswith(("0f", "0F")):
            return np.array(int(operand[2:], 16), np.uint32).view(np.float32).astype(result_type)
        if operand.startswith(("0d", "0D")):
            return np.array(int(operand[2:], 16), np.uint64).view(np.float64).astype(result_type)
        number = self.symbols[operand] if operand in self.symbols else 32 if operand == "WARP_SZ" else int(operand.rstrip("U"), 0)
        if result_type is np.bool_:
            return np.bool_(number)
        bits = 8 * np.dtype(result_type).itemsize
        return np.array(number & (1 << bits) - 1, table.UNSIGNED[bits]).view(result_type)

    def store(self, operand: str):
        """Return a function (values, mask, full) that writes an operand; narrower values are extended."""
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

    def fault(self, problem: str, text: str, bad: np.ndarray, address: np.ndarray) -> None:
        i = int(np.flatnonzero(bad)[0])
        place = ", ".join(f"{name} {int(self.special[f'%{name}'][i])}" for name in ("tid.x", "tid.y", "ctaid.x", "ctaid.y"))
        raise Fault(f"{self.kernel.name}: {problem}: {text} at {int(address[i]):#x}, {place}")

    def locate(self, space: str, address: np.ndarray, mask: np.ndarray, size: int, text: str) -> np.ndarray:
        """Check an access and return the indices of the active threads in that memory."""
        if (bad := mask & (address % size != 0)).any():
            self.fault(f"misaligned for {size} bytes", text, bad, address)
        if space == "shared":
            if (bad := mask & ((address < 0) | (address + size > self.shared_size))).any():
                self.fault("outside of shared memory", text, bad, address)
            return (address + self.block * self.shared.size)[mask]
        if (mask & ~self.waited).any():
            self.problems.setdefault("global memory before griddepcontrol.wait", text)
        index, bad = self.memory.locate(address, size)
        if (bad := mask & bad).any():
            self.fault("outside of all buffers", text, bad, address)
        return index[mask]

    def local_span(self, address: np.ndarray, mask: np.ndarray, size: int, text: str) -> tuple[np.ndarray, np.ndarray]:
        index = np.where(address >= LOCAL, address - LOCAL, address)
        if (bad := mask & ((index < 0) | (index + size > self.local_size) | (index % size != 0))).any():
            self.fault("outside of local memory, or misaligned", text, bad, address)
        return np.flatnonzero(mask)[:, None], index[mask][:, None] + np.arange(size)

    def load(self, space: str, address: np.ndarray, mask: np.ndarray, size: int, no_coherence: bool, text: str) -> np.ndarray:
        if space == "local":
            return self.local[self.local_span(address, mask, size, text)]
        index, threads = self.locate(space, address, mask, size, text), np.flatnonzero(mask)
        if space == "shared":
            return self.shared.load(index, size, threads, self.problems, text)
        return self.memory.load(index, size, threads, self.block_size, no_coherence, self.problems, text)

    def save(self, space: str, address: np.ndarray, mask: np.ndarray, size: int, raw: np.ndarray, text: str) -> None:
        if space == "local":
            self.local[self.local_span(address, mask, size, text)] = raw
            return
        index, threads = self.locate(space, address, mask, size, text), np.flatnonzero(mask)
        memory = self.shared if space == "shared" else self.memory
        memory.store(index, size, threads, raw, self.problems, text)
