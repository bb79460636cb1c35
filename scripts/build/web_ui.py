#!/usr/bin/env python3
"""Build llama-server's chat page from the llama.cpp tree's tools/ui, once for each tree.

    web_ui.py build                      print the folder of the built page; exit 1 with one line if there is none

The page is kept in the cache (pinned.py): for the pinned tree by its version, for the tree in GGML_EXT_LLAMA_CPP_DIR by
a digest of tools/ui. npm comes from the PATH and asks the registry that the user's npm is set up for; everything it fetches
and unpacks, 860 MB, lies in one folder of the cache that is removed at the end, however that comes.
The standard library and npm with Node.js are all this needs.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from llama_cpp import PIN, pristine_tree, version
from pinned import Failure, cache_dir, sha256

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

# what llama.cpp's scripts/ui-assets.cmake insists on
REQUIRED = ("index.html", "manifest.webmanifest", "sw.js", "build.json", "_app/version.json", "**/bundle*.js", "**/bundle*.css",
            "workbox*.js")
UNUSED = shutil.ignore_patterns("node_modules", "dist", ".svelte-kit")
WORK = ".llama-ui-"  # how the names of folders of builds under way begin
LIMIT_S = 1800  # for each of npm's two steps, which take 15 s and 2 min on two cores
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def listing(page: Path) -> str:
    """SHA-256 and name of every file, as sha256sum prints them."""
    files = sorted(p.relative_to(page).as_posix() for p in page.rglob("*") if p.is_file())
    return "".join(f"{sha256(page / name)}  {name}\n" for name in files)


def is_complete(entry: Path) -> bool:
    """Whether a folder of the cache holds the page that was put there, every byte of it."""
    record = entry / "files.sha256"
    return record.is_file() and record.read_text() == listing(entry / "page")


def cache_entry(tree: Path) -> Path:
    if not os.environ.get("GGML_EXT_LLAMA_CPP_DIR"):
        return cache_dir() / f"llama-ui-{PIN['version']}"
    digest = hashlib.sha256()
    sources = tree / "tools" / "ui"
    for folder, names, files in os.walk(sources):
        names[:] = sorted(set(names) - UNUSED(folder, names))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file():
                digest.update(f"{path.relative_to(sources).as_posix()} {sha256(path)}\n".encode())
    return cache_dir() / f"llama-ui-{digest.hexdigest()[:16]}"


def reason(output: str) -> str:
    """What npm or a program it ran says was wrong, in one line."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines() if line.strip()]
    engine = re.search(r'your version of node/npm: (\S+).*?Required: .*?"node":"([^"]+)".*?Actual: .*?"node":"v?([^"]+)"', output, re.S)
    if engine:
        return f"Node.js {engine[3]} is too old, {engine[1]} needs {engine[2]}"
    if "error during build:" in lines[:-1]:  # vite
        return lines[lines.index("error during build:") + 1][:300]
    # npm's own: "code E404" and the like, then the sentence, then a stack or where its log is
    said = [line.split(" ", 2)[2] for line in lines if re.match(r"npm (error|ERR!) (?!(code|syscall|errno|path|A complete log) )", line)]
    return (said or lines[-1:] or ["it printed nothing"])[0][:300]


def run_npm(title: str, command: list[str], folder: Path, env: dict[str, str]) -> None:
    # into a file: processes that a killed npm leaves behind would keep a pipe open
    with tempfile.TemporaryFile("w+", dir=folder.parent, encoding="utf-8", errors="replace") as output:
        # a session of its own, so that all its processes can be ended
        try:
            process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as e:
            raise Failure(f"{title} failed: {command[0]}: {e.strerror}") from None
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"{title} did not end within {LIMIT_S} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
                process.wait()
        if code:
            output.seek(0)
            raise Failure(f"{title} failed: {reason(output.read())}")


def build_page(npm: str, tree: Path, work: Path) -> Path:
    """work/entry, as it goes into the cache."""
    sources, entry = work / "sources", work / "entry"
    shutil.copytree(tree / "tools" / "ui", sources, ignore=UNUSED)
    # the tree may be read-only
    for path in (sources, *sources.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    env = {**os.environ, "LLAMA_UI_OUT_DIR": str(entry / "page"), "LLAMA_BUILD_NUMBER": version(tree).split(",")[0],
           "npm_config_cache": str(work / "npm"), "npm_config_update_notifier": "false"}
    # all it needs are development dependencies, which NODE_ENV=production would leave out
    run_npm("npm ci", [npm, "ci", "--ignore-scripts", "--include=dev", "--no-audit", "--no-fund", "--loglevel=error"], sources, env)
    run_npm("npm run build", [npm, "run", "build"], sources, env)
    absent = [name for name in REQUIRED if not any((entry / "page").glob(name))]
    absent += [path.name for path in (entry / "page").rglob("*") if path.is_file() and not path.stat().st_size]
    if absent:
        raise Failure(f"npm run build made an incomplete page: {', '.join(absent)} absent or empty")
    (entry / "files.sha256").write_text(listing(entry / "page"))
    return entry


def remove(folder: Path) -> None:
    """Also while processes that were killed just now still write into it."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """One process at a time; false where that cannot be had. The lock ends with the process and leaves no file."""
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            alone = True
        except OSError:  # some network file systems
            alone = False
        yield alone
    finally:
        os.close(handle)


def build() -> Path:
    """The folder of the page, built if the cache lacks it."""
    tree = pristine_tree()
    own = tree / "tools" / "ui" / "dist"
    if (own / "index.html").exists():  # the owner of the tree has built it there
        return own
    entry = cache_entry(tree)
    if is_complete(entry):
        return entry / "page"
    if not (tree / "tools" / "ui" / "package-lock.json").exists():
        raise Failure(f"{tree} has no sources of it (tools/ui/package-lock.json)")
    npm = shutil.which("npm")
    if not npm:
        raise Failure("npm is not installed; install Node.js with npm, and build again")
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with locked(cache_dir()) as alone:
            if is_complete(entry):  # another process has built it meanwhile
                return entry / "page"
            if alone:  # what is there now is of processes that were killed
                for left_over in cache_dir().glob(f"{WORK}*"):
                    remove(left_over)
            work = Path(tempfile.mkdtemp(dir=cache_dir(), prefix=WORK))
            try:
                made = build_page(npm, tree, work)
                if entry.exists():  # damaged
                    os.replace(entry, work / "damaged")
                os.replace(made, entry)
            finally:
                remove(work)
    except OSError as e:
        raise Failure(f"{e.filename or cache_dir()}: {e.strerror or e}; GGML_EXT_CACHE_DIR names another folder for the cache") from None
    return entry / "page"


def stop(number: int, frame: object) -> None:
    for signal_ in SIGNALS:  # not again while the folder is removed
        signal.signal(signal_, signal.SIG_IGN)
    raise Failure(f"stopped by {signal.Signals(number).name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_subparsers(dest="command", required=True).add_parser("build")
    parser.parse_args(argv)
    for signal_ in SIGNALS:
        signal.signal(signal_, stop)
    try:
        print(build())
    except (Failure, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
