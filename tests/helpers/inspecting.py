"""ggml-ext inspect, as a process or in this process."""

from __future__ import annotations

import json
import subprocess
import sys

from ggml_ext import inspect as program
from helpers.commands import run_main


def run_inspect(*args, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "ggml_ext.inspect", *map(str, args)], capture_output=True, text=True, timeout=300, **kwargs)


def inspect(*args, **kwargs) -> dict[str, list[str]]:
    """Run inspect, which must succeed, and return the columns of each line by the first column."""
    result = run_inspect(*args, **kwargs)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line}


def inspect_in_process(*args) -> subprocess.CompletedProcess:
    return run_main(program.main, *args)


def inspect_json(*args) -> dict:
    done = inspect_in_process(*args, "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)
