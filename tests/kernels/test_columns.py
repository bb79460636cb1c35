"""scripts/tools/columns.py: its tables. The speeds are not tested."""

import subprocess
import sys

import pytest

import columns
from helpers.native import LOCAL_ISAS, ROOT


def test_columns_table_has_a_row_per_type():
    command = [sys.executable, ROOT / "scripts" / "tools" / "columns.py", "--columns", "2,9", "--rounds", "1", "--shapes", "64x768",
               "--copies-mb", "0", "--threads", "1", "--types", "itq3_s,q3_k"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| 64x768 |")]
    assert [row[1] for row in rows] == ["ITQ3_S", "Q3_K"]


@pytest.mark.skipif("avx2" not in LOCAL_ISAS, reason="the peak is known of x86 CPUs")
def test_peak_table_has_a_row_per_type():
    command = [sys.executable, ROOT / "scripts" / "tools" / "columns.py", "--columns", "2,40", "--peak", "--rounds", "1", "--shapes", "64x768",
               "--copies-mb", "0", "--threads", "1", "--types", "itq3_s,itq3_t64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| 64x768 |")] == ["ITQ3_S", "ITQ3_T64"]


def test_columns_are_ratios_of_the_least_times(monkeypatch, capsys, lib):
    """With a fake clock: the second round is faster, and n columns take 1 + n times 10 microseconds."""
    calls = []

    def seconds(work, plan, threads, clock):
        calls.append(plan)
        n_columns = [1, 2, 9][(len(calls) - 1) % 3]
        return 1e-5 * (1 + n_columns) * (2 if len(calls) <= 3 else 1)

    monkeypatch.setattr(columns, "seconds", seconds)
    columns.main(["--columns", "2,9", "--rounds", "2", "--shapes", "64x768", "--copies-mb", "0", "--threads", "1", "--types", "itq3_s"])
    assert len(calls) == 6
    assert capsys.readouterr().out.splitlines()[-1] == "| 64x768 | ITQ3_S | 20 | 1.50 | 5.00 |"
