"""Three-way merges of the patches with a newer llama.cpp, for llama_cpp.py rebase.

Each patch changes one upstream file, so a merge needs only the old file, the patched old file and the new file, and one run finds all
conflicts.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pinned import Failure

CONTEXT = 2  # lines around a hunk


@dataclass(frozen=True)
class Rebased:
    """The result of rebasing a patch.

    Attributes:
        patch: path of the patch.
        file: the patched file in the tree.
        text: the new patch; None if it failed.
        outcome: the result in words.
        conflicts: file with conflict markers.
        lines: lines of the markers.
    """

    patch: Path
    file: str
    text: str | None
    outcome: str
    conflicts: Path | None = None
    lines: Sequence[int] = ()


def read_header(text: str) -> str:
    """Return a patch's text before the diff, such as the note that it fixes an upstream bug."""
    return text[: re.search(r"^diff --git ", text, re.M).start()]


def run_git(*args: str, cwd: Path) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(["git", *args], cwd=cwd, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        raise Failure("git is needed to merge the patches; install it") from None


def make_patch(file: str, before: Path, after: Path) -> str:
    """Return the diff of two files, without hashes and function names, which change on their own."""
    with tempfile.TemporaryDirectory() as tmp:
        for name, source in (("a", before), ("b", after)):
            target = Path(tmp) / name / file
            target.parent.mkdir(parents=True)
            shutil.copyfile(source, target)
        done = run_git("diff", "--no-index", "--no-color", "--no-prefix", f"-U{CONTEXT}", f"a/{file}", f"b/{file}", cwd=Path(tmp))
    if done.returncode not in (0, 1):
        raise Failure(f"git diff of {file}: {done.stderr.strip()}")
    lines = [line for line in done.stdout.splitlines(keepends=True) if not line.startswith(("index ", "old mode", "new mode"))]
    return "".join(re.sub(r"^(@@ -\S+ \+\S+ @@).*", r"\1", line) for line in lines)


def rebase_one(patch: Path, file: str, trees: tuple[Path, Path, Path], work: Path, merged: Path | None) -> Rebased:
    """Rebase one patch.

    Args:
        patch: the patch.
        file: its file in the tree.
        trees: the old, the patched old and the new tree.
        work: directory for the merged file, with markers of conflicts.
        merged: directory with files merged by hand, or None.
    """
    old, patched, new = (tree / file for tree in trees)
    if not new.is_file():
        return Rebased(patch, file, None, f"{file} is not in the new tree: it was moved or removed")
    by_hand = None if merged is None else merged / file
    target = work / file
    target.parent.mkdir(parents=True, exist_ok=True)
    if by_hand is not None and by_hand.is_file():
        shutil.copyfile(by_hand, target)
        outcome = "merged by hand"
    else:
        names = ["-L", "this patch", "-L", "the old llama.cpp", "-L", "the new llama.cpp"]
        done = run_git("merge-file", "-p", *names, str(patched), str(old), str(new), cwd=work)
        if done.returncode < 0 or done.returncode > 127:
            raise Failure(f"git merge-file of {file}: {done.stderr.strip()}")
        target.write_text(done.stdout)
        outcome = "unchanged" if old.read_bytes() == new.read_bytes() else "merged"
    lines = [i for i, line in enumerate(target.read_text(errors="replace").splitlines(), 1) if line.startswith("<<<<<<< ")]
    if lines:
        return Rebased(patch, file, None, "conflict", target, lines)
    if outcome == "unchanged":
        return Rebased(patch, file, patch.read_text(), outcome)
    if target.read_bytes() == new.read_bytes():
        return Rebased(patch, file, None, f"the new {file} has this change already: remove the patch")
    return Rebased(patch, file, read_header(patch.read_text()) + make_patch(file, new, target), outcome)


def rebase(
    patches: Sequence[Path], file_of: Callable[[Path], str], trees: tuple[Path, Path, Path], work: Path, merged: Path | None
) -> list[Rebased]:
    """Rebase all patches without writing them. file_of: returns a patch's file; other arguments as for rebase_one()."""
    work.mkdir(parents=True, exist_ok=True)
    return [rebase_one(patch, file_of(patch), trees, work, merged) for patch in patches]


def write_back(rebased: Sequence[Rebased]) -> None:
    """Replace the patches, after all new ones are written completely."""
    parts = []
    for one in rebased:
        part = one.patch.with_name(f".{one.patch.name}.part")
        part.write_text(one.text)
        parts.append((part, one.patch))
    for part, patch in parts:
        os.replace(part, patch)
