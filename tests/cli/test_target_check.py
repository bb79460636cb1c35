"""The types chosen for a size against the best fixed type that fits: which one is written, and what the summary and the report say."""

from __future__ import annotations

import json

import pytest

from ggml_ext import inspect_model
from ggml_ext._allocation import target
from ggml_ext._base.errors import UserError
from ggml_ext._calibration import calibration
from ggml_ext._commands import quantizing, target_check
from ggml_ext._evaluation.figures import Figure
from ggml_ext._formats.gguf_file import GGUFFile
from helpers import choosing
from helpers.choosing import MATRICES, bits_per_weight
from helpers.commands import quantize, tool
from helpers.models import MODEL, write_gguf

fresh = choosing.fresh
LOG = "   1  9.0 ± 1.0  0.1 ± 0.1  {0} ± 0.1  0.1 ± 0.1 %  90.0 ± 0.1 %\n   2  9.0 ± 1.0  0.1 ± 0.1  {0} ± 0.1  0.1 ± 0.1 %  90.0 ± 0.1 %\n"


@pytest.fixture
def workspace(fresh, monkeypatch):
    """Return a workspace whose model has a vocabulary, so that it counts as one that can be measured."""
    write_gguf(fresh.model, MATRICES, fill=lambda writer: writer.add_token_list(["a", "b"]))
    monkeypatch.setattr(target_check, "find_tool", lambda name: fresh.path / name)
    return fresh


def let_measure(monkeypatch, chosen: float, fixed: float) -> None:
    def measure(settings, file, paths, directory, console):
        assert all(GGUFFile(path).tensors for path in paths)
        return [Figure(chosen, 0.001), Figure(fixed, 0.001)], [LOG.format(chosen), LOG.format(fixed)]

    monkeypatch.setattr(target_check, "_measure", measure)


@pytest.mark.parametrize("measured", [(0.25, 0.5), (0.5, 0.25)])
def test_the_better_file_is_written(workspace, monkeypatch, measured):
    let_measure(monkeypatch, *measured)
    workspace.out.touch(0o600)
    out, err = workspace.run("--target-bpw", "4", "--report", workspace.path / "report.json")
    assert workspace.out.stat().st_mode & 0o777 == 0o600
    report = json.loads((workspace.path / "report.json").read_text())
    check = report["target_check"]
    chosen, fixed = check["files"]
    is_fixed = measured[1] < measured[0]
    assert check["written"] == report["type"] == (fixed["type"] if is_fixed else "auto") and chosen["type"] == "auto" != fixed["type"]
    assert [f["kl_divergence"][0] for f in check["files"]] == list(measured) and check["paired"][0] == pytest.approx(measured[0] - measured[1])
    assert report["predicted_kl_divergence"] == check["files"][is_fixed]["predicted_kl_divergence"] and chosen["predicted_kl_divergence"] > 0
    assert fixed["type"] + (" was written in place of the chosen types" if is_fixed else ", the best fixed type") in out
    assert ": 50.0% less than that of" in out and "difference 0.25 +- 0\n" in out and out.count("[ 1/14]") == 1
    assert f"comparing with {fixed['type']}" in err
    # The file in place is the one that the report describes, it fits, and nothing else is left.
    assert workspace.out.stat().st_size == report["output"][0]["bytes"] == check["files"][is_fixed]["bytes"] and bits_per_weight(workspace.out) <= 4
    assert {t["name"]: t["type"] for t in report["tensors"]} == workspace.types()
    assert {p.name for p in workspace.out.parent.iterdir()} == {workspace.out.name, workspace.cache.name}
    if is_fixed:  # the same bytes as with --type, but for the options in the metadata
        plain = workspace.out.with_name("plain.gguf")
        quantize(workspace.model, plain, "--type", fixed["type"])
        files = [GGUFFile(path) for path in (workspace.out, plain)]
        data = [{t.name: file.rows(t, 0, t.n_rows).tobytes() for t in file.tensors} for file in files]
        assert data[0] == data[1] and files[0].value("ggml_ext.type") == fixed["type"]


def test_both_files_get_the_same_hessians(workspace, monkeypatch):
    """The fixed type counts the factorizations of the target too, on which the choice of Hessians depends."""
    let_measure(monkeypatch, 0.25, 0.5)
    counts, prepare = [], calibration.prepare

    def record(*args, n_compared_metrics, **options):
        counts.append(n_compared_metrics)
        return prepare(*args, n_compared_metrics=n_compared_metrics, **options)

    monkeypatch.setattr(calibration, "prepare", record)
    workspace.run("--target-bpw", "4")
    assert len(counts) == 2 and counts[0] == counts[1] > 1


def test_fixed_types_fit_and_follow_the_options(workspace, monkeypatch):
    """Their sizes are at most the target's; --stock and --target-types limit them too."""
    let_measure(monkeypatch, 0.5, 0.25)
    for flags, allowed in (
        ([], None), (["--stock"], None), (["--target-types", "itq2_t,itq3_t,q8_0,q6_k"], {"itq2_t", "itq3_t", "q8_0", "q6_k", "f32"}),
    ):
        workspace.run("--target-bpw", "3.6", *flags)
        types = set(workspace.types().values())
        assert bits_per_weight(workspace.out) <= 3.6 and (allowed is None or types <= allowed)
        assert "--stock" not in flags or not types & {*target.DEFAULT_TYPES} - {*target.UPSTREAM_TYPES}
    size = workspace.out.stat().st_size - 100
    workspace.run("--target-size", str(size))
    assert workspace.out.stat().st_size <= size


def test_check_is_skipped(workspace, monkeypatch):
    """On demand, for a target without a size, and without measurements."""
    def fail(*_):
        raise AssertionError("compared")

    monkeypatch.setattr(target_check, "_measure", fail)
    for flags in (
        ["--target-bpw", "4", "--no-target-check"], ["--target-kld", "0.5"], ["--target-bpw", "4", "--no-calibration"],
        ["--target-bpw", "4", "--split-max-size", "1M"], ["--target-bpw", "4", "--dry-run"],
    ):
        assert "best fixed type" not in "".join(workspace.run(*flags))


def test_failed_check_keeps_the_chosen_types(workspace, monkeypatch):
    def fail(*_):
        raise UserError("llama-perplexity failed")

    monkeypatch.setattr(target_check, "_measure", fail)
    _, err = workspace.run("--target-bpw", "4")
    assert "warning: the chosen types were not compared" in err and "llama-perplexity failed" in err
    assert GGUFFile(workspace.out).value("ggml_ext.type") == "auto"
    assert {p.name for p in workspace.out.parent.iterdir()} == {workspace.out.name, workspace.cache.name}


@pytest.mark.slow
def test_reference_model_is_measured(tmp_path):
    """The report has llama-perplexity's figures of both files; the chosen types win by far here (docs/results/targets.md)."""
    tool("llama-perplexity")
    source = tmp_path / "f16.gguf"
    source.write_bytes(MODEL.read_bytes())
    flags = ["--target-bpw", "3", "--sensitivity", "usual", "--effort", "fast", "--importance", "diagonal", "--report", tmp_path / "report.json"]
    quantize(source, tmp_path / "out.gguf", *flags)
    check = json.loads((tmp_path / "report.json").read_text())["target_check"]
    chosen, fixed = (f["kl_divergence"] for f in check["files"])
    assert check["written"] == "auto" and 0 < chosen[0] < fixed[0] and 0 < chosen[1] < 0.1 * chosen[0]
    # The mean of the paired differences is the difference of the means: 16 chunks of means with five decimals.
    assert check["paired"][0] == pytest.approx(chosen[0] - fixed[0], abs=1e-5)


@pytest.mark.parametrize("measured", [pytest.param((0.25, 0.5), marks=pytest.mark.nightly), (0.5, 0.25)])
def test_better_types_are_quantized_sequentially(tmp_path, monkeypatch, measured):
    """The files that are compared are not; they are gone afterwards."""
    tool("ggml-ext-streams")
    let_measure(monkeypatch, *measured)
    # files of standard types have no metadata that tell how they were made
    monkeypatch.setattr(quantizing, "list_fixed_types", lambda *args: [f for f in target_check.list_fixed_types(*args) if not f.is_upstream])
    source, out, report = tmp_path / "f16.gguf", tmp_path / "out" / "out.gguf", tmp_path / "report.json"
    source.write_bytes(MODEL.read_bytes())
    out.parent.mkdir()
    flags = ["--target-bpw", "3.5", "--sensitivity", "usual", "--effort", "fast", "--propagate", "--calibration-chunks", "2", "--report", report]
    done = quantize(source, out, *flags)
    record = json.loads(report.read_text())
    check, written = record["target_check"], GGUFFile(out)
    assert done.stdout.count("measured KL divergence without sequential quantization ") == 1
    assert check["written"] == record["type"] == written.value("ggml_ext.type") == check["files"][measured[1] < measured[0]]["type"]
    assert "propagate" in str(written.value("ggml_ext.options")) and inspect_model(out).record()["stream_errors"]
    assert bits_per_weight(out) <= 3.5 and not [p for p in out.parent.iterdir() if p.name.startswith(".")]
