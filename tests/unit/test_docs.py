"""What documents and errors tell a reader to type."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata

import pytest

from ggml_ext._base import extras
from helpers.native import ROOT

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
    command = extras.install_command("hf", ["torch"])
    assert command.startswith("pip install ") and "extra" not in command and "matplotlib" not in command
    for requirement in PROJECT["optional-dependencies"]["hf"]:
        assert re.split("[<>=]", requirement)[0] in command
    monkeypatch.setattr(extras.metadata, "requires", lambda _: ["a>=1", 'b<2,>=1; extra == "hf"', "c ; extra == 'hf'", "d; extra == 'hfx'"])
    assert extras.install_command("hf", []) == "pip install 'b<2,>=1' c"

    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.metadata, "requires", missing)
    assert extras.install_command("hf", ["torch", "sentencepiece"]) == "pip install torch sentencepiece"


def test_packages_of_an_extra_can_be_installed_alone():
    """pip install '.[hf]' compiles all of llama.cpp again."""
    requirements = PROJECT["optional-dependencies"]["hf"]
    assert f"    pip install {' '.join(map(repr, requirements))}\n" in (ROOT / "docs/using/quantize.md").read_text("utf-8")


def test_every_program_is_built_a_command_and_listed():
    (built,) = re.findall(r"set\(tools (.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.S)
    commands = {name for name in PROJECT["scripts"] if not name.startswith("ggml-ext")}
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "using" / "programs.md").read_text("utf-8"), re.M)
    assert commands == set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert commands == {*built.split(), "rpc-server", "convert_lora_to_gguf.py"} - {"ggml-rpc-server"}


# Paths of this repository in running text, in back quotes or not.
PATHS = r"`((?:ggml_ext|cuda|metal|vulkan|py|tests|scripts|docs|data)/[\w./-]+)`|(?<![\w/])(docs/[\w/-]+\.md)|(scripts/\w+/\w+\.py)"


def anchors(text: str) -> set[str]:
    """What a link may name behind #, as GitHub makes it of the headings."""
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(name: str, text: str, documents: dict[str, str]) -> list[str]:
    """Files, links and headings that a document names and that are not there."""
    found = [path for groups in re.findall(PATHS, text) for path in groups if path and not (ROOT / path).exists()]
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        shown = str(target.relative_to(ROOT))
        if not target.exists() or anchor and anchor not in anchors(documents.get(shown, "")):
            found.append(link)
    return [f"{name}: {path}" for path in found]


def test_documents_name_files_and_headings_that_exist():
    documents = {path: text for path, text in texts().items() if path.endswith(".md")}
    assert [path for name, text in documents.items() for path in broken(name, text, documents)] == []


@pytest.mark.parametrize("text", ["`docs/no.md`", "[x](docs/no.md)", "[x](docs/README.md#no)", "[x](#no)", "scripts/tools/no.py"])
def test_a_broken_link_is_found(text):
    assert len(broken("README.md", f"# Head\n{text}\n", {"README.md": "# Head"})) >= 1
    assert broken("README.md", "[x](#head) [y](docs/README.md)", {"README.md": "# Head"}) == []


def code_lines() -> list[tuple[str, str]]:
    """(document, line) of all code blocks."""
    documents = {path: text for path, text in texts().items() if path.endswith(".md")}
    return [(path, line) for path, text in documents.items() for line in re.findall(r"^ {4,}(.+)$", text, re.M)]


def commands() -> set[tuple[str, str]]:
    """(document, command) where a line, or a part of one, begins with a name like those of this project."""
    begins = ((path, begin.split(" ")[0]) for path, line in code_lines() for begin in re.split(r"&& |\| |; |\$\(", line))
    return {(path, name) for path, name in begins if name.startswith(("llama-", "ggml-", "rpc-"))}


def test_every_command_in_a_code_block_exists():
    named = commands()
    assert {"llama-server", "rpc-server"} <= {name for _, name in named}
    assert [(path, name) for path, name in sorted(named) if name not in PROJECT["scripts"]] == []


def test_every_module_script_and_target_in_a_code_block_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path, line in code_lines():
        for module in re.findall(r"python -m ggml_ext\.(\w+)", line):
            assert (ROOT / "py" / "ggml_ext" / f"{module}.py").is_file(), f"{path}: {line}"
        for script in re.findall(r"python (scripts/\S+\.py)", line):
            assert (ROOT / script).is_file(), f"{path}: {line}"
        for target in re.findall(r"^make ([\w-]+)", line):
            assert target in targets, f"{path}: {line}"
