"""Programs that are run for their result: their environment, and the error if they fail."""

import os

import pytest

from ggml_ext._base.errors import UserError
from ggml_ext._native import library, programs
from ggml_ext._native.process import describe_failure, run_captured, run_logged, run_streamed


def test_abort_message_is_not_hidden_by_a_backtrace(tmp_path, monkeypatch):
    monkeypatch.delenv("GGML_NO_BACKTRACE", raising=False)
    command = ["sh", "-c", "echo $GGML_NO_BACKTRACE"]
    assert run_logged(command, tmp_path) == run_streamed(command, tmp_path, print, {}) == run_captured(command, tmp_path)[:2] == (0, "1\n")


@pytest.mark.parametrize(("script", "message"), [
    ("echo failed to load model; exit 3", "llama-x exited with 3 for m.gguf: failed to load model; pass another"),
    ("echo '0.0 E load: error loading model: check_dims: tensor a not found'; echo 0.0 E main : failed to init; exit 1",
     "llama-x exited with 1 for m.gguf: the model does not load: tensor a not found; convert or download it again"),
    ("echo error loading model: std::bad_alloc; exit 1", "llama-x exited with 1 for m.gguf: error loading model: std::bad_alloc; pass another"),
    ("echo error loading model: unknown model architecture: x; exit 1",
     "llama-x exited with 1 for m.gguf: the model does not load: unknown model architecture: x; this llama.cpp does not support it"),
    ("echo error loading model: unable to allocate CPU buffer; exit 1",
     "llama-x exited with 1 for m.gguf: error loading model: unable to allocate CPU buffer; pass another"),
    ("echo half a li; kill -9 $$", "llama-x was killed for m.gguf, most likely because memory ran out: free some memory"),
    ("echo x.c:1: GGML_ASSERT failed; kill -6 $$", "llama-x was ended by signal 6 (Aborted) for m.gguf: x.c:1: GGML_ASSERT failed; pass another"),
])
def test_failure_names_its_cause(tmp_path, script, message):
    code, log = run_logged(["sh", "-c", script], tmp_path)
    assert describe_failure("llama-x", code, log, "for m.gguf", "pass another") == message


@pytest.fixture
def other_directory(tmp_path, monkeypatch):
    """Return a directory in LD_LIBRARY_PATH that has another library with the name of one of the package."""
    own, other = tmp_path / "ours", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        (folder / "libllama.so.0").touch()
    monkeypatch.setattr(programs, "native_dir", lambda: own)
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(["/usr/lib", str(own), "", str(other)]))
    return other


def test_foreign_library_is_named(other_directory, monkeypatch):
    hint = f"LD_LIBRARY_PATH names {other_directory}, which has another libllama.so.0: unset it, or remove that directory from it"
    assert programs.library_conflict() == hint
    log = "llama-x: symbol lookup error: libllama.so.0: undefined symbol: ggml_ext_rule\n"
    assert describe_failure("llama-x", 127, log, hint="reinstall").endswith(f"ggml_ext_rule; {hint}")
    assert "LD_LIBRARY_PATH" not in describe_failure("llama-x", 1, "no such model")
    (other_directory / "libggml-base.so").write_text("no library")
    with pytest.raises(UserError, match=f"cannot load .*; {hint}"):
        library.Library(other_directory / "libggml-base.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(programs.native_dir()))
    assert describe_failure("llama-x", 127, log, hint="reinstall").endswith("; reinstall")
