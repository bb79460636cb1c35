"""Linux control groups (versions 1 and 2) of this process: the limits of containers, job schedulers and service managers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def own_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the mounted directories of the process's control group and of all groups above it.

    controller: "memory" or "cpu". root: the directory that holds proc and sys.
    """
    try:
        groups = (root / "proc" / "self" / "cgroup").read_text().splitlines()
        mounts = (root / "proc" / "self" / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths: dict[str, str] = {}  # by controller; version 2 has the key ""
    for _, controllers, path in (line.split(":", 2) for line in groups):
        paths |= dict.fromkeys(controllers.split(","), path)
    for mount, _, source in (line.partition(" - ") for line in mounts):
        kind, _, options = source.split(maxsplit=2)
        key = {"cgroup2": "", "cgroup": controller}.get(kind)
        if key not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        mounted, mount_point = mount.split()[3:5]
        path = os.path.relpath(paths[key], mounted)
        group = PurePosixPath("." if path.startswith("..") else path)  # a container may see no more than its own group
        yield from (root / mount_point.lstrip("/") / directory for directory in (group, *group.parents))


def read_values(path: Path) -> list[str]:
    """Return the words of a control group's file; none if it does not exist."""
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []
