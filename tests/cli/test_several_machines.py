"""The examples of docs/using/several-machines.md, run or checked as they stand there."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_ext._formats.reserved_paths import journal_of
from ggml_ext._formats.split import open_model
from helpers.models import ROOT
from helpers.slurm import find_processes, start_cluster, wait_until

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


@pytest.mark.slow
@pytest.mark.parametrize("n_jobs", [2, pytest.param(5, marks=pytest.mark.nightly)])
def test_gnu_parallel(single, directory, n_jobs):
    """A job is killed; --resume-failed repeats it alone."""
    if not shutil.which("parallel"):
        pytest.skip("parallel is not installed")
    command = example("GNU parallel").replace("--jobs 2", f"--jobs {n_jobs} --joblog jobs.log")
    run = {"shell": True, "cwd": directory, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **run) as jobs:
        wait_until(lambda: is_under_way(directory, 3), "part 3 has tensors")
        for process in find_processes(directory, "--part\0003/5"):
            os.kill(process, signal.SIGKILL)
        assert jobs.wait(300) == 1
    assert [part_path(directory, i).exists() for i in range(1, N_PARTS + 1)] == [True, True, False, True, True]
    others = [part_path(directory, i).stat().st_mtime_ns for i in (1, 2, 4, 5)]
    again = subprocess.run(command.replace("jobs.log", "jobs.log --resume-failed"), **run, timeout=300)
    assert again.returncode == 0 and again.stderr.count("resuming after") == 1, again.stderr
    assert [part_path(directory, i).stat().st_mtime_ns for i in (1, 2, 4, 5)] == others
    assert read_model(part_path(directory, 1)) == read_model(single / "model-itq3t.gguf")


@pytest.mark.nightly
def test_slurm_requeues_the_part_of_a_lost_node(single, directory, tmp_path_factory):
    (directory / "quantize.sh").write_text(example("Slurm"))
    with start_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        cluster.environment |= {"PATH": environment()["PATH"]}
        cluster.run("sbatch", "quantize.sh", cwd=directory)
        wait_until(lambda: is_under_way(directory, 1), "part 1 has tensors")
        (node,) = re.findall(r"NodeList=(n\d)", cluster.run("scontrol", "show", "job", "1_1"))
        cluster.lose_node(node, directory)
        assert not part_path(directory, 1).exists()
        wait_until(lambda: not cluster.run("squeue", "--noheader"), "all parts are written")
        assert "Restarts=1" in cluster.run("scontrol", "show", "job", "1_1")
    assert "resuming after" in (directory / "part-1.log").read_text()
    assert read_model(part_path(directory, 1)) == read_model(single / "model-itq3t.gguf")


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
