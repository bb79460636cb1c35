#!/usr/bin/env python3
"""Cross-compile llama.cpp's programs with the ggml-ext types for x86-64 Windows with mingw-w64: `make windows`.

Writes dist/ggml-ext-VERSION-win-x64.zip with the programs, their libraries, all CPU variants of llama.cpp (chosen at run time), the
chat page and, if possible, the Vulkan backend. Refuses libraries with vector instructions that need an aligned address, because the
stack of Windows is not aligned enough for them (windows.cmake). docs/maintaining/windows.md has the details. The log of the build is
build/windows.log.
"""
from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import system_packages
import wheel
from llama_cpp import Failure, tomllib

ROOT = Path(__file__).resolve().parents[2]
BUILD, LOG, DIST = ROOT / "build" / "windows", ROOT / "build" / "windows.log", ROOT / "dist"
TOOLCHAIN = ROOT / "scripts" / "build" / "windows.cmake"
VULKAN = BUILD / "vulkan"  # headers and import library, where windows.cmake searches
PREFIX = "x86_64-w64-mingw32-"
RUNTIME = ("libstdc++-6.dll", "libgcc_s_seh-1.dll", "libwinpthread-1.dll")
PROGRAMS = ("llama-server", "llama-cli", "llama-completion", "llama-quantize", "llama-imatrix", "llama-perplexity", "llama-bench",
            "llama-gguf-split", "ggml-ext-graph")
README = """ggml-ext {version}: llama.cpp with weight types of 1 to 5 bits, for x86-64 Windows 10 and newer

llama-server.exe -m model.gguf      chat page at http://127.0.0.1:8080
llama-cli.exe -m model.gguf         chat in the terminal
llama-quantize.exe in.gguf out.gguf ITQ3_T      without calibration; for better files, quantize with the Python package on Linux
All programs take llama.cpp's options and --help. They choose the kernels of this CPU at run time; {vulkan}.
Unpack all files into one directory, and keep them together.
The programs were tested under Wine and never run on Windows itself. They are not signed, so Windows may warn of an unknown publisher.
Licence: MIT, like llama.cpp; GCC's runtime libraries: GPL 3 with the runtime exception.
"""
# VEX and EVEX moves that fault on an address that is not aligned to their size
ALIGNED_MOVE = re.compile(r"\bvmov(?:ap[sd]|dqa(?:32|64)?|ntdqa?|ntp[sd])\s(?=[^\n]*%[yz]mm)[^\n]*\(")


def prepare_vulkan() -> bool:
    """Collect the headers of Vulkan and an import library of its loader, vulkan-1.dll. Return whether the packages are present."""
    if not system_packages.find_programs(system_packages.VULKAN, "the programs for Windows are built without the Vulkan backend"):
        return False
    shutil.rmtree(VULKAN, ignore_errors=True)
    for name in ("include/vulkan", "include/vk_video", "include/spirv", "share/cmake/SPIRV-Headers"):
        shutil.copytree(Path("/usr") / name, VULKAN / name)
    (VULKAN / "lib").mkdir()
    # the loader exports all functions of the core, whose names end in no capital letters
    names = re.findall(r"VKAPI_CALL (vk\w+[a-z0-9])\(", (VULKAN / "include/vulkan/vulkan_core.h").read_text())
    (VULKAN / "vulkan-1.def").write_text("\n".join(["LIBRARY vulkan-1.dll", "EXPORTS", *names, ""]))
    subprocess.run([f"{PREFIX}dlltool", "-d", VULKAN / "vulkan-1.def", "-l", VULKAN / "lib" / "libvulkan-1.a"], check=True)
    return True


def aligned_moves(assembly: str) -> list[str]:
    """Return the moves of 32 or 64 bytes in a disassembly that need an aligned address."""
    return [line.strip() for line in assembly.splitlines() if ALIGNED_MOVE.search(line)]


def check_alignment(library: Path) -> None:
    """Raise Failure if a library has vector moves that need an aligned address."""
    text = subprocess.run([f"{PREFIX}objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True).stdout
    if moves := aligned_moves(text):
        raise Failure(f"{library.name} has {len(moves)} vector moves that need an aligned stack, the first is {moves[0]}; see {TOOLCHAIN.name}")


def stage_files(directory: Path) -> list[Path]:
    """Copy the programs and libraries without debug information, and the compiler's runtime libraries; return the files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    sources = [*(BUILD / "bin" / f"{name}.exe" for name in PROGRAMS), *sorted((BUILD / "bin").glob("*.dll"))]
    for name in RUNTIME:
        done = subprocess.run([f"{PREFIX}g++-posix", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        path = Path(done.stdout.strip())
        if not path.is_absolute():
            raise Failure(f"{PREFIX}g++-posix has no {name}")
        sources.append(path)
    for source in sources:
        subprocess.run([f"{PREFIX}strip", "--strip-unneeded", "-o", directory / source.name, source], check=True)
    return sorted(directory.iterdir())


def write_archive(files: list[Path], archive: Path, readme: str) -> None:
    """Write the zip file; a failed run leaves none."""
    archive.parent.mkdir(exist_ok=True)
    part = archive.with_suffix(".part")
    tree = BUILD / "llama.cpp"
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for path in files:
            out.write(path, path.name)
        out.writestr("README.txt", readme.replace("\n", "\r\n"))
        for name, path in [("ggml-ext", ROOT / "LICENSE"), ("llama.cpp", tree / "LICENSE"), *((p.name, p) for p in sorted((tree / "licenses").iterdir()))]:
            out.write(path, f"licenses/{name}")
    os.replace(part, archive)


def build_archive(jobs: int) -> Path:
    """Build the programs and return the archive."""
    if not system_packages.find_programs(system_packages.WINDOWS, "the programs for Windows are not built"):
        raise Failure("the cross compiler is missing")
    LOG.parent.mkdir(exist_ok=True)
    LOG.unlink(missing_ok=True)
    has_vulkan = prepare_vulkan()
    options = {**wheel.OPTIONS, "GGML_VULKAN": "ON" if has_vulkan else "OFF", "CMAKE_TOOLCHAIN_FILE": TOOLCHAIN, "Python_EXECUTABLE": sys.executable}
    print(f"building; the log is {LOG.relative_to(ROOT)}", flush=True)
    for what, *command in (("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", *(f"-D{name}={value}" for name, value in options.items())),
                           ("the build", "--build", BUILD, "--target", *PROGRAMS, "--parallel", jobs)):
        wheel.run_logged(what, "cmake", *command, env=wheel.build_environment(), log=LOG)
    files = stage_files(BUILD / "stage")
    expected = wheel.variants((BUILD / "llama.cpp" / "ggml" / "src" / "CMakeLists.txt").read_text(), "x86_64")
    if wrong := {p.stem.removeprefix("ggml-cpu-") for p in files if p.name.startswith("ggml-cpu-")} ^ set(expected):
        raise Failure(f"missing or unexpected CPU variants: {', '.join(sorted(wrong))}")
    for path in files:
        check_alignment(path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    archive = DIST / f"ggml-ext-{version}-win-x64.zip"
    vulkan = "a GPU's Vulkan driver is used if there is one" if has_vulkan else "this build has no Vulkan backend"
    write_archive(files, archive, README.format(version=version, vulkan=vulkan))
    return archive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        archive = build_archive(args.jobs)
    except (Failure, OSError, subprocess.CalledProcessError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{archive.relative_to(ROOT)}, {archive.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
