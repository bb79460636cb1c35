"""Histograms, --json, --tensor and --picture of ggml-ext inspect."""

import os
import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

import gguf
import numpy as np
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from ggml_ext._encode import histogram
from ggml_ext._formats import gguf_file
from ggml_ext._report import picture as _picture
from helpers.commands import quantize
from helpers.errors import check_error
from helpers.inspecting import inspect_in_process, inspect_json
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.moments_files import correlated, write_moments

UP, NORM = "blk.0.ffn_up.weight", "blk.0.attn_norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """out.gguf with a tensor of each ggml-ext type, one of an upstream type and a norm."""
    folder = tmp_path_factory.mktemp("histograms")
    tensors = {f"blk.{i}.{part}.weight": gaussian(8, 256, seed=3 * i + k) for i in range(3) for k, part in enumerate(("attn_q", "ffn_up"))}
    tensors |= {f"blk.0.{name}_x.weight": gaussian(16, 512, seed=20 + k) for k, name in enumerate(WEIGHT_TYPES)}
    tensors |= {"token_embd.weight": gaussian(16, 256), NORM: gaussian(256)}
    write_gguf(folder / "in.gguf", tensors)
    flags = [f for name in WEIGHT_TYPES for f in ("--tensor-type", f"{name}_x={name}")]
    quantize(folder / "in.gguf", folder / "out.gguf", "--type", "itq3_t", "--token-embedding-type", "q8_0", *flags)
    return folder


def inspect_process(*args, env: dict | None = None) -> subprocess.CompletedProcess:
    """Run inspect as a process, whose stderr includes messages of libraries."""
    command = [sys.executable, "-m", "ggml_ext.inspect", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | (env or {}))


def unpack_scalar(lib, info, block):
    """Return the codes and scales of a block by the library's unpack contract."""
    q, scale, d, offset = lib.unpack_block(int(info.id), block)
    if info.name == "ditto3":  # its codes are signed values of the codebook
        q = q.astype(int) - int(offset)
    return q, d * scale[: info.block_size // info.group] if info.name == "ccq2" else np.array([d])


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_counts_match_the_blocks(folder, lib, name):
    """Against blocks unpacked one by one by the library."""
    info = TYPES[name]
    stored = read_tensors(folder / "out.gguf")[f"blk.0.{name}_x.weight"]
    assert stored.tensor_type.name.lower() == name
    fields = [unpack_scalar(lib, info, np.array(b)) for b in stored.data.reshape(-1, info.block_bytes)]
    codes = Counter(int(c) for q, _ in fields for c in q)
    scales = np.array([float(s) for _, block_scales in fields for s in block_scales])
    octaves = Counter(int(np.floor(np.log2(abs(s)))) for s in scales if s)

    result = inspect_json(folder / "out.gguf", "--histograms", "--tensor", f"{name}_x")["histograms"]
    assert list(result) == [name]
    result = result[name]
    assert result["weights"] == result["weights_read"] == 16 * 512 == sum(codes.values())
    assert result["codes"] == {str(c): n for c, n in sorted(codes.items())}
    assert result["scale_octaves"] == {str(o): n for o, n in sorted(octaves.items())}
    assert result["scales"] == {"number": scales.size, "zero": int((scales == 0).sum()), "negative": int((scales < 0).sum()), "not_finite": 0}
    share = np.array(list(codes.values())) / 8192
    assert abs(result["code_entropy"] + (share * np.log2(share)).sum()) < 1e-6  # printed with six decimals


def test_bars_of_the_terminal(folder):
    done = inspect_in_process(folder / "out.gguf", "--histograms", "--tensor", "itq3_s_x|token_embd")
    assert done.returncode == 0, done.stderr
    lines = done.stdout[done.stdout.index("itq3_s: codes") :].splitlines()
    assert lines[0].startswith("itq3_s: codes of all 8,192 weights, entropy 2.")
    bars = [line.split() for line in lines[1:9]]
    assert [b[0] for b in bars] == [str(c) for c in range(8)]
    shares = [float(b[1]) for b in bars]
    assert abs(sum(shares) - 100) < 0.5 and max(len(b[3]) for b in bars) == 40  # eight values rounded to a tenth; the longest bar
    assert [len(b[3]) if len(b) > 3 else 0 for b in bars] == pytest.approx([40 * s / max(shares) for s in shares], abs=0.6)
    assert lines[10] == "itq3_s: magnitudes of 32 scales" and all(line.split()[0].startswith("2^-") for line in lines[11:])
    assert "q8_0:" not in done.stdout
    none = inspect_in_process(folder / "out.gguf", "--histograms", "--tensor", "token_embd").stdout
    assert none.endswith("no histogram: no tensor has a ggml-ext type\n")


def test_many_codes_share_a_bar():
    lines = histogram._bars(np.arange(1, 65), lambda a, b: f"{a} to {b}")
    assert len(lines) == 16 and lines[0].split()[:3] == ["0", "to", "3"] and lines[-1].split()[:3] == ["60", "to", "63"]
    assert histogram._bars(np.zeros(5, int), str) == []


def write_sparse_file(path, ne, qtype):
    """Write a sparse file with one tensor of zeros."""
    tensor = gguf_file.Tensor(UP, ne, qtype, 0, 0)
    n_bytes = gguf_file.row_bytes(qtype, ne[0]) * tensor.n_rows
    header = gguf_file.pack_header({}, [tensor], [qtype], 32)
    with open(path, "wb") as f:
        f.write(header)
        f.truncate(len(header) + gguf_file.pad(n_bytes, 32))
    return path


def test_large_tensors_are_sampled_in_little_memory(tmp_path):
    """2^33 weights: loading the tensor would take gigabytes, pieces take a few MB."""
    path = write_sparse_file(tmp_path / "in.gguf", (1 << 16, 1 << 17), gguf.GGMLQuantizationType.ITQ2_T)
    code = ("import resource, sys; from ggml_ext import inspect; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            "assert inspect.main(sys.argv[1:]) == 0; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)")
    done = subprocess.run([sys.executable, "-c", code, path, "--histograms"], capture_output=True, text=True, check=True)
    *lines, growth = done.stdout.splitlines()
    assert int(growth) * (1 if sys.platform == "darwin" else 1024) < 64 << 20
    assert f"itq2_t: codes of {100 * histogram.SAMPLE_WEIGHTS / 2**33:.2g} % of the {2**33:,} weights" in "\n".join(lines)
    assert f"itq2_t: magnitudes of {histogram.SAMPLE_WEIGHTS // 256:,} scales, {histogram.SAMPLE_WEIGHTS // 256:,} zero" in "\n".join(lines)


def test_sample_covers_the_tensor_evenly(tmp_path):
    qtype = gguf.GGMLQuantizationType.ITQ3_S
    path = write_sparse_file(tmp_path / "in.gguf", (1 << 12, 1 << 10), qtype)
    file = gguf_file.GGUFFile(path)
    (tensor,) = file.tensors
    n_blocks = tensor.n_elements // 256
    data = np.memmap(path, np.uint8, "r+", tensor.offset, (n_blocks, 100))
    data[:, :4] = np.arange(n_blocks, dtype="<u4").view(np.uint8).reshape(-1, 4)  # block numbers in place of scales
    data.flush()
    pieces = [b[:, :4].copy().view("<u4").ravel() for b in histogram.sample_blocks(file, tensor)]
    sampled = np.concatenate(pieces)
    assert len(pieces) == 16 and sampled.size * 256 == histogram.SAMPLE_WEIGHTS == np.unique(sampled).size * 256
    assert sampled[0] == 0 and sampled[-1] == n_blocks - 1
    assert np.ptp(np.diff([p[0] for p in pieces])) <= 1  # evenly spaced


def test_damaged_scales_are_counted(folder, tmp_path):
    file = gguf_file.GGUFFile(folder / "out.gguf")
    data = bytearray((folder / "out.gguf").read_bytes())
    start = next(t.offset for t in file.tensors if "itq3_s_x" in t.name)
    for block, value in enumerate((np.nan, -np.inf, 0.0, -1.0)):
        data[start + 100 * block : start + 100 * block + 2] = np.float16(value).tobytes()
    (tmp_path / "out.gguf").write_bytes(data)
    args = tmp_path / "out.gguf", "--histograms", "--tensor", "itq3_s_x"
    found = inspect_json(*args)["histograms"]["itq3_s"]["scales"]
    assert found == {"number": 32, "zero": 1, "negative": 1, "not_finite": 2}
    assert "magnitudes of 32 scales, 1 zero, 1 negative, 2 not finite\n" in inspect_in_process(*args).stdout


def test_json_matches_the_table(folder, tmp_path):
    out, original = folder / "out.gguf", folder / "in.gguf"
    result = inspect_json(out, "--against", original)
    rows = {line.split()[0]: line.split() for line in inspect_in_process(out, "--against", original).stdout.splitlines() if line}
    assert [t["name"] for t in result["tensors"]] == list(read_tensors(out)) and "histograms" not in result
    for t in result["tensors"]:
        row = rows[t["name"]]
        assert " x ".join(map(str, t["shape"])) in " ".join(row) and t["type"] in row and f"{t['bits_per_weight']:.4g}" in row
        assert row[-3:] == [f"{t['relative_squared_error']:.6f}", f"{t['largest_error']:.6g}", "ok"]
        assert t["within_epsilon"] and (("epsilon" in t) == (t["type"] == "ditto3"))
    assert result["total"]["weights"] == sum(int(np.prod(t["shape"])) for t in result["tensors"])
    assert result["against"] == str(original) and result["importance"] == "none"
    alone = inspect_json(out, "--tensor", NORM)
    assert [t["name"] for t in alone["tensors"]] == [NORM] and "against" not in alone and "largest_error" not in alone["tensors"][0]


def test_tensor_selects_by_name_or_pattern(folder):
    def names(pattern):
        return [t["name"] for t in inspect_json(folder / "out.gguf", "--tensor", pattern)["tensors"]]

    assert names("blk.1.attn_q.weight") == ["blk.1.attn_q.weight"]
    assert names("attn_q") == [f"blk.{i}.attn_q.weight" for i in range(3)]
    assert names(r"^token|blk\.2\.") == ["blk.2.attn_q.weight", "blk.2.ffn_up.weight", "token_embd.weight"]
    text = inspect_in_process(folder / "out.gguf", "--tensor", "attn_q").stdout
    assert f"\n3 of {len(read_tensors(folder / 'out.gguf'))} tensors, 6,144 weights, " in text


def svg_texts(path) -> list[str]:
    return [e.text for e in ElementTree.parse(path).iter() if e.tag.endswith("text") and e.text]


def test_picture_shows_layers_and_classes(folder, tmp_path):
    args = [folder / "out.gguf", "--against", folder / "in.gguf", "--picture"]
    for name in ("a.svg", "b.svg", "c.png"):
        done = inspect_in_process(*args, tmp_path / name)
        assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    texts = svg_texts(tmp_path / "a.svg")
    assert {"attn_q", "ffn_up", "token_embd", "none", "0", "1", "2", "NMSE", "out.gguf"} <= {*texts}
    assert "attn_norm" not in texts  # it was copied
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.svg", "b.svg", "c.png"]
    check_error(inspect_in_process(*args, tmp_path / "a.svg"), "a.svg exists", "--force")
    assert inspect_in_process(*args, tmp_path / "a.svg", "--force", "--tensor", "attn_q").returncode == 0
    assert "ffn_up" not in svg_texts(tmp_path / "a.svg")


def test_picture_does_not_replace_inputs_or_links(folder, tmp_path):
    args = [folder / "out.gguf", "--against", folder / "in.gguf", "--picture"]
    (tmp_path / "model.svg").symlink_to(folder / "in.gguf")
    check_error(inspect_in_process(*args, tmp_path / "model.svg", "--force"), "--picture", "model.svg is the same file as --against")
    (tmp_path / "link.svg").symlink_to("target.svg")
    assert inspect_in_process(*args, tmp_path / "link.svg").returncode == 0
    assert (tmp_path / "link.svg").is_symlink() and svg_texts(tmp_path / "target.svg")
    (tmp_path / "link.png").symlink_to("none/target.png")
    check_error(inspect_in_process(*args, tmp_path / "link.png"), "--picture", "directory", "none does not exist")
    assert len([*tmp_path.iterdir()]) == 4


def test_picture_shows_weighted_errors_if_all_tensors_have_them(folder, tmp_path):
    inputs = {f"blk.{i}.{part}.weight": correlated(600, 256, seed=i) for i in range(3) for part in ("attn_q", "ffn_up")}
    imatrix = write_moments(tmp_path / "m.gguf", inputs)
    args = [folder / "out.gguf", "--against", folder / "in.gguf", "--imatrix", imatrix, "--picture"]
    for pattern, what in (("attn_q|ffn_up", "weighted NMSE"), ("attn_q|token_embd", "NMSE")):
        done = inspect_in_process(*args, tmp_path / "a.svg", "--force", "--tensor", pattern)
        assert done.returncode == 0 and what in svg_texts(tmp_path / "a.svg"), done.stderr


def test_picture_table_and_colour_range():
    errors = {"blk.10.attn_q.weight": 0.5, "blk.2.attn_q.weight": 0.25, "output.weight": 0.001, "enc.blk.2.attn_q.weight": 0.4}
    classes, layers, values = _picture.format_table(errors)
    assert classes == ["attn_q", "output", "enc.attn_q"] and layers == [None, 2, 10]
    np.testing.assert_array_equal(values, [[np.nan, 0.25, 0.5], [0.001, np.nan, np.nan], [np.nan, 0.4, np.nan]])
    shown = np.ma.masked_invalid(values)
    assert _picture.colour_range(shown, layers) == (0.25, 0.5)
    assert _picture.colour_range(shown[:, :1], layers[:1]) == (0.001, 0.00125)  # no layers; equal errors
    assert _picture.colour_range(np.ma.masked_all((1, 2)), [0, 1]) == (0.1, 1.0)


@pytest.mark.parametrize(("flags", "parts"), [
    (["--tensor", "("], ("--tensor", "'('", "regular expression")),
    (["--tensor", "no_such"], ("--tensor", "'no_such'", f"matches none of the {len(WEIGHT_TYPES) + 8} tensors", "such as ")),
    (["--picture", "a.svg"], ("--picture", "--against ORIGINAL")),
    (["--against", "in.gguf", "--picture", "a.jpg"], ("--picture", "'a.jpg'", ".svg or .png")),
    (["--against", "in.gguf", "--picture", "none/a.svg"], ("--picture", "directory", "none does not exist")),
    (["--against", "out.gguf", "--picture", "a.svg"], ("--picture", "no tensor changed its type")),
    (["--against", "in.gguf", "--picture", "dir.svg"], ("--picture", "not a regular file")),
])
def test_bad_flags_are_reported(folder, flags, parts, monkeypatch):
    (folder / "dir.svg").mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    check_error(inspect_in_process("out.gguf", *flags), *parts)
    assert not (folder / "a.svg").exists()


def test_missing_matplotlib_is_reported(folder, tmp_path):
    """The optional dependency is not installed."""
    code = "import sys; sys.modules['matplotlib'] = None; from ggml_ext import inspect; sys.exit(inspect.main(sys.argv[1:]))"
    args = [str(folder / "out.gguf"), "--against", str(folder / "in.gguf"), "--picture", str(tmp_path / "a.svg")]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    check_error(done, "--picture needs matplotlib", "pip install 'matplotlib>=")


@pytest.mark.parametrize(("suffix", "notes"), [("svg", 0), ("png", 1)])
def test_characters_missing_in_the_font_are_noted(folder, tmp_path, suffix, notes):
    """A .png shows boxes and one note says so; matplotlib does not warn, not even about the layout."""
    named = tmp_path / "\u65e5\u672c.gguf"
    named.write_bytes((folder / "out.gguf").read_bytes())
    picture = tmp_path / f"a.{suffix}"
    done = inspect_process(named, "--against", folder / "in.gguf", "--picture", picture, "--tensor", "blk.0.attn_q.weight")
    assert done.returncode == 0 and picture.stat().st_size
    assert done.stderr.count("\n") == done.stderr.count("note: --picture: the font lacks characters") == notes, done.stderr
    if suffix == "svg":
        texts = svg_texts(picture)
        assert named.name in texts and not any("math" in text for text in texts)
        assert any(re.fullmatch(r"0\.\d+", text) for text in texts)  # labels of the colour bar


@pytest.mark.parametrize(("env", "part"), [
    ({"MPLCONFIGDIR": "file"}, None),
    ({"HOME": "/dev/null", "MPLCONFIGDIR": "", "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""}, None),
    ({"MPLCONFIGDIR": "odd"}, None),
    ({"MPLBACKEND": "nonsense"}, "--picture: matplotlib cannot be loaded"),
], ids=["no folder", "no home", "odd settings", "no backend"])
def test_unusual_matplotlib_environments(folder, tmp_path, env, part):
    """The picture is drawn without a message, or one line names the reason."""
    (tmp_path / "file").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "matplotlibrc").write_text("no.such.key: 3\nfont.sans-serif: No Such Font\n")
    env = {key: str(tmp_path / value) if (tmp_path / value).exists() and value else value for key, value in env.items()}
    args = [folder / "out.gguf", "--against", folder / "in.gguf", "--picture", tmp_path / "a.svg"]
    done = inspect_process(*args, env=env)
    if part is not None:
        check_error(done, part)
        return
    assert done.returncode == 0 and done.stderr == "" and "attn_q" in svg_texts(tmp_path / "a.svg")


def test_full_disk_is_reported(folder, tmp_path):
    """The picture is the only file written."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # noqa: E731
    code = "import signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from ggml_ext import inspect; sys.exit(inspect.main(sys.argv[1:]))"
    args = [str(folder / "out.gguf"), "--against", str(folder / "in.gguf"), "--picture", str(tmp_path / "a.svg")]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, preexec_fn=limit)
    check_error(done, "--picture: cannot write", "a.svg")
    assert not [*tmp_path.iterdir()]
