"""The programs and commands of the installed package."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

import ggml_ext
from ggml_ext import quantize as quantizer


def tool(name: str) -> Path:
    """Return the path of a llama.cpp tool of the installed package; skip the test if it is not built."""
    path = Path(ggml_ext.__file__).parent / "bin" / (name + (".exe" if sys.platform == "win32" else ""))
    if not path.is_file():
        pytest.skip(f"{name} is not built into the installed package")
    return path


def quantize_arguments(*args) -> list[str]:
    """Add --importance none unless the arguments choose calibration or importances."""
    args = [*map(str, args)]
    is_given = any(a.startswith(("--imatrix", "--importance", "--no-calibration", "--calibration")) for a in args)
    return [*args, *([] if is_given else ["--importance", "none"])]


def quantize_command(*args) -> list[str]:
    return [sys.executable, "-m", "ggml_ext.quantize", *quantize_arguments(*args)]


def run_main(main, *args) -> subprocess.CompletedProcess:
    """Run a command's main() in this process, which saves the third of a second that imports take."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*map(str, args)])
        except SystemExit as e:  # argparse exits on errors
            code = e.code
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def run_quantize(*args, **kwargs) -> subprocess.CompletedProcess:
    """Run the quantizer, in its own process if there are options for subprocess.run(). A failure raises nothing."""
    if kwargs:
        return subprocess.run(quantize_command(*args), capture_output=True, text=True, timeout=300, **kwargs)
    return run_main(quantizer.main, *quantize_arguments(*args))


def quantize(*args) -> subprocess.CompletedProcess:
    """Run the quantizer, which must succeed."""
    result = run_quantize(*args)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result
