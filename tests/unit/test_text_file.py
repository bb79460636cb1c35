"""The calibration text: what is refused before a program runs, its end, and its tokens as llama-imatrix counts them."""

import json
import os
import re
import subprocess
import tracemalloc

import pytest

from ggml_ext._allocation import sensitivity
from ggml_ext._base.errors import UserError
from ggml_ext._native import count_tokens as _count_tokens
from ggml_ext._native import text_file
from ggml_ext._native.text_file import check_text, count_tokens, read_end
from helpers import calibration_folder
from helpers.commands import quantize, run_quantize, tool
from helpers.errors import check_error, files
from helpers.models import ROOT
from helpers.native import BUILD

workspace = calibration_folder.workspace  # the fixture

WORDS = "Ein paar Wörter für jeden Tag, und déjà vu. " * 100


def expect_refusal(path, *parts):
    with pytest.raises(UserError) as error:
        check_text(path)
    (line,) = str(error.value).splitlines()
    assert line.startswith("--imatrix-from: ") and all(part in line for part in (str(path), *parts)), line


@pytest.mark.parametrize(("content", "parts"), [
    (WORDS.encode("utf-16"), ("in UTF-16, must be in UTF-8", "iconv -f UTF-16 -t UTF-8", "Out-File -Encoding utf8")),
    (b"\xfe\xff" + WORDS.encode("utf-16-be"), ("in UTF-16", "iconv")),
    (WORDS.encode("utf-32"), ("in UTF-32", "iconv -f UTF-32")),
    (b"\0\0\xfe\xff" + WORDS.encode("utf-32-be"), ("in UTF-32",)),
    (WORDS.encode("utf-16-le"), ("a zero at byte 1", "iconv -f UTF-16LE")),
    (WORDS.encode() + b"\0" + WORDS.encode(), ("a zero at byte 4,800", "binary file")),
    (WORDS.encode("latin-1"), ("not in UTF-8", "byte 10 is 0xf6", "iconv -f LATIN1")),
    (WORDS.encode() + "ö".encode()[:1], ("not in UTF-8", "byte 4,800 is 0xc3", "the last character is truncated")),
    (b"x" * (text_file.PIECE - 1) + "ö".encode()[:1] + b"x", ("byte 1,048,575 is 0xc3", "iconv -f LATIN1")),
    (b"\x7fELF" + bytes(range(1, 256)) * 20, ("not in UTF-8",)),
], ids=["utf-16", "utf-16-be", "utf-32", "utf-32-be", "utf-16-without-mark", "zero", "latin-1", "cut", "between-pieces", "binary"])
def test_text_must_be_utf8(tmp_path, content, parts):
    path = tmp_path / "some.txt"
    path.write_bytes(content)
    expect_refusal(path, *parts)


def test_special_files_are_refused(tmp_path):
    """None is opened: a pipe would wait for its writer, a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    expect_refusal(tmp_path / "pipe", "is a pipe", "into a file")
    expect_refusal(tmp_path, "is a directory")
    expect_refusal(tmp_path / "missing", "cannot read", "No such file")
    if os.path.exists("/dev/zero"):
        (tmp_path / "link").symlink_to("/dev/zero")
        expect_refusal(tmp_path / "link", "is a device")


def test_too_long_text_is_refused(tmp_path):
    """The file is sparse, and nothing of it is read."""
    with open(tmp_path / "large.txt", "wb") as f:
        f.truncate(text_file.MAX_BYTES + 1)
    expect_refusal(tmp_path / "large.txt", "2,147,483,646 bytes", "a part of it")


@pytest.mark.parametrize(("content", "n"), [
    (b"", 0), (b" \n" * 3000, 0), (b" a b \n", 3), ("\ufeffWörter".encode(), 10), ("ö".encode() * 10, 20), (b"a\r\nb\r\n", 4),
    (b" " * text_file.PIECE + b"ab" + b" " * text_file.PIECE, 2), (b" " + b"x" * 2 * text_file.PIECE + b"\n\n", 2 * text_file.PIECE),
    (b"x" * (text_file.PIECE - 1) + "ö".encode(), text_file.PIECE + 1),
])
def test_blanks_at_the_ends_do_not_count(tmp_path, content, n):
    (tmp_path / "a.txt").write_bytes(content)
    assert check_text(tmp_path / "a.txt") == n == len(content.strip())


def test_long_text_is_not_held_in_memory(tmp_path):
    (tmp_path / "long.txt").write_bytes(b"word " * 8_000_000)
    tracemalloc.start()
    try:
        assert check_text(tmp_path / "long.txt") == 39_999_999
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_quantizer_refuses_the_text_before_running(workspace):
    workspace.text.write_text(WORDS, "utf-16")
    for flags in ([], ["--dry-run"]):
        _, err = workspace.run("--imatrix-from", workspace.text, *flags, code=1)
        assert "some.txt is in UTF-16" in err
    assert not workspace.runs() and not list(workspace.out.parent.iterdir())


def test_text_may_be_a_link(workspace):
    """llama-imatrix runs in the directory of the link's target."""
    (workspace.path / "elsewhere").mkdir()
    (link := workspace.path / "elsewhere" / "link.txt").symlink_to(workspace.text)
    workspace.run("--imatrix-from", link)
    assert workspace.fields()["ggml_ext.calibration"] == "link.txt" and workspace.runs()[0]["-f"] == workspace.text.name


def test_end_of_a_file_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    assert [read_end(tmp_path / "a.txt", n) for n in (3, 10, 11)] == [b"789", b"0123456789", b"0123456789"]


def test_end_of_a_text_begins_with_a_character():
    """llama-perplexity would stop at a partial character."""
    n = sensitivity.TEXT_BYTES
    text = ("€" * n).encode()
    for cut in range(3):
        end = sensitivity.cut_text(text + b"x" * cut)
        assert set(end.decode()) <= set("€x") and n - 3 < len(end) <= n


# --- tokens

def test_params_match_llama_h():
    """Compares names and order with the tree that the package is built from."""
    header = BUILD / "llama.cpp" / "include" / "llama.h"
    if not header.is_file():
        pytest.skip(f"{header} is missing: build the package")
    text = re.search(r"struct llama_model_params \{(.*?)\n    \};", header.read_text(), re.S)[1]
    fields = re.findall(r"^\s+([\w ]+?[\s*]+)(\w+);", re.sub(r"//.*", "", text), re.M)
    ctypes_by_name = {"bool": _count_tokens.c_bool, "int32_t": _count_tokens.c_int32}

    def ctype(declared: str):
        if "*" in declared or "callback" in declared:
            return _count_tokens.c_void_p
        return ctypes_by_name.get(declared.strip(), _count_tokens.c_int)  # enums

    assert [(name, ctype(declared)) for declared, name in fields] == _count_tokens.ModelParams._fields_


HELDOUT = (ROOT / "data" / "heldout.txt").read_bytes()


@pytest.mark.parametrize("content", [HELDOUT[:2500], HELDOUT[:2501] + b"\n", HELDOUT[:2000] + b"\n\n\n", b"\xef\xbb\xbf" + WORDS[:900].encode(),
                                     b"<|endoftext|></s><s>" * 40], ids=["plain", "newline", "newlines", "mark", "special"])
def test_tokens_match_llama_imatrix(model, lib, tmp_path, content):
    """llama-imatrix prints the number of tokens of a text that is too short."""
    (path := tmp_path / "a.txt").write_bytes(content)
    count = count_tokens(model, path, 1 << 20)
    done = subprocess.run([tool("llama-imatrix"), "-m", model, "-f", path, "-o", tmp_path / "o.gguf"], capture_output=True, text=True, cwd=tmp_path)
    assert f"tokenizes to only {count} tokens" in done.stdout + done.stderr and count > 100


def test_counting_stops_at_the_limit(model, lib):
    text = ROOT / "data" / "heldout.txt"
    whole = count_tokens(model, text, 1 << 20)
    assert 5 * 512 < count_tokens(model, text, 5 * 512) < whole / 4


def test_count_is_none_without_a_vocabulary(model, lib, tmp_path, monkeypatch):
    """Also None for a program that fails and a package without libllama."""
    text = ROOT / "data" / "heldout.txt"
    assert count_tokens(text, text, 512) is None
    monkeypatch.setattr(text_file, "COUNTER", tmp_path / "missing.py")
    assert count_tokens(model, text, 512) is None
    monkeypatch.setattr(text_file._lib, "libllama_path", lambda: None)
    assert count_tokens(model, text, 512) is None


@pytest.mark.slow
def test_short_text_limits_the_chunks(model, lib, tmp_path):
    """The output, the choice and the record use the chunks that llama-imatrix runs. The cache serves every larger request, as does that of
    an earlier version, which recorded the requested number."""
    tool("llama-imatrix")
    (text := tmp_path / "nine.txt").write_bytes(HELDOUT[:9000])
    dry = quantize(model, "--type", "itq2_t", "--imatrix-from", text, "--dry-run")
    n_chunks = int(re.search(r"(\d+) chunks of 512 tokens of nine\.txt", dry.stdout)[1])
    assert n_chunks * 512 >= 2 * 768 and "block-diagonal" not in dry.stderr

    def run(*more) -> str:
        one_matrix = ["--tensor-type", "blk.0.attn_q=ditto3", "--tensor-type", ".*=f16"]
        flags = ["--type", "ditto3", *one_matrix, "--importance", "diagonal", "--imatrix-from", text, "--force", *more]
        return quantize(model, tmp_path / "out.gguf", *flags).stderr

    first = run("--progress")
    assert f"{n_chunks}/{n_chunks}" in first and f"{n_chunks} chunks of 512" in first
    record = tmp_path / "model-f16.imatrix.json"
    assert json.loads(record.read_text())["made_from"]["chunks"] == n_chunks
    assert "reusing" in run("--calibration-chunks", 1_000_000) and "reusing" in run("--calibration-chunks", n_chunks)
    record.write_text(record.read_text().replace(f'"chunks": {n_chunks}', '"chunks": 100'))
    assert "reusing" in run() and "computing it again" in run("--calibration-chunks", n_chunks - 1)


@pytest.mark.skipif(not os.path.exists("/dev/stdin"), reason="no /dev/stdin")
def test_text_may_be_standard_input(model, lib):
    """The programs have another standard input."""
    tool("llama-imatrix")
    path = ROOT / "data" / "heldout.txt"
    with open(path, "rb") as f:
        of_stdin = run_quantize(model, "--type", "ditto3", "--dry-run", "--imatrix-from", "/dev/stdin", stdin=f)
    assert of_stdin.returncode == 0, of_stdin.stderr
    of_path = quantize(model, "--type", "ditto3", "--dry-run", "--imatrix-from", path)
    assert of_stdin.stdout.replace("stdin", "heldout.txt") == of_path.stdout


def test_text_of_less_than_two_chunks_is_refused(model, lib, tmp_path):
    tool("llama-imatrix")
    (text := tmp_path / "short.txt").write_bytes(HELDOUT[:2600])
    before = files(tmp_path)
    result = run_quantize(model, tmp_path / "out.gguf", "--type", "ditto3", "--imatrix-from", text)
    check_error(result, "--imatrix-from: ", "short.txt has ", " tokens, llama-imatrix needs 1,024 tokens")
    assert files(tmp_path) == before
