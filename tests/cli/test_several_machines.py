"""The examples of docs/using/several-machines.md, run or checked as they stand there."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ggml_ext._formats.reserved_paths import journal_of
from ggml_ext._formats.split import open_model
from helpers.models import ROOT

PAGE = (ROOT / "docs" / "using" / "several-machines.md").read_text()
N_PARTS = 5
TENSORS_BEFORE_KILL = 2


def example(heading: str) -> str:
    """Return the first block of code of a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2]
    return re.search(r"```\w+\n(.*?)```", section, re.DOTALL)[1]


def read_model(path):
    file = open_model(path)
    return {t.name: (t.type, file.rows(t, 0, t.n_rows).tobytes()) for t in file.tensors}


def part_path(directory, number):
    return directory / f"model-itq3t-{number:05}-of-{N_PARTS:05}.gguf"


@pytest.fixture(scope="module")
def single(model, lib, tmp_path_factory):
    """Calibrate with the page's first command and quantize in one run. Return the directory."""
    directory = tmp_path_factory.mktemp("single")
    (directory / "model-f16.gguf").symlink_to(model)
    (directory / "text.txt").write_text((ROOT / "data" / "heldout.txt").read_text()[:20000])
    calibrate, quantize = re.findall(r"^    (.+)$", PAGE, re.MULTILINE)[:2]
    for command in (calibrate, quantize.replace(" --part 2/5", "")):
        subprocess.run(command, shell=True, cwd=directory, env=environment(), check=True, capture_output=True, timeout=300)
    return directory


def environment():
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def directory(single, tmp_path):
    """Return a directory with the model and its calibration."""
    for name in ("model-f16.gguf", "imatrix.gguf"):
        shutil.copy(single / name, tmp_path)
    return tmp_path


def is_under_way(directory, number):
    """Whether a part has finished some of its tensors, but not all."""
    journal = journal_of(part_path(directory, number))
    return journal.exists() and len(journal.read_bytes().splitlines()) > TENSORS_BEFORE_KILL


def find_processes(directory: Path, word: str) -> list[int]:
    """List the processes that work in a directory and have a word in their command."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(directory) and word.encode() in (process / "cmdline").read_bytes():
                processes.append(int(process.name))
    return processes


@pytest.mark.slow
def test_gnu_parallel(single, directory):
    """A job is killed; --resume-failed repeats it alone."""
    if not shutil.which("parallel"):
        pytest.skip("parallel is not installed")
    command = example("GNU parallel").replace("--jobs 2", "--jobs 2 --joblog jobs.log")
    run = {"shell": True, "cwd": directory, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **run) as jobs:
        end = time.monotonic() + 240
        while not is_under_way(directory, 3):
            assert time.monotonic() < end, "part 3 has no tensors"
            time.sleep(0.02)
        for process in find_processes(directory, "--part\0003/5"):
            os.kill(process, signal.SIGKILL)
        assert jobs.wait(300) == 1
    assert [part_path(directory, i).exists() for i in range(1, N_PARTS + 1)] == [True, True, False, True, True]
    others = [part_path(directory, i).stat().st_mtime_ns for i in (1, 2, 4, 5)]
    again = subprocess.run(command.replace("jobs.log", "jobs.log --resume-failed"), **run, timeout=300)
    assert again.returncode == 0 and again.stderr.count("resuming after") == 1, again.stderr
    assert [part_path(directory, i).stat().st_mtime_ns for i in (1, 2, 4, 5)] == others
    assert read_model(part_path(directory, 1)) == read_model(single / "model-itq3t.gguf")


def test_slurm_script_writes_its_part(directory):
    script = example("Slurm")
    (directory / "quantize.sh").write_text(script)
    assert f"#SBATCH --array=1-{N_PARTS}\n" in script
    task = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": str(N_PARTS)}
    subprocess.run(["sh", "quantize.sh"], cwd=directory, env=environment() | task, check=True, capture_output=True, timeout=300)
    assert part_path(directory, 2).exists()


@pytest.mark.extra_build
def test_kubernetes_job_follows_the_schema():
    """kubernetes-validate has the API's schemas. The shell expands JOB_COMPLETION_INDEX, which begins at 0."""
    kubernetes_validate, yaml = pytest.importorskip("kubernetes_validate"), pytest.importorskip("yaml")
    job = yaml.safe_load(example("Kubernetes"))
    kubernetes_validate.validate(job, "1.33", strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    command = script.replace("exec ggml-ext", "echo")
    parts = []
    for index in range(job["spec"]["completions"]):
        done = subprocess.run([*container["command"], command], env={**os.environ, "JOB_COMPLETION_INDEX": str(index)}, capture_output=True, text=True, check=True)
        parts.append(done.stdout.split()[-1])
    assert parts == [f"{i}/{N_PARTS}" for i in range(1, N_PARTS + 1)]
