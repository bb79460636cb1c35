"""Hugging Face checkpoints as input: converted by llama.cpp's converter, quantized and run; bad ones are refused."""

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
from helpers.checkpoint_files import CONFIG, N_LAYERS, tensors, tokenizer_backend_files, write_checkpoint
from helpers.checkpoint_folder import read_weights
from helpers.commands import quantize, tool
from helpers.errors import files, fill_disk
from helpers.hub_client import IS_OLD, REPO, Client, install_other_version
from helpers.hub_server import Repository, serving
from helpers.models import gaussian, write_gguf

pytest.importorskip("torch", reason="the extra hf is not installed")
checkpoint, workspace = checkpoint_folder.checkpoint, checkpoint_folder.workspace  # fixtures


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    """Convert a checkpoint with the real converter: the run, and its directory with out.gguf and kept.gguf."""
    workspace = tmp_path_factory.mktemp("made")
    done = quantize(checkpoint, workspace / "out.gguf", "--type", "itq3_s", "--keep-gguf", workspace / "kept.gguf")
    return done, workspace


def generate(path) -> str:
    command = [tool("llama-completion"), "-m", path, "-p", "The quick", "-n", "4", "--temp", "0", "-no-cnv", "-t", "1"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def truncate_to_bf16(values):
    """Truncate values as write_safetensors() does."""
    return (values.view("<u4") & 0xFFFF0000).view("<f4")


@pytest.mark.slow
def test_checkpoint_is_converted_and_runs(checkpoint, converted):
    done, directory = converted
    assert f"note: converting {checkpoint} to a GGUF file, about 3 MiB in {directory}{os.sep}.converted-" in done.stderr
    assert f"kept as {directory / 'kept.gguf'}" in done.stderr
    assert sorted(p.name for p in directory.iterdir()) == ["kept.gguf", "out.gguf"]
    weights, source = read_weights(directory / "kept.gguf"), tensors()
    names = {"token_embd": "embed_tokens", "blk.1.ffn_up": "layers.1.mlp.up_proj", "blk.0.attn_v": "layers.0.self_attn.v_proj"}
    for name, original_name in names.items():
        assert np.array_equal(weights[f"{name}.weight"], truncate_to_bf16(source[f"model.{original_name}.weight"]))
    assert len(weights) == len(source)
    # The announced size is right to a tenth: the tokenizer is a quarter of the three megabytes.
    announced = _checkpoint.converted_size(checkpoint, _checkpoint.check_checkpoint(checkpoint))
    assert abs(announced / (directory / "kept.gguf").stat().st_size - 1) < 0.1
    assert "The quick" in generate(directory / "out.gguf")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files that are no UTF-8")
def test_directory_name_that_is_not_utf8_becomes_the_model_name(checkpoint, converted, tmp_path):
    """A GGUF file is UTF-8; the locale may be ASCII."""
    source = tmp_path / os.fsdecode("größer".encode() + b"-\xff")
    shutil.copytree(checkpoint, source)
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "ggml_ext.quantize", source, tmp_path / "out.gguf", "--type", "itq3_s", "--importance", "none"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Größer \\Xff" in gguf.GGUFReader(tmp_path / "out.gguf").fields["general.name"].contents()
    weights, before = read_weights(tmp_path / "out.gguf"), read_weights(converted[1] / "out.gguf")
    assert all(np.array_equal(weights[name], before[name]) for name in before)


@pytest.fixture
def client(tmp_path):
    """Return a client of the installed transformers."""
    with serving() as hub:
        yield Client(hub, tmp_path)


def test_repository_gives_the_bytes_of_the_checkpoint(client, checkpoint, converted):
    """The name of its directory in the cache is a hash."""
    contents = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    others = {"consolidated.safetensors": b"", "evil.py": b"", "original/params.json": b"{}"}
    client.hub.repositories[REPO] = Repository(contents | others)
    client.succeed()
    assert sorted(name for name, _ in client.hub.downloads) == sorted(contents)
    assert client.out.read_bytes() == (converted[1] / "out.gguf").read_bytes()
    assert list(files(client.out.parent)) == ["out.gguf"]


@pytest.mark.slow
def test_experts_are_merged_into_one_tensor(tmp_path):
    """A Mixtral checkpoint is converted, calibrated, quantized and run."""
    source = write_checkpoint(tmp_path / "mixture", n_experts=4)
    flags = ("--importance", "block", "--calibration-chunks", "2", "--threads", "1", "--no-propagate")
    done = quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", *flags)
    assert "calibration: " in done.stderr
    tensors = {t.name: (list(t.shape), t.tensor_type.name) for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert tensors["blk.1.ffn_gate_exps.weight"] == ([256, 512, 4], "ITQ3_T")
    assert tensors["blk.1.ffn_down_exps.weight"] == ([512, 256, 4], "ITQ3_T")
    assert tensors["blk.0.ffn_gate_inp.weight"][1] == "F32" and sum("exps" in name for name in tensors) == 3 * N_LAYERS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mixture", "mixture.imatrix.gguf", "mixture.imatrix.json", "out.gguf"]
    assert "The quick" in generate(tmp_path / "out.gguf")


@pytest.fixture
def write_converter(tmp_path_factory, converted, monkeypatch):
    """Return a function that installs a converter, which runs given code or copies the real one's result."""

    def install(code=f"import shutil, sys; shutil.copy({str(converted[1] / 'kept.gguf')!r}, sys.argv[sys.argv.index('--outfile') + 1])"):
        path = tmp_path_factory.mktemp("stub") / "convert_hf_to_gguf.py"
        path.write_text(code)
        monkeypatch.setattr(_checkpoint, "CONVERTER", path)

    return install


@pytest.fixture(scope="module")
def other_transformers(tmp_path_factory):
    """Install the other major version of transformers and return its directory."""
    return install_other_version(tmp_path_factory.mktemp("transformers"), "transformers>=5,<6" if IS_OLD else "transformers>=4.57,<5")


@pytest.mark.nightly
def test_other_transformers_give_the_same_bytes(client, checkpoint, converted, other_transformers):
    """A tokenizer class of version 5 needs version 5."""
    client.packages = other_transformers
    contents = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    client.hub.repositories[REPO] = Repository(contents)
    client.succeed()
    assert client.out.read_bytes() == (converted[1] / "out.gguf").read_bytes()
    del contents["tokenizer.model"]
    client.hub.repositories[REPO].files = contents | tokenizer_backend_files()
    for packages, is_old in ((None, IS_OLD), (other_transformers, not IS_OLD)):
        client.packages = packages
        if is_old:
            client.error("Tokenizer class TokenizersBackend does not exist", "it needs a newer transformers than 4.", flags=["--force"])
        else:
            client.succeed("--force")
            assert gguf.GGUFReader(client.out).fields["tokenizer.ggml.tokens"].contents()[3 + 65] == "<0x41>"


def test_unsupported_architecture_is_refused(workspace):
    """The message is the real converter's."""
    workspace.config(architectures=["PigeonForCausalLM"])
    workspace.error(f"{workspace.source} cannot be converted", "Model PigeonForCausalLM is not supported", "pass a GGUF file")


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


@pytest.mark.parametrize(("stored", "message"), STORED, ids=lambda v: v["quant_method"] if isinstance(v, dict) else None)
def test_quantized_weights_are_refused_before_conversion(workspace, write_converter, stored, message):
    """As in a GGUF file, weights below 8 bits are refused."""
    write_converter()
    workspace.config(quantization_config=stored)
    if message is None:
        workspace.run()
    else:
        workspace.error(f"{workspace.source} is already quantized to {message}", "or pass --allow-requantize")
        workspace.run("--allow-requantize")


def test_partly_quantized_weights_are_refused(workspace):
    workspace.config(text_config={"quantization_config": STORED[0][0]})
    workspace.error("is already quantized to 4 bits")


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_damaged_config_is_refused(workspace, content):
    (workspace.source / "config.json").write_bytes(content.encode("latin-1"))
    workspace.error("config.json is not a JSON object: download it again")


@pytest.mark.parametrize("has_config", [False, True])
def test_adapter_is_refused(workspace, has_config):
    """Trainers write it alone or next to the base model's config.json."""
    for path in workspace.source.glob("model*"):
        path.unlink()
    if not has_config:
        (workspace.source / "config.json").unlink()
    (workspace.source / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    workspace.error("has only an adapter: quantize org/base", "--lora")


def test_unusable_repository_is_refused_before_download(client):
    weights = {"model.safetensors": b"x" * 1000}
    client.hub.repositories[REPO] = Repository({"config.json": json.dumps(CONFIG | {"quantization_config": STORED[0][0]}).encode(), **weights})
    client.error(f"--hf-repo: {REPO} is already quantized to 4 bits", "--allow-requantize")
    assert [name for name, _ in client.hub.downloads] == ["config.json"]
    client.hub.repositories[REPO] = Repository({"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    client.error(f"{REPO} has only an adapter")


@pytest.mark.parametrize(
    ("saved_by", "message", "is_newer"),
    [
        ("99.1.0", "TypeError: what 99 writes", True),
        (None, "ValueError: Tokenizer class TokenizersBackend does not exist or is not currently imported.", True),
        ("4.30.0", "ValueError: something else", False),
        ("", "ValueError: something else", False),
    ],
)
def test_failure_on_a_newer_checkpoint_names_its_version(workspace, write_converter, saved_by, message, is_newer):
    write_converter(f"raise SystemExit({message!r})")
    workspace.config(transformers_version=saved_by)
    workspace.error(message.rstrip("."), "it needs a newer transformers than " if is_newer else "pass a GGUF file of it")


@pytest.mark.parametrize("outtype", ["f32", "bf16"])
def test_outtype_sets_the_type_of_floats(workspace, outtype):
    """The converter converts from the stored weights."""
    workspace.run("--type", outtype)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(workspace.out).tensors}
    assert types["blk.0.ffn_up.weight"] == outtype.upper() and types["blk.0.attn_norm.weight"] == "F32"
    assert np.array_equal(read_weights(workspace.out)["blk.1.ffn_up.weight"], truncate_to_bf16(tensors()["model.layers.1.mlp.up_proj.weight"]))


def test_temporary_file_is_removed(workspace, write_converter):
    write_converter()
    before = sorted(p.name for p in workspace.path.iterdir())
    output = workspace.run()
    assert f"converting {workspace.source} tensor by tensor" in output and "--keep-gguf FILE keeps them as a GGUF file" in output
    assert list(files(workspace.out.parent)) == ["out.gguf"] and sorted(p.name for p in workspace.path.iterdir()) == before


def test_leftovers_of_a_killed_conversion_are_removed(workspace, write_converter):
    write_converter()
    leftover = workspace.out.parent / ".converted-of-a-killed-run"
    leftover.mkdir()
    (leftover / "model.gguf").write_bytes(b"GGUF")
    os.utime(leftover, (0, 0))
    assert f"removed temporary files of a killed run: {leftover}" in workspace.run() and not leftover.exists()


def test_dry_run_shows_the_plan(workspace, write_converter):
    write_converter()
    workspace.run("--dry-run")
    assert not files(workspace.out.parent)


def test_kept_file_is_not_replaced(workspace, write_converter):
    write_converter()
    kept = workspace.path / "kept.gguf"
    workspace.run("--keep-gguf", kept)
    before = kept.read_bytes()
    workspace.error("kept.gguf exists: pass it as IN", flags=["--keep-gguf", kept, "--force"])
    workspace.error("in a directory that does not exist", flags=["--keep-gguf", workspace.path / "no" / "kept.gguf", "--force"])
    other = workspace.path / "other.gguf"
    write_converter(f"import pathlib, sys; pathlib.Path({str(other)!r}).write_text('precious'); "
         "pathlib.Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text('converted')")
    message = workspace.run("--keep-gguf", other, "--force", code=1)
    assert f"--keep-gguf: {other} appeared during the conversion" in message and other.read_text() == "precious"
    other.unlink()
    workspace.source = kept
    workspace.error("only a checkpoint's directory is converted", flags=["--keep-gguf", workspace.path / "other.gguf", "--force"])
    assert kept.read_bytes() == before


@pytest.mark.parametrize(
    ("kept", "flags", "parts"),
    [
        ("out.gguf", (), ("--keep-gguf: ", "is the same file as OUT")),
        ("../results/out.gguf", (), ("--keep-gguf: ", "is the same file as OUT")),
        ("out-00001-of-00001.gguf", ("--split-max-size", "1G"), ("--keep-gguf: ", "is the same file as OUT, or has a name of its parts")),
        (".out.gguf.partial", (), ("--keep-gguf: ", "incomplete files")),
        ("kept.gguf", ("--report", "kept.gguf"), ("--report: kept.gguf is the same file as --keep-gguf",)),
        ("kept.gguf", ("--model-card", "./kept.gguf"), ("--model-card: kept.gguf is the same file as --keep-gguf",)),
        ("kept.gguf", ("--report", "kept.choice.json"), ("--report: kept.choice.json is where ", "of kept is kept")),
        ("kept.gguf", ("--report", "old.json"), ("--report: old.json exists",)),
    ],
    ids=str,
)
def test_name_conflicts_are_refused_before_conversion(workspace, write_converter, monkeypatch, kept, flags, parts):
    write_converter("raise SystemExit('it ran')")
    monkeypatch.chdir(workspace.out.parent)
    (workspace.out.parent / "old.json").write_text("{}")
    workspace.error(*parts, flags=["--keep-gguf", workspace.out.parent / kept, *flags])


def interrupt(workspace, monkeypatch):
    """Run the quantizer until it has finished a tensor."""
    finish = Output.finish

    def stop(self, *args):
        finish(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            workspace.run()
    assert partial_path(workspace.out).exists()


def test_partial_output_is_no_part_of_the_checkpoint(workspace, write_converter, monkeypatch):
    """The checkpoint is converted again, and the run resumes after the first tensor."""
    write_converter()
    workspace.run()
    expected = workspace.out.read_bytes()
    workspace.out = workspace.source / "out.gguf"
    interrupt(workspace, monkeypatch)
    assert "resuming after 1 of" in workspace.run() and workspace.out.read_bytes() == expected


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_changed_checkpoint_does_not_resume(workspace, write_converter, monkeypatch, name):
    write_converter()
    interrupt(workspace, monkeypatch)
    os.utime(workspace.source / name, (1, 1))
    assert "discarding stale partial output (different input)" in workspace.run() and workspace.out.exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise NotImplementedError('no such tokenizer')", "exited with 1: NotImplementedError: no such tokenizer"),
        ("print('half a line', end=''); raise SystemExit(3)", "exited with 3: half a line"),
        ("", "exited with 0: no output"),
        ("raise OSError(28, 'No space left on device')", "No space left on device; free some space"),
    ],
)
def test_converter_failure_is_reported(workspace, write_converter, code, message):
    write_converter(code)
    workspace.error(f"{workspace.source} cannot be converted", message)


def test_interrupt_ends_the_converter(workspace, write_converter):
    """The converter's file is removed."""
    pid = workspace.path / "pid"
    pid.write_text("")
    write_converter(
        "import os, signal, sys, time\n"
        "open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('half')\n"
        f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        f"os.kill(os.getppid(), signal.{signal.SIGTERM.name})\n"
        "time.sleep(600)\n"
    )
    assert "interrupted" in workspace.run(code=128 + signal.SIGTERM) and not files(workspace.out.parent)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_missing_space_for_the_conversion_is_refused(workspace, monkeypatch):
    fill_disk(monkeypatch, 2**20)
    workspace.error("no space left on device", " MiB, 1.00 MiB are free", str(workspace.out.parent))


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_extra_is_named(workspace, monkeypatch, missing):
    """The error has the command that installs it; GGUF files do not need it."""
    find = _checkpoint.importlib.util.find_spec
    monkeypatch.setattr(_checkpoint.importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    workspace.error(f"needs {missing}, which is not installed: pip install 'torch>=", " 'transformers", " 'huggingface-hub>=")


def test_missing_hub_client_is_named(workspace, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(_checkpoint.importlib.util, "find_spec", lambda name: None)
    code = program.main(["--hf-repo", REPO, str(workspace.out), "--type", "itq3_s"])
    message = "--hf-repo needs huggingface_hub, which is not installed: pip install 'torch>="
    assert code == 1 and message in workspace.capsys.readouterr().err


def test_missing_converter_is_reported(workspace, monkeypatch):
    monkeypatch.setattr(_checkpoint, "CONVERTER", workspace.path / "none.py")
    workspace.error("none.py is missing: reinstall ggml-ext")


def test_directory_without_a_checkpoint_is_refused(workspace):
    (workspace.source / "config.json").unlink()
    workspace.error("has no config.json, so it is not a Hugging Face checkpoint: pass a GGUF file or the directory of a checkpoint")
    write_gguf(workspace.source / "model.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)})
    workspace.error(f"pass one of its files, such as {workspace.source / 'model.gguf'}")
    workspace.source = workspace.source / "tokenizer.model"
    workspace.error("is not a GGUF file", "or the directory of a Hugging Face checkpoint")


def test_output_may_not_replace_a_checkpoint_file(workspace):
    workspace.out = workspace.source / "tokenizer.model"
    before = workspace.out.read_bytes()
    workspace.run("--force", code=1)
    assert workspace.out.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--type", "itq3_s"], "required: IN, or --hf-repo ORG/NAME"),
        (["a.gguf", "b.gguf", "--hf-repo", REPO, "--type", "itq3_s"], "pass OUT alone"),
        (["a.gguf", "b.gguf", "--type", "itq3_s", "--hf-file", "c.gguf"], "--hf-file needs --hf-repo"),
        (["a.gguf", "b.gguf", "--type", "itq3_s", "--revision", "main"], "--revision needs --hf-repo"),
        (["a.gguf", "b.gguf", "--type", "itq3_s", "--hf-token", "hf"], "--hf-token needs --hf-repo"),
        (["--hf-repo", REPO, "--type", "itq3_s"], "OUT is missing"),
    ],
)
def test_conflicting_options_are_refused(capsys, arguments, message):
    assert program.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
