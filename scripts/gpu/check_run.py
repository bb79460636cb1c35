"""What the checks on a GPU share: their types, one run with its report, its time and the programs it starts."""
from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THREE_BITS, TWO_BITS = ["itq3_s", "ditto3", "itq3_t"], ["ccq2", "itq2_t"]
FIVE_BITS, FOUR_BITS = ["ditto5"], ["itq4_t"]
OF_64 = ["itq4_t64", "itq3_t64", "itq2_t64"]  # for rows that the others cannot have: measured, but no ratio is asked for
OURS = THREE_BITS + TWO_BITS + OF_64 + FIVE_BITS + FOUR_BITS
N_CHUNKS = 60  # of 256 tokens
# Activations have a scale for 256 values on the CPU and for 32 on the GPU. The first of these roundings changes the mean
# log-likelihood of a chunk by a standard deviation of up to 0.0028 (CCQ2; 60 chunks against the same weights in F32), the
# second by less: five times both together, of the mean over all chunks. A forgotten rotation costs whole units.
LOG_TOLERANCE = 5 * math.sqrt(2) * 0.0028 / math.sqrt(N_CHUNKS)


class Failed(Exception):
    """One line that says why."""


def fingerprint() -> str:
    """Of the sources that results depend on."""
    digest = hashlib.sha256()
    folders = [ROOT / name for name in ("cuda", "metal", "vulkan", "ggml_ext", "tests/gpu")]
    for path in sorted(p for folder in folders for p in folder.rglob("*") if p.is_file() and p.suffix not in (".pyc", ".so")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    digest.update((ROOT / "tests/native/backend_ops_cases.h").read_bytes())
    return digest.hexdigest()[:16]


class Run:
    """What is known so far, and how much time is left."""

    def __init__(self, out: Path, build: Path, minutes: float, device: str, shape: str, n_layers: int, *, types: list[str] = OURS,
                 rehearsal: bool = False, resume: bool = False):
        self.out, self.build, self.minutes = out, build, minutes
        self.device, self.shape, self.n_layers, self.rehearsal = device, shape, n_layers, rehearsal
        self.types = types
        identity = {"sources": fingerprint(), "device": device, "rehearsal": rehearsal}
        self.report = {"passed": False, "identity": identity, "environment": {}, "checks": [], "figures": {}}
        self.lock, self.running = threading.RLock(), set()
        if resume:
            self.resume()
        self.start_part("")

    def resume(self) -> None:
        """Takes over the results of a report of the same sources and device."""
        with contextlib.suppress(OSError, ValueError):
            old = json.loads(self.out.read_text())
            if old.get("identity") == self.report["identity"]:
                self.report = old

    def start_part(self, part: str) -> None:
        self.part, self.deadline = part, time.monotonic() + 60 * self.minutes

    def seconds_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Failed("not run: the time is over")
        return left

    def command(self, *command, timeout: float | None = None, keep: list | None = None, env: dict | None = None) -> str:
        """Standard output; Failed with its last lines if it fails or the time is over, when all that it started is ended. keep
        takes the output of both."""
        limit = self.seconds_left() if self.rehearsal else min(self.seconds_left(), timeout or math.inf)  # CPUs may be slow
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                process = subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                                           errors="replace", start_new_session=True, env={**os.environ, **(env or {})})
            except FileNotFoundError:
                raise Failed(f"{command[0]} is missing") from None
            self.running.add(process)
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                self.end(process)
                raise Failed(f"{Path(command[0]).name} took longer than {limit:.0f} s") from None
            finally:
                self.running.discard(process)
            log.seek(0)
            errors = log.read()
        if keep is not None:
            keep.append(output)
        if process.returncode:
            last = (output + errors).strip().splitlines()[-6:]
            raise Failed(f"{Path(command[0]).name} ended with {process.returncode}: " + " / ".join(last))
        return output

    @staticmethod
    def end(process: subprocess.Popen) -> None:
        """It and all that it started, such as the compilers of a build."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def stop(self, *_) -> None:
        """What has been found out is in the report already."""
        for process in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        print("stopped; results so far are in " + str(self.out), flush=True)
        os._exit(1)

    def kept(self, name: str) -> bool:
        """Whether an earlier run has passed this check."""
        return any(c["name"] == name and c["passed"] for c in self.report["checks"])

    def wants(self, *names: str) -> bool:
        return not all(map(self.kept, names))

    def check(self, name: str, function, *args, again: bool = False) -> object:
        """Runs function(run, *args), whose result is the check's figures; None if it failed. What has passed earlier is kept
        unless it is needed again."""
        if not again and self.kept(name):
            print(f"kept             {name}", flush=True)
            return next(c for c in self.report["checks"] if c["name"] == name).get("figures", {})
        start = time.monotonic()
        try:
            found, error = function(self, *args), None
        except Failed as e:
            found, error = None, str(e)
        except Exception as e:  # noqa: BLE001  the other checks still have to run
            found, error = None, f"{type(e).__name__}: {e}"
        entry = {"name": name, "part": self.part, "passed": error is None, "seconds": round(time.monotonic() - start, 1)}
        entry |= {"error": error} if error else {}
        entry |= {"figures": found} if found else {}
        with self.lock:
            self.report["checks"] = [*(c for c in self.report["checks"] if c["name"] != name), entry]
            print(f"{'FAIL' if error else 'pass'}  {entry['seconds']:6.1f} s  {name}" + (f": {error}" if error else ""), flush=True)
            self.write()
        return found

    def write(self) -> None:
        self.report["passed"] = bool(self.report["checks"]) and all(c["passed"] for c in self.report["checks"])
        beside = self.out.with_name(self.out.name + ".part")
        beside.write_text(json.dumps(self.report, indent=1))
        os.replace(beside, self.out)

    def tool(self, name: str) -> Path:
        return self.build / "bin" / ("ggml-ext-cuda-host-kernels" if self.rehearsal and name == "ggml-ext-gpu-kernels" else name)
