"""The bundle of the GPU check: its files are complete, and it runs with only Python and numpy. Without the CUDA backend, which takes an
hour to build."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy
import pytest

import gpu_build
import gpu_bundle
from helpers import native, vulkan

pytestmark = [pytest.mark.extra_build, pytest.mark.skipif(sys.platform != "linux", reason="the bundle is for Linux")]
NOWHERE = {"PATH": "/usr/bin:/bin"}  # no project, no toolkit, no virtual environment


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """Unpack a bundle of the package's programs, with the Vulkan backend if that is built."""
    programs = native.require_built(native.BUILD, "test-backend-ops").parent
    for name in (*gpu_build.PROGRAMS, *gpu_build.HOST_PROGRAMS):
        native.require_built(native.BUILD, name)
    folder = tmp_path_factory.mktemp("gpu")
    copy = folder / "programs"
    shutil.copytree(programs, copy, symlinks=True)
    if (vulkan.VULKAN / "bin" / "libggml-vulkan.so").exists():
        shutil.copy(vulkan.VULKAN / "bin" / "libggml-vulkan.so", copy)
    gpu_bundle.assemble(copy, folder / "bundle", ["90"])
    shutil.rmtree(copy)
    return folder / "bundle"


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Create a Python environment that has only numpy."""
    environment = tmp_path_factory.mktemp("python")
    venv.create(environment, symlinks=True)
    packages = next((environment / "lib").glob("python3*")) / "site-packages"
    for path in Path(numpy.__file__).parents[1].glob("numpy*"):
        (packages / path.name).symlink_to(path)
    return environment / "bin" / "python"


def run_gpu_check(bundle: Path, python: Path, tmp_path: Path, *args: str) -> tuple[int, dict, str]:
    """Run ./gpu-check --rehearse and return exit code, report and standard output."""
    done = subprocess.run([bundle / "gpu-check", "--rehearse", *args], cwd=tmp_path, capture_output=True, text=True, timeout=1200,
                          env={**NOWHERE, "PYTHON": str(python)})
    print(done.stdout + done.stderr)
    assert "Traceback" not in done.stderr
    assert (tmp_path / "gpu-check.md").exists()
    return done.returncode, json.loads((tmp_path / "gpu-check.json").read_text()), done.stdout


def test_bundle_has_every_library(bundle):
    """Checks with ldd: a library outside the bundle is one of every such machine, or the compiler's, which lib/ has too."""
    programs = [path for path in (bundle / "bin").iterdir() if path.is_file()]
    assert {*gpu_build.PROGRAMS, *gpu_build.HOST_PROGRAMS} <= {path.name for path in programs}
    for program in programs:
        output = subprocess.run(["ldd", program], capture_output=True, text=True, env=NOWHERE).stdout
        for name, path in re.findall(r"^\s*(\S+) => (.*?)(?: \(0x|$)", output, re.M):
            outside = gpu_bundle.PROVIDED.match(name) or (bundle / "lib" / name).exists()
            assert outside or Path(path).parent == bundle / "bin", f"{program.name} needs {name}, which is {path}"


def test_bundle_runs_on_an_old_system(bundle, tmp_path):
    assert gpu_bundle.newest_glibc(bundle) <= gpu_bundle.MAX_GLIBC
    # lib/ has the compiler's libraries for a system without them.
    assert {"libstdc++.so.6", "libgcc_s.so.1"} <= {path.name for path in (bundle / "lib").iterdir()}


def test_missing_program_is_named(tmp_path):
    with pytest.raises(gpu_build.BuildError, match="has no llama-bench, "):
        gpu_bundle.assemble(tmp_path, tmp_path / "bundle", ["90"])


def test_missing_numpy_is_one_line(bundle):
    done = subprocess.run([bundle / "gpu-check"], capture_output=True, text=True, env={**NOWHERE, "PYTHON": "/bin/false"})
    assert done.returncode == 1 and done.stderr.startswith("error: no Python 3.10 or later with numpy") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_rehearsal_of_one_type_passes(bundle, python, tmp_path):
    code, report, _ = run_gpu_check(bundle, python, tmp_path, "--backend", "cuda", "--types", "itq3_s")
    assert code == 0 and report["cuda"]["passed"] and {c["part"] for c in report["cuda"]["checks"]} == {
        "machine", "correctness", "perplexity", "speed", "sanitizer", "counters", "more"}


@pytest.mark.slow
@pytest.mark.parametrize("fault, check, words", [
    ("no-device", "device", "llama.cpp finds no device CUDA99"), ("missing-library", "device", "libggml-missing.so cannot be loaded: "),
    ("hang", "perplexity itq3_s", "llama-perplexity took longer than"), ("out-of-memory", "perplexity itq3_s", "llama-perplexity exited with"),
    ("wrong-value", "perplexity itq3_s", "expected"),
])
def test_fault_fails_only_its_check(bundle, python, tmp_path, fault, check, words):
    code, report, output = run_gpu_check(bundle, python, tmp_path, "--backend", "cuda", "--types", "itq3_s,itq3_t", "--only", "correctness,perplexity",
                                     "--inject", fault)
    checks = {c["name"]: c for c in report["cuda"]["checks"]}
    assert code == 1 and [name for name, c in checks.items() if c["status"] != "passed"] == [check]
    assert words in checks[check]["error"] and f"cuda, failed: {check}: " in output
    if check != "device":
        assert checks["perplexity itq3_t"]["status"] == "passed"


@pytest.mark.nightly
def test_rehearsal_of_all_checks(bundle, python, tmp_path):
    """Runs CUDA's checks on the CPU, Vulkan's on lavapipe. Vulkan's test library lacks the standard types that speeds are compared with."""
    vulkan.environment()
    code, report, _ = run_gpu_check(bundle, python, tmp_path, "--minutes", "60")
    assert report["cuda"]["passed"]
    failed = {c["name"] for c in report["vulkan"]["checks"] if c["status"] != "passed"}
    needs_standard_types = {"perplexity q3_k", "generation and prompts", "sequences", "single products", "products of experts", "mixture of experts"}
    assert code == 1 and failed == needs_standard_types
