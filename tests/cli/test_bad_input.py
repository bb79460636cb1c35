"""Bad input and failures, each in a real process: one clear line, the right exit code, no leftovers."""

import errno
import os
import resource
import struct
import subprocess

import gguf
import numpy as np
import pytest

from ggml_ext import WEIGHT_TYPES
from ggml_ext import quantize as quantize_module
from ggml_ext._formats import gguf_file
from ggml_ext._output import output as _output
from helpers.commands import quantize, quantize_command, run_quantize
from helpers.errors import check_error, expect_error, files, fill_disk, key, mount_namespace_prefix, quantize_error, raw_gguf
from helpers.models import gaussian, write_gguf

KNOWN = "known types: " + ", ".join(WEIGHT_TYPES)


@pytest.fixture
def source(tmp_path):
    return write_gguf(
        tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256), "blk.0.ffn_down.weight": gaussian(8, 512)}
    )


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"PK\3\4" * 100, "not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "4,611,686,018,427,387,904 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "9,223,372,036,854,775,808 keys"),
    ],
    ids=[
        "empty",
        "two_bytes",
        "zip",
        "magic_only",
        "version_1",
        "version_4",
        "big_endian",
        "many_tensors",
        "many_keys",
    ],
)
def test_file_that_is_not_gguf_is_refused(tmp_path, content, part):
    (tmp_path / "in.gguf").write_bytes(content)
    quantize_error(tmp_path, tmp_path / "in.gguf", part, "in.gguf")


def test_truncated_header_is_refused_at_every_byte(source):
    """Runs in this process; no other exception may occur."""
    data = source.read_bytes()
    end = gguf_file.GGUFFile(source).tensors[0].offset
    for n_bytes in range(end):
        source.write_bytes(data[:n_bytes])
        with pytest.raises(gguf_file.UserError):
            gguf_file.GGUFFile(source)


def test_damaged_header_is_read_or_refused(source):
    """Flips bytes; the message has seed and position."""
    data = source.read_bytes()
    end = gguf_file.GGUFFile(source).tensors[0].offset
    rng = np.random.default_rng(7)
    for _ in range(2000):
        position, value = int(rng.integers(4, end)), int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
        source.write_bytes(data[:position] + bytes([value]) + data[position + 1 :])
        try:
            file = gguf_file.GGUFFile(source)
            assert all(t.offset + t.n_bytes <= len(data) for t in file.tensors)
        except gguf_file.UserError:
            pass
        except Exception as e:
            pytest.fail(f"seed 7, byte {position} = {value}: {type(e).__name__}: {e}")


@pytest.mark.parametrize("keep", [30, -1], ids=["header", "data"])
def test_truncated_data_is_refused(tmp_path, source, keep):
    data = source.read_bytes()
    end = max(t.offset + t.n_bytes for t in gguf_file.GGUFFile(source).tensors)
    source.write_bytes(data[: keep if keep > 0 else end - 1])
    quantize_error(
        tmp_path, source, "truncated", "download or convert it again", *(["blk.0.ffn_down.weight"] if keep < 0 else [])
    )


@pytest.mark.parametrize(
    ("tensor", "parts"),
    [
        ((b"a.weight", (256, 0), 1, 0), ("a.weight", "[256, 0]", "at least 1")),
        ((b"a.weight", (2**40, 2**40), 1, 0), ("a.weight", "2**63")),
        ((b"a.weight", (2**40,), 1, 0), ("a.weight", "truncated")),
        ((b"a.weight", (256, 2), 159, 0), ("a.weight", "unknown type 159")),
        ((b"a.weight", (), 1, 0), ("a.weight", "0 dimensions")),
        ((b"a.weight", (1, 1, 1, 1, 1), 1, 0), ("a.weight", "5 dimensions")),
        ((b"a.weight", (100, 2), 14, 0), ("a.weight", "rows of 100", "Q6_K")),
        ((b"a.weight", (256,), 1, 7), ("a.weight", "offset 7")),
        ((b"\xff\xfe", (256,), 1, 0), ("not UTF-8",)),
        ((b"n" * 64, (256,), 1, 0), ("64 bytes", "63")),
    ],
    ids=["zero", "overflow", "beyond_end", "type", "no_dims", "five_dims", "block", "offset", "utf8", "long_name"],
)
def test_bad_tensor_info_is_refused(tmp_path, tensor, parts):
    quantize_error(tmp_path, raw_gguf(tmp_path / "in.gguf", tensors=[tensor]), *parts)


@pytest.mark.parametrize(
    ("kv", "n_kv", "parts"),
    [
        (key(b"k", 13), 1, ("'k'", "unknown value type 13")),
        (key(b"k", 9, struct.pack("<IQ", 5, 2**60)), 1, ("'k'", "truncated or corrupt")),
        (key(b"k", 9, struct.pack("<IQ", 8, 2**60)), 1, ("'k'", "truncated or corrupt")),
        (key(b"k", 9, struct.pack("<IQ", 9, 1)), 1, ("'k'", "array of arrays")),
        (key(b"k", 8, struct.pack("<Q", 2**63)), 1, ("'k'", "truncated or corrupt")),
        (key(b"k", 4, b"1234") * 2, 2, ("'k'", "twice")),
        (key(b"general.alignment", 4, struct.pack("<I", 24)), 1, ("general.alignment is 24",)),
        (key(b"general.alignment", 4, struct.pack("<I", 0)), 1, ("general.alignment is 0",)),
        (key(b"general.alignment", 8, struct.pack("<Q", 2) + b"32"), 1, ("general.alignment is 32 (STRING)",)),
    ],
    ids=["type", "array", "strings", "nested", "string", "twice", "align_24", "align_0", "align_string"],
)
def test_bad_metadata_is_refused(tmp_path, kv, n_kv, parts):
    quantize_error(tmp_path, raw_gguf(tmp_path / "in.gguf", kv, n_kv), *parts)


def test_duplicate_tensor_is_refused(tmp_path):
    info = (b"a.weight", (256,), 1, 0)
    quantize_error(tmp_path, raw_gguf(tmp_path / "in.gguf", tensors=[info, info]), "a.weight", "twice")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--type", "itq9_z"], ("--type", "'itq9_z'", KNOWN)),
        (["--type", "itq3t"], ("--type", "'itq3t': did you mean 'itq3_t'? known types: ")),
        (["--type", "q8_kr"], ("--type", "'q8_kr'", KNOWN)),
        (["--type", "itq3_s", "--tensor-type", "attn_k=q9_9"], ("--tensor-type", "'q9_9'", "q8_0")),
        (["--type", "itq3_s", "--tensor-type", "attn_k=Q6K"], ("--tensor-type", "'Q6K': did you mean 'q6_k'?")),
        (["--type", "itq3_s", "--token-embedding-type", "iq4nl"], ("--token-embedding-type", "did you mean 'iq4_nl'?")),
        (["--type", "itq3_s", "--output-tensor-type", "fp16"], ("--output-tensor-type", "did you mean 'f16'?")),
        (["--type", "itq3_s", "--tensor-type", "attn_k"], ("--tensor-type", "'attn_k'", "REGEX=TYPE")),
        (["--type", "itq3_s", "--tensor-type", "=q8_0"], ("--tensor-type", "REGEX=TYPE")),
        (["--type", "itq3_s", "--tensor-type", "attn_(=q8_0"], ("--tensor-type", "'attn_('", "regular expression")),
        (["--type", "itq3_s", "--token-embedding-type", "i32"], ("--token-embedding-type", "'i32'", "q8_0")),
        (["--type", "itq3_s", "--output-tensor-type", "q8_k"], ("--output-tensor-type", "'q8_k'", "q8_0")),
        (["--type", "itq3_s", "--threads", "0"], ("--threads", "got 0")),
        (["--type", "itq3_s", "-t", "-2"], ("--threads", "got -2")),
        (["--type", "itq3_s", "--itq3-levels", "4"], ("--itq3-levels", "got 4", "8 or 3")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_flags_are_refused(tmp_path, source, flags, parts):
    expect_error(tmp_path, [source, tmp_path / "out.gguf", *flags], *parts)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [([], "required: --type"), (["in.gguf", "out.gguf"], "--type"), (["in.gguf", "--type"], "expected one argument"),
     (["in.gguf", "out.gguf", "--type", "itq3_s", "-t", "two"], "-t/--threads"),
     (["in.gguf", "out.gguf", "--type", "itq3_s", "--bogus"], "--bogus")],
)
def test_bad_command_line_exits_with_1(tmp_path, arguments, part):
    expect_error(tmp_path, arguments, part, "--help")


def test_types_need_their_importance_matrix(tmp_path, source):
    quantize_error(
        tmp_path, source, "blk.0.ffn_up.weight", "iq2_xs", "imatrix", flags=["--tensor-type", "ffn_up=iq2_xs"]
    )


@pytest.mark.parametrize("qtype", ["Q4_0", "Q5_1", "ITQ3_T"])
def test_requantization_needs_the_flag(tmp_path, qtype):
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)}, qtype)
    quantize_error(tmp_path, source, "blk.0.ffn_up.weight", qtype.lower(), "--allow-requantize")
    quantize(source, tmp_path / "out.gguf", "--type", "itq3_s", "--allow-requantize")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16"])
def test_non_finite_weight_is_named(tmp_path, value, qtype):
    weights = gaussian(2000, 512)
    weights[1500, 300] = value  # in a later chunk
    tensors = {"blk.0.attn_q.weight": gaussian(8, 256), "blk.0.ffn_up.weight": weights}
    source = write_gguf(tmp_path / "in.gguf", tensors, qtype)
    quantize_error(tmp_path, source, "blk.0.ffn_up.weight", "weight 768,300 (row 1,500, column 300)", f"is {value}")


def test_non_finite_weight_of_a_copied_tensor_is_named(tmp_path):
    norm = gaussian(256)
    norm[17] = np.nan
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.attn_norm.weight": norm, "blk.0.ffn_up.weight": gaussian(8, 256)})
    quantize_error(tmp_path, source, "blk.0.attn_norm.weight", "column 17", "nan")


def test_weight_beyond_the_scales_is_named(tmp_path):
    weights = gaussian(8, 256)
    weights[3, 5] = -1e6
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": weights}, "F32")
    quantize_error(tmp_path, source, "blk.0.ffn_up.weight", "row 3, column 5", "-1e+06", "14329")
    quantize(source, tmp_path / "out.gguf", "--type", "itq3_s", "--tensor-type", r"blk\.0\.ffn_up\.weight=f32")


def test_missing_file_is_refused(tmp_path):
    quantize_error(tmp_path, tmp_path / "missing.gguf", "missing.gguf", "No such file")


def test_directory_as_input_is_refused(tmp_path):
    quantize_error(tmp_path, tmp_path, str(tmp_path), "directory")


def test_device_as_input_is_refused(tmp_path):
    quantize_error(tmp_path, os.devnull, "not a regular file")


def test_missing_output_argument_is_refused(tmp_path, source):
    expect_error(tmp_path, [source, "--type", "itq3_s"], "OUT", "--dry-run")


@pytest.mark.parametrize("flags", [[], ["--force"]], ids=["", "force"])
def test_directory_or_device_as_output_is_refused(tmp_path, source, flags):
    expect_error(tmp_path, [source, tmp_path, "--type", "itq3_s", *flags], "OUT", "directory")
    expect_error(tmp_path, [source, os.devnull, "--type", "itq3_s", *flags], "OUT", "not a regular file")


@pytest.mark.parametrize("args", [["PIPE", "--force"], ["out.gguf", "--report", "PIPE"], ["out.gguf", "--model-card", "PIPE"]], ids=" ".join)
def test_pipe_as_output_is_refused(tmp_path, source, args):
    """/dev/stdout is such a pipe: its resolved name is in no directory."""
    reader, writer = os.pipe()
    pipe = f"/dev/fd/{writer}"
    arguments = [{"PIPE": pipe, "out.gguf": tmp_path / "out.gguf"}.get(a, a) for a in args]
    expect_error(tmp_path, [source, *arguments, "--type", "itq3_s"], "OUT" if args[0] == "PIPE" else args[1], f"{pipe} is not a regular file")
    os.close(reader)
    os.close(writer)


def test_missing_output_directory_is_refused(tmp_path, source):
    expect_error(tmp_path, [source, tmp_path / "no" / "out.gguf", "--type", "itq3_s"], "directory", "does not exist")


def test_existing_output_needs_force(tmp_path, source):
    (tmp_path / "out.gguf").write_text("precious")
    quantize_error(tmp_path, source, "exists", "--force")


@pytest.mark.parametrize("make", [lambda a, b: None, os.symlink, os.link], ids=["same", "symlink", "hardlink"])
@pytest.mark.parametrize("flags", [[], ["--force"]], ids=["", "force"])
def test_output_equal_to_input_is_refused(tmp_path, source, make, flags):
    output = source if make.__name__ == "<lambda>" else tmp_path / "out.gguf"
    make(source, output)
    expect_error(tmp_path, [source, output, "--type", "itq3_s", *flags], "same file as IN")


def test_incomplete_split_model_is_refused(tmp_path):
    source = write_gguf(
        tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)}, fill=lambda w: w.add_uint16("split.count", 3)
    )
    quantize_error(tmp_path, source, "one of 3 parts", "its name must end in")
    with source.open("ab") as file:
        file.write(source.read_bytes())
    quantize_error(tmp_path, source, "one of 3 parts", "llama-gguf-split --merge")


def test_upstream_type_needs_the_library(tmp_path):
    source = write_gguf(
        tmp_path / "in.gguf", {"output.weight": gaussian(8, 256), "token_embd.weight": gaussian(8, 256)}
    )
    quantize_error(
        tmp_path,
        source,
        "output.weight",
        "q6_k",
        "--output-tensor-type q8_0",
        flags=["--encoder", "numpy", "--token-embedding-type", "q8_0"],
    )
    quantize(
        source,
        tmp_path / "out.gguf",
        "--type",
        "itq3_s",
        "--encoder",
        "numpy",
        "--token-embedding-type",
        "q8_0",
        "--output-tensor-type",
        "q8_0",
    )


@pytest.mark.parametrize(("content", "part"), [(None, "has no"), (b"not a library", "cannot load")])
def test_library_directory_without_a_usable_library_is_refused(tmp_path, source, content, part):
    folder = tmp_path / "lib"
    folder.mkdir()
    if content:
        for name in ("libggml-base.so.0", "libggml-base.0.dylib", "ggml-base.dll"):
            (folder / name).write_bytes(content)
    result = run_quantize(
        source, tmp_path / "out.gguf", "--type", "itq3_s", env={**os.environ, "GGML_EXT_LIB_DIR": str(folder)}
    )
    check_error(result, part, str(folder))
    assert not (tmp_path / "out.gguf").exists()


def big_source(folder, n_rows):
    return write_gguf(folder / "in.gguf", {"blk.0.ffn_up.weight": np.tile(gaussian(256, 1024), (n_rows // 256, 1))})


def test_missing_space_is_noticed_before_writing(tmp_path, monkeypatch, capsys):
    """Uses a real file system of 64 kB where the machine allows mounting, otherwise a faked free size."""
    source = big_source(tmp_path, 1024)  # 400 kB quantized
    (tmp_path / "disk").mkdir()
    args = [source, tmp_path / "disk" / "out.gguf", "--type", "itq3_s", "--no-calibration"]
    if prefix := mount_namespace_prefix():
        script = f'mount -t tmpfs -o size=64k tmpfs "{tmp_path}/disk"; shift 0; "$@"; code=$?; ls -A "{tmp_path}/disk"; exit $code'
        result = subprocess.run([*prefix, script, "sh", *quantize_command(*args)], capture_output=True, text=True)
        check_error(result, "no space left on device", "out.gguf needs 0.39 MiB", "0.06 MiB are free")
        assert result.stdout == ""  # ls: no leftovers
    else:
        fill_disk(monkeypatch, 65536)
        assert quantize_module.main([str(a) for a in args]) == 1
        assert "no space left on device" in capsys.readouterr().err
    assert not any((tmp_path / "disk").iterdir())


def test_failed_write_leaves_nothing(tmp_path):
    """With a limit of the file size the file system reports enough room, and the write fails."""
    source = big_source(tmp_path, 1024)
    before = files(tmp_path)
    limit = 100_000  # of 400 kB
    result = run_quantize(
        source,
        tmp_path / "out.gguf",
        "--type",
        "itq3_s",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    check_error(result, "no space left on device", "out.gguf needs 0.39 MiB", "another disk")
    assert files(tmp_path) == before


def test_read_only_directory_is_refused(tmp_path, source, monkeypatch, capsys):
    """Faked in this process: permissions do not stop root, who may run the tests."""
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(_output, "open_file", refuse)
    before = files(tmp_path)
    assert quantize_module.main([str(source), str(tmp_path / "out.gguf"), "--type", "itq3_s", "--no-calibration"]) == 1
    assert "error: cannot write" in (err := capsys.readouterr().err) and "Permission denied" in err
    assert files(tmp_path) == before


def test_too_long_file_name_is_refused(tmp_path, source):
    quantize(source, tmp_path / ("n" * 250 + ".gguf"), "--type", "itq3_s")
    expect_error(tmp_path, [source, tmp_path / ("n" * 300), "--type", "itq3_s"], "OUT", "name too long")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_closed_streams_are_ignored(tmp_path, source, stream):
    command = " ".join(f"'{a}'" for a in quantize_command(source, tmp_path / "out.gguf", "--type", "itq3_s"))
    assert subprocess.run(["sh", "-c", f"{command} {1 if stream == 'stdout' else 2}>&-"]).returncode == 0
    assert (tmp_path / "out.gguf").exists()


def test_full_standard_output_is_reported(tmp_path, source):
    command = " ".join(f"'{a}'" for a in quantize_command(source, tmp_path / "out.gguf", "--type", "itq3_s"))
    result = subprocess.run(["sh", "-c", f"{command} > /dev/full"], capture_output=True, text=True)
    check_error(result, "standard output", "direct it to a file")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("qtype", [9, 15], ids=["q8_1", "q8_k"])
def test_tensors_of_activation_types_are_copied(tmp_path, qtype):
    """They hold no weights, and some cannot be dequantized."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(qtype)]
    path = raw_gguf(tmp_path / "in.gguf", tensors=[(b"a.weight", (256, 2), qtype, 0), (b"b.weight", (256, 2), 1, 1024)],
                    data=2 * 256 // block_size * block_bytes + 4096)
    result = quantize(path, tmp_path / "out.gguf", "--type", "itq3_s")
    name = gguf.GGMLQuantizationType(qtype).name.lower()
    of_arch, of_tensor = result.stderr.splitlines()
    assert "does not know the architecture ''" in of_arch and of_tensor == f"warning: tensor a.weight, {name}: holds no weights: kept"


@pytest.mark.parametrize("payload", [(8, struct.pack("<Q", 1) + b"2"), (9, struct.pack("<IQI", 4, 1, 2))], ids=["string", "array"])
def test_split_count_of_another_type_is_refused(tmp_path, payload):
    path = raw_gguf(tmp_path / "in.gguf", key(b"split.count", *payload), 1, tensors=[(b"a.weight", (256, 2), 1, 0)])
    quantize(path, tmp_path / "out.gguf", "--type", "itq3_s")


def test_closed_standard_output_is_ignored(tmp_path, source):
    command = " ".join(f"'{a}'" for a in quantize_command(source, tmp_path / "out.gguf", "--type", "itq3_s"))
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(["sh", "-c", command], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    check_error(result, "standard output was closed")
    assert not [p for p in tmp_path.iterdir() if p != source]


def test_files_that_gguf_reads_are_accepted(tmp_path):
    source = write_gguf(
        tmp_path / "in.gguf", {"a.weight": gaussian(2, 256)}, fill=lambda w: w.add_array("a", ["x"] * 1000)
    )
    assert len(gguf_file.GGUFFile(source).tensors) == len(gguf.GGUFReader(source).tensors) == 1
