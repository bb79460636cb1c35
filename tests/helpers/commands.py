"""The installed package as a user has it: its programs and its commands."""

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
    """One of the llama.cpp tools of the installed package; skips if it is not built."""
    path = Path(ggml_ext.__file__).parent / "bin" / (name + (".exe" if sys.platform == "win32" else ""))
    if not path.is_file():
        pytest.skip(f"{name} is not built into the installed package")
    return path


def quantize_arguments(*args) -> list[str]:
    """Without calibration, unless the arguments say where importances come from."""
    args = [*map(str, args)]
    chosen = any(a.startswith(("--imatrix", "--importance", "--no-calibration", "--calibration")) for a in args)
    return [*args, *([] if chosen else ["--importance", "none"])]


def quantize_command(*args) -> list[str]:
    return [sys.executable, "-m", "ggml_ext.quantize", *quantize_arguments(*args)]


def run_main(main, *args) -> subprocess.CompletedProcess:
    """A command's main() in this process, which has the imports behind it: a process of its own takes a third of a second more."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*map(str, args)])
        except SystemExit as e:  # argparse's
            code = e.code
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def run_quantize(*args, **kwargs) -> subprocess.CompletedProcess:
    """The quantizer; does not raise when it fails. With options of subprocess.run() as a process of its own."""
    if kwargs:
        return subprocess.run(quantize_command(*args), capture_output=True, text=True, timeout=300, **kwargs)
    return run_main(quantizer.main, *quantize_arguments(*args))


def quantize(*args) -> subprocess.CompletedProcess:
    """run_quantize() that has to succeed."""
    result = run_quantize(*args)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result
