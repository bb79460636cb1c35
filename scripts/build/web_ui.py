#!/usr/bin/env python3
"""Build llama-server's chat page from tools/ui of the llama.cpp tree, once per tree. Needs only the standard library and npm with Node.js.

    web_ui.py build                      print the directory of the built page; exit with 1 and one line if that fails
    web_ui.py install DIR [--optional]   put the page into DIR, in place of what is there; --optional: an error leaves it out

The page is cached (pinned.py): for the pinned tree under its version, for the tree in GGML_EXT_LLAMA_CPP_DIR under a digest of tools/ui.
npm comes from the PATH and uses the user's registry. Its downloads, 860 MB, are in a temporary directory of the cache that is removed at
the end, also after errors and signals.
"""
from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from llama_cpp import PIN, pristine_tree, version
from pinned import Failure, cache_dir, run_script, sha256

# required by llama.cpp's scripts/ui-assets.cmake
REQUIRED = ("index.html", "manifest.webmanifest", "sw.js", "build.json", "_app/version.json", "**/bundle*.js", "**/bundle*.css",
            "workbox*.js")
# a step takes 1 to 3 minutes on two cores; npm has no time limit of its own
STEP_LIMIT = 20 * 60  # seconds
UNUSED = shutil.ignore_patterns("node_modules", "dist", ".svelte-kit")


def cache_entry(tree: Path) -> Path:
    """Return the cache directory of a tree's page."""
    if not os.environ.get("GGML_EXT_LLAMA_CPP_DIR"):
        return cache_dir() / f"chat-page-{PIN['version']}"
    digest = hashlib.sha256()
    sources = tree / "tools" / "ui"
    for directory, names, files in os.walk(sources):
        names[:] = sorted(set(names) - UNUSED(directory, names))
        for name in sorted(files):
            path = Path(directory, name)
            if path.is_file():
                digest.update(f"{path.relative_to(sources).as_posix()} {sha256(path)}\n".encode())
    return cache_dir() / f"chat-page-{digest.hexdigest()[:16]}"


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
    """Run a step of npm. Failure if it fails or takes longer than STEP_LIMIT; what it started then ends too."""
    try:
        process = subprocess.Popen(command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, errors="replace", start_new_session=True)
    except OSError as e:
        raise Failure(f"{title} failed: {command[0]}: {e.strerror}") from None
    with process:
        try:
            output, _ = process.communicate(timeout=STEP_LIMIT)
        except subprocess.TimeoutExpired:
            raise Failure(f"{title} took longer than {STEP_LIMIT // 60} minutes; check the connection to npm's registry, and build again") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise Failure(f"{title} failed: {reason(output)}")


def build_page(npm: str, tree: Path, work: Path) -> Path:
    """Build the page in `work` and return its directory."""
    sources, page = work / "sources", work / "page"
    shutil.copytree(tree / "tools" / "ui", sources, ignore=UNUSED)
    # the tree may be read-only, and so the copy
    for path in (sources, *sources.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    env = {**os.environ, "LLAMA_UI_OUT_DIR": str(page), "LLAMA_BUILD_NUMBER": version(tree).split(",")[0],
           "npm_config_cache": str(work / "npm"), "npm_config_update_notifier": "false"}
    # NODE_ENV=production would leave out the development dependencies, which are all that it needs
    run_npm("npm ci", [npm, "ci", "--ignore-scripts", "--include=dev", "--no-audit", "--no-fund", "--loglevel=error"], sources, env)
    run_npm("npm run build", [npm, "run", "build"], sources, env)
    absent = [name for name in REQUIRED if not any(path.stat().st_size for path in page.glob(name))]
    if absent:
        raise Failure(f"the page that npm run build wrote is incomplete: {', '.join(absent)} absent or empty")
    return page


def build() -> Path:
    """Return the directory of the page, after building it if the cache lacks it."""
    tree = pristine_tree()
    own = tree / "tools" / "ui" / "dist"
    if (own / "index.html").exists():  # built by the owner of the tree
        return own
    entry = cache_entry(tree)
    if entry.is_dir():
        return entry
    if not (tree / "tools" / "ui" / "package-lock.json").exists():
        raise Failure(f"{tree} has no sources of it (tools/ui/package-lock.json)")
    npm = shutil.which("npm")
    if not npm:
        raise Failure("npm is not installed; install Node.js with npm, and build again")
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".chat-page-", ignore_cleanup_errors=True) as work:
            page = build_page(npm, tree, Path(work))
            if not entry.is_dir():  # no other process has built it meanwhile
                os.replace(page, entry)
    except OSError as e:
        raise Failure(f"{e.filename or cache_dir()}: {e.strerror or e}; set GGML_EXT_CACHE_DIR to another directory") from None
    return entry


def stop(number: int, frame: object) -> None:
    """Signal handler: end with a Failure, so that the temporary directory is removed."""
    raise Failure(f"stopped by {signal.Signals(number).name}")


def install(directory: Path, is_optional: bool) -> None:
    """Put the page into `directory`, in place of what is there, and say in one line whether llama-server has it."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        shutil.copytree(build(), directory)
    except Failure as e:
        if not is_optional:
            raise Failure(f"chat page: {e}; GGML_EXT_UI=OFF leaves it out") from None
        print(f"chat page: left out, {e}")
    else:
        print("chat page: in llama-server")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build")
    installer = commands.add_parser("install")
    installer.add_argument("directory", metavar="DIR", type=Path)
    installer.add_argument("--optional", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return run_script(lambda: install(args.directory, args.optional) if args.command == "install" else print(build()))


if __name__ == "__main__":
    sys.exit(main())
