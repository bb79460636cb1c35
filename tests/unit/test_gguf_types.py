"""What `import ggml_ext` adds to the gguf package."""

import copy
import pickle
import subprocess
import sys
from enum import IntEnum

import gguf
import numpy as np
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES, quants
from ggml_ext._formats import gguf_types
from ggml_ext.quants import itq3_s
from helpers.commands import quantize
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.weights import relative_mse

ITQ3_S = gguf.GGMLQuantizationType(160)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    source = write_gguf(folder / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 512)})
    quantize(source, folder / "out.gguf", "--type", "itq3_s")
    return folder / "out.gguf"


@pytest.mark.parametrize("info", TYPES.values(), ids=lambda t: t.name)
def test_types_are_known_by_value_name_and_attribute(info):
    enum, name = gguf.GGMLQuantizationType, info.name.upper()
    member = enum(int(info.id))
    assert member is enum[name] is getattr(enum, name)
    assert (member.name, member.value, int(member)) == (name, info.id, info.id)
    assert member in list(enum) and isinstance(member, enum)
    assert gguf.GGML_QUANT_SIZES[member] == (info.block_size, info.block_bytes)
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member
    assert repr(member) == f"<GGMLQuantizationType.{name}: {int(info.id)}>"


@pytest.mark.parametrize("info", WEIGHT_TYPES.values(), ids=lambda t: t.name)
def test_file_types_are_known(info):
    assert gguf.LlamaFileType(int(info.id)).name == f"MOSTLY_{info.name.upper()}"


def test_upstream_types_are_unchanged():
    assert gguf.GGMLQuantizationType(14).name == "Q6_K"
    with pytest.raises(ValueError, match="159"):
        gguf.GGMLQuantizationType(159)


def test_extending_again_changes_nothing():
    before = (list(gguf.GGMLQuantizationType), list(gguf.LlamaFileType), dict(gguf.GGML_QUANT_SIZES))
    gguf_types.extend_gguf()
    assert before == (list(gguf.GGMLQuantizationType), list(gguf.LlamaFileType), dict(gguf.GGML_QUANT_SIZES))


@pytest.mark.parametrize(("name", "value"), [("ONE", 3), ("THREE", 1)])
def test_clash_with_gguf_is_refused(name, value):
    enum = IntEnum("Numbers", {"ONE": 1})
    with pytest.raises(ImportError, match="clashes with"):
        gguf_types.add_enum_member(enum, name, value)


@pytest.mark.parametrize("info", WEIGHT_TYPES.values(), ids=lambda t: t.name)
def test_gguf_quants_know_every_block_size(info):
    """Quantizes rows of three blocks with gguf's functions; a row with one weight less is refused."""
    qtype, n = gguf.GGMLQuantizationType(int(info.id)), info.block_size
    x = gaussian(2, 3 * n)
    data = gguf.quants.quantize(x, qtype)
    assert data.shape == (2, 3 * info.block_bytes)
    assert np.array_equal(data.reshape(-1, info.block_bytes), quants.reference(info.name).quantize_blocks(x.reshape(-1, n)))
    error = relative_mse(gguf.quants.dequantize(data, qtype), x)
    assert error <= 1.3 * info.usual_rel_mse
    with pytest.raises(gguf.quants.QuantError, match=info.name.upper()):
        gguf.quants.quantize(x[:, 1:], qtype)


def test_gguf_quants_use_the_reference():
    x = gaussian(3, 5, 768)
    data = gguf.quants.quantize(x, ITQ3_S)
    assert data.shape == (3, 5, 300) and data.dtype == np.uint8
    assert np.array_equal(data.reshape(-1, 100), itq3_s.quantize_blocks(x.reshape(-1, 256)))
    weights = gguf.quants.dequantize(data, ITQ3_S)
    assert weights.shape == x.shape
    assert np.array_equal(weights.reshape(-1, 256), itq3_s.dequantize_blocks(data.reshape(-1, 100)))
    with pytest.raises(gguf.quants.QuantError, match="ITQ3_S"):
        gguf.quants.quantize(gaussian(3, 100), ITQ3_S)


def test_writer_and_reader_round_trip(tmp_path):
    x = gaussian(4, 256)
    write_gguf(tmp_path / "a.gguf", {"a.weight": x}, qtype="ITQ3_S")
    tensor = read_tensors(tmp_path / "a.gguf")["a.weight"]
    assert tensor.tensor_type is ITQ3_S
    assert np.array_equal(tensor.data, gguf.quants.quantize(x, ITQ3_S))


def test_reader_opens_a_quantized_file(quantized):
    tensor = read_tensors(quantized)["blk.0.ffn_up.weight"]
    assert tensor.tensor_type is ITQ3_S
    assert tensor.shape.tolist() == [512, 8] and tensor.data.shape == (8, 200)


def test_reader_without_the_import_refuses_the_file(quantized):
    code = f"import gguf; gguf.GGUFReader({str(quantized)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0 and "160" in result.stderr


def test_gguf_dump_lists_the_types(quantized):
    result = subprocess.run([sys.executable, "-c", "import ggml_ext; from gguf.scripts.gguf_dump import main; main()", str(quantized)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "ITQ3_S" in result.stdout and "ggml_ext.type = 'itq3_s'" in result.stdout
