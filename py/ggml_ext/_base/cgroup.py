"""The control groups of this process, of both versions: what containers, job schedulers and service managers limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def own_groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the group that the process is in and of all groups above it, as far as they are mounted. controller: "memory" or
    "cpu"; root: where proc and sys are."""
    try:
        groups = (root / "proc" / "self" / "cgroup").read_text().splitlines()
        mounts = (root / "proc" / "self" / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths = {}  # by controller, of version 2 by ""
    for _, controllers, path in (line.split(":", 2) for line in groups):
        paths |= dict.fromkeys(controllers.split(","), path)
    for before, _, after in (line.partition(" - ") for line in mounts):
        kind, _, options = after.split(maxsplit=2)
        key = {"cgroup2": "", "cgroup": controller}.get(kind)
        if key not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        mounted, point = before.split()[3:5]
        path = os.path.relpath(paths[key], mounted)
        group = PurePosixPath("." if path.startswith("..") else path)  # a container may see no more than its own group
        yield from (root / point.lstrip("/") / folder for folder in (group, *group.parents))


def read_values(path: Path) -> list[str]:
    """The words of a file of a group; nothing where it is not there."""
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []
