"""The patches on a newer llama.cpp: each file's change merged with upstream's, in three ways, and written as a patch again.

llama_cpp.py rebase calls it. Each patch changes one file of upstream's. So base (the old file), ours (the old file, patched) and theirs
(the new file) are all that a merge needs, and every conflict of all patches is named in one run.
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

CONTEXT = 2  # lines around a hunk, as in all patches


@dataclass(frozen=True)
class Rebased:
    """A patch on the new tree. text: None where it could not be made; said: what happened to it; lines: of the conflicts in `where`."""

    patch: Path
    file: str
    text: str | None
    said: str
    where: Path | None = None
    lines: Sequence[int] = ()


def header_of(text: str) -> str:
    """What stands before the diff, such as the note that a patch mends a bug of upstream's."""
    return text[: re.search(r"^diff --git ", text, re.M).start()]


def run_git(*args: str, cwd: Path) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(["git", *args], cwd=cwd, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        raise Failure("git is needed to merge the patches; install it") from None


def make_patch(file: str, before: Path, after: Path) -> str:
    """The difference of two files with the fewest lines that apply safely; without hashes and names of functions, which change alone."""
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
    """trees: the old one, the same patched, and the new one; work: gets the file with markers; merged: folder with files merged by hand."""
    old, ours, new = (tree / file for tree in trees)
    if not new.is_file():
        return Rebased(patch, file, None, f"{file} is not in the new tree: it was moved or removed")
    by_hand = None if merged is None else merged / file
    target = work / file
    target.parent.mkdir(parents=True, exist_ok=True)
    if by_hand is not None and by_hand.is_file():
        shutil.copyfile(by_hand, target)
        said = "merged by hand"
    else:
        names = ["-L", "this patch", "-L", "the old llama.cpp", "-L", "the new llama.cpp"]
        done = run_git("merge-file", "-p", *names, str(ours), str(old), str(new), cwd=work)
        if done.returncode < 0 or done.returncode > 127:
            raise Failure(f"git merge-file of {file}: {done.stderr.strip()}")
        target.write_text(done.stdout)
        said = "as it was" if old.read_bytes() == new.read_bytes() else "merged"
    conflicts = [i for i, line in enumerate(target.read_text(errors="replace").splitlines(), 1) if line.startswith("<<<<<<< ")]
    if conflicts:
        return Rebased(patch, file, None, "conflict", target, conflicts)
    if said == "as it was":
        return Rebased(patch, file, patch.read_text(), said)
    if target.read_bytes() == new.read_bytes():
        return Rebased(patch, file, None, f"the new {file} has this change already: remove the patch")
    return Rebased(patch, file, header_of(patch.read_text()) + make_patch(file, new, target), said)


def rebase(
    patches: Sequence[Path], file_of: Callable[[Path], str], trees: tuple[Path, Path, Path], work: Path, merged: Path | None
) -> list[Rebased]:
    """All patches on the new tree, none of which is written. The arguments: see rebase_one()."""
    work.mkdir(parents=True, exist_ok=True)
    return [rebase_one(patch, file_of(patch), trees, work, merged) for patch in patches]


def write_back(found: Sequence[Rebased]) -> None:
    """Replaces the patches: all are whole beside their places before the first is."""
    parts = []
    for one in found:
        part = one.patch.with_name(f".{one.patch.name}.part")
        part.write_text(one.text)
        parts.append((part, one.patch))
    for part, patch in parts:
        os.replace(part, patch)
