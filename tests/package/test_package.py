"""The installed package: commands on the PATH, run paths, the portable switch."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import textwrap
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest

import ggml_ext
import wheel
from ggml_ext._base.errors import UserError
from ggml_ext._formats.tensor_types import IMATRIX_TYPES
from ggml_ext._native import library, programs
from helpers.commands import tool
from helpers.errors import mount_namespace_prefix
from helpers.native import ROOT

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
BIN = Path(ggml_ext.__file__).parent / "bin"


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run(name):
    result = subprocess.run([Path(sys.executable).parent / name, "--help"], capture_output=True, text=True, timeout=60)
    # rpc-server and llama-quantize print their help and exit with 1; the converter of adapters needs the extra hf.
    assert result.returncode in ((0, 1) if name in ("rpc-server", "llama-quantize", "convert_lora_to_gguf.py") else (0,))
    output = result.stdout + result.stderr
    assert "usage" in output.lower() or "convert_lora_to_gguf.py needs torch" in output


def test_version_names_llama_cpp(tmp_path):
    """The version is that of the built libraries, or the pin if there are none."""
    pin = tomllib.loads((ROOT / "ggml_ext" / "upstream.toml").read_text())
    version, command = metadata.version("ggml-ext"), [Path(sys.executable).parent / "ggml-ext", "--version"]
    no_libraries = {**os.environ, "GGML_EXT_LIB_DIR": str(tmp_path)}
    assert subprocess.run(command, capture_output=True, text=True, env=no_libraries).stdout == (
        f"ggml-ext {version} (llama.cpp {pin['llama_cpp']}, ggml {pin['ggml']})\n"
    )
    libraries = [ctypes.CDLL(str(next(BIN.glob(f"lib{n}.*")))) for n in ("llama", "ggml-base")]
    functions = [libraries[0].llama_version, libraries[1].ggml_version]
    for function in functions:
        function.restype = ctypes.c_char_p
    llama_cpp, ggml = (function().decode() for function in functions)
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"ggml-ext {version} (llama.cpp {llama_cpp}, ggml {ggml})\n"


def test_version_follows_other_libraries(monkeypatch, tmp_path):
    """A package that is built from another llama.cpp reports that version."""
    for name, function, value in (("llama", "llama_version", "9.1"), ("ggml-base", "ggml_version", "9.2")):
        code = f'const char * {function}(void) {{ return "{value}"; }}'
        subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", tmp_path / f"lib{name}.so.0"], input=code, text=True, check=True)
    monkeypatch.setenv("GGML_EXT_LIB_DIR", str(tmp_path))
    assert library.upstream_versions() == ("9.1", "9.2")


def test_programs_come_from_the_library_directory(monkeypatch, tmp_path, lib):
    """With GGML_EXT_LIB_DIR the package's programs are not used: they may be from another build."""
    assert programs.find_tool("llama-cli") == BIN / "llama-cli" and programs.find_tool("no-such-program") is None
    (tmp_path / "build").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in (str(tmp_path / "build"), "build"):  # programs are started in other directories
        monkeypatch.setenv("GGML_EXT_LIB_DIR", folder)
        with pytest.raises(UserError, match="GGML_EXT_LIB_DIR is .*build, which has no llama-imatrix: .* unset it"):
            programs.find_tool("llama-imatrix")
        (program := tmp_path / "build" / "llama-imatrix").write_text("")
        assert programs.find_tool("llama-imatrix") == program
        program.unlink()
    name = Path(sys.executable).parent / "llama-quantize"
    done = subprocess.run([name, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: GGML_EXT_LIB_DIR is ") and done.stderr.count("\n") == 1
    monkeypatch.setenv("GGML_EXT_LIB_DIR", str(BIN))
    assert "usage" in subprocess.run([name, "--help"], capture_output=True, text=True, timeout=60).stdout


def test_llama_quantize_lists_ggml_ext_types():
    text = subprocess.run([tool("llama-quantize"), "--help"], capture_output=True, text=True).stdout
    for info in ggml_ext.WEIGHT_TYPES.values():
        assert f"{int(info.id)}  or  {info.name.upper()}" in text


@pytest.mark.skipif(sys.platform != "linux", reason="ELF run paths")
def test_run_paths_are_relative():
    """The only run path is $ORIGIN: another llama.cpp is never loaded, and the directory can move."""
    assert len([p for p in BIN.iterdir() if p.is_file()]) > 15
    assert not wheel.foreign_run_paths(BIN)
    maps = subprocess.run(["ldd", BIN / "llama-server"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}).stdout
    libraries = [line for line in maps.splitlines() if "libggml" in line or "libllama" in line]
    assert libraries and all(str(BIN) in line for line in libraries)


@pytest.mark.skipif(sys.platform != "linux", reason="LD_LIBRARY_PATH")
def test_library_path_of_other_programs_is_ignored(tmp_path):
    """Programs that start llama-server, and imported modules, set LD_LIBRARY_PATH to their own libraries."""
    names = [path.name for path in BIN.glob("lib*.so.0")]
    assert "libllama.so.0" in names and "libggml-base.so.0" in names
    for name in names:
        subprocess.run(["cc", "-shared", "-xc", os.devnull, "-o", tmp_path / name], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    code = "from ggml_ext._native import library; print(library.load() and library.load_rules() is not None)"
    for command in (["llama-server", "--version"], ["llama-quantize", "--help"], [sys.executable, "-c", code]):
        path = Path(sys.executable).parent / command[0]
        done = subprocess.run([path, *command[1:]], env=env, capture_output=True, text=True, timeout=60)
        assert "undefined symbol" not in done.stderr and any(word in done.stdout + done.stderr for word in ("version: ", "usage", "True")), done


@pytest.mark.skipif(sys.platform != "linux", reason="the script of docs/using/programs.md for Linux")
def test_replacement_script_drops_foreign_backends(tmp_path):
    text = (ROOT / "docs" / "using" / "programs.md").read_text()
    script = tmp_path / "llama-server"
    server = str(Path(sys.executable).parent / "llama-server")
    lines = re.search(r"^( +)#!/bin/sh\n.*?\n\n", text, re.M | re.S)[0]
    script.write_text(textwrap.dedent(lines).replace("/home/you/.venv/bin/llama-server", server))
    script.chmod(0o755)
    env = {**os.environ, "GGML_BACKEND_PATH": str(tmp_path / "no-backend.so")}
    logs = [subprocess.run([p, "--list-devices"], env=env, capture_output=True, text=True, timeout=60) for p in (server, script)]
    assert ["no-backend.so" in done.stdout + done.stderr for done in logs] == [True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
@pytest.mark.parametrize("name", ["llama", "mtmd"])
def test_unversioned_libraries_are_small_files(name):
    """A wheel cannot hold links, and a program that loads both names must not get two copies of the code."""
    path = BIN / f"lib{name}.so"
    assert not path.is_symlink() and path.stat().st_size < 100_000
    assert f"lib{name}.so.0" in wheel.dynamic_section(path)[0]


def test_licences_of_the_programs_are_installed():
    assert "MIT" in (BIN.parent / "licenses" / "llama.cpp" / "LICENSE").read_text()


@pytest.mark.slow
def test_read_only_source_tree_builds(tmp_path):
    """With the option of docs/using/install.md pip reaches CMake's error for GGML_HIP."""
    prefix = mount_namespace_prefix()
    if prefix is None or find_spec("scikit_build_core") is None:
        pytest.skip("a shell that may mount, and scikit-build-core")
    (option,) = re.findall(r"pip install \. (-C build-dir=)\S+", (ROOT / "docs" / "using" / "install.md").read_text())
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"'
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", tmp_path, "-C", "cmake.define.GGML_HIP=ON"]
    build = [*prefix, script, ROOT, *build, *f"{option}{tmp_path}/build".split()]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 1 and "ggml-ext has no kernels for them" in done.stderr + done.stdout


def test_portable_switch_changes_a_configured_directory(tmp_path):
    def configure(portable: str) -> dict[str, str]:
        subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
                        f"-DGGML_EXT_PORTABLE={portable}", "-DGGML_EXT_UI=OFF"], check=True, capture_output=True)
        lines = (tmp_path / "CMakeCache.txt").read_text().splitlines()
        return {k.split(":")[0]: v for k, _, v in (line.partition("=") for line in lines if ":" in line)}

    for portable, native in (("OFF", "ON"), ("ON", "OFF"), ("OFF", "ON")):
        cache = configure(portable)
        assert (cache["GGML_NATIVE"], cache["GGML_BACKEND_DL"], cache["GGML_CPU_ALL_VARIANTS"]) == (native, portable, portable)


def test_imatrix_types_include_those_of_ggml(lib):
    requires = ctypes.CDLL(str(lib.path)).ggml_quantize_requires_imatrix
    requires.restype = ctypes.c_bool
    required = {t for t in gguf.GGMLQuantizationType if requires(int(t))}
    assert required and required <= set(IMATRIX_TYPES)
