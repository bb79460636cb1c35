"""scripts/tools/gemv.py runs and compares like with like; its figures are for people, never tested."""

import subprocess
import sys

from ggml_ext import WEIGHT_TYPES
from helpers.native import ROOT


def test_products_agree():
    """The script itself fails where the two ways differ by more than the rounding of activations."""
    command = [sys.executable, ROOT / "scripts" / "tools" / "bench.py", "--gemv", "--rounds", "1", "--shapes", "512x768",
               "--types", ",".join(WEIGHT_TYPES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("| 512x768 |") for line in done.stdout.splitlines()) == len(WEIGHT_TYPES)


def test_columns_table():
    command = [sys.executable, ROOT / "scripts" / "tools" / "gemv.py", "--columns", "2,9", "--rounds", "1", "--shapes", "64x768",
               "--copies-mb", "0", "--threads", "1", "--types", "itq3_s,q3_k"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| 64x768 |")]
    assert [row[1] for row in rows] == ["ITQ3_S", "Q3_K"]
    assert all(float(cell.rstrip(" |")) > 0 for row in rows for cell in row[2:])
