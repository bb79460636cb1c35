"""One run of the GPU check: its report, its time budget, and the programs it starts."""
from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import check_faults

ROOT = Path(__file__).resolve().parents[2]  # of the sources or of an unpacked bundle
BUNDLE_FILE = ROOT / "bundle.json"
THREE_BITS, TWO_BITS = ["itq3_s", "ditto3", "itq3_t"], ["ccq2", "itq2_t"]
FIVE_BITS, FOUR_BITS, BELOW_TWO_BITS = ["ditto5"], ["itq4_t"], ["itq1h_t", "itq1_t"]
SHORT_BLOCKS = ["itq4_t64", "itq3_t64", "itq2_t64", "itq1h_t64", "itq1_t64", "itq4_t32", "itq3_t32", "itq2_t32"]  # for rows that 256 does not divide: measured, but no ratio is required
EXT_TYPES = THREE_BITS + TWO_BITS + BELOW_TWO_BITS + SHORT_BLOCKS + FIVE_BITS + FOUR_BITS
N_CORES = os.cpu_count() or 1
KILL_SECONDS = 10  # how long a killed program may take to end; one that a driver holds may never end


class Failed(Exception):
    """A check failed; one line says why."""

    status = "failed"


class TooSlow(Failed):
    """Results are right, but a required speed was missed."""

    status = "slow"


class NotRun(Failed):
    """The time was over, or this machine lacks something that the check needs."""

    status = "not run"


class Unavailable(NotRun):
    """This machine lacks an optional tool; the run passes without it."""

    status = "unavailable"


def source_fingerprint() -> str:
    """A hash of the sources that results depend on; a bundle carries that of its sources."""
    if BUNDLE_FILE.exists():
        return json.loads(BUNDLE_FILE.read_text())["sources"]
    digest = hashlib.sha256()
    directories = [ROOT / name for name in ("cuda", "metal", "vulkan", "ggml_ext", "tests/gpu")]
    for path in sorted(p for d in directories for p in d.rglob("*") if p.is_file() and p.suffix not in (".pyc", ".so")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    digest.update((ROOT / "tests/native/backend_ops_cases.h").read_bytes())
    return digest.hexdigest()[:16]


def json_lines(text: str) -> list[dict]:
    """Parse the JSON lines in a program's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def count_cases(output: str, op: str) -> int:
    """Count the cases of an operation that test-backend-ops has passed."""
    return len(re.findall(rf"^\s*{op}\(.*(?:OK|SUPPORTED)", re.sub(r"\x1b\[[\d;]*m", "", output), re.M))


def read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def program_name(command: list[str]) -> str:
    """Return the program that a command runs, after words such as env and timeout."""
    return next((Path(word).name for word in command if "/" in word and "=" not in word), command[0])


class Run:
    """The checks of one backend.

    Args:
        backend: name of the backend, the key of its results in the report.
        device: the device as llama.cpp names it; the CPU in a rehearsal without a driver.
        programs: directory of the programs and libraries.
        report_file: JSON file of the results; it is rewritten after every check.
        rehearsal: use little data and require no speed.
        fault: fault to inject into one check of a rehearsal (check_faults.py).
        resume: keep the checks that passed in an earlier run of the same sources on the same device.
    """

    def __init__(self, backend: str, device: str, programs: Path, report_file: Path, *, types: list[str], shape: str, n_layers: int,
                 rehearsal: bool = False, fault: str | None = None, resume: bool = True):
        self.backend, self.device, self.programs, self.report_file = backend, device, programs, report_file
        self.types, self.shape, self.n_layers, self.rehearsal, self.fault = types, shape, n_layers, rehearsal, fault
        self.lock, self.processes = threading.RLock(), set()
        self.current = threading.local()  # per thread: the name of its check, and its own deadline
        self.part, self.deadline, self.end = "", math.inf, math.inf
        identity = {"sources": source_fingerprint(), "device": device, "rehearsal": rehearsal}
        self.document: dict = {}
        with contextlib.suppress(OSError, ValueError):
            self.document = json.loads(report_file.read_text())
        earlier = self.document.get(backend) if resume else None
        self.report = earlier if earlier and earlier.get("identity") == identity else {
            "passed": False, "identity": identity, "environment": {}, "checks": [], "figures": {}}
        self.document[backend] = self.report

    @property
    def has_slow_driver(self) -> bool:
        """Whether the device is a driver for CPUs, which takes half a minute for what a GPU does in one second."""
        return self.rehearsal and self.device != "CPU"

    def tiny_shape(self, shape: str) -> str:
        """Return the shape of a model with experts or ragged rows; in a rehearsal a tiny one."""
        return {"olmoe-1b-7b": "tiny-experts", "qwen2.5-0.5b": "tiny-ragged"}[shape] if self.shape == "tiny" else shape

    # --- time ---------------------------------------------------------------------------------------------------------

    def start_part(self, part: str, deadline: float) -> None:
        """Begin a part. deadline: its end in seconds of time.monotonic()."""
        self.part, self.deadline = part, deadline

    def seconds_left(self) -> float:
        seconds = getattr(self.current, "deadline", self.deadline) - time.monotonic()
        if seconds <= 0:
            raise NotRun("the time is over")
        return seconds

    # --- programs -----------------------------------------------------------------------------------------------------

    def command(self, *command, timeout: float = math.inf, env: dict | None = None, keep: list | None = None) -> str:
        """Run a program and return its standard output.

        Args:
            timeout: limit in seconds; a rehearsal on a slow CPU has the part's limit alone.
            env: additional environment variables.
            keep: list that receives both outputs, even if the program fails.

        Raises:
            Failed: the program failed or took too long; everything that it started has been killed.
        """
        limit = self.seconds_left() if self.rehearsal else min(self.seconds_left(), timeout)
        words = [*map(str, command)]
        if self.fault:
            words, limit = check_faults.inject(self.fault, getattr(self.current, "check", ""), words, limit)
        with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as log:  # not pipes: llama-perplexity loses lines there
            try:
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True,
                                           env={**os.environ, **(env or {})})
            except FileNotFoundError:
                raise Failed(f"{words[0]} is missing") from None
            self.processes.add(process)
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                ended = self.kill(process)
                raise Failed(f"{program_name(words)} took longer than {limit:.0f} s"
                             + ("" if ended else ", and cannot be killed: the driver holds it")) from None
            finally:
                self.processes.discard(process)
                output, errors = (read_text(file) for file in (out, log))
                if keep is not None:
                    keep.append(output + errors)
        if process.returncode:
            last = (output + errors).strip().splitlines()[-6:]
            raise Failed(f"{program_name(words)} exited with {process.returncode}: " + " / ".join(last))
        return output

    @staticmethod
    def kill(process: subprocess.Popen) -> bool:
        """Kill a program and everything it started. Returns whether it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, *_) -> None:
        """Signal handler: end at once. All results so far are in the report."""
        for process in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        print(f"stopped; the results so far are in {self.report_file}", flush=True)
        os._exit(1)

    def program(self, name: str) -> Path:
        on_host = self.rehearsal and name == "ggml-ext-gpu-kernels"
        return self.programs / ("ggml-ext-cuda-host-kernels" if on_host else name)

    # --- checks -------------------------------------------------------------------------------------------------------

    def has_passed(self, name: str) -> bool:
        return any(c["name"] == name and c["status"] == "passed" for c in self.report["checks"])

    def pending(self, *names: str) -> bool:
        """Whether one of these checks has not passed yet."""
        return not all(map(self.has_passed, names))

    def check(self, name: str, function: Callable, *args, again: bool = False):
        """Run function(run, *args) as a check and record the result.

        Args:
            again: run it even if it passed in an earlier run.

        Returns:
            The figures that the function returned or an earlier run recorded; None if the check failed.
        """
        if not again and self.has_passed(name):
            print(f"kept               {name}", flush=True)
            return next(c for c in self.report["checks"] if c["name"] == name).get("figures", {})
        start, self.current.check = time.monotonic(), name
        result, error, status = None, None, "passed"
        try:
            self.seconds_left()
            result = function(self, *args)
        except Failed as e:
            error, status = str(e), e.status
        except Exception as e:  # noqa: BLE001  the other checks still have to run
            error, status = f"{type(e).__name__}: {e}", "failed"
        entry = {"name": name, "part": self.part, "status": status, "seconds": round(time.monotonic() - start, 1)}
        entry |= {"error": error} if error else {}
        entry |= {"figures": result} if result else {}
        with self.lock:
            self.report["checks"] = [*(c for c in self.report["checks"] if c["name"] != name), entry]
            print(f"{status:11} {entry['seconds']:6.1f} s  {name}" + (f": {error}" if error else ""), flush=True)
            self.write()
        return result

    def of_status(self, *statuses: str) -> list[dict]:
        return [c for c in self.report["checks"] if c["status"] in statuses]

    def write(self) -> None:
        self.report["passed"] = bool(self.report["checks"]) and not self.of_status("failed", "slow", "not run")
        part = self.report_file.with_name(self.report_file.name + ".part")
        part.write_text(json.dumps(self.document, indent=1, default=str))
        os.replace(part, self.report_file)
