#!/usr/bin/env python3
"""Registers, spills and shared memory of the CUDA kernels of each type, as ptxas counts them: what a GPU is not needed for.

    cuda_registers.py [--arch sm_90] [--types itq3_t,q3_K] [--build build/package]

Compiles for each type the few kernels that decode, prompts and look-ups spend their time in: mul_mat_vec_q for 1 and 8 columns,
with a fused gate, with four rows a block (rows below 4096 weights) and for experts, mul_mat_q with tiles of 16 and 128 columns,
dequantisation to F16; and the quantisation of activations. Ten seconds of a processor a type. Needs nvcc and cuBLAS's headers.
Prints a table, rows as they come; "regs" is registers a thread, "spill" bytes stored and loaded, "shared" static bytes.
"""
from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build"))
import cuda_tools
from ggml_ext import WEIGHT_TYPES
from ggml_ext._console.cli import run_script

ROOT = Path(__file__).resolve().parents[2]
STOCK = ["q3_K", "q4_K", "q5_K", "iq2_xxs", "iq3_s"]
# title: kernel as upstream declares it; {type} is ggml.h's name
PRODUCTS = {
    "mul_mat_vec_q, 1 column": "mul_mat_vec_q<{type}, 1, false, false, false>",
    "mul_mat_vec_q, 1 column, short rows": "mul_mat_vec_q<{type}, 1, false, true, false>",
    "mul_mat_vec_q, 1 column, fused": "mul_mat_vec_q<{type}, 1, true, false, false>",
    "mul_mat_vec_q, 8 columns": "mul_mat_vec_q<{type}, 8, false, false, false>",
    "mul_mat_vec_q, experts": "mul_mat_vec_q_moe<{type}, 2, true>",
    "mul_mat_q, 16 columns": "mul_mat_q<{type}, 16, false>",
    "mul_mat_q, 128 columns": "mul_mat_q<{type}, 128, false>",
    "mul_mat_q, 128 columns, ragged": "mul_mat_q<{type}, 128, true>",
}
OURS = {"dequantize_rows to F16": "ggml_ext::dequantize_rows<block_{name}, half>"}
ACTIVATIONS = {
    "quantize_q8, plain": "ggml_ext::quantize_q8<256, false, 0>",
    "quantize_q8, rotated": "ggml_ext::quantize_q8<256, true, 0>",
    "quantize_q8, rotated, in pairs": "ggml_ext::quantize_q8<256, true, 4>",
    "quantize_q8, rotated, of 64": "ggml_ext::quantize_q8<64, true, 4>",
    "quantize_rotated_mmq": "ggml_ext::quantize_rotated_mmq<256, false, false>",
    "quantize_rotated_mmq, sums": "ggml_ext::quantize_rotated_mmq<256, true, false>",
    "quantize_rotated_mmq, of 64": "ggml_ext::quantize_rotated_mmq<64, false, false>",
    "quantize_rotated_mmq, scattered": "ggml_ext::quantize_rotated_mmq<256, false, true>",
    "quantize_rotated_mmq, scattered, of 64": "ggml_ext::quantize_rotated_mmq<64, false, true>",
}


def source(ggml: Path, kernels: list[str], with_products: bool) -> str:
    """A CUDA source with these kernels alone, in their order."""
    # the kernels of upstream's mmvq.cu without the switch over all types behind them
    mmvq = (ggml / "src/ggml-cuda/mmvq.cu").read_text()
    products = mmvq.partition("static void mul_mat_vec_q_switch_type")[0] if with_products else ""
    names = "".join(f"    (const void *) &{kernel},\n" for kernel in kernels)
    return (f'{products}\n#include "ggml-cuda/mmq.cuh"\n#include "cuda/dequantize.cuh"\n#include "cuda/quantize.cuh"\n'
            f"extern const void * const kernels[];\nconst void * const kernels[] = {{\n{names}}};\n")


def parsed(log: str) -> dict[str, tuple[int, int, int, int]]:
    """What ptxas -v says: {mangled name: (registers, bytes spilt, bytes loaded again, bytes of shared memory)}."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        stored, loaded = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        found[part.partition("'")[0]] = (registers, stored, loaded, int(shared[1]) if shared else 0)
    return found


def mangled(kernel: str, type_id: int | None) -> str:
    """A pattern for the mangled name of a kernel of the lists above."""
    name, arguments = re.fullmatch(r"(?:ggml_ext::)?(\w+)<(.*)>", kernel).groups()
    parts = []
    for a in arguments.split(", "):
        if a.startswith("block_"):
            parts.append(f"{len(a)}{a}")
        elif a.startswith("GGML_TYPE_"):
            parts.append(f"L9ggml_type{type_id}E")
        else:
            parts.append({"true": "Lb1E", "false": "Lb0E", "half": "6__half"}.get(a, f"Li{a}E"))
    return rf"{len(name)}{name}I{''.join(parts)}(?!Lb|Li)"


def compiled(ggml: Path, arch: str, kernels: dict[str, str], type_id: int | None, with_products: bool) -> list[tuple[str, tuple]]:
    with tempfile.TemporaryDirectory() as tmp:
        unit = Path(tmp) / "kernels.cu"
        unit.write_text(source(ggml, list(kernels.values()), with_products))
        done = subprocess.run(cuda_tools.compile_command(ggml, arch, "-w", "-cubin", "-Xptxas", "-v", "-o", f"{tmp}/out", unit),
                              capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: nvcc failed: {(done.stdout + done.stderr).strip()[-1500:]}")
    found = parsed(done.stdout + done.stderr)
    rows = []
    for title, kernel in kernels.items():
        pattern = re.compile(mangled(kernel, type_id))
        matches = [counts for name, counts in found.items() if pattern.search(name)]
        if len(matches) != 1:
            sys.exit(f"error: {len(matches)} kernels of nvcc's look like {kernel}; of {len(found)}: {', '.join(found)}")
        rows.append((title, matches[0]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--types", default=",".join([*WEIGHT_TYPES, *STOCK]), help="as ggml names them (default: %(default)s)")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "package")
    args = parser.parse_args()
    ggml = args.build.resolve() / "llama.cpp" / "ggml"
    header = ggml / "include" / "ggml.h"
    if not header.exists():
        sys.exit(f"error: {ggml} is not there: build the package, or name another build folder with --build")
    ids = {name.lower(): int(value) for name, value in re.findall(r"GGML_TYPE_(\w+)\s*=\s*(\d+)", header.read_text())}
    ids |= {name: int(info.id) for name, info in WEIGHT_TYPES.items()}
    if unknown := [name for name in args.types.split(",") if name.lower() not in ids]:
        sys.exit(f"error: --types: no type {', '.join(unknown)}")
    print(f"| type | kernel, {args.arch} | regs | spill | shared |\n| --- | --- | --- | --- | --- |")
    for name in ["", *args.types.split(",")]:
        kernels = PRODUCTS | (OURS if name in WEIGHT_TYPES else {}) if name else ACTIVATIONS
        kernels = {title: kernel.format(type=f"GGML_TYPE_{name.upper()}", name=name) for title, kernel in kernels.items()}
        for title, (registers, stored, loaded, shared) in compiled(ggml, args.arch, kernels, ids.get(name.lower()), bool(name)):
            print(f"| {name} | {title} | {registers} | {stored}/{loaded} | {shared} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
