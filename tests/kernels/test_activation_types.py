"""Activation types have ids, as ggml's tables require, but no place in a file, and neither have types of an older encoding.

Every reader refuses them by name.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as T

from ggml_ext import TYPES, export, inspect, quantize
from ggml_ext._base.types import RETIRED_TYPES
from helpers.commands import run_main, tool
from helpers.models import gaussian, write_gguf

# id of a refused type -> the rest of the message
REFUSED = {int(info.id): f" ({name}), which is for activations, not for weights; download or convert"
           for name, info in TYPES.items() if info.kind == "activation"}
REFUSED |= {number: f", {name} before its code was changed; quantize the model again" for number, name in RETIRED_TYPES.items()}
TENSOR = "blk.0.attn_q.weight"
COMMANDS = {
    "quantize": (quantize.main, ("{path}", "{out}", "--type", "itq3_s")),
    "export": (export.main, ("{path}", "{out}", "--type", "q8_0")),
    "inspect": (inspect.main, ("{path}",)),
}


def copy_with_type(model: Path, path: Path, type_id: int) -> Path:
    """Copy a GGUF file and change the type of TENSOR; the data stay."""
    data, name = bytearray(model.read_bytes()), TENSOR.encode()
    offset = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (n_dims,) = struct.unpack_from("<I", data, offset)
    struct.pack_into("<I", data, offset + 4 + 8 * n_dims, type_id)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("number", REFUSED)
@pytest.mark.parametrize("options", [(), ("--check-tensors",)], ids=["load", "check-tensors"])
def test_libllama_refuses_the_type(number, options, model, tmp_path):
    path = copy_with_type(model, tmp_path / "in.gguf", number)
    command = [tool("llama-completion"), "-m", path, "-p", "import", "-n", 1, "-no-cnv", *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 1, (done.returncode, done.stderr[-1000:])
    assert f"tensor '{TENSOR}' has type {number}{REFUSED[number]}" in done.stderr + done.stdout


@pytest.mark.parametrize("number", REFUSED)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_the_type(number, command, model, tmp_path):
    path, out = copy_with_type(model, tmp_path / "in.gguf", number), tmp_path / "out.gguf"
    main, args = COMMANDS[command]
    done = run_main(main, *(a.format(path=path, out=out) for a in args))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"tensor {TENSOR} has type {number}{REFUSED[number]}" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("qtype", [T.Q8_1, T.Q8_K])
@pytest.mark.parametrize("options", [(), ("--pure",)], ids=["export", "pure"])
def test_export_copies_upstream_activation_types(lib, tmp_path, qtype, options):
    """The quantizer copies them too; nothing dequantizes them."""
    source = write_gguf(tmp_path / "in.gguf", {TENSOR: gaussian(8, 256), "blk.0.attn_k.weight": gaussian(8, 256)})
    assert run_main(quantize.main, source, tmp_path / "ours.gguf", "--type", "itq3_s", "--importance", "none", "--leave-output-tensor",
                    "--tensor-type", "attn_q=f32").returncode == 0
    path, out = copy_with_type(tmp_path / "ours.gguf", tmp_path / "odd.gguf", int(qtype)), tmp_path / "out.gguf"
    done = run_main(export.main, path, out, "--type", "q8_0", *options)
    assert done.returncode == 0, done.stderr
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(out).tensors}
    assert types == {TENSOR: qtype, "blk.0.attn_k.weight": T.Q8_0}
