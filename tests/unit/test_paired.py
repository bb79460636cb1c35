"""scripts/tools/paired.py: differences between two types."""

import re
import subprocess
import sys

import pytest

from helpers.models import ROOT

SCRIPT = ROOT / "scripts" / "tools" / "paired.py"


def paired(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_pair(model, lib):
    """Both ways round: the same difference with the other sign. 10 chunks tell three bits from two by many errors."""
    done = paired("--pairs", "itq3_t:q2_k,q2_k:itq3_t", "-m", model, "--chunks", 10, "-t", 2)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\| (\w+) \| (\w+) \| (-?[\d.]+) \+- ([\d.]+) \|", done.stdout, re.M)
    by_pair = {row[:2]: (float(row[2]), float(row[3])) for row in found}
    value, error = by_pair["ITQ3_T", "Q2_K"]
    other, _ = by_pair["Q2_K", "ITQ3_T"]
    assert value < -5 * error
    # base logits are stored in 16 bits of their range: the same 2560 tokens, each with an error of their own
    assert abs(value + other) < 0.1 * abs(value)


@pytest.mark.parametrize(("pairs", "part"), [("q3_k", "need TYPE:TYPE"), ("itq3_t:q9_k", "unknown type 'q9_k'")])
def test_bad_input(pairs, part):
    done = paired("--pairs", pairs)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and part in done.stderr
