"""The table of instructions, one entry per opcode with all its modifiers. Any other opcode raises.

An entry is a compiler: from a launch and an instruction it makes a function (mask of threads, whether the mask is full). Values are arrays
over all threads of the launch; those outside the mask are not stored. arithmetic.py and effects.py fill the table.
"""

from __future__ import annotations

import itertools
import re

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
KINDS = {"u": UNSIGNED, "b": UNSIGNED, "s": SIGNED, "f": FLOAT}
ALL_LANES = 0xFFFFFFFF

TABLE: dict = {}


def dtype(type_name: str):
    return np.bool_ if type_name == "pred" else KINDS[type_name[0]][int(type_name[1:])]


def expand(pattern: str) -> list[str]:
    """Expand "add.{s32,u32}" to both opcodes."""
    parts = re.split(r"\{(.*?)\}", pattern)
    return ["".join(p) for p in itertools.product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts)))]


def entry(pattern: str):
    """Register a function (launch, instruction, parts of the opcode) for all opcodes of a pattern."""
    def register(compiler):
        for opcode in expand(pattern):
            assert opcode not in TABLE, opcode
            TABLE[opcode] = compiler
        return compiler
    return register


def compile_instruction(launch, instruction):
    compiler = TABLE.get(instruction.opcode)
    if compiler is None:
        raise NotImplementedError(f"{launch.kernel.name}: no instruction {instruction.opcode}: {instruction.text}")
    return compiler(launch, instruction, instruction.opcode.split("."))
