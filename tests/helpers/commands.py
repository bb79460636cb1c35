"""The installed package as a user has it: its programs, and the quantizer as a process."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

import ggml_ext


def tool(name: str) -> Path:
    """One of the llama.cpp tools of the installed package; skips if it is not built."""
    path = Path(ggml_ext.__file__).parent / "bin" / (name + (".exe" if sys.platform == "win32" else ""))
    if not path.is_file():
        pytest.skip(f"{name} is not built into the installed package")
    return path


def quantize_command(*args) -> list[str]:
    """Without calibration, unless the arguments say where importances come from."""
    args = [*map(str, args)]
    chosen = any(a.startswith(("--imatrix", "--importance", "--no-calibration", "--calibration")) for a in args)
    return [sys.executable, "-m", "ggml_ext.quantize", *args, *([] if chosen else ["--importance", "none"])]


def run_quantize(*args, **kwargs) -> subprocess.CompletedProcess:
    """The quantizer as a process of its own; does not raise when it fails."""
    return subprocess.run(quantize_command(*args), capture_output=True, text=True, timeout=300, **kwargs)


def quantize(*args) -> subprocess.CompletedProcess:
    """run_quantize() that has to succeed."""
    result = run_quantize(*args)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def run_main(main, *args) -> subprocess.CompletedProcess:
    """A command's main() in this process, which has the imports behind it; other tests run the commands as processes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, args)])
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())
