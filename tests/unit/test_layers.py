"""Layers of the Python package (no cycle, no upward import, small functions and files), and the C headers that each target sees."""

import ast
import json
import re
import subprocess
import sys

import pytest

from helpers.models import ROOT
from helpers.native import BUILD

PACKAGE = ROOT / "py" / "ggml_ext"
GRAPH = ROOT / "scripts" / "build" / "import_graph.py"
MAX_LINES, MAX_PARAMETERS, MAX_FILE = 80, 8, 500


def run_import_graph(package) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, GRAPH, package], capture_output=True, text=True)


def test_modules_import_only_packages_below_them():
    done = run_import_graph(PACKAGE)
    assert done.returncode == 0 and "no import cycle" in done.stdout, done.stdout


def test_cycles_and_upward_imports_are_reported(tmp_path):
    for package in ("_base", "_plan"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "_base" / "a.py").write_text("from .._plan.b import f\n")
    (tmp_path / "_plan" / "b.py").write_text("x = 1\n")
    done = run_import_graph(tmp_path)
    assert done.returncode == 1 and "_base.a" in done.stdout and "_plan.b" in done.stdout
    (tmp_path / "_base" / "a.py").write_text("x = 1\n")
    assert run_import_graph(tmp_path).returncode == 0
    (tmp_path / "_plan" / "c.py").write_text("from . import b\n")
    (tmp_path / "_plan" / "b.py").write_text("from . import c\n")
    assert run_import_graph(tmp_path).returncode == 1


def n_parameters(function: ast.FunctionDef) -> int:
    a = function.args
    n = len(a.posonlyargs + a.args + a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg)
    return n - bool(a.args and a.args[0].arg in ("self", "cls"))


def list_large_parts(text: str) -> list[str]:
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lines = {f.name: f.end_lineno - f.lineno + 1 for f in functions}
    return [f.name for f in functions if lines[f.name] > MAX_LINES or n_parameters(f) > MAX_PARAMETERS]


def test_functions_and_files_are_small():
    files = {p.relative_to(PACKAGE): p.read_text() for p in PACKAGE.rglob("*.py") if "convert" not in p.parts}
    assert files and {str(p): large for p, text in files.items() if (large := list_large_parts(text))} == {}
    assert [str(p) for p, text in files.items() if text.count("\n") > MAX_FILE] == []


def test_large_functions_are_noticed():
    assert list_large_parts("def f(" + ", ".join("abcdefghi") + "): pass") == ["f"]
    assert list_large_parts("class A:\n    def f(self, " + ", ".join("abcdefgh") + "): pass") == []
    assert list_large_parts("def f():\n" + "    x = 1\n" * MAX_LINES) == ["f"]


def test_command_lines_stay_in_the_console():
    """Only the commands and _console import argparse."""
    users = {p.relative_to(PACKAGE).parts[0] for p in PACKAGE.rglob("*.py") if "import argparse" in p.read_text() and "convert" not in p.parts}
    commands = {f"{name}.py" for name in ("__main__", "bench", "evaluate", "export", "gpu_report", "inspect", "libdir", "quantize", "scale_adapter", "upload")}
    assert users == {"_console", *commands}


# --- C headers of each target

# All other targets see only hooks/, so that no upstream file can include simd.h or all.h by accident.
SEES_BASE = ("ggml-base", "llama-common", "server-context", "llama-imatrix", "ggml-cuda", "ggml-metal", "ggml-vulkan")
SEES_ALL = ("ggml-cpu", "ggml-ext-", "fuzz-", "threadpool-stress")  # prefixes: variants of the CPU backend, and test programs


def test_headers_reach_only_the_targets_that_need_them():
    commands = BUILD / "compile_commands.json"
    if not commands.exists():
        pytest.skip(f"{commands} is not there: make install writes it")
    directories: dict[str, set[str]] = {}
    for entry in json.loads(commands.read_text()):
        target = re.search(r"CMakeFiles/([^/]+)\.dir", entry["output"] if "output" in entry else entry["command"])[1]
        directories.setdefault(target, set()).update(re.findall(r"-I\S*?/(ggml_ext(?:/cpu)?)(?=\s)", entry["command"]))
    assert len(directories) > 20 and directories["ggml-base"] == {"ggml_ext"}
    for target, folders in directories.items():
        allowed = {"ggml_ext", "ggml_ext/cpu"} if target.startswith(SEES_ALL) else {"ggml_ext"} if target in SEES_BASE else set()
        assert folders <= allowed, f"{target} sees {folders - allowed}"
