#!/usr/bin/env python3
"""Instructions a weight of the Vulkan products, in the machine code that RADV makes for AMD's GPUs: what can be said of their speed without one.

    vulkan_instructions.py [--build build/vulkan] [--families gfx1100,navi21]

Compiles our products of one to eight columns and llama.cpp's of stock types with the numbers of rows that ggml-vulkan takes for that GPU,
and the tiles of products of many columns, and counts their hot loops: VALU, look-ups in shared memory, loads. RADV makes the code of a GPU that
is not there (RADV_FORCE_FAMILY; gfx1100 is NAVI31, the Radeon RX 7900 XTX, navi21 the RX 6900 XT). Needs Mesa's drivers, glslc, a C compiler and
Vulkan's headers (Debian: mesa-vulkan-drivers, glslc, libvulkan-dev), and the shaders' sources and generator of a build with GGML_VULKAN=ON,
which scripts/build/build_tests.py --only vulkan makes. Stock types' products by integer dots are left out: Debian 12's glslc has none.
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
from dataclasses import dataclass
from pathlib import Path

from ggml_ext import WEIGHT_TYPES
from ggml_ext._base.errors import UserError
from ggml_ext._console.cli import run_script

ROOT = Path(__file__).resolve().parents[2]
GLSLC = ROOT / "tests" / "native" / "glslc_stubs.sh"
DRIVERS = [path for folder in ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d") for path in sorted(Path(folder).glob("radeon_icd*.json"))]
COLUMNS = (1, 2, 4, 8)
SUBGROUP = 32
# Stock types: rows of a workgroup on AMD behind GCN (rm_kq, rm_iq of ggml-vulkan.cpp), weights of a row that a thread takes in a turn of
# the loop of mul_mat_vec_<type>.comp, with up to four columns and with more.
STOCK = {"q2_k": (2, 16, 16), "q3_k": (2, 16, 16), "q4_k": (2, 16, 16), "iq2_xxs": (4, 16, 16), "iq3_s": (4, 32, 16)}
N_SUBGROUPS = 4  # of our workgroups (vulkan/pipelines.h)
OURS = 32        # weights of a row and a thread
# m_warptile_mmq of ggml-vulkan.cpp without matrix cores: 128 threads, tiles of 64 x 64 outputs, 32 deep
TILES = (128, 64, 64, 32, SUBGROUP, 32, 2, 4, 2, 1, SUBGROUP)
FUSED = ("v_fma", "v_dual_fma", "v_pk_fma", "v_mad_f")
KINDS = {"VALU": ("v_",), "look-ups": ("ds_load", "ds_read"), "loads": ("buffer_load", "global_load")}


@dataclass(frozen=True)
class Kernel:
    """A compiled shader, its specialisation constants, and the weights of a turn of its loop."""
    shader: str
    constants: tuple[int, ...]
    n_weights: int


def rows_of_ours(n_columns: int) -> int:
    return 2 if n_columns > 4 else 4


def product(name: str, n_columns: int) -> Kernel:
    if name in WEIGHT_TYPES:
        rows = rows_of_ours(n_columns)
        return Kernel(f"mul_mat_vec_{name}_f32_f32_subgroup_no_shmem", (N_SUBGROUPS * SUBGROUP, rows, n_columns), OURS * rows)
    rows, few, many = STOCK[name]
    return Kernel(f"mul_mat_vec_{name}_f32_f32_subgroup_no_shmem", (SUBGROUP, rows, n_columns), (few if n_columns <= 4 else many) * rows)


def compile_shaders(build: Path, out: Path) -> None:
    """The wanted shaders of both kinds into out, by llama.cpp's own generator."""
    generator = next((p for p in (build / "Release" / "vulkan-shaders-gen", build / "bin" / "vulkan-shaders-gen") if p.exists()), None)
    sources = build / "llama.cpp" / "ggml" / "src" / "ggml-vulkan" / "vulkan-shaders"
    if generator is None or not sources.is_dir():
        raise UserError(f"{build} has no vulkan-shaders-gen: python scripts/build/build_tests.py --package build/package --only vulkan")
    names = "|".join((*WEIGHT_TYPES, *STOCK))
    env = {**os.environ, "GLSLC_ONLY": f"mul_mat_vec_({names})_f32_f32_subgroup_no_shmem|matmul_({names})_f16"}
    for source in ("ggml_ext_mul_mat_vec.comp", "mul_mm.comp", *(f"mul_mat_vec_{name}.comp" for name in STOCK)):
        done = subprocess.run([generator, "--glslc", GLSLC, "--source", sources / source, "--output-dir", out,
                               "--target-hpp", out / "shaders.hpp", "--target-cpp", out / f"{source}.cpp"], env=env, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{source} was not compiled: {(done.stdout + done.stderr).strip().splitlines()[-1]}")


def compile_program(out: Path) -> Path:
    program = out / "vulkan_pipeline"
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    done = subprocess.run([compiler, "-O1", ROOT / "scripts" / "gpu" / "vulkan_pipeline.c", "-o", program, "-lvulkan"], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"vulkan_pipeline.c was not compiled: {done.stderr.strip().splitlines()[0]}: install Vulkan's headers and loader (libvulkan-dev)")
    return program


def pipeline(program: Path, family: str, shader: Path, constants: tuple[int, ...]) -> tuple[dict[str, int], str]:
    """The driver's statistics and the assembly."""
    if not DRIVERS:
        raise UserError("there is no radeon_icd of Mesa's Vulkan drivers: install mesa-vulkan-drivers")
    env = {**os.environ, "RADV_FORCE_FAMILY": family, "VK_ICD_FILENAMES": str(DRIVERS[0]), "MESA_SHADER_CACHE_DISABLE": "true"}
    done = subprocess.run([program, shader, str(SUBGROUP), *map(str, constants)], env=env, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise UserError(f"{shader.name} for {family}: {done.stderr.strip() or f'ended with {done.returncode}'}")
    statistics = {name: int(value) for name, value in re.findall(r"^statistic (.+): (\d+)$", done.stdout, re.M)}
    return statistics, done.stdout.partition("representation Assembly\n")[2]


def innermost_loops(assembly: str) -> list[list[str]]:
    """Opcodes of each loop that has no other in it."""
    at, code = {}, []
    for line in assembly.splitlines():
        if label := re.match(r"(BB\d+):", line):
            at[label[1]] = len(code)
        elif instruction := re.match(r"\s+([a-z]\w+)([^;]*)", line):
            code.append(instruction.groups())
    back = [(at[to[0]], i) for i, (opcode, operands) in enumerate(code)
            if "branch" in opcode and (to := re.findall(r"BB\d+", operands)) and at.get(to[0], i + 1) <= i]
    return [[opcode for opcode, _ in code[first:last + 1]] for first, last in back
            if not any((a, b) != (first, last) and first <= a and b <= last for a, b in back)]


def hot_loop(assembly: str) -> list[str]:
    """The loop with the most fused multiply-adds, that of rows in groups, and of such the shortest: the other asks for each row whether it is there."""
    def n_fused(loop: list[str]) -> int:
        return sum(opcode.startswith(FUSED) for opcode in loop)

    loops = innermost_loops(assembly)
    most = max(map(n_fused, loops), default=0)
    return min((loop for loop in loops if n_fused(loop) > 0.9 * most), key=len, default=[])


def counts(loop: list[str]) -> dict[str, int]:
    found = Counter(next((kind for kind, starts in KINDS.items() if opcode.startswith(starts)), "") for opcode in loop)
    return {kind: found[kind] for kind in KINDS}


def cell(program: Path, family: str, shaders: Path, kernel: Kernel) -> tuple[str, str]:
    """VALU a weight, with look-ups behind a plus, and registers, with a star where some are spilled."""
    statistics, assembly = pipeline(program, family, shaders / f"{kernel.shader}.spv", kernel.constants)
    n = counts(hot_loop(assembly))
    look_ups = f" + {n['look-ups'] / kernel.n_weights:.2f}" if n["look-ups"] else ""
    return f"{n['VALU'] / kernel.n_weights:.2f}{look_ups}", f"{statistics['VGPRs']}{' *' if statistics.get('Spilled VGPRs') else ''}"


def tiles_cell(program: Path, family: str, shaders: Path, name: str) -> str:
    """VALU of a thread in a turn of the tiles' loop; nothing for K-quants, which share one shader."""
    shader = shaders / f"matmul_{name}_f16.spv"
    if not shader.exists():
        return ""
    _, assembly = pipeline(program, family, shader, TILES)
    return str(counts(max(innermost_loops(assembly), key=len, default=[]))["VALU"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "vulkan", help="build folder with GGML_VULKAN=ON")
    parser.add_argument("--families", default="gfx1100,navi21", help="GPUs by RADV's names")
    args = parser.parse_args()
    if not shutil.which("glslc"):
        raise UserError("glslc is missing: install it (Debian: glslc)")
    with tempfile.TemporaryDirectory() as tmp:
        shaders = Path(tmp)
        compile_shaders(args.build, shaders)
        program = compile_program(shaders)
        for family in args.families.split(","):
            print(f"| VALU a weight (+ look-ups), {family} | {' | '.join(f'{n} columns' if n > 1 else '1 column' for n in COLUMNS)} | registers | tiles, VALU of a thread |\n"
                  f"|{' --- |' * (len(COLUMNS) + 3)}")
            for name in (*WEIGHT_TYPES, *STOCK):
                cells = [cell(program, family, shaders, product(name, n)) for n in COLUMNS]
                print(f"| {name} | {' | '.join(valu for valu, _ in cells)} | {cells[0][1]} | {tiles_cell(program, family, shaders, name)} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
