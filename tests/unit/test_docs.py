"""Commands, flags, files and links in documents and errors."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata

import pytest

from ggml_ext._base import package
from helpers.native import ROOT

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def read_texts() -> dict[str, str]:
    """Return documents and sources by path."""
    command = ["git", "-C", ROOT, "ls-files", "*.md", "py/*.py", "scripts/*.py", "tests/*.py", "Makefile"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git checkout")
    return {name: (ROOT / name).read_text("utf-8") for name in done.stdout.split() if (ROOT / name).is_file()}


def test_no_text_installs_an_unregistered_name():
    """Anybody could register the name ggml-ext."""
    name = "ggml-ext" + "["
    assert [path for path, text in read_texts().items() if name in text] == []


def test_extra_is_installed_by_its_requirements(monkeypatch):
    command = package.install_command("hf", ["torch"])
    assert command.startswith("pip install ") and "extra" not in command and "matplotlib" not in command
    for requirement in PROJECT["optional-dependencies"]["hf"]:
        assert re.split("[<>=]", requirement)[0] in command
    monkeypatch.setattr(package.metadata, "requires", lambda _: ["a>=1", 'b<2,>=1; extra == "hf"', "c ; extra == 'hf'", "d; extra == 'hfx'"])
    assert package.install_command("hf", []) == "pip install 'b<2,>=1' c"

    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package.metadata, "requires", missing)
    assert package.install_command("hf", ["torch", "sentencepiece"]) == "pip install torch sentencepiece"


def test_documents_list_the_packages_of_an_extra():
    """pip install '.[hf]' would compile llama.cpp again."""
    requirements = PROJECT["optional-dependencies"]["hf"]
    assert f"    pip install {' '.join(map(repr, requirements))}\n" in (ROOT / "docs/using/inputs.md").read_text("utf-8")


def test_every_program_is_built_installed_and_listed():
    (tools,) = re.findall(r"set\(tools (.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.S)
    commands = {name for name in PROJECT["scripts"] if not name.startswith("ggml-ext")}
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "using" / "programs.md").read_text("utf-8"), re.M)
    assert commands == set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert commands == {*tools.split(), "rpc-server", "convert_lora_to_gguf.py"} - {"ggml-rpc-server"}


def test_programs_names_the_pinned_llama_cpp():
    pinned = tomllib.loads((ROOT / "ggml_ext" / "upstream.toml").read_text("utf-8"))
    text = (ROOT / "docs" / "using" / "programs.md").read_text("utf-8")
    assert f"{pinned['llama_cpp']}, commit {pinned['commit']}" in " ".join(text.split())
    assert f"{pinned['package']}=={pinned['version']}" in text


# Paths of this repository in running text, with or without backquotes.
PATHS = r"`((?:ggml_ext|cuda|metal|vulkan|py|tests|scripts|docs|data)/[\w./-]+)`|(?<![\w/])(docs/[\w/-]+\.md)|(scripts/\w+/\w+\.py)"


def documents() -> dict[str, str]:
    """Return all Markdown files by path."""
    return {path: text for path, text in read_texts().items() if path.endswith(".md")}


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub derives from the headings."""
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def find_broken(name: str, text: str, pages: dict[str, str]) -> list[str]:
    """List the files, links and headings that a document names and that do not exist."""
    broken = [path for groups in re.findall(PATHS, text) for path in groups if path and not (ROOT / path).exists()]
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        page = pages.get(str(target.relative_to(ROOT)), "")
        if not target.exists() or anchor and anchor not in anchors(page):
            broken.append(link)
    return [f"{name}: {path}" for path in broken]


def test_documents_name_files_and_headings_that_exist():
    pages = documents()
    assert [path for name, text in pages.items() for path in find_broken(name, text, pages)] == []


@pytest.mark.parametrize("text", ["`docs/no.md`", "[x](docs/no.md)", "[x](docs/README.md#no)", "[x](#no)", "scripts/tools/no.py"])
def test_broken_link_is_noticed(text):
    assert len(find_broken("README.md", f"# Head\n{text}\n", {"README.md": "# Head"})) >= 1
    assert find_broken("README.md", "[x](#head) [y](docs/README.md)", {"README.md": "# Head"}) == []


def test_sources_name_documents_that_exist():
    sources = {path: text for path, text in read_texts().items() if path.endswith(".py") and path != "tests/unit/test_docs.py"}
    named = {(path, page) for path, text in sources.items() for page in re.findall(r"(?<![\w/])docs/\w+/[\w-]+\.md", text)}
    assert named and [(path, page) for path, page in sorted(named) if not (ROOT / page).is_file()] == []


def test_every_page_is_listed():
    text = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("*/*.md")}
    assert pages == set(re.findall(r"\]\((\w+/[\w-]+\.md)\)", text))


def test_every_package_has_its_place():
    text = (ROOT / "docs" / "maintaining" / "places.md").read_text("utf-8")
    packages = {path.parent.name for path in (ROOT / "py" / "ggml_ext").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(\w+)` \|", text, re.M))


def test_functions_are_in_the_files_that_documents_name():
    named = [(name, path) for text in documents().values() for name, path in re.findall(r"`(?:\w+\.)?(\w+)\(\)` in `([\w/.-]+)`", text)]
    assert len(named) >= 4
    assert [(name, path) for name, path in named if f"{name}(" not in (ROOT / path).read_text("utf-8")] == []


def test_readme_is_a_landing_page():
    assert (ROOT / "README.md").read_text("utf-8").count("\n") <= 100


def code_lines() -> list[tuple[str, str]]:
    """Return (document, line) of all code blocks."""
    return [(path, line) for path, text in documents().items() for line in re.findall(r"^ {4,}(.+)$", text, re.M)]


def commands() -> set[tuple[str, str]]:
    """Return (document, command) of every command in a code block that may be one of this project."""
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


FLAGS = r"(?<![\w-])--[a-z][\w-]*"
OPTIONS = (ROOT / "docs" / "reference" / "options.md").read_text("utf-8")
FLAGS_BY_COMMAND = {command: set(re.findall(FLAGS, section)) for command, section in re.findall(r"^## ggml-ext (\w+)\n(.*?)(?=^## |\Z)", OPTIONS, re.M | re.S)}
OTHER_FLAGS = {"--lora", "--moments", "--moments-columns", "--layers", "--mtp-layers", "--spec-type", "--in-file", "--upgrade"}  # of llama.cpp's programs and of pip


def test_every_flag_of_a_command_in_a_code_block_exists():
    used = [(path, *match.groups()) for path, line in code_lines() if (match := re.match(r"ggml-ext (\w+) ([^#]*)", line))]
    assert len(used) > 30
    assert [row for row in used if (known := FLAGS_BY_COMMAND.get(row[1])) and not set(re.findall(FLAGS, row[2])) <= known] == []


@pytest.mark.parametrize("page", ["quantize", "inputs", "calibrate", "size", "long-runs", "evaluate", "publish", "export"])
def test_every_flag_that_a_page_explains_exists(page):
    text = (ROOT / "docs" / "using" / f"{page}.md").read_text("utf-8")
    flags = {flag for words in re.findall(r"`([^`]+)`", text) for flag in re.findall(FLAGS, words)}
    assert flags - set(re.findall(FLAGS, OPTIONS)) - OTHER_FLAGS == set()
