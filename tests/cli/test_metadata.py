"""ggml-ext new-metadata and set-metadata: gguf's programs on ggml-ext files, with one-line errors."""

import errno
import io

import gguf
import pytest

from ggml_ext import new_metadata, set_metadata
from ggml_ext._formats.gguf_file import GGUFFile
from helpers.commands import quantize, run_main
from helpers.errors import check_error, files
from helpers.models import gaussian, read_tensors, write_gguf


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Write a model; no terminal answers questions."""
    def fill(writer):
        writer.add_token_list(["a", "b", "c"])
        writer.add_bool("tokenizer.ggml.add_bos_token", True)
        writer.add_uint32("tokenizer.ggml.eos_token_id", 1)

    write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256), "output_norm.weight": gaussian(256)}, fill=fill)
    quantize(tmp_path / "in.gguf", tmp_path / "model.gguf", "--type", "itq3_s")
    (tmp_path / "in.gguf").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return tmp_path / "model.gguf"


def run_new_metadata(*args):
    return run_main(new_metadata.main, *args)


def run_set_metadata(*args):
    return run_main(set_metadata.main, *args)


def test_new_metadata_copies_the_tensors(model):
    out = model.with_name("out.gguf")
    done = run_new_metadata(model, out, "--general-name", "mine", "--special-token", "eos", "c", "--chat-template", "{{ messages }}")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    before, after = GGUFFile(model), GGUFFile(out)
    changed = {"general.name": "mine", "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "{{ messages }}"}
    assert {key: after.value(key) for key in changed} == changed
    assert {k: kv.raw for k, kv in after.metadata.items() if k not in changed} == {k: kv.raw for k, kv in before.metadata.items() if k not in changed}
    old, copied = read_tensors(model), read_tensors(out)
    assert copied["blk.0.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.ITQ3_S
    assert all(copied[name].data.tobytes() == tensor.data.tobytes() for name, tensor in old.items()) and len(copied) == len(old)
    assert sorted(p.name for p in model.parent.iterdir()) == ["model.gguf", "out.gguf"]


def test_bad_copies_are_refused(model, monkeypatch):
    out = model.with_name("out.gguf")
    out.write_text("precious")
    model.with_name("cut.gguf").write_bytes(model.read_bytes()[:-100])
    before = files(model.parent)
    check_error(run_new_metadata(model, out, "--general-name", "mine"), "--force")
    check_error(run_new_metadata(model, model, "--general-name", "mine", "--force"), "is the same file as IN")
    check_error(run_new_metadata(model, model.with_name("no") / "out.gguf", "--general-name", "mine"), "does not exist")
    check_error(run_new_metadata(model.with_name("cut.gguf"), model.with_name("new.gguf")), "cut.gguf: truncated")
    check_error(run_new_metadata(model.with_name("none.gguf"), model.with_name("new.gguf")), "none.gguf: No such file")
    check_error(run_new_metadata(model, model.with_name("new.gguf"), "--special-token", "eos", "z"), '"z"')
    check_error(run_new_metadata(model, model.with_name("new.gguf"), "--chat-template-file", model.with_name("no.jinja")), "no.jinja: No such file")
    check_error(run_new_metadata(model, model.with_name("new.gguf"), "--bogus"), "--bogus", "--help")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    check_error(run_new_metadata(model, out, "--general-name", "mine", "--force"), "No space left")
    assert files(model.parent) == before


def test_set_metadata_changes_a_value(model):
    size = model.stat().st_size
    for key, text, value in (("tokenizer.ggml.eos_token_id", "2", 2), ("tokenizer.ggml.add_bos_token", "false", False)):
        done = run_set_metadata(model, key, text, "--force")
        assert done.returncode == 0 and GGUFFile(model).value(key) == value, done.stderr
    assert model.stat().st_size == size and "blk.0.ffn_up.weight" in read_tensors(model)


@pytest.mark.parametrize(("key", "value", "flags", "part"), [
    ("tokenizer.ggml.eos_token_id", "two", ["--force"], "'two'"), ("tokenizer.ggml.add_bos_token", "no", ["--force"], "must be true or false"),
    ("no.such.key", "1", ["--force"], "'no.such.key' not found"), ("tokenizer.ggml.tokens", "1", ["--force"], "unsupported type"),
    ("tokenizer.ggml.eos_token_id", "2", [], "--force"),
])
def test_bad_values_are_refused(model, key, value, flags, part):
    before = files(model.parent)
    check_error(run_set_metadata(model, key, value, *flags), part)
    assert files(model.parent) == before
    model.write_bytes(model.read_bytes()[:50])
    check_error(run_set_metadata(model, key, value, *flags), "model.gguf: truncated")
