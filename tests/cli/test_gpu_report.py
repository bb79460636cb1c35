"""ggml-ext gpu-report on the CPU: its files, wrong results, crashes and hangs of the program, and what it refuses."""

from __future__ import annotations

import json

import pytest

from ggml_ext import gpu_report as program
from ggml_ext._base.signals import StopRequest
from ggml_ext._base.types import WEIGHT_TYPES
from ggml_ext._commands import gpu_reporting, kernel_check
from ggml_ext._commands.gpu_page import baselines
from ggml_ext._native import backend
from ggml_ext._native.backend import BackendRun, Device
from helpers.commands import run_main
from helpers.errors import check_error

TYPES = ("itq4_t", "itq4_t64")  # both are compared with Q4_K
ID = {"itq4_t": 172, "itq4_t64": 173}
# a program that does something else in the cases of a type whose names contain a pattern
FAULTY = """
import importlib.util, json, os, sys, time

spec = importlib.util.spec_from_file_location("program", {path!r})
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
run_case = program.run_case


def faulty(ggml, device, backend, case):
    if case["type"] == {type_id} and {pattern!r} in case["name"]:
        {fault}
    return run_case(ggml, device, backend, case)


program.run_case = faulty
program.main(json.loads(sys.argv[1]))
"""
WRONG = """seconds = run_case(ggml, device, backend, case)
        with open(case["output_file"], "r+b") as f:
            f.seek(40); f.write({bytes!r})
        return seconds"""


@pytest.fixture(autouse=True)
def short_products(monkeypatch):
    if not backend.can_run():
        pytest.skip("the package has no native libraries")
    monkeypatch.setattr(kernel_check, "SPEED_SECONDS", {"tokens": 0.005, "prompt": 0.01})


@pytest.fixture
def inject(monkeypatch, tmp_path):
    """Return a function that makes the program misbehave in cases of ITQ4_T."""

    def inject(pattern: str, fault: str) -> None:
        path = tmp_path / "program.py"
        path.write_text(FAULTY.format(path=str(backend.PROGRAM), type_id=ID["itq4_t"], pattern=pattern, fault=fault))
        monkeypatch.setattr(backend, "PROGRAM", path)

    return inject


def report(directory, *args, types=TYPES):
    """Run the command on the CPU. Return the process, the results by type, and the page; None without files."""
    path = directory / "r.json"
    done = run_main(program.main, "--device", "CPU", "--type", ",".join(types), "-o", path, "-q", *args)
    if not path.exists():
        return done, None, None
    (device,) = json.loads(path.read_text())["devices"]
    return done, {r["type"]: r for r in device["results"]}, path.with_suffix(".md").read_text()


def check_failed(directory, correct: str, *parts: str, n_failures: int = 1) -> dict:
    """Check that ITQ4_T is not right, with its failures, and the others are. Return its result."""
    done, results, page = report(directory)
    check_error(done, "ITQ4_T on CPU")
    assert [results[name]["correct"] for name in ("Q4_K", "ITQ4_T", "ITQ4_T64")] == ["yes", correct, "yes"]
    failures = results["ITQ4_T"]["failures"]
    assert len(failures) == n_failures and all("\n" not in line and f"- ITQ4_T: {line}" in page for line in failures)
    assert all(part in failures[0] for part in parts), failures
    assert results["ITQ4_T64"]["ratios"]["tokens"]["Q4_K"] > 0 and "**1 of 2 ggml-ext types are right.**" in page
    return results["ITQ4_T"]


def test_cpu_is_right(tmp_path):
    """Blocks of 256, 64 and 32 and standard types, with ratios to the types of their sizes."""
    done, results, page = report(tmp_path, types=("itq2_t", "itq4_t64", "itq3_t32", "ditto5"))
    assert done.returncode == 0, done.stderr
    assert page.strip() in done.stdout and {r["correct"] for r in results.values()} == {"yes"}
    assert list(results)[:4] == ["ITQ2_T", "ITQ4_T64", "ITQ3_T32", "DITTO5"]
    for result in results.values():
        assert len(result["nmse"]) == 18 and min(result["seconds"].values()) > 0
        assert 1e-6 < max(value for case, value in result["nmse"].items() if "MUL_MAT" in case) < kernel_check.MAX_NMSE
    assert set(results["ITQ2_T"]["ratios"]["prompt"]) == {"IQ2_XXS", "Q2_K"} and set(results["DITTO5"]["ratios"]["tokens"]) == {"Q5_K"}
    assert "**4 of 4 ggml-ext types are right.**" in page and "### Failures" not in page


@pytest.mark.parametrize(("pattern", "value", "reason"), [
    ("MUL_MAT, 5 columns, rows of 768", b"\0\0\xc8\x42", "NMSE"),  # 100
    ("MUL_MAT_ID, 16 columns", b"\0\0\xc0\x7f", "1 of 1024 values are not finite"),
    ("GET_ROWS, rows of 1024", b"\xbd\x37\x86\x3e", "of the row's largest value"),
], ids=["products", "experts", "rows"])
def test_wrong_result_is_reported(tmp_path, inject, pattern, value, reason):
    inject(pattern, WRONG.format(bytes=value))
    result = check_failed(tmp_path, "no", pattern, reason)
    assert set(result["seconds"]) == {"tokens", "prompt"}


def test_baselines_have_a_similar_size():
    names = {name: baselines(info.bpw) for name, info in WEIGHT_TYPES.items()}
    assert names["itq1_t"] == names["itq2_t32"] == ("IQ2_XXS", "Q2_K") and names["ditto3"] == names["itq3_t32"] == ("IQ3_S", "Q3_K")
    assert names["itq4_t32"] == ("Q4_K",) and names["ditto5"] == ("Q5_K",)


def test_crash_is_one_line_and_other_cases_go_on(tmp_path, inject):
    inject("MUL_MAT, 8 columns", "print('GGML_ASSERT(x) failed', flush=True); os.abort()")
    result = check_failed(tmp_path, "crashed", "MUL_MAT, 8 columns, rows of 1024", "GGML_ASSERT(x) failed", n_failures=2)
    assert len(result["nmse"]) == 16 and set(result["seconds"]) == {"tokens", "prompt"} and result["log"]


def test_hang_is_stopped(tmp_path, inject, monkeypatch):
    monkeypatch.setattr(gpu_reporting, "TYPE_SHARE", 6 / 600)
    inject("MUL_MAT, 8 columns", "time.sleep(30)")
    result = check_failed(tmp_path, "hung", "MUL_MAT, 8 columns, rows of 1024", "stopped after 6 s")
    assert len(result["nmse"]) == 3


def test_unsupported_operation_is_not_right(tmp_path, inject):
    inject("MUL_MAT_ID", "return None")
    done, results, page = report(tmp_path)
    check_error(done, "ITQ4_T on CPU")
    assert results["ITQ4_T"]["correct"] == "not supported" and len(results["ITQ4_T"]["unsupported"]) == 2
    assert "- ITQ4_T: MUL_MAT_ID, 16 columns, rows of 768, MUL_MAT_ID, 1 column, rows of 768" in page


def test_interrupt_keeps_results(tmp_path, monkeypatch):
    check = gpu_reporting.check_type

    def interrupted(*args):
        if args[2].name == "ITQ4_T64":
            raise StopRequest(2)
        check(*args)

    monkeypatch.setattr(gpu_reporting, "check_type", interrupted)
    done, results, page = report(tmp_path)
    check_error(done, "interrupted", "r.json", code=130)
    assert results["ITQ4_T"]["correct"] == "yes" and results["ITQ4_T64"]["correct"] == "not measured" and "| ITQ4_T |" in page


def test_time_limit_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_reporting, "TYPE_SHARE", 0.0)
    done, results, page = report(tmp_path)
    check_error(done, "ITQ4_T64 on CPU")
    assert "pass a larger --minutes, or --type itq4_t" in results["ITQ4_T"]["failures"][0] and "not measured" in page


def test_slow_type_is_right_without_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_check, "SPEED_SHARE", 1.0)
    done, results, page = report(tmp_path)
    assert done.returncode == 0, done.stderr
    assert results["ITQ4_T"]["correct"] == "yes" and not results["ITQ4_T"]["seconds"] and "- ITQ4_T: speed not measured" in page


def test_machine_without_gpu(tmp_path, monkeypatch):
    cpu = Device("CPU", "a CPU", "CPU", "cpu", 0, 0)
    monkeypatch.setattr(backend, "list_devices", lambda _: ([cpu], BackendRun([], "ended", "", "")))
    done = run_main(program.main, "-o", tmp_path / "r.json", "-q")
    check_error(done, "no GPU was found", "CPU (a CPU)", "GGML_CUDA=ON", "GGML_VULKAN=ON", "docs/using/install.md")
    check_error(run_main(program.main, "-o", tmp_path / "r.json", "--device", "CUDA0"), "--device", "'CUDA0'", "CPU (a CPU)")
    assert not list(tmp_path.iterdir())


def test_refused_arguments(tmp_path):
    """Existing files are not replaced without --force."""
    (tmp_path / "r.md").write_text("mine")
    check_error(report(tmp_path)[0], "r.md exists", "--force")
    assert [p.name for p in tmp_path.iterdir()] == ["r.md"] and (tmp_path / "r.md").read_text() == "mine"
    assert report(tmp_path, "--force", types=["itq4_t"])[0].returncode == 0
    assert (tmp_path / "r.md").read_text().startswith("# GPU report")
    check_error(report(tmp_path)[0], "r.json exists", "--force")
    for args, parts in (
        (["--type", "itq4"], ["--type", "'itq4'", "itq4_t"]), (["-o", tmp_path / "x.md"], ["--output", "x.json"]),
        (["-o", tmp_path / "no" / "x.json"], ["no does not exist"]), (["--minutes", "0"], ["--minutes", "at least 1"]),
    ):
        check_error(run_main(program.main, "--device", "CPU", *args), *parts)
