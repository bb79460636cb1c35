"""The text that a model is calibrated with: what it must be, its end, and how many tokens a model makes of it."""

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
from . import library as _lib
from .process import run_logged

FLAG = "--imatrix-from"
PIECE = 1 << 20  # bytes that are read at once
MAX_BYTES = (1 << 31) - 3  # llama.cpp counts a text and its tokens in 32 bits, with one to begin and one to end it
TOKEN_BYTES = 16  # that a token has at most, in the mean of a text
# A beginning of a text ends inside a word, whose tokens may be others: by far fewer than these.
CUT_TOKENS = 512
COUNTER = Path(__file__).with_name("count_tokens.py")

KINDS_OF_FILES = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
# UTF-32 first: its mark begins with one of UTF-16
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}


def check_text(path: Path, flag: str = FLAG) -> int:
    """Bytes of a text without the blanks at both ends. UserError naming the flag for what is no regular file or no text in UTF-8.

    It is read in pieces, and never opened where that could wait. A byte order mark of UTF-8 is part of the text: one more character.
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
    """check_text() of a regular file. OSError too."""
    decoder, position, begin, end = codecs.getincrementaldecoder("utf-8")(), 0, None, 0
    for piece in _pieces(path):
        if position == 0:
            _check_mark(path, piece, flag)
        if (zero := piece.find(b"\0")) >= 0:
            raise UserError(
                f"{flag}: {path} has a zero at byte {position + zero:,}: it is no text in UTF-8, but a binary file or in UTF-16; "
                f"pass a text in UTF-8; UTF-16 is converted by {_conversion(path, 'UTF-16LE')}"
            )
        n_held = len(decoder.getstate()[0])  # of a character that began in the last piece
        try:
            decoder.decode(piece, not piece)
        except UnicodeDecodeError as e:
            way_out = f"pass a text in UTF-8; Latin-1 is converted by {_conversion(path, 'LATIN1')}"
            raise UserError(
                f"{flag}: {path} is not in UTF-8: byte {position - n_held + e.start:,} is 0x{e.object[e.start]:02x}, "
                + (f"of no character; {way_out}" if piece else "the last character is cut: leave it out")
            ) from None
        if piece.strip():
            begin = position + len(piece) - len(piece.lstrip()) if begin is None else begin
            end = position + len(piece.rstrip())
        position += len(piece)
    return end - (begin or 0)


def _pieces(path: Path) -> Iterator[bytes]:
    """The content, and nothing at its end."""
    with open(path, "rb") as f:
        while piece := f.read(PIECE):
            yield piece
    yield b""


def _check_mark(path: Path, begin: bytes, flag: str) -> None:
    """UserError for a byte order mark of another encoding."""
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if begin.startswith(mark)), None)
    if encoding:
        raise UserError(
            f"{flag}: {path} is in {encoding}, must be in UTF-8: convert it with {_conversion(path, encoding)}, in PowerShell with "
            f"Get-Content {path} | Out-File -Encoding utf8 {_converted(path)}"
        )


def _conversion(path: Path, encoding: str) -> str:
    """The command."""
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(_converted(path))}"


def _converted(path: Path) -> str:
    return f"{path.stem}-utf8.txt"


def read_end(path: Path, n_bytes: int) -> bytes:
    """The last n_bytes of a file, of a shorter one all."""
    with open(path, "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - n_bytes))
        return f.read(n_bytes)


def count_tokens(model: Path, text: Path, enough: int) -> int | None:
    """Tokens of a checked text as llama-imatrix counts them; of a long text at least `enough` are counted, and not all.

    None where libllama is not there or cannot read the model's vocabulary.
    """
    library = _lib.libllama_path()
    if library is None or not sys.executable:
        return None
    n_all = text.stat().st_size
    for n_bytes in sorted({min(n_all, enough * TOKEN_BYTES), n_all}):
        found = _ask_counter(library, model, text, n_bytes)
        if found is None or found >= enough + CUT_TOKENS:
            break
    return found


def _ask_counter(library: Path, model: Path, text: Path, n_bytes: int) -> int | None:
    """Tokens of the first n_bytes; None where the program does not say."""
    # isolated (-I): beside the program are modules with the names of standard ones; /dev/stdin would be another file there
    command = [sys.executable, "-I", COUNTER, library, model, os.path.realpath(text), n_bytes]
    code, log = run_logged([*map(str, command)], Path())
    found = re.search(r"^tokens (\d+)$", log, re.M)
    return int(found[1]) if found and code == 0 else None
