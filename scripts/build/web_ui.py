#!/usr/bin/env python3
"""Build llama-server's chat page from tools/ui of the llama.cpp tree, once per tree. Needs only the standard library and npm with Node.js.

    web_ui.py build                      print the directory of the built page; exit with 1 and one line if that fails

The page is cached (pinned.py): for the pinned tree under its version, for the tree in GGML_EXT_LLAMA_CPP_DIR under a digest of tools/ui.
npm comes from the PATH and uses the user's registry. Its downloads, 860 MB, are in a temporary directory of the cache that is removed at
the end, also after errors and signals.
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

# required by llama.cpp's scripts/ui-assets.cmake
REQUIRED = ("index.html", "manifest.webmanifest", "sw.js", "build.json", "_app/version.json", "**/bundle*.js", "**/bundle*.css",
            "workbox*.js")
UNUSED = shutil.ignore_patterns("node_modules", "dist", ".svelte-kit")
WORK = ".llama-ui-"  # prefix of temporary directories
LIMIT_S = 1800  # for each of npm's two steps, which take 15 s and 2 min on two cores
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def listing(page: Path) -> str:
    """List SHA-256 and name of every file, in sha256sum's format."""
    files = sorted(p.relative_to(page).as_posix() for p in page.rglob("*") if p.is_file())
    return "".join(f"{sha256(page / name)}  {name}\n" for name in files)


def is_complete(entry: Path) -> bool:
    """Return whether a cache entry holds the unchanged page."""
    record = entry / "files.sha256"
    return record.is_file() and record.read_bytes() == listing(entry / "page").encode()


def cache_entry(tree: Path) -> Path:
    """Return the cache directory of a tree's page."""
    if not os.environ.get("GGML_EXT_LLAMA_CPP_DIR"):
        return cache_dir() / f"llama-ui-{PIN['version']}"
    digest = hashlib.sha256()
    sources = tree / "tools" / "ui"
    for directory, names, files in os.walk(sources):
        names[:] = sorted(set(names) - UNUSED(directory, names))
        for name in sorted(files):
            path = Path(directory, name)
            if path.is_file():
                digest.update(f"{path.relative_to(sources).as_posix()} {sha256(path)}\n".encode())
    return cache_dir() / f"llama-ui-{digest.hexdigest()[:16]}"


def reason(output: str) -> str:
    """Return the error of npm or of a program that it ran, in one line."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines() if line.strip()]
    engine = re.search(r'your version of node/npm: (\S+).*?Required: .*?"node":"([^"]+)".*?Actual: .*?"node":"v?([^"]+)"', output, re.S)
    if engine:
        return f"Node.js {engine[3]} is too old, {engine[1]} needs {engine[2]}"
    if "error during build:" in lines[:-1]:  # vite
        return lines[lines.index("error during build:") + 1][:300]
    # npm prints a code such as "code E404", then the message, then a stack or the path of its log
    messages = [line.split(" ", 2)[2] for line in lines if re.match(r"npm (error|ERR!) (?!(code|syscall|errno|path|A complete log) )", line)]
    return (messages or lines[-1:] or ["no output"])[0][:300]


def run_npm(title: str, command: list[str], directory: Path, env: dict[str, str]) -> None:
    """Run a step of npm. Failure if it fails or takes too long."""
    # a file, because processes that a killed npm leaves behind would keep a pipe open
    with tempfile.TemporaryFile("w+", dir=directory.parent, encoding="utf-8", errors="replace") as output:
        # a new session, so that all its processes can be killed
        try:
            process = subprocess.Popen(command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=output,
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
    """Build the page in `work` and return the finished cache entry."""
    sources, entry = work / "sources", work / "entry"
    shutil.copytree(tree / "tools" / "ui", sources, ignore=UNUSED)
    # the tree may be read-only, and so the copy
    for path in (sources, *sources.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    env = {**os.environ, "LLAMA_UI_OUT_DIR": str(entry / "page"), "LLAMA_BUILD_NUMBER": version(tree).split(",")[0],
           "npm_config_cache": str(work / "npm"), "npm_config_update_notifier": "false"}
    # NODE_ENV=production would leave out the development dependencies, which are all that it needs
    run_npm("npm ci", [npm, "ci", "--ignore-scripts", "--include=dev", "--no-audit", "--no-fund", "--loglevel=error"], sources, env)
    run_npm("npm run build", [npm, "run", "build"], sources, env)
    absent = [name for name in REQUIRED if not any((entry / "page").glob(name))]
    absent += [path.name for path in (entry / "page").rglob("*") if path.is_file() and not path.stat().st_size]
    if absent:
        raise Failure(f"the page that npm run build wrote is incomplete: {', '.join(absent)} absent or empty")
    (entry / "files.sha256").write_bytes(listing(entry / "page").encode())
    return entry


def remove(directory: Path) -> None:
    """Remove a directory, even while killed processes still write into it."""
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Lock a directory; yields whether the lock is held. It ends with the process and leaves no file."""
    if fcntl is None:
        yield False
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            has_lock = True
        except OSError:  # some network file systems
            has_lock = False
        yield has_lock
    finally:
        os.close(handle)


def build() -> Path:
    """Return the directory of the page, after building it if the cache lacks it."""
    tree = pristine_tree()
    own = tree / "tools" / "ui" / "dist"
    if (own / "index.html").exists():  # built by the owner of the tree
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
        with locked(cache_dir()) as has_lock:
            if is_complete(entry):  # another process has built it meanwhile
                return entry / "page"
            if has_lock:  # other temporary directories belong to killed processes
                for stale in cache_dir().glob(f"{WORK}*"):
                    remove(stale)
            work = Path(tempfile.mkdtemp(dir=cache_dir(), prefix=WORK))
            try:
                page = build_page(npm, tree, work)
                if entry.exists():  # damaged
                    os.replace(entry, work / "damaged")
                os.replace(page, entry)
            finally:
                remove(work)
    except OSError as e:
        raise Failure(f"{e.filename or cache_dir()}: {e.strerror or e}; set GGML_EXT_CACHE_DIR to another directory") from None
    return entry / "page"


def stop(number: int, frame: object) -> None:
    """Signal handler: end with a Failure, so that the temporary directory is removed."""
    for signal_ in SIGNALS:  # ignore further signals during the removal
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
