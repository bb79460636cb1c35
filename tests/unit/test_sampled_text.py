"""scripts/studies/sampled_text.py with stand-ins for llama-completion: what gets into the file, and what ends a run."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sampled_text
from helpers.models import ROOT


@pytest.fixture
def run(tmp_path):
    """Runs the study with a program that is the Python code given, and has `seed`; returns process and output."""

    def started(code: str, *args) -> tuple[subprocess.CompletedProcess, str | None]:
        program, out = tmp_path / "stand-in", tmp_path / "sampled.txt"
        program.write_text(f"#!{sys.executable}\nimport sys\nseed = sys.argv[sys.argv.index('--seed') + 1]\n{code}\n")
        program.chmod(0o755)
        command = [sys.executable, sampled_text.__file__, "-m", ROOT / "README.md", "-o", out, "--program", program, *args]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr
        return done, out.read_text() if out.exists() else None

    return started


def test_pieces_have_their_starts_and_short_ones_are_left_out(run):
    done, text = run("print('x' * (int(seed) % 2 * 200) + ' [end of text]')", "--bytes", "450", "--starts", "code")
    assert done.returncode == 0, done.stderr
    # seeds 1, 3 and 5; 2 and 4 wrote nothing
    assert text.split("\n\n") == [start + "x" * 200 for start in sampled_text.CODE[:5:2]] + [""]
    assert "in 3 pieces; left out: 2 of" in done.stdout


def test_a_piece_may_end_within_a_character(run):
    done, text = run("sys.stdout.buffer.write(('ж' * 200).encode()[:-1])", "--bytes", "300", "--starts", "bos")
    assert done.returncode == 0 and text == "ж" * 199 + "\n\n"


@pytest.mark.parametrize("code, words", [
    ("sys.exit('failed to load model')", "stand-in exited with 1: failed to load model"),
    ("pass", "20 runs gave 0 bytes: it ends its texts at once; try other --starts"),
])
def test_failures_are_one_line_and_leave_no_text(run, code, words):
    done, text = run(code)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr and text is None
