"""Limits of memory and CPUs in the files of /proc and /sys."""

import os

import pytest

from ggml_ext._base.memory import available_memory
from ggml_ext._base.threads import usable_cores
from ggml_ext._base.units import GIB

V2 = ("cgroup2", "")
OLD_MEMORY, OLD_CPU = ("memory", "memory"), ("cpu,cpuacct", "cpu,cpuacct")
NO_LIMIT = 9223372036854771712  # in cgroup version 1


def fake_root(root, path: str, mount: tuple[str, str], mounted: str, files: dict[str, object]):
    """Create a machine with 50 GiB of free memory.

    Args:
        root: the directory that replaces /.
        path: the control group of the process.
        mount: type and place of the cgroup file system.
        mounted: the group that the process sees as the root.
        files: contents by path below that place.
    """
    folder, controllers = mount
    point = "/sys/fs/cgroup" + ("" if mount == V2 else f"/{folder}")
    kind = "cgroup2 cgroup2 rw,nsdelegate" if mount == V2 else f"cgroup cgroup rw,{controllers}"
    contents = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable:   {50 << 20} kB\nCached: 7 kB\n",
        "proc/self/cgroup": f"5:pids:/elsewhere\n{0 if mount == V2 else 4}:{controllers}:{path}\n",
        "proc/self/mountinfo": f"22 28 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n35 22 0:32 {mounted} {point} rw,relatime shared:9 - {kind}\n",
    }
    contents |= {f"{point}/{name}".lstrip("/"): f"{content}\n" for name, content in files.items()}
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(("group", "n_gib"), [
    ({}, 50),
    ({"memory.max": "max", "memory.current": GIB}, 50),
    ({"memory.max": 16 * GIB, "memory.current": 15 * GIB}, 1),
    ({"memory.max": 16 * GIB, "memory.high": 12 * GIB, "memory.current": 5 * GIB}, 7),
    ({"memory.max": 16 * GIB}, 50),
    # A model of 14 GiB was read: the kernel drops its pages when memory is needed.
    ({"memory.max": 16 * GIB, "memory.current": 15 * GIB, "memory.stat": f"anon 5\ninactive_file {14 * GIB}\nactive_file 3\n"}, 15),
    ({"memory.max": 16 * GIB, "memory.current": 17 * GIB, "memory.stat": "anon 5\n"}, 0),
    ({"memory.max": 999 * GIB, "memory.current": GIB, "memory.stat": "inactive_file 0\n"}, 50),
])
def test_memory_is_limited_by_the_container(tmp_path, group, n_gib):
    """The page cache counts as used in a control group."""
    assert available_memory(fake_root(tmp_path, "/", V2, "/", group)) == n_gib * GIB


def group_v2(folder: str, limit: object, used: int) -> dict[str, object]:
    """Return the files of a cgroup version 2."""
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used}


def group_v1(folder: str, limit: int, used: int, n_file: int = 0) -> dict[str, object]:
    stat = f"inactive_file 7\ntotal_inactive_file {n_file}"
    return {f"{folder}/memory.limit_in_bytes": limit, f"{folder}/memory.usage_in_bytes": used, f"{folder}/memory.stat": stat}


@pytest.mark.parametrize(("path", "mount", "mounted", "groups", "n_gib"), [
    # A systemd scope without a limit in a slice with one.
    ("/user.slice/a.scope", V2, "/", group_v2("user.slice", 8 * GIB, 2 * GIB) | group_v2("user.slice/a.scope", "max", GIB), 6),
    # Slurm: a step within a job.
    ("/slurm/job_7/step_0", V2, "/", group_v2("slurm/job_7", 32 * GIB, GIB) | group_v2("slurm/job_7/step_0", 4 * GIB, GIB), 3),
    ("/slurm/uid_1/job_7/step_0", OLD_MEMORY, "/", group_v1("slurm/uid_1/job_7", 5 * GIB, 2 * GIB, GIB) | group_v1(".", NO_LIMIT, 9 * GIB), 4),
    # Containers of version 1, which see their own group as the root, and groups in them.
    ("/docker/c0ffee", OLD_MEMORY, "/docker/c0ffee", group_v1(".", 3 * GIB, GIB), 2),
    ("/docker/c0ffee/job", OLD_MEMORY, "/docker/c0ffee", group_v1(".", 9 * GIB, GIB) | group_v1("job", 3 * GIB, GIB), 2),
    ("/../other", V2, "/", group_v2(".", 3 * GIB, GIB), 2),
    # Limits of unrelated groups do not count.
    ("/a", V2, "/", group_v2("b", 3 * GIB, GIB), 50),
])
def test_memory_is_limited_by_all_parent_groups(tmp_path, path, mount, mounted, groups, n_gib):
    assert available_memory(fake_root(tmp_path, path, mount, mounted, groups)) == n_gib * GIB


@pytest.mark.parametrize(("mount", "files", "n"), [
    (V2, {"a/b/cpu.max": "max 100000"}, 64),
    (V2, {"a/b/cpu.max": "200000 100000"}, 2),
    (V2, {"a/cpu.max": "350000 100000", "a/b/cpu.max": "max 100000"}, 4),
    (V2, {"a/b/cpu.max": "10000 100000"}, 1),
    (V2, {"a/b/cpu.max": "9900000 100000"}, 64),
    (OLD_CPU, {"a/cpu.cfs_quota_us": 300000, "a/cpu.cfs_period_us": 50000, "a/b/cpu.cfs_quota_us": -1, "a/b/cpu.cfs_period_us": 50000}, 6),
])
def test_threads_follow_quotas(tmp_path, monkeypatch, mount, files, n):
    """The machine has 64 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    assert usable_cores(fake_root(tmp_path, "/a/b", mount, "/", files)) == n


def test_other_systems_have_no_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(3), raising=False)
    assert usable_cores(tmp_path) == 3
