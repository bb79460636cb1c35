#!/usr/bin/env python3
"""Instructions of MMVQ's inner loop for 32 weights, counted in the machine code: what can be said of CUDA without a GPU.

    cuda_instructions.py [--arch sm_90] [--build build/package]

In all and by the pipe that executes them: a type is as fast as its fullest pipe lets it be.

Compiles the patched mmvq.cu for these types and disassembles the kernels of each type for one column of activations and for four; of those
each thread takes two rows of weights, and what is given is of one row. Were blocks unpacked for each column anew, four would cost
four times one. Needs nvcc,
cuBLAS's headers, and cuobjdump with nvdisasm: in the toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm.
"""
from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build"))
import cuda_tools
from ggml_ext import WEIGHT_TYPES
from ggml_ext._console.cli import run_script

ROOT = Path(__file__).resolve().parents[2]
# ids of ggml.h, and IDP for 32 weights and a column, of one column and of four: eight, and more where sums of activations are taken by
# them, which two rows of four columns share. By them it is known how many weights a turn of the loop takes.
EIGHT, WITH_SUMS = {1: 8, 4: 8}, {1: 16, 4: 12}
STOCK = {"q2_K": (10, {1: 16, 4: 16}), "q3_K": (11, EIGHT), "q4_K": (12, WITH_SUMS), "q5_K": (13, WITH_SUMS), "iq2_xxs": (16, EIGHT),
         "iq3_xxs": (18, EIGHT), "iq3_s": (21, EIGHT)}
TYPES = {name: (int(info.id), WITH_SUMS if name == "ccq2" else EIGHT) for name, info in WEIGHT_TYPES.items()} | STOCK

ROWS_OF_COLUMNS = {1: 1, 4: 2}  # upstream's calc_rows_per_block()

# What executes an instruction; all others but jumps and the uniform ones, which have units of their own, take the ALU. That IMAD and
# IDP have the FMA pipe is NVIDIA's statement for sm_80 and later (forums.developer.nvidia.com/t/302018, post 7).
PIPES = {"ALU": (), "FMA": ("IMAD", "IMUL", "IDP", "FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"),
         "LSU": ("LDG", "LD", "LDC", "LDS", "STG", "STS", "LDL", "STL", "SHFL")}
NO_PIPE = ("BRA", "BAR", "EXIT", "BSSY", "BSYNC", "NOP", "WARPSYNC", "DEPBAR", "CS2R", "S2R", "YIELD", "I2F", "F2I", "F2F", "MUFU", "POPC")


def pipe(opcode: str) -> str | None:
    if opcode in NO_PIPE or (opcode.startswith("U") and opcode != "UNKNOWN") or opcode == "R2UR":
        return None
    return next((name for name, opcodes in PIPES.items() if opcode in opcodes), "ALU")


def tool(name: str) -> str:
    found = shutil.which(name)
    for folder in map(Path, sys.path):
        found = found or next(map(str, folder.glob(f"nvidia/*/bin/{name}")), None)
    if not found:
        sys.exit(f"error: {name} is missing: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


def inner_loop(function: str) -> list[str]:
    """The instructions of the longest loop of a disassembled function, without predicates."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", function)]
    jumps = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)) and int(to[1], 16) < at]
    if not jumps:
        return []
    first, last = max(jumps, key=lambda jump: jump[1] - jump[0])
    return [re.sub(r"^@\S+ ", "", text) for at, text in code if first <= at <= last]


def disassembled(arch: str, ggml: Path) -> dict[str, str]:
    """Machine code of MMVQ's kernels for the types of TYPES by their mangled names. ggml: that folder of the patched tree."""
    cuobjdump, path = tool("cuobjdump"), f"{Path(tool('nvdisasm')).parent}:{os.environ['PATH']}"
    upstream = ggml / "src" / "ggml-cuda" / "mmvq.cu"
    with tempfile.TemporaryDirectory() as tmp:
        source = Path(tmp, "mmvq.cu")
        source.write_text(cuda_tools.trimmed_mmvq(upstream.read_text(), {name: name in WEIGHT_TYPES for name in TYPES}, tuple(ROWS_OF_COLUMNS)))
        subprocess.run(cuda_tools.compile_command(ggml, arch, "-cubin", "-o", f"{tmp}/mmvq.cubin", source), check=True)
        code = subprocess.run([cuobjdump, "-sass", f"{tmp}/mmvq.cubin"], check=True, capture_output=True, text=True,
                              env={**os.environ, "PATH": path}).stdout
    return {f.split("\n")[0].strip(): f for f in re.split(r"\n\s+Function : ", code)[1:]}


def counts(functions: dict[str, str], name: str, n_columns: int) -> dict[str, int]:
    """Instructions for 32 weights of a row: "all", and by pipe."""
    type_id, idps = TYPES[name]
    kernel = re.compile(rf"_Z\d+mul_mat_vec_qIL9ggml_type{type_id}ELi{n_columns}ELb0ELb0ELb0")
    loop = [text.split()[0].split(".")[0] for text in inner_loop(next(f for key, f in functions.items() if kernel.match(key)))]
    n_rows = ROWS_OF_COLUMNS[n_columns]
    n_weights = 32 * loop.count("IDP") // (idps[n_columns] * n_columns * n_rows)
    pipes = Counter(pipe(opcode) for opcode in loop)
    return {key: n * 32 // (n_weights * n_rows) for key, n in (("all", len(loop)), *((key, pipes[key]) for key in PIPES))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "package")
    args = parser.parse_args()
    functions = disassembled(args.arch, args.build.resolve() / "llama.cpp" / "ggml")
    print(f"| type | instructions for 32 weights, {args.arch} | {' | '.join(PIPES)} | four columns | {' | '.join(PIPES)} |\n|{' --- |' * 9}")
    for name in TYPES:
        cells = [n for n_columns in ROWS_OF_COLUMNS for n in counts(functions, name, n_columns).values()]
        print(f"| {name} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    sys.exit(run_script(main))
