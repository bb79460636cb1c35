"""Texts for models of the tests."""

import random
import string

import pytest

from ggml_ext._native import token_sums
from helpers.streams import HELDOUT


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(random.Random(1).choices(string.ascii_lowercase + " ", k=600)))
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(HELDOUT.read_bytes()[-9000:])
    return path


@pytest.fixture
def float32_sums(monkeypatch):
    """Let sums over tokens have the precision of float32 on every CPU."""
    monkeypatch.setattr(token_sums, "bf16_library", lambda: None)
