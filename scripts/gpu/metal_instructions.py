#!/usr/bin/env python3
"""Instructions a weight of Metal's mul_mv with one column, run as host code: what can be said of its speed without a Mac.

    metal_instructions.py [--build build/package]

Compiles upstream's kernels and ours as the tests do (tests/metal_host/), with -O3 and without vectors, and counts with valgrind's
cachegrind: the difference between rows of 4096 and of 2048 weights. Look-ups count as one instruction, whatever they cost on a GPU.
"""
from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ggml_ext import WEIGHT_TYPES
from ggml_ext._base.errors import UserError
from ggml_ext._console.cli import run_script

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "tests" / "metal_host"
# scalar, but for conversions of halves and fused multiply-adds, which a GPU has as instructions too
FLAGS = ["-std=c++17", "-O3", "-mf16c", "-mfma", "-ffp-contract=fast", "-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-w"]
# ggml-metal-impl.h: rows a simdgroup, simdgroups, bytes of threadgroup memory; weights and bytes of a block
STOCK = {"q3_K": (2, 2, 0, 256, 110), "q4_K": (2, 2, 0, 256, 144), "q5_K": (1, 2, 0, 256, 176),
         "iq2_xxs": (4, 2, 2176, 256, 66), "iq3_s": (4, 2, 2048, 256, 110)}


def constants() -> dict[str, int]:
    """The numbers that metal/args.h defines, products of them among these."""
    found = re.findall(r"#define (\w+) +\(?(\d+(?:\*\d+)*)", (ROOT / "metal" / "args.h").read_text())
    return {name: math.prod(int(factor) for factor in value.split("*")) for name, value in found}


def shapes() -> dict[str, tuple[int, ...]]:
    c, found = constants(), {}
    for name, info in WEIGHT_TYPES.items():
        has_table = "has_table = 1" in (ROOT / "metal" / f"{name}.metal").read_text()
        end = "_TABLE" if has_table else ""
        found[name] = (c["GGML_EXT_METAL_NR0"], c[f"GGML_EXT_METAL_NSG{end}"], c["GGML_EXT_METAL_TABLE_BYTES"] if has_table else 0,
                       info.block_size, info.block_bytes)
    return found | STOCK


def compile_kernels(tree: Path, folder: Path) -> Path:
    metal, objects = tree / "ggml" / "src" / "ggml-metal", []
    includes = [f"-I{p}" for p in (HOST, folder, ROOT, ROOT / "ggml_ext", ROOT / "ggml_ext" / "hooks", metal, tree / "ggml/include", tree / "ggml/src")]
    units = [HOST / "runtime.cpp", HOST / "count.cpp"]
    for kind, only in ("mul_mv", f"kernel_mul_mv_({'|'.join(STOCK)})_f32"), ("ggml_ext", r"kernel_mul_mv_\w+_f32"):
        subprocess.run([sys.executable, HOST / "translate.py", metal / "kernels" / f"{kind}.metal", folder / f"{kind}.h", "--only", only],
                       check=True)
        units.append(folder / f"{kind}.cpp")
        units[-1].write_text(f"#include <metal_stdlib>\nnamespace {{\n#include \"{kind}.h\"\n}}\n")
    for unit in units:
        objects.append(folder / f"{unit.stem}.o")
        subprocess.run(["g++", *FLAGS, *includes, "-c", unit, "-o", objects[-1]], check=True)
    subprocess.run(["g++", *objects, "-o", folder / "count"], check=True)
    return folder / "count"


def count(program: Path, kernel: str, n: int, shape: tuple[int, ...]) -> int:
    done = subprocess.run(["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", program, kernel, str(n),
                           *map(str, shape)], capture_output=True, text=True, check=True)
    return int(re.search(r"refs:\s+([\d,]+)", done.stderr)[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "package", help="a build folder with the patched llama.cpp")
    args = parser.parse_args()
    tree = args.build / "llama.cpp"
    if not (tree / "ggml" / "src" / "ggml-metal").is_dir():
        raise UserError(f"--build {args.build}: no patched llama.cpp there; run make install, or name another build folder")
    if not shutil.which("valgrind"):
        raise UserError("valgrind is missing: install it (Debian's package has that name)")
    with tempfile.TemporaryDirectory() as folder:
        program = compile_kernels(tree.resolve(), Path(folder))
        print("| type | instructions a weight |\n| --- | --- |")
        for name, shape in shapes().items():
            few, many = (count(program, f"kernel_mul_mv_{name}_f32", n, shape) for n in (2048, 4096))
            print(f"| {name.upper()} | {(many - few) / (shape[0] * shape[1] * 2048):.1f} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
