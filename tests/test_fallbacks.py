"""Rows that a type does not fit: what the quantizer says and refuses, and what the loader and llama-bench call the file."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios

import gguf
import numpy as np
import pytest
from conftest import gaussian, quantize, quantize_command, read_tensors, run_quantize, tool, write_gguf
from test_bad_input import check_error, files

from ggml_ext import WEIGHT_TYPES, _gguf_file, _names, _plan, _report

# Rows of 320 fall back to IQ4_NL, rows of 100 to F16.
TENSORS = {
    "token_embd.weight": gaussian(16, 512),
    "blk.0.ffn_down.weight": gaussian(8, 256),
    "blk.1.ffn_down.weight": gaussian(8, 256),
    "blk.0.ffn_up.weight": gaussian(8, 320),
    "blk.1.ffn_up.weight": gaussian(8, 320),
    "blk.0.attn_q.weight": gaussian(8, 320),
    "blk.1.attn_q.weight": gaussian(8, 320),
    "blk.1.attn_v.weight": gaussian(8, 100),
    "blk.0.attn_norm.weight": gaussian(320),
}
GROUPED = "4 tensors in 2 classes, rows of 320: iq4_nl instead of itq3_t, which needs a multiple of 256: ffn_up, attn_q"
SINGLE = "tensor blk.1.attn_v.weight, rows of 100: f16 instead of itq3_t, which needs a multiple of 256"
WARNINGS = f"warning: {GROUPED}\nwarning: {SINGLE}\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("fallbacks") / "in.gguf", TENSORS)


def blocks_bpw(path) -> float:
    """Of the matrices of the blocks."""
    tensors = [t for n, t in read_tensors(path).items() if n.startswith("blk.") and len(t.shape) > 1]
    return sum(t.n_bytes for t in tensors) * 8 / sum(t.n_elements for t in tensors)


def all_bpw(path) -> float:
    tensors = read_tensors(path).values()
    return sum(t.n_bytes for t in tensors) * 8 / sum(t.n_elements for t in tensors)


def test_warnings_are_grouped_and_the_summary_compares(lib, source, tmp_path):
    out = tmp_path / "out.gguf"
    result = quantize(source, out, "--type", "itq3_t")
    assert result.stderr == WARNINGS
    types = {name: t.tensor_type.name for name, t in read_tensors(out).items()}
    assert (types["blk.1.ffn_up.weight"], types["blk.1.attn_v.weight"], types["blk.1.ffn_down.weight"]) == ("IQ4_NL", "F16", "ITQ3_T")
    assert result.stdout.splitlines()[-2:] == [
        f"asked for itq3_t, 3.0625 bpw; got {blocks_bpw(out):.5g} bpw in the blocks, {all_bpw(out):.2f} bpw in all",
        "5 of 8 matrices fell back for their rows of 100, 320; --no-fallback refuses that",
    ]


def test_who_gets_what_was_asked_for_reads_one_line(lib, tmp_path):
    source = write_gguf(tmp_path / "in.gguf", {n: t for n, t in TENSORS.items() if t.shape[-1] in (256, 512)})
    for flags in ([], ["--no-fallback"]):
        out = tmp_path / f"out{len(flags)}.gguf"
        result = quantize(source, out, "--type", "itq3_t", *flags)
        assert result.stdout.splitlines()[-2:] == ["", f"itq3_t as asked: 3.0625 bpw in the blocks, {all_bpw(out):.2f} bpw in all"]
        assert result.stderr == ""


def test_a_recipe_is_compared_with_itself(lib, source, tmp_path):
    """Where nothing falls back it would be 3.0625 but for attn_v, a q4_k."""
    result = quantize(source, "--type", "itq3_t_m", "--dry-run")
    assert "tensor blk.1.attn_v.weight, rows of 100: f16 instead of q4_k, which needs a multiple of 256" in result.stderr
    n, n_v = sum(t.size for name, t in TENSORS.items() if name.startswith("blk.") and t.ndim > 1), 8 * 100
    assert f"asked for itq3_t_m, {(3.0625 * (n - n_v) + 4.5 * n_v) / n:.5g} bpw; got " in result.stdout


def test_no_fallback_refuses_in_one_line(lib, source, tmp_path):
    before = files(tmp_path)
    for flags in ([], ["--dry-run"], ["-q"]):
        result = run_quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--no-fallback", *flags)
        check_error(result, "--no-fallback", GROUPED, "--tensor-type REGEX=TYPE", "leave out --no-fallback")
        assert result.stdout == "" and result.stderr.count("\n") == 1
    assert files(tmp_path) == before
    quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--no-fallback", "--tensor-type", "attn|ffn_up=f16")


def test_quiet_is_quiet_about_fallbacks_alone(lib, source, tmp_path):
    result = quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "-q", "--tensor-type", "nothing=f16")
    assert result.stdout == "" and result.stderr == "warning: --tensor-type nothing=f16 matches no tensor\n"


def test_summary_alone(lib, source, tmp_path):
    whole = quantize(source, "--type", "itq3_t", "--dry-run").stdout
    short = quantize(source, "--type", "itq3_t", "--dry-run", "--summary").stdout
    assert whole.startswith("[1/9] token_embd.weight") and whole.endswith(short) and "[" not in short
    assert quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--summary").stderr == WARNINGS


def test_of_many_classes_some_are_listed():
    names = [f"blk.{i}.part{k}.weight" for i in range(2) for k in range(12)]
    assert _names.describe_tensors(names, " x") == (
        "24 tensors in 12 classes x: part0, part1, part2, part3, part4, part5, part6, part7 and 4 more"
    )


def wide_source(folder):
    """Names and numbers as large models have them, and one name of the greatest length."""
    names = ["blk.15.attn_output.weight", "blk.15.ffn_gate_exps.weight", "per_layer_token_embd.weight", f"blk.15.{'long_' * 9}norm.weight"]
    return write_gguf(folder / "in.gguf", {name: gaussian(2, 4, 256) for name in names})


def test_lines_fit_80_columns(lib, tmp_path):
    result = quantize(wide_source(tmp_path), tmp_path / "out.gguf", "--type", "itq3_t")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) == 80
    assert lines[0].startswith("[1/4] blk.15.attn_output.weight ") and lines[0].endswith("256x4x2  f16 -> itq3_t  0.004 -> 0.001 MiB")
    assert [line for line in lines if re.match(r"\[4/4\] blk\.15\.long_lo\S*\.\.\S*norm\.weight ", line)]


def test_lines_of_large_models_fit_80_columns():
    """Mixtral's and Llama's matrices, from the header alone."""
    f16, tensors = gguf.GGMLQuantizationType.F16, []
    for name, ne in (("token_embd.weight", (4096, 128256)), ("blk.31.ffn_gate_exps.weight", (4096, 14336, 8)), ("blk.31.attn_output.weight", (4096, 4096))):
        tensors.append(_gguf_file.Tensor(name, ne, f16, 0, int(np.prod(ne)) * 2))
    plan = _plan.Plan(tensors * 97)
    for tensor in plan.tensors:
        plan.add(tensor, gguf.GGMLQuantizationType(163), gguf.GGMLQuantizationType(163))
    lines = _report.tensor_lines(plan, 80)
    assert lines[0] == "[  1/291] token_embd.weight         4096x128256  f16 -> itq3_t   1002 -> 192 MiB"
    assert lines[2] == "[  3/291] blk.31.attn_output.weight   4096x4096  f16 -> itq3_t  32.0 -> 6.12 MiB"
    assert all(len(line) == 80 for line in lines)
    assert all(len(line) == 100 for line in _report.tensor_lines(plan, 100))


def test_wide_terminals_are_used(lib, tmp_path):
    """A pseudo-terminal of 120 columns."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    command = quantize_command(wide_source(tmp_path), "--type", "itq3_t", "--dry-run")
    subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, env=env, check=True)
    os.close(writer)
    text = os.read(reader, 1 << 16).decode()
    os.close(reader)
    lines = text.splitlines()
    assert len(lines[3]) == 120 and f"blk.15.{'long_' * 9}norm.weight" in lines[3]


@pytest.fixture(scope="module")
def narrow_model(model, tmp_path_factory):
    """A model of two blocks that loads, with random weights in rows of 320."""
    file = _gguf_file.GGUFFile(model)
    sizes = {"llama.embedding_length": 320, "llama.block_count": 2, "llama.attention.head_count": 5, "llama.attention.head_count_kv": 1}
    metadata = file.metadata | {key: _gguf_file.uint32_value(key, n) for key, n in sizes.items()}
    f16, f32 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
    shapes = {"token_embd": (4096, 320), "output_norm": (320,)}
    for i in range(2):
        of_block = {"attn_norm": (320,), "ffn_norm": (320,), "attn_q": (320, 320), "attn_k": (64, 320), "attn_v": (64, 320),
                    "attn_output": (320, 320), "ffn_gate": (768, 320), "ffn_up": (768, 320), "ffn_down": (320, 768)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in of_block.items()}
    tensors = [_gguf_file.Tensor(f"{n}.weight", s[::-1], f16 if len(s) > 1 else f32, 0, 0) for n, s in shapes.items()]
    path = tmp_path_factory.mktemp("narrow") / "in.gguf"
    with open(path, "wb") as f:
        f.write(_gguf_file.pack_header(metadata, tensors, [t.type for t in tensors], file.alignment))
        for seed, shape in enumerate(shapes.values()):
            weights = gaussian(*shape, seed=seed).astype(np.float16) if len(shape) > 1 else np.ones(shape, np.float32)
            f.write(weights.tobytes())
            _gguf_file.write_padding(f, weights.nbytes, file.alignment)
    return path


def names_of(path) -> set[str]:
    """What llama-bench and the loader's log call the file."""
    bench = subprocess.run([tool("llama-bench"), "-m", path, "-p", "1", "-n", "0", "-r", "1", "-t", "1", "-ngl", "0", "-o", "json"],
                           capture_output=True, text=True, timeout=300, check=True)
    log = subprocess.run([tool("llama-completion"), "-m", path, "-p", "a", "-n", "1", "-no-cnv", "-lv", "4", "-ngl", "0"],
                         stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=True)
    model_type = json.loads(re.search(r"\[\n.*\]", bench.stdout, re.S)[0])[0]["model_type"]
    return {re.sub(r"^llama \S+ ", "", model_type), *re.findall(r"file type += (.*)", log.stdout + log.stderr)}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--type", "itq3_t"], "ITQ3_T - 3.0625 bpw"),
        (["--type", "itq3_t", "--token-embedding-type", "f16"], "ITQ3_T - 3.0625 bpw"),
        (["--type", "itq2_t", "--pure"], "ITQ2_T - 2.0625 bpw"),
        (["--type", "itq3_t_m"], "ITQ3_T_M - {blocks:.2f} bpw, {all:.2f} in all"),
        (["--type", "itq2_t", "--tensor-type", "attn_v=ccq2"], "ITQ2_T, mixed - 2.06 bpw, {all:.2f} in all"),  # as many bits
        (["--type", "itq3_t", "--tensor-type", "attn_v=q8_0"], "ITQ3_T, mixed - {blocks:.2f} bpw, {all:.2f} in all"),
        (["--type", "itq3_s", "--tensor-type", "attn_v=f16"], "ITQ3_S, mixed - {blocks:.2f} bpw, {all:.2f} in all"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_the_loader_counts_the_bits_of_the_file(lib, model, tmp_path, flags, name):
    out = tmp_path / "out.gguf"
    quantize(model, out, "--effort", "fast", "-q", *flags)
    assert names_of(out) == {name.format(blocks=blocks_bpw(out), all=all_bpw(out))}


def test_the_loader_tells_where_rows_fell_back(lib, narrow_model, tmp_path):
    """Also in a file of llama-quantize."""
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    quantize(narrow_model, ours, "--type", "itq3_s")
    subprocess.run([tool("llama-quantize"), narrow_model, theirs, "ITQ3_S"], check=True, capture_output=True)
    assert blocks_bpw(ours) == blocks_bpw(theirs) and 4 < blocks_bpw(ours) < 4.5
    name = f"ITQ3_S, mixed - {blocks_bpw(ours):.2f} bpw, {all_bpw(ours):.2f} in all"
    assert names_of(ours) == names_of(theirs) == {name}


@pytest.mark.parametrize("value", ["itq2_t_m", "itq3_sx", "itq3_s_" + "m" * 40, "itq3_s_\n[31m"])
def test_a_recipe_of_another_type_is_not_believed(lib, model, tmp_path, value):
    """llama-quantize keeps the key of the file it reads; other programs may write anything."""
    quantize(model, tmp_path / "in.gguf", "--type", "itq3_s", "--tensor-type", "attn_v=q8_0")
    file = _gguf_file.GGUFFile(tmp_path / "in.gguf")
    metadata = file.metadata | {"ggml_ext.type": _gguf_file.string_value("ggml_ext.type", value)}
    out = tmp_path / "out.gguf"
    header = _gguf_file.pack_header(metadata, file.tensors, [t.type for t in file.tensors], file.alignment)
    out.write_bytes(header + (tmp_path / "in.gguf").read_bytes()[min(t.offset for t in file.tensors) :])
    assert names_of(out) == {f"ITQ3_S, mixed - {blocks_bpw(out):.2f} bpw, {all_bpw(out):.2f} in all"}


def test_titles_name_their_type_and_bits():
    """The loader takes the name before the blank from them."""
    for info in WEIGHT_TYPES.values():
        assert info.title == f"{info.name.upper()} - {info.bpw:g} bpw"
