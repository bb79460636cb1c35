"""--calibrate-with: a proxy model runs in place of the model, and the cache records it."""

from __future__ import annotations

import json

import pytest

from ggml_ext._base import files as base_files
from ggml_ext._base.units import GIB
from ggml_ext._calibration import proxy
from helpers.calibration_folder import MATRICES, workspace  # noqa: F401
from helpers.errors import files
from helpers.models import gaussian, write_gguf

COPY = '#!/bin/sh\necho "$@" >> "{log}"\ncp "$2" "$3"\n'


@pytest.fixture
def quantizer(workspace, monkeypatch):  # noqa: F811
    """Install a fake llama-quantize that copies, and return the file that gets its arguments."""
    log, fake = workspace.path / "quantize-log", workspace.path / "llama-quantize"
    fake.write_text(COPY.format(log=log))
    fake.chmod(0o755)
    monkeypatch.setattr(proxy, "find_tool", lambda name: fake)
    return log


def read_record(workspace) -> dict:  # noqa: F811
    return json.loads(workspace.cache.with_suffix(".json").read_text())["made_from"]


def test_proxy_exists_only_during_calibration(workspace, quantizer):  # noqa: F811
    _, err = workspace.run("--calibrate-with", "q8_0")
    assert "proxy model q8_0" in err
    (call,) = quantizer.read_text().splitlines()
    assert call.startswith(f"--allow-requantize {workspace.model} ") and call.endswith(" Q8_0 2")
    (run,) = workspace.runs()
    assert run["-m"].endswith("/q8_0.gguf") and read_record(workspace)["proxy"] == "q8_0"
    assert sorted(p.name for p in workspace.out.parent.iterdir()) == ["out.gguf", "small-f16.imatrix.gguf", "small-f16.imatrix.json"]
    # The same proxy type reuses the cache; another type or the model itself calibrates again, and the model's result then serves all.
    workspace.run("--calibrate-with", "q8_0")
    assert len(workspace.runs()) == 1
    workspace.run("--calibrate-with", "q4_k")
    assert len(workspace.runs()) == 2 and read_record(workspace)["proxy"] == "q4_k"
    workspace.run("--calibrate-with", "source")
    assert len(workspace.runs()) == 3 and "proxy" not in read_record(workspace) and workspace.runs()[-1]["-m"] == str(workspace.model)
    workspace.run("--calibrate-with", "q8_0")
    assert len(workspace.runs()) == 3


def test_existing_proxy_file_is_used(workspace, quantizer):  # noqa: F811
    proxy = write_gguf(workspace.path / "given.gguf", MATRICES, "Q8_0")
    _, err = workspace.run("--calibrate-with", proxy)
    assert f"proxy model {proxy}" in err and workspace.runs()[0]["-m"] == str(proxy) and not quantizer.exists()
    assert read_record(workspace)["proxy"][0]["bytes"] == proxy.stat().st_size


def test_proxy_of_another_model_is_refused(workspace):  # noqa: F811
    other = write_gguf(workspace.path / "other.gguf", {name: gaussian(8, 768) for name in MATRICES})
    workspace.error("--calibrate-with", "is [768, 8]", "[256, 8]", "other.gguf", flags=["--calibrate-with", other])
    few = write_gguf(workspace.path / "few.gguf", dict(list(MATRICES.items())[:2]))
    workspace.error("--calibrate-with", "few.gguf has no tensor blk.0.ffn_down.weight", flags=["--calibrate-with", few])
    workspace.error("--calibrate-with: got 'q9'", "q8_0", flags=["--calibrate-with", "q9"])
    workspace.error("--calibrate-with", "--no-calibration", flags=["--calibrate-with", "q8_0", "--no-calibration"])
    assert not workspace.runs()


@pytest.mark.slow
def test_proxy_is_chosen_if_the_model_does_not_fit(workspace, quantizer):  # noqa: F811
    """The largest type that fits is chosen and reported."""
    size = workspace.model.stat().st_size
    for share, name in ((0.8, "q8_0"), (0.4, "q4_k"), (0.01, "q4_k")):
        workspace.cache.unlink(missing_ok=True)
        workspace.cache.with_suffix(".json").unlink(missing_ok=True)
        _, err = workspace.run("--memory", repr(share * size / GIB), type_name="itq3_t")
        assert f"calibrating with the proxy model {name}" in err and "--calibrate-with source" in err, err
        assert ("does not fit into memory either" in err) == (share < 0.1), err
    n = len(workspace.runs())
    workspace.run("--memory", repr(0.1 * size / GIB), "--calibrate-with", "source", type_name="itq3_t")
    assert len(workspace.runs()) == n + 1 and workspace.runs()[-1]["-m"] == str(workspace.model)


def test_dry_run_writes_no_proxy(workspace, quantizer):  # noqa: F811
    out, _ = workspace.run("--dry-run", "--calibrate-with", "q8_0")
    assert "proxy model q8_0" in out and not quantizer.exists() and not workspace.runs()


def test_missing_space_for_the_proxy_is_refused(workspace, quantizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(proxy, "check_free_space", lambda path, n_bytes, *texts: base_files.check_free_space(path, 2**62, *texts))
    before = files(workspace.out.parent)
    _, err = workspace.run("--calibrate-with", "q8_0", code=1)
    assert "no space left on device" in err and "--calibrate-with source" in err and files(workspace.out.parent) == before


def test_failure_of_llama_quantize_is_reported(workspace, quantizer):  # noqa: F811
    (workspace.path / "llama-quantize").write_text("#!/bin/sh\necho 'error: bad magic'\nexit 1\n")
    _, err = workspace.run("--calibrate-with", "q8_0", code=1)
    assert "llama-quantize exited with 1" in err and "bad magic" in err
    assert not list(workspace.out.parent.iterdir())


def test_failure_with_devices_suggests_the_cpu(workspace, monkeypatch):  # noqa: F811
    monkeypatch.setenv("FAKE_IMATRIX_DO", "fail")
    workspace.error("exited with 3", "check --rpc host:50052, pass another text", flags=["--rpc", "host:50052"])


def test_devices_are_passed_to_llama_imatrix(workspace):  # noqa: F811
    workspace.run("-ngl", "99", "--device", "none", "--rpc", "host:50052")
    (run,) = workspace.runs()
    assert (run["-ngl"], run["--device"], run["--rpc"]) == ("99", "none", "host:50052")
