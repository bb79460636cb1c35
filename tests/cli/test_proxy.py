"""--calibrate-with: the model in fewer bits runs in place of the model, and what is kept says so."""

from __future__ import annotations

import json

import pytest

from ggml_ext._base import files as base_files
from ggml_ext._base.units import GIB
from ggml_ext._calibration import proxy
from helpers.calibration_folder import MATRICES, folder  # noqa: F401
from helpers.errors import files
from helpers.models import gaussian, write_gguf

COPY = '#!/bin/sh\necho "$@" >> "{log}"\ncp "$2" "$3"\n'


@pytest.fixture
def quantizer(folder, monkeypatch):  # noqa: F811
    """A stand-in for llama-quantize that copies; the file that gets its arguments."""
    log, fake = folder.path / "quantize-log", folder.path / "llama-quantize"
    fake.write_text(COPY.format(log=log))
    fake.chmod(0o755)
    monkeypatch.setattr(proxy, "find_tool", lambda name: fake)
    return log


def record(folder) -> dict:  # noqa: F811
    return json.loads(folder.kept.with_suffix(".json").read_text())["made_from"]


def test_a_type_is_made_for_the_time_of_the_calibration(folder, quantizer):  # noqa: F811
    _, err = folder.run("--calibrate-with", "q8_0")
    assert "by the model in q8_0" in err
    (made,) = quantizer.read_text().splitlines()
    assert made.startswith(f"--allow-requantize {folder.model} ") and made.endswith(" Q8_0 2")
    (run,) = folder.runs()
    assert run["-m"].endswith("/q8_0.gguf") and record(folder)["stand_in"] == "q8_0"
    assert sorted(p.name for p in folder.out.parent.iterdir()) == ["out.gguf", "small-f16.imatrix.gguf", "small-f16.imatrix.json"]
    # used again by the same, made anew by another type or the model itself, which then serves all
    folder.run("--calibrate-with", "q8_0")
    assert len(folder.runs()) == 1
    folder.run("--calibrate-with", "q4_k")
    assert len(folder.runs()) == 2 and record(folder)["stand_in"] == "q4_k"
    folder.run("--calibrate-with", "source")
    assert len(folder.runs()) == 3 and "stand_in" not in record(folder) and folder.runs()[-1]["-m"] == str(folder.model)
    folder.run("--calibrate-with", "q8_0")
    assert len(folder.runs()) == 3


def test_a_given_file(folder, quantizer):  # noqa: F811
    given = write_gguf(folder.path / "given.gguf", MATRICES, "Q8_0")
    _, err = folder.run("--calibrate-with", given)
    assert f"by the model as {given}" in err and folder.runs()[0]["-m"] == str(given) and not quantizer.exists()
    assert record(folder)["stand_in"][0]["bytes"] == given.stat().st_size


def test_a_file_of_another_model(folder):  # noqa: F811
    other = write_gguf(folder.path / "other.gguf", {name: gaussian(8, 768) for name in MATRICES})
    folder.error("--calibrate-with", "is [768, 8]", "[256, 8]", "other.gguf", flags=["--calibrate-with", other])
    few = write_gguf(folder.path / "few.gguf", dict(list(MATRICES.items())[:2]))
    folder.error("--calibrate-with", "few.gguf has no tensor blk.0.ffn_down.weight", flags=["--calibrate-with", few])
    folder.error("--calibrate-with: got 'q9'", "q8_0", flags=["--calibrate-with", "q9"])
    folder.error("--calibrate-with", "--no-calibration", flags=["--calibrate-with", "q8_0", "--no-calibration"])
    assert not folder.runs()


@pytest.mark.slow
def test_by_itself_where_the_model_does_not_fit(folder, quantizer):  # noqa: F811
    """The largest that fits, and a line that says so; none where the model fits."""
    size = folder.model.stat().st_size
    for share, name in ((0.8, "q8_0"), (0.4, "q4_k"), (0.01, "q4_k")):
        folder.kept.unlink(missing_ok=True)
        folder.kept.with_suffix(".json").unlink(missing_ok=True)
        _, err = folder.run("--memory", repr(share * size / GIB), type_name="itq3_t")
        assert f"calibrated with the model in {name}" in err and "--calibrate-with source" in err, err
    n = len(folder.runs())
    folder.run("--memory", repr(0.1 * size / GIB), "--calibrate-with", "source", type_name="itq3_t")
    assert len(folder.runs()) == n + 1 and folder.runs()[-1]["-m"] == str(folder.model)


def test_a_dry_run_makes_nothing(folder, quantizer):  # noqa: F811
    out, _ = folder.run("--dry-run", "--calibrate-with", "q8_0")
    assert "by the model in q8_0" in out and not quantizer.exists() and not folder.runs()


def test_no_room(folder, quantizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(proxy, "check_free_space", lambda folder, n_bytes, *texts: base_files.check_free_space(folder, 2**62, *texts))
    before = files(folder.out.parent)
    _, err = folder.run("--calibrate-with", "q8_0", code=1)
    assert "no space left on device" in err and "--calibrate-with source" in err and files(folder.out.parent) == before


def test_a_quantizer_that_fails(folder, quantizer):  # noqa: F811
    (folder.path / "llama-quantize").write_text("#!/bin/sh\necho 'error: bad magic'\nexit 1\n")
    _, err = folder.run("--calibrate-with", "q8_0", code=1)
    assert "llama-quantize exited with 1" in err and "bad magic" in err
    assert not list(folder.out.parent.iterdir())


def test_devices_may_be_why_it_fails(folder, monkeypatch):  # noqa: F811
    monkeypatch.setenv("FAKE_IMATRIX_DO", "fail")
    folder.error("exited with 3", "check --rpc host:50052, pass another text", flags=["--rpc", "host:50052"])


def test_devices_are_handed_on(folder):  # noqa: F811
    """To llama-imatrix, as it takes them."""
    folder.run("-ngl", "99", "--device", "none", "--rpc", "host:50052")
    (run,) = folder.runs()
    assert (run["-ngl"], run["--device"], run["--rpc"]) == ("99", "none", "host:50052")
