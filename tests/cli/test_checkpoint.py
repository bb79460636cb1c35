"""Folders of Hugging Face checkpoints as input: converted by llama.cpp's own converter, quantized and run; bad ones."""

import json
import os
import shutil
import signal
import subprocess
import sys

import gguf
import numpy as np
import pytest

from ggml_ext import quantize as program
from ggml_ext._base.files import partial_path
from ggml_ext._output.output import Output
from ggml_ext._source import checkpoint as _checkpoint
from helpers import checkpoint_folder
from helpers.checkpoint_files import CONFIG, N_LAYERS, tensors, tokenizer_of_5, write_checkpoint
from helpers.checkpoint_folder import decoded
from helpers.commands import quantize, tool
from helpers.errors import files, fill_disk
from helpers.hub_client import IS_OLD, REPO, Client, install_beside
from helpers.hub_server import Repository, serving
from helpers.models import gaussian, write_gguf

pytest.importorskip("torch", reason="the extra hf is not installed")
checkpoint, folder = checkpoint_folder.checkpoint, checkpoint_folder.folder  # fixtures


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """Converted for real: the run, its folder with out.gguf and kept.gguf."""
    folder = tmp_path_factory.mktemp("made")
    done = quantize(checkpoint, folder / "out.gguf", "--type", "itq3_s", "--keep-gguf", folder / "kept.gguf")
    return done, folder


def generate(path) -> str:
    command = [tool("llama-completion"), "-m", path, "-p", "The quick", "-n", "4", "--temp", "0", "-no-cnv", "-t", "1"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def bf16(values):
    """As write_safetensors() stores them."""
    return (values.view("<u4") & 0xFFFF0000).view("<f4")


@pytest.mark.slow
def test_converted_and_run(checkpoint, made):
    done, folder = made
    assert f"note: converting {checkpoint} to a GGUF file, about 3 MiB in {folder}{os.sep}.converted-" in done.stderr
    assert f"kept as {folder / 'kept.gguf'}" in done.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["kept.gguf", "out.gguf"]
    converted, source = decoded(folder / "kept.gguf"), tensors()
    names = {"token_embd": "embed_tokens", "blk.1.ffn_up": "layers.1.mlp.up_proj", "blk.0.attn_v": "layers.0.self_attn.v_proj"}
    for ours, theirs in names.items():
        assert np.array_equal(converted[f"{ours}.weight"], bf16(source[f"model.{theirs}.weight"]))
    assert len(converted) == len(source)
    # what was announced is what came out, to a tenth: the tokenizer is a quarter megabyte of these three
    announced = _checkpoint.converted_size(checkpoint, _checkpoint.check_checkpoint(checkpoint))
    assert abs(announced / (folder / "kept.gguf").stat().st_size - 1) < 0.1
    assert "The quick" in generate(folder / "out.gguf")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files that are no UTF-8")
def test_a_name_that_is_no_text(checkpoint, made, tmp_path):
    """It becomes the model's name, in a GGUF file, which is UTF-8; in a locale of ASCII too."""
    source = tmp_path / os.fsdecode("größer".encode() + b"-\xff")
    shutil.copytree(checkpoint, source)
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "ggml_ext.quantize", source, tmp_path / "out.gguf", "--type", "itq3_s", "--importance", "none"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Größer \\Xff" in gguf.GGUFReader(tmp_path / "out.gguf").fields["general.name"].contents()
    ours, before = decoded(tmp_path / "out.gguf"), decoded(made[1] / "out.gguf")
    assert all(np.array_equal(ours[name], before[name]) for name in before)


@pytest.fixture
def client(tmp_path):
    """The one of the transformers that is installed."""
    with serving() as hub:
        yield Client(hub, tmp_path)


def test_repository_with_safetensors(client, checkpoint, made):
    """The same bytes as from the folder, whose name in the cache is a hash."""
    contents = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    others = {"consolidated.safetensors": b"", "evil.py": b"", "original/params.json": b"{}"}
    client.hub.repositories[REPO] = Repository(contents | others)
    client.succeed()
    assert sorted(name for name, _ in client.hub.downloads) == sorted(contents)
    assert client.out.read_bytes() == (made[1] / "out.gguf").read_bytes()
    assert list(files(client.out.parent)) == ["out.gguf"]


@pytest.mark.slow
def test_experts(tmp_path):
    """A mixture: the experts' matrices become tensors of three dimensions, calibrated, quantized and run."""
    source = write_checkpoint(tmp_path / "mixture", n_experts=4)
    flags = ("--importance", "block", "--calibration-chunks", "2", "--threads", "1")
    done = quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", *flags)
    assert "calibration: second moments" in done.stderr
    found = {t.name: (list(t.shape), t.tensor_type.name) for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert found["blk.1.ffn_gate_exps.weight"] == ([256, 512, 4], "ITQ3_T")
    assert found["blk.1.ffn_down_exps.weight"] == ([512, 256, 4], "ITQ3_T")
    assert found["blk.0.ffn_gate_inp.weight"][1] == "F32" and sum("exps" in name for name in found) == 3 * N_LAYERS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mixture", "mixture.imatrix.gguf", "mixture.imatrix.json", "out.gguf"]
    assert "The quick" in generate(tmp_path / "out.gguf")


@pytest.fixture
def stub(tmp_path_factory, made, monkeypatch):
    """A converter that runs the code it is given, or copies what the real one has made."""

    def write(code=f"import shutil, sys; shutil.copy({str(made[1] / 'kept.gguf')!r}, sys.argv[sys.argv.index('--outfile') + 1])"):
        path = tmp_path_factory.mktemp("stub") / "convert_hf_to_gguf.py"
        path.write_text(code)
        monkeypatch.setattr(_checkpoint, "CONVERTER", path)

    return write


@pytest.fixture(scope="module")
def other_transformers(tmp_path_factory):
    """A folder with the major version that this environment does not have."""
    return install_beside(tmp_path_factory.mktemp("transformers"), "transformers>=5,<6" if IS_OLD else "transformers>=4.57,<5")


@pytest.mark.nightly
def test_other_version_of_transformers(client, checkpoint, made, other_transformers):
    """The same bytes; a tokenizer of 5 in its own class needs 5."""
    client.packages = other_transformers
    contents = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    client.hub.repositories[REPO] = Repository(contents)
    client.succeed()
    assert client.out.read_bytes() == (made[1] / "out.gguf").read_bytes()
    del contents["tokenizer.model"]
    client.hub.repositories[REPO].files = contents | tokenizer_of_5()
    for packages, is_old in ((None, IS_OLD), (other_transformers, not IS_OLD)):
        client.packages = packages
        if is_old:
            client.error("Tokenizer class TokenizersBackend does not exist", "it needs a newer transformers than 4.", flags=["--force"])
        else:
            client.succeed("--force")
            assert gguf.GGUFReader(client.out).fields["tokenizer.ggml.tokens"].contents()[3 + 65] == "<0x41>"


def test_unsupported_architecture(folder):
    """As the real converter says it."""
    folder.config(architectures=["PigeonForCausalLM"])
    folder.error(f"{folder.source} cannot be converted", "Model PigeonForCausalLM is not supported", "pass a GGUF file")


GROUP = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, "input_activations": None}
STORED = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "4 bits (gptq"),
    ({"quant_method": "awq", "bits": 4}, "4 bits (awq"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "4 bits (bitsandbytes"),
    ({"quant_method": "bitnet"}, "2 bits (bitnet"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}, "4 bits (compressed-tensors"),
    ({"quant_method": "gptq", "bits": 8}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": GROUP}}, None),  # stays NVFP4
    ({"quant_method": "mxfp4"}, None),
]


@pytest.mark.parametrize(("stored", "said"), STORED, ids=lambda v: v["quant_method"] if isinstance(v, dict) else None)
def test_weights_that_are_quantized_already(folder, stub, stored, said):
    """Below 8 bits they are refused, as in a GGUF file, before anything is converted."""
    stub()
    folder.config(quantization_config=stored)
    if said is None:
        folder.run()
    else:
        folder.error(f"{folder.source} is already quantized to {said}", "or pass --allow-requantize")
        folder.run("--allow-requantize")


def test_quantized_weights_of_a_part_of_the_model(folder):
    folder.config(text_config={"quantization_config": STORED[0][0]})
    folder.error("is already quantized to 4 bits")


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_damaged_config(folder, content):
    (folder.source / "config.json").write_bytes(content.encode("latin-1"))
    folder.error("config.json is no JSON object: download it again")


@pytest.mark.parametrize("has_config", [False, True])
def test_adapter_in_the_place_of_a_model(folder, has_config):
    """As trainers leave it, beside the config.json of its base or alone."""
    for path in folder.source.glob("model*"):
        path.unlink()
    if not has_config:
        (folder.source / "config.json").unlink()
    (folder.source / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    folder.error("has only an adapter: quantize org/base", "--lora")


def test_what_of_a_repository_is_no_source(client):
    """Known before its weights are downloaded."""
    weights = {"model.safetensors": b"x" * 1000}
    client.hub.repositories[REPO] = Repository({"config.json": json.dumps(CONFIG | {"quantization_config": STORED[0][0]}).encode(), **weights})
    client.error(f"--hf-repo: {REPO} is already quantized to 4 bits", "--allow-requantize")
    assert [name for name, _ in client.hub.downloads] == ["config.json"]
    client.hub.repositories[REPO] = Repository({"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    client.error(f"{REPO} has only an adapter")


@pytest.mark.parametrize(
    ("saved_by", "said", "is_newer"),
    [
        ("99.1.0", "TypeError: what 99 writes", True),
        (None, "ValueError: Tokenizer class TokenizersBackend does not exist or is not currently imported.", True),
        ("4.30.0", "ValueError: something else", False),
        ("", "ValueError: something else", False),
    ],
)
def test_checkpoint_of_a_newer_transformers(folder, stub, saved_by, said, is_newer):
    stub(f"raise SystemExit({said!r})")
    folder.config(transformers_version=saved_by)
    folder.error(said.rstrip("."), "it needs a newer transformers than " if is_newer else "pass a GGUF file of it")


@pytest.mark.parametrize("outtype", ["f32", "bf16"])
def test_type_of_floats(folder, outtype):
    """The converter makes it of the weights as they are stored."""
    folder.run("--type", outtype)
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(folder.out).tensors}
    assert found["blk.0.ffn_up.weight"] == outtype.upper() and found["blk.0.attn_norm.weight"] == "F32"
    assert np.array_equal(decoded(folder.out)["blk.1.ffn_up.weight"], bf16(tensors()["model.layers.1.mlp.up_proj.weight"]))


def test_temporary_file_is_removed(folder, stub):
    stub()
    before = sorted(p.name for p in folder.path.iterdir())
    said = folder.run()
    assert f"in {folder.out.parent}{os.sep}.converted-" in said and "removed afterwards; --keep-gguf FILE keeps it" in said
    assert list(files(folder.out.parent)) == ["out.gguf"] and sorted(p.name for p in folder.path.iterdir()) == before


def test_what_a_killed_conversion_left_is_removed_and_named(folder, stub):
    stub()
    left = folder.out.parent / ".converted-of-a-killed-run"
    left.mkdir()
    (left / "model.gguf").write_bytes(b"GGUF")
    os.utime(left, (0, 0))
    assert f"removed temporary files of a killed run: {left}" in folder.run() and not left.exists()


def test_dry_run_shows_the_plan(folder, stub):
    stub()
    folder.run("--dry-run")
    assert not files(folder.out.parent)


def test_kept_file_is_not_replaced(folder, stub):
    stub()
    kept = folder.path / "kept.gguf"
    folder.run("--keep-gguf", kept)
    before = kept.read_bytes()
    folder.error("kept.gguf exists: pass it as IN", flags=["--keep-gguf", kept, "--force"])
    folder.error("in a directory that does not exist", flags=["--keep-gguf", folder.path / "no" / "kept.gguf", "--force"])
    other = folder.path / "other.gguf"
    stub(f"import pathlib, sys; pathlib.Path({str(other)!r}).write_text('precious'); "
         "pathlib.Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text('converted')")
    said = folder.run("--keep-gguf", other, "--force", code=1)
    assert f"--keep-gguf: {other} appeared during the conversion" in said and other.read_text() == "precious"
    other.unlink()
    folder.source = kept
    folder.error("only a checkpoint's directory is converted", flags=["--keep-gguf", folder.path / "other.gguf", "--force"])
    assert kept.read_bytes() == before


@pytest.mark.parametrize(
    ("kept", "flags", "parts"),
    [
        ("out.gguf", (), ("--keep-gguf: ", "is the same file as OUT")),
        ("../results/out.gguf", (), ("--keep-gguf: ", "is the same file as OUT")),
        ("out-00001-of-00001.gguf", ("--split-max-size", "1G"), ("--keep-gguf: ", "is the same file as OUT, or has a name of its parts")),
        (".out.gguf.partial", (), ("--keep-gguf: ", "not yet whole")),
        ("kept.gguf", ("--report", "kept.gguf"), ("--report: kept.gguf is the same file as --keep-gguf",)),
        ("kept.gguf", ("--model-card", "./kept.gguf"), ("--model-card: kept.gguf is the same file as --keep-gguf",)),
        ("kept.gguf", ("--report", "kept.choice.json"), ("--report: kept.choice.json is where ", "of kept is kept")),
        ("kept.gguf", ("--report", "old.json"), ("--report: old.json exists",)),
    ],
    ids=str,
)
def test_names_are_compared_before_anything_is_converted(folder, stub, monkeypatch, kept, flags, parts):
    stub("raise SystemExit('it ran')")
    monkeypatch.chdir(folder.out.parent)
    (folder.out.parent / "old.json").write_text("{}")
    folder.error(*parts, flags=["--keep-gguf", folder.out.parent / kept, *flags])


def test_a_stopped_run_goes_on_in_the_folder_of_the_checkpoint(folder, stub, monkeypatch):
    """What it left is no part of the checkpoint."""
    stub()
    folder.out = folder.source / "out.gguf"
    finish = Output.finish

    def stop(self, *args):
        finish(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            folder.run()
    assert partial_path(folder.out).exists() and "an earlier run was stopped" in folder.run() and folder.out.exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise NotImplementedError('no such tokenizer')", "exited with 1: NotImplementedError: no such tokenizer"),
        ("print('half a line', end=''); raise SystemExit(3)", "exited with 3: half a line"),
        ("", "exited with 0: no output"),
        ("raise OSError(28, 'No space left on device')", "No space left on device; free some space"),
    ],
)
def test_converter_that_fails(folder, stub, code, said):
    stub(code)
    folder.error(f"{folder.source} cannot be converted", said)


def test_interrupted_while_converting(folder, stub):
    """The program ends too, and its file goes."""
    pid = folder.path / "pid"
    pid.write_text("")
    stub(
        "import os, signal, sys, time\n"
        "open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('half')\n"
        f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        f"os.kill(os.getppid(), signal.{signal.SIGTERM.name})\n"
        "time.sleep(600)\n"
    )
    assert "interrupted" in folder.run(code=128 + signal.SIGTERM) and not files(folder.out.parent)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_no_space_for_the_converted_file(folder, monkeypatch):
    fill_disk(monkeypatch, 2**20)
    folder.error("no space left on device", " MiB, 1.00 MiB are free", str(folder.out.parent))


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_extra(folder, monkeypatch, missing):
    """One line with the command that installs it; GGUF files need nothing of it."""
    find = _checkpoint.importlib.util.find_spec
    monkeypatch.setattr(_checkpoint.importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    folder.error(f"needs {missing}, which is not installed: pip install 'torch>=", " 'transformers", " 'huggingface-hub>=")


def test_missing_client_of_the_hub(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(_checkpoint.importlib.util, "find_spec", lambda name: None)
    code = program.main(["--hf-repo", REPO, str(folder.out), "--type", "itq3_s"])
    said = "--hf-repo needs huggingface_hub, which is not installed: pip install 'torch>="
    assert code == 1 and said in folder.capsys.readouterr().err


def test_package_without_the_converter(folder, monkeypatch):
    monkeypatch.setattr(_checkpoint, "CONVERTER", folder.path / "none.py")
    folder.error("none.py is missing: reinstall ggml-ext")


def test_folder_that_is_no_checkpoint(folder):
    (folder.source / "config.json").unlink()
    folder.error("is a directory without config.json, no Hugging Face checkpoint: pass a GGUF file or the directory of a checkpoint")
    write_gguf(folder.source / "model.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)})
    folder.error(f"pass one of its files, such as {folder.source / 'model.gguf'}")
    folder.source = folder.source / "tokenizer.model"
    folder.error("is not a GGUF file", "or the directory of a Hugging Face checkpoint")


def test_output_is_no_file_of_the_checkpoint(folder):
    folder.out = folder.source / "tokenizer.model"
    before = folder.out.read_bytes()
    folder.run("--force", code=1)
    assert folder.out.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--type", "itq3_s"], "required: IN, or --hf-repo ORG/NAME"),
        (["a.gguf", "b.gguf", "--hf-repo", REPO, "--type", "itq3_s"], "pass OUT alone"),
        (["a.gguf", "b.gguf", "--type", "itq3_s", "--hf-file", "c.gguf"], "--hf-file belongs to --hf-repo"),
        (["a.gguf", "b.gguf", "--type", "itq3_s", "--revision", "main"], "--revision belongs to --hf-repo"),
        (["a.gguf", "b.gguf", "--type", "itq3_s", "--hf-token", "hf"], "--hf-token belongs to --hf-repo"),
        (["--hf-repo", REPO, "--type", "itq3_s"], "OUT is missing"),
    ],
)
def test_options_that_do_not_fit_together(capsys, arguments, said):
    assert program.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
