"""Texts for models of the tests."""

import random
import string

import pytest

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
