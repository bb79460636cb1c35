"""Calibration texts: their checks, their end, and their tokens."""

from __future__ import annotations

import codecs
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from .._base.errors import UserError
from .._formats.context import context_length
from .._formats.gguf_file import GGUFFile
from . import library as _lib
from .process import describe_failure, run_captured, run_logged
from .programs import require_tool

FLAG = "--imatrix-from"
PIECE = 1 << 20  # bytes per read
MAX_BYTES = (1 << 31) - 3  # llama.cpp counts bytes and tokens in 32 bits, and adds BOS and EOS
TOKEN_BYTES = 16  # upper bound of the mean bytes per token
CUT_TOKENS = 512  # far more than the tokens that change where a text is cut inside a word
COUNTER = Path(__file__).with_name("count_tokens.py")

KINDS_OF_FILES = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
# UTF-32 first: its mark begins with one of UTF-16
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}


def check_text(path: Path, flag: str = FLAG) -> int:
    """Return the bytes of a text without leading and trailing whitespace. UserError if it is no regular file or not UTF-8.

    Pipes and devices are refused before they are opened, as that could block. A UTF-8 byte order mark counts as a character.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = KINDS_OF_FILES.get(stat.S_IFMT(status.st_mode), "a device")
            raise UserError(f"{flag}: {path} is {kind}: write the text into a file and pass that")
        if status.st_size > MAX_BYTES:
            raise UserError(f"{flag}: {path} has {status.st_size:,} bytes, llama.cpp takes at most {MAX_BYTES:,}: pass a part of it")
        return _check_content(path, flag)
    except OSError as e:
        raise UserError(f"{flag}: cannot read {path}: {e.strerror}") from e


def _check_content(path: Path, flag: str) -> int:
    """Do the work of check_text() for a regular file. May raise OSError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, end = 0, 0
    begin: int | None = None
    for piece in _pieces(path):
        if position == 0:
            _check_byte_order_mark(path, piece, flag)
        if (zero := piece.find(b"\0")) >= 0:
            raise UserError(
                f"{flag}: {path} has a zero at byte {position + zero:,}: it is a binary file or in UTF-16; "
                f"pass a text in UTF-8; UTF-16 is converted by {_iconv_command(path, 'UTF-16LE')}"
            )
        n_pending = len(decoder.getstate()[0])  # bytes of a character that began in the last piece
        try:
            decoder.decode(piece, not piece)
        except UnicodeDecodeError as e:
            hint = f"pass a text in UTF-8; Latin-1 is converted by {_iconv_command(path, 'LATIN1')}"
            raise UserError(
                f"{flag}: {path} is not in UTF-8: byte {position - n_pending + e.start:,} is 0x{e.object[e.start]:02x}, "
                + (f"which begins no character; {hint}" if piece else "and the last character is truncated: remove it")
            ) from None
        if piece.strip():
            begin = position + len(piece) - len(piece.lstrip()) if begin is None else begin
            end = position + len(piece.rstrip())
        position += len(piece)
    return end - (begin or 0)


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield a file's content in pieces, then an empty piece."""
    with open(path, "rb") as f:
        while piece := f.read(PIECE):
            yield piece
    yield b""


def _check_byte_order_mark(path: Path, begin: bytes, flag: str) -> None:
    """Raise UserError for a byte order mark of another encoding."""
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if begin.startswith(mark)), None)
    if encoding:
        raise UserError(
            f"{flag}: {path} is in {encoding}, must be in UTF-8: convert it with {_iconv_command(path, encoding)}, in PowerShell with "
            f"Get-Content {path} | Out-File -Encoding utf8 {_converted_name(path)}"
        )


def _iconv_command(path: Path, encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(_converted_name(path))}"


def _converted_name(path: Path) -> str:
    return f"{path.stem}-utf8.txt"


def read_end(path: Path, n_bytes: int) -> bytes:
    """Return the last n_bytes of a file, or all of a shorter one."""
    with open(path, "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - n_bytes))
        return f.read(n_bytes)


def count_tokens(model: Path, text: Path, enough: int) -> int | None:
    """Count the tokens of a checked text as llama-imatrix does; in a long text, count only a beginning with at least `enough` tokens.

    None if libllama is missing or cannot read the model's vocabulary.
    """
    library = _lib.libllama_path()
    if library is None or not sys.executable:
        return None
    n_all = text.stat().st_size
    n_tokens: int | None = None
    for n_bytes in sorted({min(n_all, enough * TOKEN_BYTES), n_all}):
        n_tokens = _run_counter(library, model, text, n_bytes)
        if n_tokens is None or n_tokens >= enough + CUT_TOKENS:
            break
    return n_tokens


def _run_counter(library: Path, model: Path, text: Path, n_bytes: int) -> int | None:
    """Count the tokens of the first n_bytes; None if the program fails."""
    # -I: modules next to the program have names of standard ones. realpath: /dev/stdin would be another file in the program
    command = [sys.executable, "-I", COUNTER, library, model, os.path.realpath(text), n_bytes]
    code, log = run_logged([*map(str, command)], Path())
    match = re.search(r"^tokens (\d+)$", log, re.M)
    return int(match[1]) if match and code == 0 else None


def count_chunks(file: GGUFFile, text: Path, n_bytes: int, n_requested: int) -> int:
    """Count the chunks of a text as llama-imatrix does, up to n_requested + 1.

    Without access to the vocabulary, each byte counts as a token.

    Args:
        file: the model, for its vocabulary.
        text: the file.
        n_bytes: its size.
        n_requested: number of chunks to calibrate with.

    Raises:
        UserError: the text is too short.
    """
    n_context = context_length(file)
    needed = 2 * n_context  # by llama-imatrix
    if n_bytes < needed:
        raise _too_short(text, f"{n_bytes:,} bytes", needed)
    n_tokens = count_tokens(file.path, text, (n_requested + 1) * n_context)
    if n_tokens is not None and n_tokens < needed:
        raise _too_short(text, f"{n_tokens:,} tokens", needed)
    return (n_bytes if n_tokens is None else n_tokens) // n_context


def _too_short(text: Path, size: str, needed: int) -> UserError:
    return UserError(f"{FLAG}: {text} has {size}, llama-imatrix needs {needed:,} tokens; pass a text of some 100 kB")


def read_tokens(model: Path, text: Path) -> list[int]:
    """Return the tokens of a text as llama-perplexity reads it. UserError if llama-tokenize fails."""
    command = [require_tool("llama-tokenize"), "-m", model, "-f", text, "--ids", "--no-parse-special"]
    code, out, log = run_captured([*map(str, command)], Path())
    if code or not (match := re.search(r"^\[([\d, ]*)\]$", out, re.M)):
        raise UserError(describe_failure("llama-tokenize", code, log, f"for {model}"))
    return [int(token) for token in match[1].split(",")]
