"""Programs that are run for their result: what they find in their environment, and what is said where they fail."""

import os

import pytest

from ggml_ext._base.errors import UserError
from ggml_ext._native import library, programs
from ggml_ext._native.process import describe_failure, run_captured, run_logged, run_streamed

COMMAND = ["sh", "-c", "echo $OMP_WAIT_POLICY"]


@pytest.mark.parametrize(("users", "expected"), [(None, "passive\n"), ("active", "active\n")])
def test_threads_wait_as_the_user_says_or_without_spinning(tmp_path, monkeypatch, users, expected):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if users:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    assert run_logged(COMMAND, tmp_path) == run_streamed(COMMAND, tmp_path, lambda _: None) == (0, expected)


def test_what_is_timed_runs_as_by_hand(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert run_captured(COMMAND, tmp_path) == (0, "\n", "")


def test_no_backtrace_hides_why_a_program_aborted(tmp_path, monkeypatch):
    monkeypatch.delenv("GGML_NO_BACKTRACE", raising=False)
    command = ["sh", "-c", "echo $GGML_NO_BACKTRACE"]
    assert run_logged(command, tmp_path) == run_streamed(command, tmp_path, print, {}) == run_captured(command, tmp_path)[:2] == (0, "1\n")


@pytest.mark.parametrize(("script", "said"), [
    ("echo failed to load model; exit 3", "llama-x exited with 3 for m.gguf: failed to load model; pass another"),
    ("echo half a li; kill -9 $$", "llama-x was killed for m.gguf, most likely because memory ran out: free some memory"),
    ("echo x.c:1: GGML_ASSERT failed; kill -6 $$", "llama-x was ended by signal 6 (Aborted) for m.gguf: x.c:1: GGML_ASSERT failed; pass another"),
])
def test_a_failure_names_its_cause(tmp_path, script, said):
    code, log = run_logged(["sh", "-c", script], tmp_path)
    assert describe_failure("llama-x", code, log, "for m.gguf", "pass another") == said


@pytest.fixture
def other_folder(tmp_path, monkeypatch):
    """A folder with another library of a name that the package has, which LD_LIBRARY_PATH names."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
        (folder / "libllama.so.0").touch()
    monkeypatch.setattr(programs, "native_folder", lambda: ours)
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(["/usr/lib", str(ours), "", str(other)]))
    return other


def test_a_foreign_library_is_named(other_folder, monkeypatch):
    said = f"LD_LIBRARY_PATH names {other_folder}, which has another libllama.so.0: unset it, or remove that directory from it"
    assert programs.library_conflict() == said
    log = "llama-x: symbol lookup error: libllama.so.0: undefined symbol: ggml_ext_rule\n"
    assert describe_failure("llama-x", 127, log, way_out="reinstall").endswith(f"ggml_ext_rule; {said}")
    assert "LD_LIBRARY_PATH" not in describe_failure("llama-x", 1, "no such model")
    (other_folder / "libggml-base.so").write_text("no library")
    with pytest.raises(UserError, match=f"cannot load .*; {said}"):
        library.Library(other_folder / "libggml-base.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(programs.native_folder()))
    assert describe_failure("llama-x", 127, log, way_out="reinstall").endswith("; reinstall")
