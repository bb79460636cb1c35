"""The Python package with Windows' Python under Wine."""

from pathlib import Path

import pytest

import ggml_ext
from helpers import windows_checks
from helpers.wine import Wine


@pytest.fixture
def wine(tmp_path):
    machine = Wine(tmp_path)
    yield machine
    machine.close()


@pytest.mark.nightly
def test_python_package_passes_its_checks(wine, tmp_path):
    python, directory = wine.install_python(Path(ggml_ext.__file__).parents[1]), tmp_path / "checks"
    directory.mkdir()
    done = wine.run(*python, windows_checks.__file__, directory)
    assert done.stdout.split() == [word for check in windows_checks.CHECKS for word in ("passed", check.__name__)]
