"""The warning that other programs were busy during a measurement."""

import os

import pytest

from ggml_ext._evaluation import load
from ggml_ext._evaluation.speed import measure_speed

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("user", "idle", "iowait", "expected"), [(20, 0, 0, "2.0 CPUs"), (0, 20, 20, None), (0.5, 19.5, 0, None)])
def test_cpu_time_of_others_is_a_warning(tmp_path, monkeypatch, user, idle, iowait, expected):
    """Ten seconds, in which this process does nothing; idle time and waiting for disks do not count."""
    stat, clock = tmp_path / "stat", iter((100.0, 110.0))

    def write(*seconds):
        stat.write_text("cpu  " + " ".join(str(int(1000 + value * TICKS)) for value in seconds) + "\ncpu0 1 2 3\n")

    monkeypatch.setattr(load, "_STAT", stat)
    monkeypatch.setattr(load.time, "monotonic", lambda: next(clock))
    write(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    other = load.OtherLoad()
    write(user, 0, 0, idle, iowait, 0, 0, 0, 0, 0)
    warning = other.warning()
    assert expected in warning if expected else warning is None


def test_systems_without_proc_stat_have_no_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_STAT", tmp_path / "missing")
    assert load.OtherLoad().warning() is None


def test_measured_speeds_come_with_the_warning(tmp_path, monkeypatch):
    class Bench:
        def run(self, model):
            return {"decode": 1.0, "prefill": 2.0}

    warnings: list[str] = []
    monkeypatch.setattr(load.OtherLoad, "warning", lambda self: "busy")
    assert measure_speed({"a": tmp_path}, Bench(), 2, lambda n: None, warn=warnings.append)["a"] == {"decode": [1.0] * 2, "prefill": [2.0] * 2}
    assert warnings == ["busy"]
