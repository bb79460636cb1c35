"""A Slurm cluster of two nodes on the loopback interface, which needs Debian's packages slurmctld, slurmd, slurm-client and munge."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
NODES = ("n1", "n2")
WAIT = 240  # seconds; Slurm may hold a requeued job for two minutes

CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={directory}/munge/socket
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdSpoolDir={directory}/%n
SlurmUser={user}
SlurmdUser={user}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def wait_until(condition, what: str, seconds: float = WAIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s until {what}"
        time.sleep(0.02)


def find_processes(directory: Path, word: str) -> list[int]:
    """List the processes that work in a directory and have a word in their command or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(directory) and word.encode() in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


class Cluster:
    """A running cluster."""

    def __init__(self, directory: Path):
        self.directory, self.processes = directory, {}
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def start(self, name: str, *command: str) -> None:
        with open(self.directory / f"{name}.log", "w") as log:
            self.processes[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        self.processes[name].send_signal(number)
        self.processes.pop(name).wait(30)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        return subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=True, timeout=60).stdout

    def lose_node(self, name: str, directory: Path) -> None:
        """End a node at once, with the processes that it runs in a directory, and tell the controller, which would notice later."""
        self.stop(name, signal.SIGKILL)
        for process in find_processes(directory, f"SLURMD_NODENAME={name}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=test")


@contextlib.contextmanager
def start_cluster(directory: Path):
    """Start a cluster. Without its programs the test is skipped, which GGML_EXT_NO_SKIP=1 makes a failure."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"{missing[0]} is not installed (Debian: slurmctld, slurmd, slurm-client, munge)")
    cluster, munge = Cluster(directory), directory / "munge"
    munge.mkdir(mode=0o700)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o600)
    (directory / "state").mkdir()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    (directory / "slurm.conf").write_text(CONFIG.format(directory=directory, ports=ports, user=getpass.getuser()))
    files = [f"--{option}={munge / name}" for option, name in (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("seed-file", "seed"), ("log-file", "log"))]
    try:
        cluster.start("munged", "munged", "--foreground", "--force", *files)
        wait_until((munge / "socket").exists, "munged listens")
        cluster.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            cluster.start(node, "slurmd", "-D", "-N", node)
        wait_until(lambda: "2 idle" in subprocess.run(
            ["sinfo", "-h", "-o", "%D %t"], env=cluster.environment, capture_output=True, text=True).stdout, "both nodes are idle")
        yield cluster
    finally:
        for name in [*cluster.processes][::-1]:
            cluster.stop(name)
