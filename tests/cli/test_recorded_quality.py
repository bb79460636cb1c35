"""Quality in a file's metadata: what evaluate --write and quantize --evaluate record, and how it gets into a file without harm to it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess

import gguf
import pytest

from ggml_ext import evaluate as evaluator
from ggml_ext import inspect as inspector
from ggml_ext import set_metadata
from ggml_ext._commands.uploading import UploadOptions, read_card
from ggml_ext._evaluation.figures import KLD, PPL, SAME_TOP
from ggml_ext._formats import header_room
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._formats.header_room import ROOM_KEY
from ggml_ext._formats.quality import RecordedQuality, digest_model, read_quality
from ggml_ext._formats.split import open_model
from helpers.commands import quantize, run_main, run_quantize, tool
from helpers.errors import check_error, files, fill_disk
from helpers.models import MODEL, gaussian, write_gguf

QUALITY = RecordedQuality(
    perplexity=11.5, perplexity_error=0.1, source_perplexity=11.25, source_perplexity_error=0.125, kl_divergence=0.0625,
    kl_divergence_error=0.001, kl_divergence_99=0.5, top_1=90.5, top_1_error=0.25, tokens=5100, chunks=20, context=512, text="built-in",
    text_sha256="ab" * 32, source="in.gguf", devices="CPU", logits="source 16 bits, file 32 bits", version="0.1.0",
)
SECTOR = 512  # bytes that every disk writes completely or not at all
OTHER = dataclasses.replace(QUALITY, kl_divergence=0.25, text="a much longer name of a text.txt")


def write_source(path, n_tokens: int = 3):
    def fill(writer):
        writer.add_uint32("llama.block_count", 1)
        writer.add_token_list([f"token {i}" for i in range(n_tokens)])

    return write_gguf(path, {"blk.0.ffn_up.weight": gaussian(48, 512), "output_norm.weight": gaussian(512)}, fill=fill)


@pytest.fixture
def model(tmp_path):
    quantize(write_source(tmp_path / "in.gguf"), tmp_path / "model.gguf", "--type", "itq3_s")
    return tmp_path / "model.gguf"


def content(path) -> tuple[dict, dict]:
    """Return metadata without the quality, and the data of the tensors."""
    file = open_model(path)
    tensors = {t.name: file.rows(t, 0, t.n_rows).tobytes() for t in file.tensors}
    return {k: kv.raw for k, kv in file.metadata.items() if not k.startswith(header_room.PREFIX)}, tensors


@pytest.mark.parametrize("has_room", [True, False])
def test_figures_are_recorded_replaced_and_removed(model, has_room):
    """A file without room is copied once, by a multiple of the block size; the copy has room."""
    path = model if has_room else model.with_name("in.gguf")
    os.chmod(path, 0o640)
    before, n_bytes, inode = content(path), path.stat().st_size, path.stat().st_ino
    for quality in (QUALITY, OTHER):
        quality.write(GGUFFile(path))
        assert read_quality(GGUFFile(path)) == (quality, False) and content(path) == before
    header_room.write_first_keys(GGUFFile(path), [])
    assert read_quality(GGUFFile(path)) == (None, False) and content(path) == before
    status = path.stat()
    assert (status.st_size - n_bytes) % 4096 == 0 and (status.st_size == n_bytes) == (status.st_ino == inode) == has_room
    assert status.st_mode & 0o777 == 0o640 and len(list(path.parent.iterdir())) == 2


@pytest.mark.parametrize("first", [QUALITY, None])
@pytest.mark.parametrize("n_writes", range(4))
def test_lost_power_leaves_a_file_that_can_be_read(model, monkeypatch, first, n_writes):
    """The write after n_writes complete ones is cut in the middle, if it is longer than a sector."""
    if first:
        first.write(GGUFFile(model))
    assert header_room.FIRST_AT + header_room.ROOM_HEAD <= SECTOR
    before = content(model)
    real, count = header_room.sync, 0

    def lose_power(f):
        nonlocal count
        real(f)
        count += 1
        if count == n_writes + 1:
            raise KeyboardInterrupt

    class Torn(io.FileIO):
        def write(self, data):
            is_last = count == n_writes and len(data) > SECTOR
            return super().write(data[: len(data) // 2] if is_last else data)

    monkeypatch.setattr(header_room, "sync", lose_power)
    monkeypatch.setattr(header_room, "open_file", lambda path: Torn(path, "r+"))
    if n_writes < 3:
        with pytest.raises(KeyboardInterrupt):
            OTHER.write(GGUFFile(model))
    else:
        OTHER.write(GGUFFile(model))
    assert content(model) == before and read_quality(GGUFFile(model)) == ((OTHER if n_writes >= 2 else None), False)


def test_figures_of_other_weights_are_not_shown(model):
    for quality in (QUALITY, OTHER):
        quality.write(GGUFFile(model))
    shown = run_main(inspector.main, model).stdout
    assert "KL divergence from in.gguf 0.25000 +- 0.00100" in shown and "5,100 tokens of the text a much longer name" in shown
    assert json.loads(run_main(inspector.main, model, "--json").stdout)["quality"] == OTHER.record()
    original = model.read_bytes()
    tensor = GGUFFile(model).tensors[0]
    for offset in (tensor.offset, tensor.offset + tensor.n_bytes - 1):
        data = bytearray(original)
        data[offset] ^= 1
        model.write_bytes(data)
        assert read_quality(GGUFFile(model)) == (None, True)
    shown = run_main(inspector.main, model).stdout
    assert "of other weights or incomplete" in shown and "0.25" not in shown
    assert "quality" not in json.loads(run_main(inspector.main, model, "--json").stdout)
    model.write_bytes(original)
    assert run_main(set_metadata.main, model, "llama.block_count", "2", "--force").returncode == 0
    assert read_quality(GGUFFile(model)) == (None, True)


def test_a_run_does_not_pass_on_figures(model):
    """Another quantization of the file has other weights."""
    QUALITY.write(GGUFFile(model))
    QUALITY.write(GGUFFile(model.with_name("in.gguf")))
    for name, source, kind in (("a", "in", "itq3_s"), ("b", "in", "q4_k"), ("c", "model", "itq3_s")):
        quantize(model.with_name(f"{source}.gguf"), model.with_name(f"{name}.gguf"), "--type", kind)
        keys = [key for key in GGUFFile(model.with_name(f"{name}.gguf")).metadata if key.startswith(header_room.PREFIX)]
        assert keys == ([] if kind == "q4_k" else [ROOM_KEY])


def test_figures_stay_with_the_parts_of_a_model(model):
    """llama-gguf-split moves tensors and metadata to other places; they remain the same."""
    split = [tool("llama-gguf-split"), "--split-max-tensors", "1"]
    parts = [model.with_name(f"out-0000{n}-of-00002.gguf") for n in (1, 2)]
    subprocess.run([*split, model, model.with_name("out")], check=True, capture_output=True)
    QUALITY.write(open_model(parts[1]))
    assert [read_quality(open_model(part)) for part in parts] == [(QUALITY, False)] * 2
    subprocess.run([split[0], "--merge", parts[0], model.with_name("merged.gguf")], check=True, capture_output=True)
    assert read_quality(open_model(model.with_name("merged.gguf"))) == (QUALITY, False)
    assert digest_model(open_model(parts[0])) == digest_model(open_model(model)) != digest_model(open_model(model.with_name("in.gguf")))


def test_files_that_may_not_change_are_refused(model, monkeypatch):
    against = ("--against", model.with_name("in.gguf"))
    check_error(run_main(evaluator.main, model, "--write"), "--write", "--against")
    check_error(run_main(evaluator.main, model, "--base-logits", model, "--write"), "--write", "--against")
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != os.fspath(model))
    before = files(model.parent)
    check_error(run_main(evaluator.main, model, *against, "--write"), "model.gguf is read-only")
    monkeypatch.undo()
    fill_disk(monkeypatch, 1000)
    check_error(run_main(evaluator.main, model.with_name("in.gguf"), *against, "--write"), "no space left")
    assert files(model.parent) == before
    blobs = model.parent / "hub" / "blobs"
    blobs.mkdir(parents=True)
    (model.parent / "hub" / "snapshots").mkdir()
    cached = model.rename(blobs / "0123")
    check_error(run_main(evaluator.main, cached, *against, "--write"), "cache of the Hugging Face hub")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["itq2_t", "q4_k_m"])
def test_finished_file_has_its_measured_quality(tmp_path, kind):
    """The figures are those of evaluate. The file loads, and its size is the one that was planned."""
    tool("llama-perplexity")
    source, out, card, report = (tmp_path / name for name in ("f16.gguf", "out.gguf", "card.md", "report.json"))
    source.write_bytes(MODEL.read_bytes())
    flags = ["--type", kind, "--effort", "fast", "--evaluate", "--evaluation-chunks", 4, "--verify", "--model-card", card, "--report", report]
    done = quantize(source, out, *flags)
    quality, is_other = read_quality(GGUFFile(out))
    assert quality is not None and not is_other and not list(tmp_path.glob(".*"))
    measured = json.loads(run_main(evaluator.main, out, "--against", source, "--chunks", 4, "--json").stdout)["models"][0]["statistics"]
    assert [quality.perplexity, quality.perplexity_error] == measured[PPL] and [quality.kl_divergence, quality.kl_divergence_error] == measured[KLD]
    assert [quality.top_1, quality.top_1_error] == measured[SAME_TOP] and quality.kl_divergence_99 == measured["99.0% KLD"][0]
    assert (quality.tokens, quality.chunks, quality.context, quality.source, quality.devices) == (4 * 255, 4, 512, "f16.gguf", "CPU")
    assert json.loads(report.read_text())["quality"] == quality.record()
    text = f"{quality.kl_divergence:.5f} +- {quality.kl_divergence_error:.5f}"
    assert text in done.stdout and f"| KL divergence, mean | {text} |" in card.read_text()
    n_room = sum(kv.key == ROOM_KEY for kv in GGUFFile(out).metadata.values())
    assert n_room == 1 and list(GGUFFile(out).metadata)[0].startswith(header_room.PREFIX)
    if kind == "q4_k_m":  # gguf's own reader knows the type
        assert gguf.GGUFReader(out).get_field("ggml_ext.quality.kl_divergence").contents() == quality.kl_divergence
    run = subprocess.run([tool("llama-completion"), "-m", out, "-p", "def", "-n", "2", "-no-cnv"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_evaluation_that_cannot_run_is_refused_before_the_work(tmp_path):
    tool("llama-perplexity")
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)})
    before = files(tmp_path)
    for flags, parts in (
        (["--evaluate"], ["has no vocabulary"]), (["--evaluation-chunks", 4], ["--evaluation-chunks: pass --evaluate"]),
        (["--evaluate", "--dry-run"], ["--evaluate: --dry-run writes nothing"]),
    ):
        check_error(run_quantize(source, tmp_path / "out.gguf", "--type", "itq3_s", *flags), *parts)
    assert files(tmp_path) == before


def test_uploaded_card_gets_the_recorded_figures(model, tmp_path):
    card = tmp_path / "card.md"
    card.write_text("# A model\n")
    options = UploadOptions(file=model, repo="org/name", model_card=card)
    assert read_card(options) == "# A model\n"
    QUALITY.write(GGUFFile(model))
    assert "| KL divergence, mean | 0.06250 +- 0.00100 |" in read_card(options)
    card.write_text(read_card(options))
    assert read_card(options).count("## Quality") == 1
