#!/usr/bin/env python3
"""Flatten the Metal kernels of the ggml-ext types into one file for the patched llama.cpp.

    metal_library.py TREE    print the file for the unpatched llama.cpp in TREE

Metal compiles the text at run time, without files. So this expands the includes of metal/library.metal: this project's files, and from
upstream's kernels/mul_mm.metal two templates without their instances. instances.metal is repeated for each weight type, and codes.metal
stands for the tables of the trellis codes. Upstream's build provides the one remaining include, common.h.
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

from pinned import Failure, run_script

ROOT = Path(__file__).resolve().parents[2]
METAL = ROOT / "metal"
KERNELS = Path("ggml/src/ggml-metal/kernels")
LIBRARY = KERNELS / "ggml_ext.metal"
TYPES_HEADER = ROOT / "ggml_ext" / "ggml-ext-types.h"
CODES_HEADER = ROOT / "ggml_ext" / "types" / "codes.h"
INCLUDE = re.compile(r'^#include "(.+)"$')
# parts of mul_mm.metal: starts of the first line and of the line after the last
MUL_MM = [("constant bool FC_mul_mm_bc_inp", "template<short ne20>"),
          ("template<typename S0, typename S0_4x4, typename S0_8x8, typename S1,", "typedef decltype(kernel_mul_mm<")]


def weight_types() -> list[str]:
    return re.findall(r"^    X\(\w+, (\w+)\)", TYPES_HEADER.read_text(), re.M)


def trellis_codes(bits: int, values: list[list[int]]) -> list[int]:
    """Return the codes of all 4096 states (ggml_ext/types/trellis.h), indexed as metal/trellis.metal does.

    The codes of a second weight are in upper bytes.
    """
    codes = []
    for i in range(4096):
        pairs = [i >> shift & 15 for shift in range(12 - 4 if bits == 2 else 4, -1, -2)]  # pair(t), pair(t-1) ...
        if bits == 4:
            i0, i1 = (i >> 8) ^ (i & 15), i >> 4 & 15
        elif bits == 3:
            i0, i1 = pairs[0] ^ pairs[1] ^ pairs[2], pairs[0] ^ i >> 8
        else:
            i0, i1 = pairs[0] ^ pairs[4], pairs[2] if len(values) == 2 else pairs[0] ^ pairs[2] ^ pairs[4]
        second = values[2][pairs[0] ^ pairs[2]] + values[3][i1] if len(values) == 4 else 0
        codes.append(values[0][i0] + values[1][i1] + 256 * second)
    return codes


def code_tables() -> list[str]:
    """Return the lines of a table for each trellis code."""
    header, lines = CODES_HEADER.read_text(), []
    bits = {code: int(k) for k, code in re.findall(r"^    X\(\w+, +\w+, +(\d+), +\d+, +\d+, +(\w+),", header, re.M)}
    for code, tables in re.findall(r"^#define GGML_EXT_TRELLIS_TABLES_(\w+) \{\{\{(.*)\}\}\}$", header, re.M):
        values = [list(map(int, table.split(", "))) for table in tables.split("}, {")]
        codes = ",".join(map(str, trellis_codes(bits[code], values)))
        lines.append(f"constant {'uint8_t' if len(values) == 2 else 'ushort'} ggml_ext_{code}_codes[4096] = {{{codes}}};")
    return lines


def mul_mm(tree: Path) -> list[str]:
    """Return the lines of upstream's two templates. Failure if they are not as in the pinned tree."""
    path = tree / KERNELS / "mul_mm.metal"
    lines, parts = path.read_text().splitlines(), []
    for first, after in MUL_MM:
        starts, ends = ([i for i, line in enumerate(lines) if line.startswith(prefix)] for prefix in (first, after))
        if not (len(starts) == 1 and ends and starts[0] < ends[0]):
            raise Failure(f"{path}: needs one line that begins with {first!r} and, after it, one with {after!r}, as in the pinned "
                          "llama.cpp; correct MUL_MM in scripts/build/metal_library.py")
        parts += lines[starts[0] : ends[0]]
    return parts


def flatten(path: Path, tree: Path | None) -> list[str]:
    """Return a file's lines with its includes expanded."""
    if path.name == "mul_mm.metal":
        return mul_mm(tree) if tree else []
    if path.name == "codes.metal":
        return code_tables()
    lines = path.read_text().splitlines()
    if path.name == "instances.metal":
        return [line.replace("NAME", name) for name in weight_types() for line in lines if line.startswith("template")]
    out = []
    for line in lines:
        include = INCLUDE.match(line)
        if include and include[1] != "common.h":
            out += flatten(path.parent / include[1], tree)
        elif line != "#pragma once":
            out.append(line)
    return out


def library(tree: Path | None) -> str:
    """Return the flattened file for a tree of llama.cpp; with None without upstream's two templates."""
    return "\n".join(flatten(METAL / "library.metal", tree)) + "\n"


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    return run_script(lambda: print(library(Path(sys.argv[1])), end=""))


if __name__ == "__main__":
    sys.exit(main())
