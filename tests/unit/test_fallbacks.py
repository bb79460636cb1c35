"""Rows that do not fit a type: what the quantizer reports and refuses, and the file's name in the loader and llama-bench."""

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

from ggml_ext import WEIGHT_TYPES
from ggml_ext._formats import gguf_file
from ggml_ext._formats import names as _names
from ggml_ext._plan import plan as _plan
from ggml_ext._report import tables as report
from helpers.commands import quantize, quantize_command, run_quantize, tool
from helpers.errors import check_error, files
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.weights import relative_mse

# Rows of 320 use blocks of 64, rows of 96 blocks of 32; rows of 90 and 100 fall back to F16.
TENSORS = {
    "token_embd.weight": gaussian(16, 512),
    "blk.0.ffn_down.weight": gaussian(8, 256),
    "blk.1.ffn_down.weight": gaussian(8, 256),
    "blk.0.ffn_up.weight": gaussian(8, 320),
    "blk.1.ffn_up.weight": gaussian(8, 320),
    "blk.0.attn_q.weight": gaussian(8, 320),
    "blk.1.attn_q.weight": gaussian(8, 320),
    "blk.0.attn_k.weight": gaussian(8, 96),
    "blk.1.attn_k.weight": gaussian(8, 96),
    "blk.1.attn_v.weight": gaussian(8, 100),
    "blk.0.attn_output.weight": gaussian(8, 90),
    "blk.1.attn_output.weight": gaussian(8, 90),
    "blk.0.attn_norm.weight": gaussian(320),
}
IN_64 = "4 tensors in 2 classes, rows of 320: itq3_t64 (3.25 bpw) in place of itq3_t: ffn_up, attn_q in layers 0-1"
IN_32 = "2 tensors in 1 class, rows of 96: itq3_t32 (3.5 bpw) in place of itq3_t: blk.0.attn_k.weight, blk.1.attn_k.weight"
NEEDS = "which needs a multiple of 256 (as itq3_t64 of 64, itq3_t32 of 32)"
GROUPED = f"2 tensors in 1 class, rows of 90: f16 instead of itq3_t, {NEEDS}: blk.0.attn_output.weight, blk.1.attn_output.weight"
SINGLE = f"tensor blk.1.attn_v.weight, rows of 100: f16 instead of itq3_t, {NEEDS}"
LINES = f"note: {IN_64}\nnote: {IN_32}\nwarning: {SINGLE}\nwarning: {GROUPED}\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("fallbacks") / "in.gguf", TENSORS)


def layers_bpw(path) -> float:
    """Return the bits per weight of the block weights."""
    tensors = [t for n, t in read_tensors(path).items() if n.startswith("blk.") and len(t.shape) > 1]
    return sum(t.n_bytes for t in tensors) * 8 / sum(t.n_elements for t in tensors)


def all_bpw(path) -> float:
    tensors = read_tensors(path).values()
    return sum(t.n_bytes for t in tensors) * 8 / sum(t.n_elements for t in tensors)


def read_types(path) -> dict[str, str]:
    """Return types by name without layer and suffix."""
    return {re.sub(r"blk\.\d\.|\.weight", "", name): t.tensor_type.name for name, t in read_tensors(path).items()}


def test_lines_are_grouped_and_summary_compares(lib, source, tmp_path):
    out = tmp_path / "out.gguf"
    result = quantize(source, out, "--type", "itq3_t")
    assert result.stderr == LINES
    of_matrices = {"ffn_down": "ITQ3_T", "ffn_up": "ITQ3_T64", "attn_q": "ITQ3_T64", "attn_k": "ITQ3_T32", "attn_v": "F16", "attn_output": "F16"}
    assert read_types(out) == of_matrices | {"token_embd": "Q6_K", "attn_norm": "F32"}
    assert result.stdout.splitlines()[-4:] == [
        f"requested itq3_t, 3.0625 bpw; result: {layers_bpw(out):.5g} bpw in the layers, {all_bpw(out):.2f} bpw in total",
        "4 of 12 matrices use itq3_t64 instead of itq3_t (rows of 320)",
        "2 of 12 matrices use itq3_t32 instead of itq3_t (rows of 96)",
        "3 of 12 matrices use fallback types (rows of 90, 100); --no-fallback makes this an error",
    ]


@pytest.mark.parametrize(
    ("type_name", "of_320", "of_96"),
    [
        ("itq3_s", "ITQ3_T64", "ITQ3_T32"),
        ("ditto3", "ITQ3_T64", "ITQ3_T32"),
        ("ditto5", "Q5_0", "Q5_0"),
        ("itq3_t", "ITQ3_T64", "ITQ3_T32"),
        ("itq3_t64", "ITQ3_T64", "ITQ3_T32"),
        ("ccq2", "ITQ2_T64", "ITQ2_T32"),
        ("itq2_t", "ITQ2_T64", "ITQ2_T32"),
        ("itq2_t64", "ITQ2_T64", "ITQ2_T32"),
    ],
)
def test_each_type_has_its_fallbacks(lib, source, tmp_path, type_name, of_320, of_96):
    """Holds with --pure too. The file keeps the name of the requested type."""
    for flags in ([], ["--pure"]):
        out = tmp_path / f"out{len(flags)}.gguf"
        result = quantize(source, out, "--type", type_name, *flags)
        types = read_types(out)
        types_of_320 = [types[n] for n in ("ffn_down", "ffn_up", "attn_q", "attn_k", "attn_v")]
        assert types_of_320 == [type_name.upper(), of_320, of_320, of_96, "F16"]
        assert gguf.GGUFReader(out).fields["general.file_type"].contents() == WEIGHT_TYPES[type_name].id
        is_note = of_320.lower() in WEIGHT_TYPES  # blocks of 64 and 32 are notes
        assert result.stderr.count("note: ") == is_note * (2 - (type_name == of_320.lower()))
        assert result.stderr.count("warning: ") == (2 if is_note else 4)
    assert types["token_embd"] == type_name.upper()


def test_better_types_of_a_mix_use_blocks_of_64(lib, tmp_path):
    names = ["blk.0.ffn_up", "blk.1.ffn_up", "blk.0.attn_q", "blk.0.attn_v"]
    source = write_gguf(tmp_path / "in.gguf", {f"{name}.weight": gaussian(8, 576) for name in names})
    result = quantize(source, tmp_path / "out.gguf", "--type", "itq2_t_m")
    tensors = read_tensors(tmp_path / "out.gguf")
    assert [tensors[f"{name}.weight"].tensor_type.name for name in names] == ["ITQ3_T64", "ITQ2_T64", "ITQ3_T64", "Q5_0"]
    assert result.stderr.splitlines() == [
        "note: 2 tensors in 2 classes, rows of 576: itq3_t64 (3.25 bpw) in place of itq3_t: blk.0.ffn_up.weight, "
        "blk.0.attn_q.weight",
        "note: tensor blk.1.ffn_up.weight, rows of 576: itq2_t64 (2.25 bpw) in place of itq2_t",
        "warning: tensor blk.0.attn_v.weight, rows of 576: q5_0 instead of q4_k, which needs a multiple of 256",
    ]


@pytest.mark.parametrize(("tied", "name"), [(True, "token_embd.weight"), (False, "output.weight")])
@pytest.mark.parametrize("type_name", ["itq3_t", "itq3_t64", "itq2_t64"])
def test_output_matrix_with_rows_of_576_falls_back(lib, tmp_path, tied, name, type_name):
    """llama-quantize compares with the block of the file's type: Q8_0 at once for 256; for 64 the output's K-quant, which then
    falls back to Q8_0 from Q6_K and to Q5_1 from Q5_K."""
    tensors = {n: gaussian(8, 576) for n in (name, "blk.0.ffn_up.weight", *([] if tied else ["token_embd.weight"]))}
    result = quantize(write_gguf(tmp_path / "in.gguf", tensors), tmp_path / "out.gguf", "--type", type_name)
    types = {n: t.tensor_type.name for n, t in read_tensors(tmp_path / "out.gguf").items()}
    assert types[name] == ("Q5_1" if type_name == "itq2_t64" else "Q8_0")
    assert tied or types["token_embd.weight"] == ("ITQ2_T64" if type_name == "itq2_t64" else "ITQ3_T64")  # from Q2_K and Q3_K
    assert (f"tensor {name}, rows of 576: " in result.stderr) == (type_name != "itq3_t")
    quantize(tmp_path / "in.gguf", tmp_path / "pure.gguf", "--type", type_name, "--pure")
    assert read_tensors(tmp_path / "pure.gguf")[name].tensor_type.name == f"{type_name.removesuffix('64')}64".upper()


def write_narrow_matrices(folder, n: int):
    return write_gguf(folder / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, n)})


def test_no_fallback_accepts_blocks_of_64(lib, tmp_path):
    source = write_narrow_matrices(tmp_path, 576)
    for type_name in ("itq3_t", "itq2_t"):
        result = quantize(source, tmp_path / "out.gguf", "--type", type_name, "--no-fallback", "--force")
        assert read_types(tmp_path / "out.gguf") == {"ffn_up": f"{type_name}64".upper()}
        assert gguf.GGUFReader(tmp_path / "out.gguf").fields["ggml_ext.options"].contents() == "effort=normal"
        assert result.stderr.startswith("note: tensor blk.0.ffn_up.weight, rows of 576: ") and result.stderr.count("\n") == 1
        outcome = result.stdout.splitlines()[-1]
        assert outcome == f"1 of 1 matrices use {type_name}64 instead of {type_name} (rows of 576)"


@pytest.mark.parametrize(
    ("type_name", "n", "fallback"),
    [
        ("itq3_s", 576, "itq3_t64"),
        ("ditto3", 576, "itq3_t64"),
        ("ccq2", 576, "itq2_t64"),
        ("ditto5", 576, "q5_0"),
        ("itq1h_t64", 96, "itq2_t32"),
        ("itq3_t", 100, "f16"),
    ],
)
def test_no_fallback_refuses_another_type(lib, tmp_path, type_name, n, fallback):
    source = write_narrow_matrices(tmp_path, n)
    result = run_quantize(source, tmp_path / "out.gguf", "--type", type_name, "--no-fallback")
    check_error(result, "--no-fallback", f"blk.0.ffn_up.weight, rows of {n}: {fallback}", type_name, "leave out --no-fallback")
    assert not (tmp_path / "out.gguf").exists()
    outcome = quantize(source, tmp_path / "out.gguf", "--type", type_name).stdout.splitlines()[-1]
    assert outcome.startswith("1 of 1 matrices ") and outcome.endswith(f" (rows of {n}); --no-fallback makes this an error")


@pytest.mark.parametrize(("n", "fallback"), [(32, "itq3_t32"), (64, "itq3_t64"), (100, "f16"), (256, "itq3_t")])
def test_smallest_rows_fall_back(lib, tmp_path, n, fallback):
    """One block or none: one line names the tensor, and the weights are kept."""
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.attn_q.weight": gaussian(2, n)}, "F32")
    result = quantize(source, tmp_path / "out.gguf", "--type", "itq3_t")
    tensor = read_tensors(tmp_path / "out.gguf")["blk.0.attn_q.weight"]
    assert tensor.tensor_type.name.lower() == fallback
    assert relative_mse(gguf.quants.dequantize(tensor.data, tensor.tensor_type), gaussian(2, n)) < 0.03
    line = r"" if fallback == "itq3_t" else rf"\w+: tensor blk\.0\.attn_q\.weight, rows of {n}: {fallback} .*\n"
    assert re.fullmatch(line, result.stderr)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_bad_weights_in_blocks_of_64_are_named(lib, tmp_path, value):
    weights = gaussian(4, 576)
    weights[2, 575] = value
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.attn_q.weight": weights}, "F32")
    result = run_quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "-q")
    what = "1e+30; itq3_t64" if value == 1e30 else "damaged"
    check_error(result, "tensor blk.0.attn_q.weight: weight 1,727 (row 2, column 575) is ", what)
    assert not (tmp_path / "out.gguf").exists()


def test_model_without_fallbacks_has_a_short_summary(lib, tmp_path):
    source = write_gguf(tmp_path / "in.gguf", {n: t for n, t in TENSORS.items() if t.shape[-1] in (256, 512)})
    for flags in ([], ["--no-fallback"]):
        out = tmp_path / f"out{len(flags)}.gguf"
        result = quantize(source, out, "--type", "itq3_t", *flags)
        assert result.stdout.splitlines()[-2:] == ["", f"itq3_t as requested: 3.0625 bpw in the layers, {all_bpw(out):.2f} bpw in total"]
        assert result.stderr == ""


def test_mix_is_compared_with_its_own_size(lib, source, tmp_path):
    """Without fallbacks it would have 3.0625 bpw plus attn_k, attn_v and attn_output in q4_k."""
    result = quantize(source, "--type", "itq3_t_m", "--dry-run")
    assert "tensor blk.1.attn_v.weight, rows of 100: f16 instead of q4_k, which needs a multiple of 256" in result.stderr
    n, n_v = sum(t.size for name, t in TENSORS.items() if name.startswith("blk.") and t.ndim > 1), 8 * (100 + 96 + 96 + 90 + 90)
    assert f"requested itq3_t_m, {(3.0625 * (n - n_v) + 4.5 * n_v) / n:.5g} bpw; result: " in result.stdout


def test_no_fallback_refuses_in_one_line(lib, source, tmp_path):
    before = files(tmp_path)
    for flags in ([], ["--dry-run"], ["-q"]):
        result = run_quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--no-fallback", *flags)
        check_error(result, "--no-fallback", SINGLE, "--tensor-type REGEX=TYPE", "leave out --no-fallback")
        assert result.stdout == "" and result.stderr.count("\n") == 1
    assert files(tmp_path) == before
    quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--no-fallback", "--tensor-type", "attn_(v|output)=f16")


def test_quiet_hides_only_fallbacks(lib, source, tmp_path):
    result = quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "-q", "--tensor-type", "nothing=f16")
    assert result.stdout == "" and result.stderr == "warning: --tensor-type nothing=f16 matches no tensor\n"


def test_dry_run_shows_the_summary(lib, source, tmp_path):
    whole = quantize(source, "--type", "itq3_t", "--dry-run").stdout
    short = quantize(source, "--type", "itq3_t", "--dry-run", "--summary").stdout
    assert whole.startswith("[ 1/13] token_embd.weight") and whole.endswith(short) and "[" not in short
    assert quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--summary").stderr == LINES


def test_long_lists_of_classes_are_shortened():
    names = [f"blk.{i}.part{k}.weight" for i in range(2) for k in range(12)]
    assert _names.describe_tensors(names, " x") == (
        "24 tensors in 12 classes x: part0, part1, part2, part3, part4, part5, part6, part7 and 4 more in layers 0-1"
    )


@pytest.mark.parametrize(("layers", "message"), [
    ({"attn_q": [1], "attn_k": [1], "ffn_up": [1]}, "attn_q, attn_k, ffn_up in layer 1"),
    ({"attn_q": [0, 1, 2, 7, 9, 10]}, "attn_q in layers 0-2, 7, 9-10"),
    ({"attn_q": [3, 4, 5], "ffn_down": [5], "attn_k": [3, 4, 5]}, "attn_q, attn_k in layers 3-5; ffn_down in layer 5"),
    ({"attn_q": range(0, 40, 2)}, "attn_q in layers 0, 2, 4, 6, 8, 10 and 14 more"),
    ({f"part{i}": [i] for i in range(6)}, "part0 in layer 0; part1 in layer 1; part2 in layer 2; part3 in layer 3 and 2 classes more"),
])
def test_layers_of_classes_are_listed(layers, message):
    names = [f"blk.{i}.{name}.weight" for name, of_class in layers.items() for i in of_class]
    assert _names.list_tensors(names) == message
    assert _names.list_tensors(["output.weight", *names]) == (f"output; {message}" if "more" not in message or len(layers) == 1 else
                                                             "output; part0 in layer 0; part1 in layer 1; part2 in layer 2 and 3 classes more")


def write_wide_source(folder):
    """Write names and numbers of large models, with one name of the maximum length."""
    names = ["blk.15.attn_output.weight", "blk.15.ffn_gate_exps.weight", "per_layer_token_embd.weight", f"blk.15.{'long_' * 9}norm.weight"]
    return write_gguf(folder / "in.gguf", {name: gaussian(2, 4, 256) for name in names})


def test_lines_fit_80_columns(lib, tmp_path):
    result = quantize(write_wide_source(tmp_path), tmp_path / "out.gguf", "--type", "itq3_t")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) == 80
    assert lines[0].startswith("[1/4] blk.15.attn_output.weight ") and lines[0].endswith("256x4x2  f16 -> itq3_t  0.004 -> 0.001 MiB")
    assert [line for line in lines if re.match(r"\[4/4\] blk\.15\.long_lo\S*\.\.\S*norm\.weight ", line)]


def test_lines_of_large_models_fit_80_columns():
    """Plans Mixtral's and Llama's matrices from the header."""
    f16, tensors = gguf.GGMLQuantizationType.F16, []
    for name, ne in (("token_embd.weight", (4096, 128256)), ("blk.31.ffn_gate_exps.weight", (4096, 14336, 8)), ("blk.31.attn_output.weight", (4096, 4096))):
        tensors.append(gguf_file.Tensor(name, ne, f16, 0, int(np.prod(ne)) * 2))
    itq3_t = gguf.GGMLQuantizationType.ITQ3_T
    plan = _plan.QuantizationPlan([_plan.PlannedTensor(t, itq3_t, itq3_t) for t in tensors * 97])
    lines = report.tensor_lines(plan, 80)
    assert lines[0] == "[  1/291] token_embd.weight         4096x128256  f16 -> itq3_t   1002 -> 192 MiB"
    assert lines[2] == "[  3/291] blk.31.attn_output.weight   4096x4096  f16 -> itq3_t  32.0 -> 6.12 MiB"
    assert all(len(line) == 80 for line in lines)
    assert all(len(line) == 100 for line in report.tensor_lines(plan, 100))


def test_wide_terminals_are_used(lib, tmp_path):
    """Runs in a pseudo-terminal of 120 columns."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    command = quantize_command(write_wide_source(tmp_path), "--type", "itq3_t", "--dry-run")
    subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, env=env, check=True)
    os.close(writer)
    text = os.read(reader, 1 << 16).decode()
    os.close(reader)
    lines = text.splitlines()
    assert len(lines[3]) == 120 and f"blk.15.{'long_' * 9}norm.weight" in lines[3]


def write_narrow_model(model, path, n: int, head: int):
    """Write a model of two blocks that loads, with random weights in rows of n, n/head heads, and of 768."""
    file = gguf_file.GGUFFile(model)
    sizes = {"llama.embedding_length": n, "llama.block_count": 2, "llama.attention.head_count": n // head,
             "llama.attention.head_count_kv": 1, "llama.rope.dimension_count": head}
    metadata = file.metadata | {key: gguf_file.uint32_value(key, n) for key, n in sizes.items()}
    f16, f32 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
    shapes = {"token_embd": (4096, n), "output_norm": (n,)}
    for i in range(2):
        of_block = {"attn_norm": (n,), "ffn_norm": (n,), "attn_q": (n, n), "attn_k": (head, n), "attn_v": (head, n),
                    "attn_output": (n, n), "ffn_gate": (768, n), "ffn_up": (768, n), "ffn_down": (n, 768)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in of_block.items()}
    tensors = [gguf_file.Tensor(f"{name}.weight", s[::-1], f16 if len(s) > 1 else f32, 0, 0) for name, s in shapes.items()]
    with open(path, "wb") as f:
        f.write(gguf_file.pack_header(metadata, tensors, [t.type for t in tensors], file.alignment))
        for seed, shape in enumerate(shapes.values()):
            weights = gaussian(*shape, seed=seed).astype(np.float16) if len(shape) > 1 else np.ones(shape, np.float32)
            f.write(weights.tobytes().ljust(gguf_file.pad(weights.nbytes, file.alignment), b"\0"))
    return path


def read_names(path) -> set[str]:
    """Return the names of the file in llama-bench and in the loader's log."""
    bench = subprocess.run([tool("llama-bench"), "-m", path, "-p", "1", "-n", "0", "-r", "1", "-t", "1", "-ngl", "0", "-o", "json"],
                           capture_output=True, text=True, timeout=300, check=True)
    log = subprocess.run([tool("llama-completion"), "-m", path, "-p", "a", "-n", "1", "-no-cnv", "-lv", "4", "-ngl", "0"],
                         stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=300, check=True)
    model_type = json.loads(re.search(r"\[\n.*\]", bench.stdout, re.S)[0])[0]["model_type"]
    return {re.sub(r"^llama \S+ ", "", model_type), *re.findall(r"file type += (.*)", log.stdout + log.stderr)}


@pytest.mark.slow
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
def test_loader_shows_the_bits_of_the_file(lib, model, tmp_path, flags, name):
    out = tmp_path / "out.gguf"
    quantize(model, out, "--effort", "fast", "-q", *flags)
    assert read_names(out) == {name.format(blocks=layers_bpw(out), all=all_bpw(out))}


MIXED = "{type}, mixed - {blocks:.2f} bpw, {all:.2f} in all"
NARROW = [
    (320, "itq3_t", "ITQ3_T - {blocks:.2f} bpw"),  # with blocks of 64
    (320, "itq2_t64", "ITQ2_T64 - 2.25 bpw"),
    (320, "itq3_s", MIXED),
    (320, "ccq2", MIXED),
    (320, "ditto5", MIXED),
    (160, "itq3_t", "ITQ3_T - {blocks:.2f} bpw"),  # with blocks of 32
    (160, "itq3_t64", "ITQ3_T64 - {blocks:.2f} bpw"),
    (160, "itq2_t32", "ITQ2_T32 - 2.5 bpw"),
    (160, "itq1h_t", MIXED),
]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "type_name", "name", "flags"), [
    *((*case, []) for case in NARROW),
    *(pytest.param(*case, ["--pure"], marks=() if i % 4 == 0 else pytest.mark.nightly) for i, case in enumerate(NARROW))])
def test_fallbacks_match_llama_quantize(lib, model, tmp_path, n, type_name, name, flags):
    """Compares the chain of fallbacks, the output matrix, the bytes and the loader's name of both files."""
    write_narrow_model(model, tmp_path / "in.gguf", n, {320: 64, 160: 32}[n])
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    command = [tool("llama-quantize"), *flags, tmp_path / "in.gguf", theirs, type_name.upper()]
    log = subprocess.run(command, check=True, capture_output=True, text=True)
    quantize(tmp_path / "in.gguf", ours, "--type", type_name, *flags)
    expected, actual = read_tensors(theirs), read_tensors(ours)
    assert {k: t.tensor_type for k, t in actual.items()} == {k: t.tensor_type for k, t in expected.items()}
    for key, tensor in expected.items():
        np.testing.assert_array_equal(actual[key].data, tensor.data, err_msg=key)
    chain = [type_name]
    while chain[-1] in WEIGHT_TYPES:
        chain.append(WEIGHT_TYPES[chain[-1]].fallback)
    fitting = next(t for t in chain if t not in WEIGHT_TYPES or n % WEIGHT_TYPES[t].block_size == 0)
    fell_back = set(re.findall(r"^warning: blk\S+ .*falling back to +(\S+)$", log.stdout + log.stderr, re.M))
    assert fell_back == {fitting} - {type_name}
    name = name.format(type=type_name.upper(), blocks=layers_bpw(ours), all=all_bpw(ours))
    assert read_names(ours) == read_names(theirs) == {name}


@pytest.mark.slow
@pytest.mark.parametrize("value", ["itq2_t_m", "itq3_sx", "itq3_s_" + "m" * 40, "itq3_s_\n[31m"])
def test_recorded_mix_of_another_type_is_ignored(lib, model, tmp_path, value):
    """llama-quantize copies the key from its input; other programs may write any value."""
    quantize(model, tmp_path / "in.gguf", "--type", "itq3_s", "--tensor-type", "attn_v=q8_0")
    file = gguf_file.GGUFFile(tmp_path / "in.gguf")
    metadata = file.metadata | {"ggml_ext.type": gguf_file.string_value("ggml_ext.type", value)}
    out = tmp_path / "out.gguf"
    header = gguf_file.pack_header(metadata, file.tensors, [t.type for t in file.tensors], file.alignment)
    out.write_bytes(header + (tmp_path / "in.gguf").read_bytes()[min(t.offset for t in file.tensors) :])
    assert read_names(out) == {f"ITQ3_S, mixed - {layers_bpw(out):.2f} bpw, {all_bpw(out):.2f} in all"}


def test_titles_have_type_and_bits():
    """The loader uses the part before the first space as the name."""
    for info in WEIGHT_TYPES.values():
        assert info.title == f"{info.name.upper()} - {info.bpw:g} bpw"
