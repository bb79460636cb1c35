#!/usr/bin/env python3
"""Fetch the pinned llama.cpp, and apply the patch set to a copy of it.

    llama_cpp.py tree                    print the path of the unpatched tree (fetched and unpacked once)
    llama_cpp.py patch SOURCE DEST       write a patched copy of SOURCE to DEST; unchanged files keep their times
    llama_cpp.py check [SOURCE]          print which patches apply to SOURCE (a newer llama.cpp); exit with 1 if one does not
    llama_cpp.py rebase NEW [--work DIR] [--merged DIR]
                                         merge all patches with the tree NEW, three-way, and write them if there is no conflict.
                                         Files with conflict markers are written to DIR (default: build/rebase); resolve them there
                                         and pass the directory with --merged

The pin is ggml_ext/upstream.toml. pip downloads the archive, and its SHA-256 is checked. Archive and tree are cached in
GGML_EXT_CACHE_DIR (default: the user's cache directory). GGML_EXT_LLAMA_CPP_DIR names a tree to use instead. Needs git, pip and, on
Python 3.10, tomli.
"""
from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import metal_library
import patch_rebase
from pinned import Failure, cache_dir, fetch, run_script

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PIN = tomllib.loads((ROOT / "ggml_ext" / "upstream.toml").read_text())
TYPES_HEADER = ROOT / "ggml_ext" / "ggml-ext-types.h"
VULKAN = ROOT / "vulkan"
VULKAN_SHADERS = Path("ggml/src/ggml-vulkan/vulkan-shaders")
CUDA_INSTANCES = Path("ggml/src/ggml-cuda/template-instances")
PATCHES = sorted((ROOT / "ggml_ext" / "patches").glob("*.patch"))
# needed by a build of the tools and of ggml's tests; the rest is 120 MB of documents and vocabularies
COPIED = ("CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "licenses", "scripts", "src", "tests", "tools", "vendor")


def pristine_tree() -> Path:
    """Return the unpatched llama.cpp: the user's own tree, or the pinned one."""
    own = os.environ.get("GGML_EXT_LLAMA_CPP_DIR")
    if own:
        if not (Path(own) / "ggml" / "CMakeLists.txt").exists():
            raise Failure(f"GGML_EXT_LLAMA_CPP_DIR={own}: no llama.cpp source tree there")
        return Path(own).resolve()
    tree = cache_dir() / f"llama.cpp-{PIN['version']}"
    if not tree.exists():
        archive = fetch(PIN, "set GGML_EXT_LLAMA_CPP_DIR")
        with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
            with tarfile.open(archive) as tar:
                members = [m for m in tar if m.name.startswith(PIN["tree"] + "/") and (m.isfile() or m.isdir())]
                if hasattr(tarfile, "data_filter"):
                    tar.extractall(tmp, members, filter="data")
                else:
                    tar.extractall(tmp, members)
            os.replace(Path(tmp) / PIN["tree"], tree)
    return tree


def version(tree: Path) -> str:
    """Return "llama.cpp 0.5.0, ggml 0.25.3", as far as the tree says."""
    def read(name: str, prefix: str) -> str:
        text = (tree / name).read_text(errors="replace") if (tree / name).exists() else ""
        parts = [re.search(rf"set\({prefix}_VERSION_{p} (\d+)\)", text) for p in ("MAJOR", "MINOR", "PATCH")]
        return ".".join(p[1] for p in parts) if all(parts) else "of unknown version"
    return f"llama.cpp {read('CMakeLists.txt', 'LLAMA')}, ggml {read('ggml/CMakeLists.txt', 'GGML')}"


def pinned_version() -> str:
    return f"llama.cpp {PIN['llama_cpp']}, ggml {PIN['ggml']}"


def git_apply(patch: Path, tree: Path, *options: str) -> subprocess.CompletedProcess:
    # inside another repository git would resolve the paths relative to that one, and skip them silently
    env = dict(os.environ, GIT_CEILING_DIRECTORIES=str(tree.parent), LC_ALL="C")
    env.pop("GIT_DIR", None)
    try:
        return subprocess.run(["git", "apply", "--verbose", *options, str(patch)], cwd=tree, env=env,
                              capture_output=True, text=True)
    except FileNotFoundError:
        raise Failure("git is needed to apply the patches; install it") from None


def patched_file(patch: Path) -> str:
    return re.search(r"^\+\+\+ b/(\S+)", patch.read_text(), re.M)[1]


def apply_all(tree: Path) -> None:
    for patch in PATCHES:
        done = git_apply(patch, tree)
        if done.returncode:
            detail = next((line for line in done.stderr.splitlines() if line.startswith("error:")), "error: ?")
            raise Failure(f"{patch.name} does not apply to {patched_file(patch)}: {detail[7:]}. The patches are made "
                          f"for {pinned_version()}; this tree is {version(tree)}. Use the pinned tree (unset "
                          f"GGML_EXT_LLAMA_CPP_DIR), or correct the patch")


def copy_tree(source: Path, dest: Path) -> None:
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, dest / name, symlinks=True)
        elif (source / name).exists():
            shutil.copy2(source / name, dest / name)


def sync(new: Path, old: Path) -> None:
    """Make old equal to new and touch only changed files, so that a rebuild compiles only these."""
    old.mkdir(parents=True, exist_ok=True)
    names = {p.name for p in new.iterdir()}
    for p in list(old.iterdir()):
        if p.name not in names:
            shutil.rmtree(p) if p.is_dir() and not p.is_symlink() else p.unlink()
    for p in new.iterdir():
        target = old / p.name
        if p.is_dir() and not p.is_symlink():
            sync(p, target)
        elif not (target.exists() and filecmp.cmp(p, target, shallow=False)):
            os.replace(p, target)
            os.utime(target)  # newer than objects of the old file


def add_vulkan(tree: Path) -> None:
    """Copy our shaders next to upstream's, whose build compiles every .comp there; included files go to their own directory."""
    shaders = tree / VULKAN_SHADERS
    (shaders / "ggml_ext").mkdir()
    for path in sorted(VULKAN.glob("*.glsl")):
        shutil.copy2(path, shaders / "ggml_ext")
    for path in sorted(VULKAN.glob("*.comp")):
        shutil.copy2(path, shaders / f"ggml_ext_{path.name}")
    # for upstream's shader compiler, a separate project that is rebuilt when a header in this directory changes
    shutil.copy2(VULKAN / "shaders.h", shaders / "ggml-ext-shaders.h")
    shutil.copy2(TYPES_HEADER, shaders)


def add_cuda_instances(tree: Path) -> None:
    """Write a CUDA source for each type next to upstream's, where its build finds them; separate sources compile in parallel."""
    for name in metal_library.weight_types():
        path = tree / CUDA_INSTANCES / f"mmq-{name}.cu"
        path.write_text(f'#include "../mmq.cuh"\n\nDECL_MMQ_CASE(GGML_TYPE_{name.upper()});\n')


def patch_tree(source: Path, dest: Path) -> None:
    """Write a patched copy of source to dest."""
    if dest.resolve() == source.resolve():
        raise Failure(f"{dest}: the patched copy cannot be the source tree itself")
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=".patching-") as tmp:
        copy_tree(source, Path(tmp))
        apply_all(Path(tmp))
        # next to ggml.h, which includes it, because Hexagon's device code is a separate project that only sees this directory
        shutil.copy2(TYPES_HEADER, Path(tmp) / "ggml" / "include")
        (Path(tmp) / metal_library.LIBRARY).write_text(metal_library.library(source))
        add_vulkan(Path(tmp))
        add_cuda_instances(Path(tmp))
        sync(Path(tmp), dest)


def check(source: Path) -> int:
    """Print which patches apply to source; the first step to a newer llama.cpp."""
    print(f"patches for {pinned_version()}; {source} is {version(source)}")
    n_bad = 0
    with tempfile.TemporaryDirectory() as tmp:
        copy_tree(source, Path(tmp))
        for patch in PATCHES:
            done = git_apply(patch, Path(tmp))
            moved = done.stderr.count("offset")
            n_bad += done.returncode != 0
            verdict = "FAILS" if done.returncode else f"applies, {moved} hunk(s) moved" if moved else "applies"
            print(f"  {patch.name:40s} {patched_file(patch):45s} {verdict}")
            if done.returncode:
                print("    " + "\n    ".join(x for x in done.stderr.splitlines() if x.startswith("error")))
    print(f"{len(PATCHES) - n_bad} of {len(PATCHES)} patches apply")
    try:
        metal_library.library(source)
    except (Failure, OSError) as e:
        print(f"Metal's kernels cannot be made: {e}")
        return 1
    return 1 if n_bad else 0


def rebase(new: Path, work: Path, merged: Path | None) -> int:
    """Rebase the patches on a newer llama.cpp; all or none are written."""
    if not (new / "ggml" / "CMakeLists.txt").exists():
        raise Failure(f"{new}: no llama.cpp source tree there")
    if merged is not None and not merged.is_dir():
        raise Failure(f"--merged {merged}: no such directory; name the --work directory of an earlier run")
    if merged is not None and merged.resolve() == work.resolve():
        work = work.with_name(f"{work.name}-again")  # do not overwrite what was merged by hand
    old = pristine_tree()
    print(f"patches for {version(old)}; {new} is {version(new)}")
    with tempfile.TemporaryDirectory() as tmp:
        copy_tree(old, Path(tmp))
        apply_all(Path(tmp))
        rebased = patch_rebase.rebase(PATCHES, patched_file, (old, Path(tmp), new.resolve()), work, merged)
    for one in rebased:
        print(f"  {one.patch.name:40s} {one.file:45s} {one.outcome}")
        if one.lines:
            print(f"    {one.conflicts}: lines {', '.join(map(str, one.lines))}")
    if failed := [one for one in rebased if one.text is None]:
        print(f"{len(failed)} of {len(rebased)} patches need manual merging; none was written. Resolve the files named above, then run this "
              f"again with --merged {work}")
        return 1
    patch_rebase.write_back(rebased)
    print(f"{len(rebased)} patches written; next: docs/maintaining/new-llama-cpp.md")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tree")
    for name in ("patch", "check"):
        sub = commands.add_parser(name)
        sub.add_argument("source", type=Path, nargs=None if name == "patch" else "?")
        if name == "patch":
            sub.add_argument("dest", type=Path)
    sub = commands.add_parser("rebase")
    sub.add_argument("new", type=Path)
    sub.add_argument("--work", type=Path, default=ROOT / "build" / "rebase")
    sub.add_argument("--merged", type=Path)
    args = parser.parse_args(argv)
    actions: dict[str, Callable[[], int | None]] = {
        "tree": lambda: print(pristine_tree()),
        "patch": lambda: patch_tree(args.source, args.dest),
        "rebase": lambda: rebase(args.new, args.work, args.merged),
        "check": lambda: check(args.source or pristine_tree()),
    }
    return run_script(actions[args.command])


if __name__ == "__main__":
    sys.exit(main())
