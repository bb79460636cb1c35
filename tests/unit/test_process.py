"""Programs that are run for their result: what they find in their environment."""

import pytest

from ggml_ext._native.process import run_captured, run_heard, run_logged

COMMAND = ["sh", "-c", "echo $OMP_WAIT_POLICY"]


@pytest.mark.parametrize(("users", "expected"), [(None, "passive\n"), ("active", "active\n")])
def test_threads_wait_as_the_user_says_or_without_spinning(tmp_path, monkeypatch, users, expected):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if users:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    assert run_logged(COMMAND, tmp_path) == run_heard(COMMAND, tmp_path, lambda _: None) == (0, expected)


def test_what_is_timed_runs_as_by_hand(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert run_captured(COMMAND, tmp_path) == (0, "\n", "")
