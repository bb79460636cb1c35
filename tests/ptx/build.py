#!/usr/bin/env python3
"""Compile the CUDA kernels that tests interpret, and upstream's host code that launches them, into build/ptx.

    tests/ptx/build.py --package build/package [--nightly]

For each unit a library <unit>.so with the host code, and the kernels' PTX for each architecture, <architecture>/<unit>.ptx; units.json
says which types are in which. What is newer than all that it is made of is left as it is. Needs nvcc and the headers of cuBLAS; no GPU
and no runtime of CUDA. Two minutes of two cores: most of a source's time goes into headers, so types share one.
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
from compiled import ARCHITECTURES, MAIN, RAGGED, STOCK, WHOLE, all_tiles_on

import cuda_tools
from ggml_ext import WEIGHT_TYPES
from helpers.type_kinds import TYPE_KINDS

COLUMNS, ALL_COLUMNS = (1, 2, 4, 8), tuple(range(1, 9))  # of MMVQ
FEW_WHOLE, FEW_RAGGED = (8, 128), (8,)  # of WHOLE and RAGGED, for most units


@dataclass(frozen=True)
class Unit:
    """One source of kernels. whole, ragged: columns of MMQ's tiles."""
    name: str
    types: tuple[str, ...]
    architectures: tuple[str, ...]
    columns: tuple[int, ...] = COLUMNS
    whole: tuple[int, ...] = FEW_WHOLE
    ragged: tuple[int, ...] = FEW_RAGGED


def known_architectures() -> tuple[str, ...]:
    """Those that this nvcc has: 120 since 12.8."""
    listed = subprocess.run([cuda_tools.nvcc(), "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    return tuple(a for a in ARCHITECTURES if f"compute_{a}" in listed)


def units(nightly: bool, architectures: tuple[str, ...]) -> list[Unit]:
    names, one = tuple(WEIGHT_TYPES), (MAIN,)
    others = tuple(a for a in architectures if a != MAIN)
    everywhere = [Unit("kinds", TYPE_KINDS, others)] if not nightly else []
    of_types, columns = (architectures, ALL_COLUMNS) if nightly else (one, COLUMNS)
    return [*everywhere, *(Unit(f"types{i}", names[i::4], of_types, columns) for i in range(4)), Unit("stock", STOCK, one),
            *(Unit(f"{name}-tiles", (name,), on, (1,), WHOLE, RAGGED) for name in names if (on := all_tiles_on(name, nightly)))]


def source(unit: Unit, mmvq: str) -> str:
    tiles = [f"PTX_TILES(GGML_TYPE_{name.upper()}, {fallback}, {', '.join(map(str, columns))})\n" for name in unit.types
             for fallback, columns in (("false", unit.whole), ("true", unit.ragged))]
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

    def object(self, name: str, path: Path, architectures: tuple[str, ...]) -> Path:
        """path compiled to <name>.o and, for each architecture, <architecture>/<name>.ptx."""
        out = self.out / f"{name}.o"
        if out.exists() and out.stat().st_mtime > max(self.newest, path.stat().st_mtime):
            return out
        targets = [f"-gencode=arch=compute_{a},code=compute_{a}" for a in architectures]
        with tempfile.TemporaryDirectory() as tmp:
            command = cuda_tools.compile_command(self.ggml, "", *targets, "-diag-suppress=177", "-Xcompiler=-fPIC,-O0,-w", "--keep", "--keep-dir", tmp,
                                                 f"-I{HERE}", "-c", path, "-o", f"{tmp}/{name}.o")
            done = subprocess.run([part for part in command if part != "-arch="], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{done.stderr[-3000:]}\nerror: {name} was not compiled")
            for a in architectures:
                (self.out / a).mkdir(exist_ok=True)
                found = next(p for p in Path(tmp).glob("*.ptx") if len(architectures) == 1 or f"compute_{a}." in p.name)
                shutil.copy(found, self.out / a / f"{name}.ptx")
            shutil.move(f"{tmp}/{name}.o", out)
        return out

    def link(self, name: str, objects: list[Path]) -> None:
        # products of other types stay undefined, and nobody calls them
        subprocess.run(["g++", "-shared", "-Wl,-z,lazy", "-o", self.out / f"{name}.so", *objects, self.library, f"-L{self.out}", "-lptx-runtime",
                        f"-Wl,-rpath,{self.library.parent}", f"-Wl,-rpath,{self.out}"], check=True)

    def runtime(self) -> None:
        subprocess.run([cuda_tools.nvcc(), "-O1", "-Xcompiler=-fPIC", "-shared", "-cudart=none", HERE / "runtime.cpp",
                        "-o", self.out / "libptx-runtime.so"], check=True)

    def unit(self, unit: Unit) -> Path:
        path, text = self.out / f"{unit.name}.cu", source(unit, (self.cuda / "mmvq.cu").read_text())
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return self.object(unit.name, path, unit.architectures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="build folder of the installed package")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "ptx")
    parser.add_argument("--nightly", action="store_true", help="all tiles and numbers of columns of all types")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    builder = Builder(args.package, args.out)
    architectures = known_architectures()
    wanted = units(args.nightly, architectures)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        builder.runtime()
        common = [pool.submit(builder.object, name, HERE / f"{name}.cu", architectures) for name in ("common", "others")]
        objects = [(unit, pool.submit(builder.unit, unit)) for unit in wanted]
        shared, others = (job.result() for job in common)
        builder.link("others", [others])
        for unit, job in objects:
            builder.link(unit.name, [job.result(), shared])
    (args.out / "units.json").write_text(json.dumps({unit.name: {"types": unit.types, "architectures": unit.architectures} for unit in wanted}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
