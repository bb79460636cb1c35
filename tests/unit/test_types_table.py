"""The table of types and the files that scripts/build/gen_types.py generates from it."""

import shutil
import subprocess
import sys

import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from ggml_ext._base.upstream import LLAMA_CPP_VERSION
from ggml_ext.quants import reference
from helpers.blocks import bit_coverage_blocks
from helpers.models import ROOT

FILES = ("ggml_ext/ggml-ext-types.h", "ggml_ext/types/all.h", "ggml_ext/cpu/all.h", "py/ggml_ext/_base/types.py")
HEADER, *_, MODULE = FILES
PIN, PIN_MODULE = "ggml_ext/upstream.toml", "py/ggml_ext/_base/upstream.py"
GENERATED = (*FILES, "docs/reference/formats.md")
NEW_TYPE = """
[[type]]
name        = "test_w"
id          = 188
kind        = "weight"
block_size  = 64
block_bytes = 18
activation  = "q8_kr"
rotated     = false
unpack_min  = -3
unpack_max  = 3
group       = 64
fallback    = "q4_0"
token_embd  = "q3_k"
output      = "q6_k"
title       = "TEST_W - 2.25 bpw"
about       = "a \\"quoted\\" description"
usual_rel_mse = 0.1
fixture_rel_mse = 0.1
student_t4_rel_mse = 0.1
hessian_gain = 0.7
fns_limits = "iq3_s"
"""


def generate(root, *args):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build" / "gen_types.py"), "--root", str(root), *args],
        capture_output=True,
        text=True,
    )


@pytest.fixture
def tree(tmp_path):
    """Copy the table and its generated files."""
    for name in ("ggml_ext/types.toml", PIN, *FILES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/reference").mkdir(parents=True)
    (tmp_path / "docs/reference/formats.md").write_text("before\n<!-- types:begin -->\nold\n<!-- types:end -->\nafter\n")
    assert generate(tmp_path).returncode == 0
    return tmp_path


def append(path, text):
    path.write_text(path.read_text() + text)


def test_committed_files_are_up_to_date():
    result = generate(ROOT, "--check")
    assert result.returncode == 0, result.stderr


def test_writing_again_changes_nothing(tree):
    before = {name: (tree / name).read_bytes() for name in GENERATED}
    result = generate(tree)
    assert result.returncode == 0 and result.stdout == ""
    assert before == {name: (tree / name).read_bytes() for name in GENERATED}


@pytest.mark.parametrize("name", FILES)
def test_check_names_the_stale_file_and_writes_nothing(tree, name):
    append(tree / name, "// stale\n")
    stale = (tree / name).read_bytes()
    result = generate(tree, "--check")
    assert result.returncode == 1
    assert name in result.stderr and all(other not in result.stderr for other in GENERATED if other != name)
    assert (tree / name).read_bytes() == stale


def test_new_row_reaches_every_file(tree):
    append(tree / "ggml_ext/types.toml", NEW_TYPE)
    result = generate(tree, "--check")
    assert result.returncode == 1 and all(name in result.stderr for name in GENERATED)
    assert generate(tree).returncode == 0
    header = " ".join((tree / HEADER).read_text().split())
    for text in (
        "GGML_TYPE_TEST_W = 188,",
        "P##TEST_W = 188,",
        "X(TEST_W, test_w)",
        "case GGML_TYPE_TEST_W:",
        "#define GGML_EXT_TEST_W_BLOCK_SIZE 64",
        "#define GGML_EXT_TEST_W_UNPACK_MIN -3",
        '#define GGML_EXT_TEST_W_TITLE "TEST_W - 2.25 bpw"',
    ):
        assert text in header
    namespace = {"__name__": "types_of_the_copy"}
    sys.modules["types_of_the_copy"] = type(sys)("types_of_the_copy")  # dataclasses look up their module
    exec((tree / MODULE).read_text(), namespace)
    info = namespace["WEIGHT_TYPES"]["test_w"]
    assert (info.id, info.block_size, info.block_bytes, info.bpw, info.about) == (188, 64, 18, 2.25, 'a "quoted" description')
    formats = (tree / "docs/reference/formats.md").read_text()
    assert '| `TEST_W` | 188 | 64 | 18 | 2.25 | a "quoted" description |' in formats
    assert formats.startswith("before\n") and formats.endswith("after\n") and "old" not in formats


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("id          = 188", "id          = 160", "id 160 is used twice"),
        ("id          = 188", "id          = 42", "id 42 is not in 160..191"),
        ('name        = "test_w"', 'name        = "itq3_s"', "name itq3_s is used twice"),
        ("group       = 64\n", "", "field 'group' is None"),
        ("block_bytes = 18", 'block_bytes = "18"', "field 'block_bytes' is '18'"),
        ("block_size  = 64", "block_size  = 128", "block_size is 128, must be one of 256, 64, 32"),
        ("block_size  = 64\n", "", "field 'block_size' is None"),
        ('"q4_0"', '"itq3_s"', "fallback is 'itq3_s', must be an upstream type or a later row with smaller blocks"),
        ('"q4_0"', '"q8_kr"', "fallback is 'q8_kr', must be an upstream type or a later row with smaller blocks"),
        ("fns_limits =", 'trellis_code = "itq3_s"\nfns_limits =', "trellis_code is 'itq3_s', must be a type with trellis_values"),
        ('"iq3_s"', '"iq3_zz"', "fns_limits is 'iq3_zz'"),
        ("fns_limits =", "trellis_bits = 2\nfns_limits =", "field 'trellis_weights' is None, must be a int"),
        ('"q8_kr"', '"q8_zz"', "activation 'q8_zz' is not in the table"),
        ('kind        = "weight"', 'kind        = "wait"', "kind is 'wait'"),
        ("[[type]]", "[[type]]\ncolour = 1", "unknown field(s) colour"),
    ],
)
def test_errors_in_the_table_are_named(tree, old, new, message):
    assert old in NEW_TYPE
    append(tree / "ggml_ext/types.toml", NEW_TYPE.replace(old, new))
    result = generate(tree)
    assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr


def test_new_pin_reaches_the_package(tree):
    pin = tree / PIN
    pin.write_text(pin.read_text().replace('llama_cpp = "', 'llama_cpp = "9.'))
    result = generate(tree, "--check")
    assert result.returncode == 1 and PIN_MODULE in result.stderr and MODULE not in result.stderr
    assert generate(tree).returncode == 0
    assert f'LLAMA_CPP_VERSION = "9.{LLAMA_CPP_VERSION}"' in (tree / PIN_MODULE).read_text()


VALUES_MUST_BE = "field 'trellis_values' must be"


def generate_changed(tree, name, old, new):
    """Generate with the first `old` in the row of a type replaced."""
    table, start = tree / "ggml_ext/types.toml", f'name        = "{name}"'
    head, row = table.read_text().split(start)
    assert old in row
    table.write_text(head + start + row.replace(old, new, 1))
    return generate(tree)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trellis_bits    = 3", "trellis_bits    = 1", "a trellis of (bits, weights, states) (1, 1, 4096) has no indices in types/trellis.h"),
        ("trellis_weights = 1", "trellis_weights = 4", "a trellis of (bits, weights, states) (3, 4, 4096)"),
        ("trellis_weights = 1", "trellis_weights = 2", f"{VALUES_MUST_BE} 4 tables of 16 integers"),
        ("block_bytes = 98", "block_bytes = 100", "block_bytes is 100, must be 98 for this trellis"),
        ("rotated     = true", "rotated     = false", "rotated is False, must be True for this trellis"),
        ('activation  = "q8_kr"', 'activation  = "q8_k"', "activation is 'q8_k', must be 'q8_kr' for this trellis"),
        ("[[16, 39,", "[[16, 390,", f"{VALUES_MUST_BE} 2 tables of 16 integers; the sums of two must be in 0..127"),
        ("[[16, 39,", "[[16,", f"{VALUES_MUST_BE} 2 tables of 16 integers; the sums of two must be in 0..127"),
    ],
)
def test_errors_of_a_trellis_are_named(tree, old, new, message):
    result = generate_changed(tree, "itq3_t", old, new)
    assert result.returncode == 1 and "type 'itq3_t': " in result.stderr and message in result.stderr


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("value", [-1, 128])
def test_tables_of_both_weights_are_checked(tree, index, value):
    table = TYPES["itq1_t"].trellis_values[index]
    result = generate_changed(tree, "itq1_t", str(table), str([*table[:5], value, *table[6:]]))
    assert result.returncode == 1 and f"type 'itq1_t': {VALUES_MUST_BE} 4 tables of 16 integers; the sums of two" in result.stderr


@pytest.mark.parametrize("text", [None, "no markers\n", "<!-- types:end -->\n<!-- types:begin -->\n"])
def test_document_without_markers_is_refused(tree, text):
    (tree / "docs/reference/formats.md").unlink()
    if text is not None:
        (tree / "docs/reference/formats.md").write_text(text)
    for args in ((), ("--check",)):
        result = generate(tree, *args)
        assert result.returncode == 1 and "docs/reference/formats.md" in result.stderr
    assert (tree / "docs/reference/formats.md").exists() == (text is not None)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_types_agree_with_the_references(name):
    """Compares block size, weights per block and the range of codes, of which value tables use a part."""
    info, module, blocks = TYPES[name], reference(name), bit_coverage_blocks(name)
    codes = module.unpack(blocks)[0]
    assert codes.shape == (len(blocks), info.block_size) == module.dequantize_blocks(blocks).shape
    used, span = int(codes.max()) - int(codes.min()), info.unpack_max - info.unpack_min  # some references subtract the offset
    assert span / 2 < used <= span
    with pytest.raises(ValueError):
        module.unpack(blocks[:, :-1])
