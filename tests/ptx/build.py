#!/usr/bin/env python3
"""Compile the CUDA kernels that tests interpret, and upstream's host code that launches them, into build/ptx.

    tests/ptx/build.py --package build/package [--nightly]

Each unit becomes a library <unit>.so with the host code and one file of PTX per architecture, <architecture>/<unit>.ptx. units.json lists
the types of each unit. Outputs newer than all sources are kept. Needs nvcc and the headers of cuBLAS, but no GPU. The build takes two
minutes on two cores; types share a source because headers take most of its time.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "scripts" / "build"), str(ROOT / "py"), str(ROOT / "tests")]
from compiled import ARCHITECTURES, FULL, MAIN, NIGHTLY_TYPES, RAGGED, STOCK, all_tiles_on

import cuda_tools
from ggml_ext import WEIGHT_TYPES
from helpers.type_kinds import TYPE_KINDS

COLUMNS, ALL_COLUMNS = (1, 2, 4, 8), tuple(range(1, 9))  # columns of MMVQ
FEW_FULL, FEW_RAGGED = (8, 128), (8,)  # tiles compiled for most units


@dataclass(frozen=True)
class Unit:
    """A source of kernels; full and ragged are the columns of MMQ's tiles."""
    name: str
    types: tuple[str, ...]
    architectures: tuple[str, ...]
    columns: tuple[int, ...] = COLUMNS
    full: tuple[int, ...] = FEW_FULL
    ragged: tuple[int, ...] = FEW_RAGGED


def supported_architectures() -> tuple[str, ...]:
    """Return the architectures that this nvcc supports; 120 needs 12.8."""
    listed = subprocess.run([cuda_tools.nvcc(), "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    return tuple(a for a in ARCHITECTURES if f"compute_{a}" in listed)


def select_units(nightly: bool, architectures: tuple[str, ...]) -> list[Unit]:
    names, main_only = tuple(name for name in WEIGHT_TYPES if nightly or name not in NIGHTLY_TYPES), (MAIN,)
    others = tuple(a for a in architectures if a != MAIN)
    kinds = [Unit("kinds", TYPE_KINDS, others)] if not nightly else []
    type_architectures, columns = (architectures, ALL_COLUMNS) if nightly else (main_only, COLUMNS)
    return [*kinds, *(Unit(f"types{i}", names[i::4], type_architectures, columns) for i in range(4)), Unit("stock", STOCK, main_only),
            *(Unit(f"{name}-tiles", (name,), tiled, (1,), FULL, RAGGED) for name in names if (tiled := all_tiles_on(name, nightly)))]


def generate_source(unit: Unit, mmvq: str) -> str:
    tiles = [f"PTX_TILES(GGML_TYPE_{name.upper()}, {fallback}, {', '.join(map(str, columns))})\n" for name in unit.types
             for fallback, columns in (("false", unit.full), ("true", unit.ragged))]
    cases = [f"DECL_MMQ_CASE(GGML_TYPE_{name.upper()});\n" for name in unit.types]
    kernels = cuda_tools.trimmed_mmvq(mmvq, {name: name in WEIGHT_TYPES for name in unit.types}, unit.columns)
    return "".join([kernels, '#include "tests/ptx/products.cuh"\n', *tiles, *cases])


class Builder:
    def __init__(self, package: Path, out: Path):
        self.ggml, self.out = package.resolve() / "llama.cpp" / "ggml", out
        self.cuda = self.ggml / "src" / "ggml-cuda"
        self.library = next(path for folder in ("bin", "lib") for path in package.glob(f"{folder}/libggml-base.so*")).resolve()
        self.newest = max(path.stat().st_mtime for folder in (self.cuda, ROOT / "cuda", ROOT / "ggml_ext", HERE)
                          for path in folder.rglob("*") if path.is_file() and path.suffix in (".cu", ".cuh", ".h", ".cpp", ".toml"))

    def compile(self, name: str, path: Path, architectures: tuple[str, ...]) -> Path:
        """Compile path to <name>.o and to <architecture>/<name>.ptx for each architecture."""
        out = self.out / f"{name}.o"
        if out.exists() and out.stat().st_mtime > max(self.newest, path.stat().st_mtime):
            return out
        targets = [f"-gencode=arch=compute_{a},code=compute_{a}" for a in architectures]
        with tempfile.TemporaryDirectory() as tmp:
            command = cuda_tools.compile_command(self.ggml, "", *targets, "-diag-suppress=177", "-Xcompiler=-fPIC,-O0,-w", "--keep", "--keep-dir", tmp,
                                                 f"-I{HERE}", "-c", path, "-o", f"{tmp}/{name}.o")
            done = subprocess.run([part for part in command if part != "-arch="], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{done.stderr[-3000:]}\nerror: {name} does not compile")
            for a in architectures:
                (self.out / a).mkdir(exist_ok=True)
                ptx = next(p for p in Path(tmp).glob("*.ptx") if len(architectures) == 1 or f"compute_{a}." in p.name)
                shutil.copy(ptx, self.out / a / f"{name}.ptx")
            shutil.move(f"{tmp}/{name}.o", out)
        return out

    def link(self, name: str, objects: list[Path]) -> None:
        # products of other types stay undefined: nothing calls them
        subprocess.run(["g++", "-shared", "-Wl,-z,lazy", "-o", self.out / f"{name}.so", *objects, self.library, f"-L{self.out}", "-lptx-runtime",
                        f"-Wl,-rpath,{self.library.parent}", f"-Wl,-rpath,{self.out}"], check=True)

    def link_runtime(self) -> None:
        subprocess.run([cuda_tools.nvcc(), "-O1", "-Xcompiler=-fPIC", "-shared", "-cudart=none", HERE / "runtime.cpp",
                        "-o", self.out / "libptx-runtime.so"], check=True)

    def compile_unit(self, unit: Unit) -> Path:
        path, text = self.out / f"{unit.name}.cu", generate_source(unit, (self.cuda / "mmvq.cu").read_text())
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return self.compile(unit.name, path, unit.architectures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="build directory of the installed package")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "ptx")
    parser.add_argument("--nightly", action="store_true", help="compile all tiles and column counts of all types")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    builder = Builder(args.package, args.out)
    architectures = supported_architectures()
    selected = select_units(args.nightly, architectures)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        builder.link_runtime()
        common = [pool.submit(builder.compile, name, HERE / f"{name}.cu", architectures) for name in ("common", "others")]
        objects = [(unit, pool.submit(builder.compile_unit, unit)) for unit in selected]
        shared, others = (job.result() for job in common)
        builder.link("others", [others])
        for unit, job in objects:
            builder.link(unit.name, [job.result(), shared])
    (args.out / "units.json").write_text(json.dumps({unit.name: {"types": unit.types, "architectures": unit.architectures} for unit in selected}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
