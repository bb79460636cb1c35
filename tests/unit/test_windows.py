"""The Python package on a system made similar to Windows. tests/package/test_wine.py runs the same checks under Wine."""

import os
import subprocess
import sys

import pytest

from helpers import windows_checks
from helpers.models import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="pretends on Linux")
def test_package_works_without_what_windows_lacks(tmp_path):
    command = [sys.executable, ROOT / "tests" / "helpers" / "windows_checks.py", "--pretend", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for check in windows_checks.CHECKS for word in ("passed", check.__name__)]
