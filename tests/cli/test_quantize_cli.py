"""python -m ggml_ext.quantize in a real process: what it writes, keeps, prints and needs."""

import hashlib
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest

import ggml_ext
from ggml_ext._encode import codec
from ggml_ext._formats import gguf_file
from ggml_ext._formats.chunks import row_chunks
from ggml_ext._formats.tensor_types import TARGET_TYPES
from ggml_ext.quants import itq3_s
from helpers.commands import quantize, quantize_command, run_quantize, tool
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.weights import relative_mse

# Eight uniform levels lose 0.0374 of a Gaussian's energy (J. Max, 1960); the encoder fits d and z to every block.
ITQ3_S_BOUND = 0.0374
# Types without a numpy encoder by default.
NUMPY_ONLY = ("--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0")
WRITTEN_KEYS = {"general.file_type", "general.quantization_version", "ggml_ext.version", "ggml_ext.type", "ggml_ext.options",
                "ggml_ext.importance", "ggml_ext.quality.room"}
MATRICES = {
    "token_embd.weight": gaussian(32, 512, seed=2),
    "blk.0.attn_norm.weight": gaussian(512, seed=3),
    "blk.0.attn_k.weight": gaussian(16, 512, seed=4),
    "blk.0.ffn_up.weight": gaussian(24, 512, seed=5),
    "blk.0.ffn_gate_exps.weight": gaussian(3, 8, 256, seed=6),
    "output.weight": gaussian(32, 512, seed=7),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Write a small model with an output matrix and experts."""
    return write_gguf(tmp_path_factory.mktemp("small") / "in.gguf", MATRICES)


@pytest.fixture(scope="module")
def quantized(model, lib, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "out.gguf"
    quantize(model, path, "--type", "itq3_s")
    return path


def read_types(path):
    return {name: t.tensor_type.name.lower() for name, t in read_tensors(path).items()}


def decode(tensor):
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize(("ne", "n"), [((256, 8), 1), ((256, 256), 2), ((768, 256), 4), ((768, 1536), 16), ((4096, 4096), 32), ((1 << 20, 3), 3)])
def test_rows_are_split_into_chunks(ne, n):
    """Covers all rows in order, groups of 16, and a power of two of equal parts where there would be few chunks."""
    tensor = gguf_file.Tensor("name", ne, 0, 0, 0)
    chunks = list(row_chunks(tensor))
    assert len(chunks) == n
    assert [first for first, _ in chunks] == np.cumsum([0, *(rows for _, rows in chunks[:-1])]).tolist()
    assert sum(rows for _, rows in chunks) == ne[1]
    assert all(rows == chunks[0][1] and rows % min(16, ne[1], max(1, (1 << 19) // ne[0])) == 0 for _, rows in chunks)


def test_metadata_is_kept_key_by_key(model, quantized):
    before, after = gguf.GGUFReader(model).fields, gguf.GGUFReader(quantized).fields
    for key, field in before.items():
        if key in WRITTEN_KEYS or key.startswith("GGUF."):
            continue
        assert after[key].types == field.types, key
        assert after[key].contents() == field.contents(), key
    assert set(after) == set(before) | WRITTEN_KEYS
    assert after["general.file_type"].contents() == 160
    assert after["general.quantization_version"].contents() == 2
    assert after["ggml_ext.version"].contents() == ggml_ext.__version__
    assert after["ggml_ext.type"].contents() == "itq3_s"
    assert after["ggml_ext.options"].contents() == "itq3-levels=8"


def test_tensors_keep_order_and_shape_and_get_their_types(model, quantized):
    before, after = read_tensors(model), read_tensors(quantized)
    assert list(before) == list(after)
    for name, tensor in after.items():
        assert tensor.shape.tolist() == before[name].shape.tolist()
        # The reference model has no output.weight: its embeddings are the output matrix.
        matrix = "q6_k" if name == "token_embd.weight" else "itq3_s"
        assert tensor.tensor_type.name.lower() == ("f32" if name.endswith("_norm.weight") else matrix), name


def test_decoded_weights_are_close(model, quantized):
    before, after = read_tensors(model), read_tensors(quantized)
    for name, tensor in after.items():
        error = relative_mse(decode(tensor), decode(before[name]))
        # q6_k: 64 levels over about 5 sigma of each 16 weights, a squared error of at most (10/64)^2/12 = 0.002.
        bound = {"F32": 0.0, "ITQ3_S": ITQ3_S_BOUND, "Q6_K": 0.002}[tensor.tensor_type.name]
        assert error <= bound, name


def test_file_has_the_bytes_of_the_encoder(model, quantized):
    before, after = read_tensors(model), read_tensors(quantized)
    name = "blk.3.ffn_down.weight"
    expected = itq3_s.quantize_blocks(decode(before[name]).reshape(-1, 256))
    assert np.array_equal(after[name].data.reshape(-1, 100), expected)


@pytest.mark.slow
@pytest.mark.parametrize("levels", ["8", "3"])
def test_c_and_numpy_write_the_same_file(model, lib, tmp_path, levels):
    digests = set()
    for encoder in ("c", "numpy"):
        quantize(
            model, tmp_path / encoder, "--type", "itq3_s", "--encoder", encoder, "--itq3-levels", levels, *NUMPY_ONLY
        )
        digests.add(hashlib.sha256((tmp_path / encoder).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_number_of_threads_leaves_the_file_unchanged(small, lib, tmp_path):
    for n in ("1", "7"):
        quantize(small, tmp_path / n, "--type", "itq3_s", "--threads", n)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "7").read_bytes()


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0"])
def test_every_float_source_type_is_read(tmp_path, qtype):
    source = write_gguf(tmp_path / "in.gguf", MATRICES, qtype)
    quantize(source, tmp_path / "out.gguf", "--type", "itq3_s", "--pure")
    before, after = read_tensors(source), read_tensors(tmp_path / "out.gguf")
    for name, tensor in after.items():
        weights = decode(before[name])
        expected = weights if weights.ndim == 1 else gguf.quants.quantize(weights, gguf.GGMLQuantizationType(160))
        assert np.array_equal(tensor.data, expected), name


def test_output_and_embeddings_have_default_types(small, lib, tmp_path):
    quantize(small, tmp_path / "out.gguf", "--type", "itq3_s")
    assert read_types(tmp_path / "out.gguf") == {
        "token_embd.weight": "q3_k",
        "blk.0.attn_norm.weight": "f32",
        "blk.0.attn_k.weight": "itq3_s",
        "blk.0.ffn_up.weight": "itq3_s",
        "blk.0.ffn_gate_exps.weight": "itq3_s",
        "output.weight": "q6_k",
    }


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--pure"], {"token_embd.weight": "itq3_s", "output.weight": "itq3_s"}),
        (["--pure", "--leave-output-tensor"], {"output.weight": "f16", "token_embd.weight": "itq3_s"}),
        ([*NUMPY_ONLY], {"output.weight": "q8_0", "token_embd.weight": "q8_0", "blk.0.ffn_up.weight": "itq3_s"}),
        (["--pure", "--tensor-type", "attn_.*=Q8_0", "--tensor-type", "attn_k=f16"], {"blk.0.attn_k.weight": "q8_0"}),
        (
            ["--pure", "--tensor-type", r"blk\.0\.FFN_=bf16"],
            {"blk.0.ffn_up.weight": "bf16", "blk.0.ffn_gate_exps.weight": "bf16"},
        ),
        (["--pure", "--tensor-type", "norm=q8_0"], {"blk.0.attn_norm.weight": "f32"}),
        ([*NUMPY_ONLY, "--tensor-type", "output=f32"], {"output.weight": "q8_0"}),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_type_flags_choose_types(small, tmp_path, flags, expected):
    quantize(small, tmp_path / "out.gguf", "--type", "itq3_s", *flags)
    actual = read_types(tmp_path / "out.gguf")
    assert {name: actual[name] for name in expected} == expected


def test_options_are_recorded(small, tmp_path):
    quantize(
        small,
        tmp_path / "out.gguf",
        "--type",
        "ITQ3_S",
        "--pure",
        "--itq3-levels",
        "3",
        "--tensor-type",
        "attn_k=q8_0",
        "--output-tensor-type",
        "f16",
        "--threads",
        "1",
    )
    record = gguf.GGUFReader(tmp_path / "out.gguf").fields["ggml_ext.options"].contents()
    assert record == "itq3-levels=3 pure output-tensor-type=f16 tensor-type=attn_k=q8_0"


def test_odd_metadata_and_shapes_survive(tmp_path):
    """Covers every value type, empty strings and arrays, a large alignment, and tensors of one to four dimensions."""

    def fill(writer):
        writer.add_custom_alignment(128)
        for i, vtype in enumerate(
            t for t in gguf.GGUFValueType if t not in (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
        ):
            writer.add_key_value(f"test.{vtype.name}", i % 2, vtype)
            writer.add_key_value(f"test.array.{vtype.name}", [1, 0, 1], gguf.GGUFValueType.ARRAY, vtype)
        writer.add_key_value("test.empty", "", gguf.GGUFValueType.STRING)
        writer.add_array("test.strings", ["", "ü", "a\0b"])
        writer.add_uint32("general.file_type", 1)

    shapes = {"a.weight": (300,), "b.weight": (3, 256), "c.weight": (2, 3, 256), "d.weight": (2, 2, 3, 256)}
    source = write_gguf(tmp_path / "in.gguf", {n: gaussian(*s) for n, s in shapes.items()}, "F32", fill=fill)
    # gguf's writer cannot write an empty array: insert one by hand before the other keys.
    data = source.read_bytes()
    key = b"test.nothing"
    raw = (
        struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 0)
    )
    file = gguf_file.GGUFFile(source)
    (n_kv,) = struct.unpack_from("<Q", data, 16)
    header = data[:16] + struct.pack("<Q", n_kv + 1) + raw + data[24:]
    info_end = header.rindex(b"d.weight") + len(b"d.weight") + 4 + 4 * 8 + 4 + 8
    start = min(t.offset for t in file.tensors)
    source.write_bytes(header[:info_end].ljust(gguf_file.pad(info_end, 128), b"\0") + data[start:])

    quantize(source, tmp_path / "out.gguf", "--type", "itq3_s")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "out.gguf")
    assert list(before.fields)[3:] == [k for k in after.fields if k not in WRITTEN_KEYS or k == "general.file_type"][3:]
    for key, field in before.fields.items():
        if key not in WRITTEN_KEYS and not key.startswith("GGUF."):
            assert [p.tobytes() for p in field.parts] == [p.tobytes() for p in after.fields[key].parts], key
    assert after.alignment == 128 and all(t.data_offset % 128 == 0 for t in after.tensors)
    assert [t.shape.tolist() for t in after.tensors] == [t.shape.tolist() for t in before.tensors]
    assert [t.tensor_type.name for t in after.tensors] == ["F32", "ITQ3_S", "ITQ3_S", "ITQ3_S"]
    assert relative_mse(decode(after.tensors[3]), before.tensors[3].data) <= ITQ3_S_BOUND


def test_dry_run_writes_nothing_and_shows_what_a_run_shows(small, lib, tmp_path):
    before = sorted(small.parent.iterdir())
    dry = quantize(small, "--type", "itq3_s", "--dry-run")
    dry_named = quantize(small, tmp_path / "out.gguf", "--type", "itq3_s", "--dry-run")
    assert sorted(small.parent.iterdir()) == before and not any(tmp_path.iterdir())
    real = quantize(small, tmp_path / "out.gguf", "--type", "itq3_s")
    table, outcome = dry.stdout.rstrip("\n").rsplit("\n\n", 1)
    assert real.stdout.startswith(table) and real.stdout.endswith(f"\n\n{outcome}\n") and dry.stdout == dry_named.stdout


def test_report_is_written(small, lib, tmp_path):
    result = quantize(small, tmp_path / "out.gguf", "--type", "itq3_s")
    lines = result.stdout.splitlines()
    assert lines[3] == "[4/6] blk.0.ffn_up.weight              512x24  f16 -> itq3_s  0.023 -> 0.005 MiB"
    assert lines[1] == "[2/6] blk.0.attn_norm.weight              512  f32                     0.002 MiB"
    assert any(
        line.split() == ["blk.*.ffn_gate_exps.weight", "itq3_s", "1", "6,144", "0.002", "3.125"] for line in lines
    )
    tensors = read_tensors(tmp_path / "out.gguf").values()
    n, size = sum(t.n_elements for t in tensors), sum(t.n_bytes for t in tensors)
    assert f"quant size  = {size / 2**20:8.2f} MiB ({size * 8 / n:.2f} BPW)" in lines
    assert "M weights/s" in lines[-3] and lines[-1].startswith("itq3_s as requested: 3.125 bpw in the layers, ")
    assert result.stderr == ""


def test_quiet_prints_nothing(small, tmp_path):
    result = quantize(small, tmp_path / "out.gguf", "--type", "itq3_s", "--pure", "-q")
    assert result.stdout == result.stderr == ""


def test_options_may_stand_between_the_files(small, tmp_path):
    quantize(small, "--type", "itq3_s", tmp_path / "out.gguf", "--summary")
    assert (tmp_path / "out.gguf").is_file()


def test_progress_bar_on_request(small, tmp_path):
    result = quantize(small, tmp_path / "out.gguf", "--type", "itq3_s", "--pure", "--progress")
    assert "itq3_s:" in result.stderr and "100%" in result.stderr


def test_force_replaces_and_links_are_followed(small, tmp_path):
    target, link = tmp_path / "real.gguf", tmp_path / "link.gguf"
    target.write_text("old")
    link.symlink_to(target)
    quantize(small, link, "--type", "itq3_s", "--pure", "--force")
    assert link.is_symlink() and read_types(target)["output.weight"] == "itq3_s"


def test_requantization_on_request(small, lib, tmp_path):
    quantize(small, tmp_path / "q4.gguf", "--type", "itq3_s", "--pure", "--tensor-type", "ffn_up=q4_0")
    quantize(tmp_path / "q4.gguf", tmp_path / "out.gguf", "--type", "itq3_s", "--pure", "--allow-requantize")
    first, second = read_tensors(tmp_path / "q4.gguf"), read_tensors(tmp_path / "out.gguf")
    assert read_types(tmp_path / "out.gguf")["blk.0.ffn_up.weight"] == "itq3_s"
    # A tensor that has the type is copied.
    assert np.array_equal(first["output.weight"].data, second["output.weight"].data)


def test_pattern_without_a_match_warns(small, tmp_path):
    result = quantize(small, tmp_path / "out.gguf", "--type", "itq3_s", "--pure", "--tensor-type", "atn_k=q8_0")
    assert result.stderr == "warning: --tensor-type atn_k=q8_0 matches no tensor\n"


@pytest.mark.slow
def test_peak_memory_is_bounded(lib, tmp_path):
    """The bound is the largest tensor in F32 plus 500 MB, and the file is larger."""
    ne, n_tensors = (8192, 4096), 14
    tensors = [
        gguf_file.Tensor(f"blk.{i}.ffn_up.weight", ne, gguf.GGMLQuantizationType.F16, 0, 0) for i in range(n_tensors)
    ]
    header = gguf_file.pack_header({}, tensors, [t.type for t in tensors], 32)
    bound = ne[0] * ne[1] * 4 + 500 * 10**6
    n_bytes = n_tensors * ne[0] * ne[1] * 2
    assert n_bytes > bound  # or the test could not fail
    with open(tmp_path / "in.gguf", "wb") as f:  # zeros, sparse
        f.write(header)
        f.truncate(len(header) + n_bytes)
    # A small process starts the quantizer: a child's peak begins at its parent's, since they share memory until exec, and this process
    # may have exceeded the bound in an earlier test.
    between = (
        "import resource, subprocess, sys; subprocess.check_call(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = quantize_command(tmp_path / "in.gguf", tmp_path / "out.gguf", "--type", "itq3_s", "-q")
    result = subprocess.run([sys.executable, "-c", between, *command], check=True, capture_output=True, text=True)
    assert int(result.stdout) * (1 if sys.platform == "darwin" else 1024) < bound


def llama_quantize(source, output, *flags):
    subprocess.run([tool("llama-quantize"), *flags, source, output, "ITQ3_S"], check=True, capture_output=True)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--pure"]], ids=lambda f: " ".join(f) or "default")
def test_same_tensors_as_llama_quantize(model, lib, tmp_path, flags):
    theirs = llama_quantize(model, tmp_path / "theirs.gguf", *flags)
    quantize(model, tmp_path / "ours.gguf", "--type", "itq3_s", *flags)
    expected, actual = read_tensors(theirs), read_tensors(tmp_path / "ours.gguf")
    assert read_types(tmp_path / "ours.gguf") == read_types(theirs)
    for name, tensor in expected.items():
        assert np.array_equal(actual[name].data, tensor.data), name
    for key in ("general.file_type", "general.quantization_version"):
        assert (
            gguf.GGUFReader(tmp_path / "ours.gguf").fields[key].contents()
            == gguf.GGUFReader(theirs).fields[key].contents()
        )


def test_library_knows_every_upstream_type(lib):
    """The library must encode each with the size that gguf knows."""
    for qtype in TARGET_TYPES.values():
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        assert lib.row_bytes(int(qtype), 4 * block_size) == 4 * block_bytes, qtype.name


@pytest.mark.parametrize("qtype", ["Q4_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_upstream_types_agree_in_c_and_numpy(lib, qtype):
    qtype = gguf.GGMLQuantizationType[qtype]
    rows = gaussian(16, 512)
    assert np.array_equal(codec.Codec(lib).encode(rows, qtype), codec.Codec(None).encode(rows, qtype))


def test_help_names_the_types_of_embeddings_and_output():
    result = run_quantize("--help")
    assert "token embeddings q3_k, output matrix q6_k" in result.stdout
