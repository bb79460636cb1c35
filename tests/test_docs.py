"""What documents and errors tell a reader to type."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata

import pytest
from native import ROOT

from ggml_ext import _extras

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def texts() -> dict[str, str]:
    """Documents and sources by their path."""
    command = ["git", "-C", ROOT, "ls-files", "*.md", "py/*.py", "scripts/*.py", "tests/*.py", "Makefile"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    return {name: (ROOT / name).read_text("utf-8") for name in listed.stdout.split() if (ROOT / name).is_file()}


def test_nothing_is_installed_by_a_name_that_no_index_has():
    """Anybody could take it."""
    name = "ggml-ext" + "["
    assert [path for path, text in texts().items() if name in text] == []


def test_an_extra_is_installed_by_its_requirements(monkeypatch):
    command = _extras.install_command("hf", ["torch"])
    assert command.startswith("pip install ") and "extra" not in command and "matplotlib" not in command
    for requirement in PROJECT["optional-dependencies"]["hf"]:
        assert re.split("[<>=]", requirement)[0] in command
    monkeypatch.setattr(_extras.metadata, "requires", lambda _: ["a>=1", 'b<2,>=1; extra == "hf"', "c ; extra == 'hf'", "d; extra == 'hfx'"])
    assert _extras.install_command("hf", []) == "pip install 'b<2,>=1' c"

    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_extras.metadata, "requires", missing)
    assert _extras.install_command("hf", ["torch", "sentencepiece"]) == "pip install torch sentencepiece"
