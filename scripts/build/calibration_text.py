#!/usr/bin/env python3
"""Build the texts in py/ggml_ext/data: calibration.txt from the packages pinned in data/calibration.toml, and evaluation.txt, which
`ggml-ext evaluate` scores by default, from those in data/evaluation.toml.

    calibration_text.py             write the texts and their licence notices
    calibration_text.py check       exit with 1 if the committed files differ
    calibration_text.py shares      print the share of characters by kind, language and source

A text is the same on every machine. Pieces of 1 to 3 kB are selected by their hash and ordered so that every beginning of the text has
about the same mixture of kinds and sources as the complete text.
"""
from __future__ import annotations

import fnmatch
import hashlib
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from calibration_readers import READERS, UNWANTED, WRITERS
from pinned import Failure, fetch

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "py" / "ggml_ext" / "data"
PIECE_BYTES = 1600  # default; a chunk of 512 tokens is about 2 kB of English


@dataclass(frozen=True)
class BuiltIn:
    """A text in the package."""

    name: str

    @property
    def pins(self) -> str:
        """Path of the table of pins."""
        return f"data/{self.name}.toml"

    @property
    def table(self) -> dict:
        return tomllib.loads((ROOT / self.pins).read_text(encoding="utf-8"))

    @property
    def path(self) -> Path:
        return DATA / f"{self.name}.txt"

    @property
    def licenses(self) -> Path:
        return DATA / f"{self.name}-licenses.txt"


CALIBRATION, EVALUATION = TEXTS = BuiltIn("calibration"), BuiltIn("evaluation")


@dataclass
class Piece:
    """A piece of a text. place: its relative position, first in its part, then in the text."""

    text: str
    kind: str
    language: str
    source: str
    place: float = 0.0

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode()) + 2  # including the blank line after it


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def members(source: dict) -> dict[str, bytes]:
    """Return the files of a source's archive that its parts and notices name, by path."""
    patterns = [pattern for part in source["part"] for pattern in part["members"]]

    def is_named(name: str) -> bool:
        return name in source["notices"] or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    archive = fetch(source)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in sorted(wheel.namelist()) if is_named(name)}
    with tarfile.open(archive) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isfile() and is_named(m.name)}


def cut(paragraph: str, limit: int) -> str:
    """Cut a long paragraph at the end of a line or a sentence."""
    head = paragraph.encode()[:limit].decode(errors="ignore")
    if head == paragraph:
        return paragraph
    for end in ("\n", ". ", "。", "। "):
        if (position := head.rfind(end)) > len(head) // 3:
            return head[:position + len(end)].rstrip()
    return head[:head.rfind(" ")] if " " in head else head


def join_paragraphs(paragraphs: list[str], size: int, blank: str) -> Iterator[str]:
    """Join consecutive paragraphs to pieces of `size` bytes; a short rest is dropped."""
    piece = ""
    for paragraph in paragraphs:
        if UNWANTED.search(paragraph):
            continue
        paragraph = cut(paragraph, 3 * size // 2)
        if len(piece.encode()) >= size or piece and len((piece + paragraph).encode()) > 3 * size // 2:
            if len(piece.encode()) >= size // 2:
                yield piece
            piece = ""
        piece += (blank if piece else "") + paragraph
    if len(piece.encode()) >= size // 2:
        yield piece


def select_pieces(part: dict, name: str, files: dict[str, bytes]) -> list[Piece]:
    """Select pieces for the part's bytes and spread them evenly. Failure if there are too few."""
    if "writer" in part:
        documents = [WRITERS[part["writer"]]()]
    else:
        chosen = [n for pattern in part["members"] for n in sorted(files) if fnmatch.fnmatchcase(n, pattern)]
        chosen = [n for n in dict.fromkeys(chosen) if not any(fnmatch.fnmatchcase(n, p) for p in part.get("without", []))]
        if not chosen:
            raise Failure(f"{name} has no file {part['members']}: correct its part in the table of pins")
        documents = [READERS[part["reader"]](files[n].decode("utf-8"), part) for n in chosen]
        if part.get("joined"):  # files that are shorter than a piece
            documents = [[p for d in documents for p in d]]
    size, blank = part.get("piece", PIECE_BYTES), part.get("blank", "\n\n")
    rank = {}
    for document in documents:
        for k, text in enumerate(sorted(join_paragraphs(document, size, blank), key=digest)):
            rank.setdefault(text, k if part.get("even") else 0)  # even: every document's first piece comes before any second piece
    selected, n_bytes = [], 0
    for text in sorted(rank, key=lambda p: (rank[p], digest(p))):
        if n_bytes >= part["bytes"] - size // 2:
            break
        selected.append(Piece(text, part["kind"], part.get("language", "en"), name))
        n_bytes += selected[-1].n_bytes
    if n_bytes < 0.8 * part["bytes"] - size // 2:
        raise Failure(f"{name} gives {n_bytes} bytes for {part['members']}, needed {part['bytes']}")
    phase = digest(selected[0].text) / 2**64  # else the single pieces of small parts would get the same place
    for i, piece in enumerate(selected):
        piece.place = (i + phase) / len(selected)
    return selected


def interleave(pieces: list[Piece]) -> list[Piece]:
    """Order the pieces: parts of a kind by their places, and each kind at its rate in characters."""
    n_chars, seen = Counter(), Counter()
    for piece in pieces:
        n_chars[piece.kind] += len(piece.text)
    for piece in sorted(pieces, key=lambda p: (p.place, digest(p.text))):
        piece.place = (seen[piece.kind] + len(piece.text) / 2) / n_chars[piece.kind]
        seen[piece.kind] += len(piece.text)
    return sorted(pieces, key=lambda p: (p.place, digest(p.text)))


def build(text: BuiltIn) -> tuple[list[Piece], str]:
    """Return the ordered pieces and the notices of a text."""
    table, pieces = text.table, []
    notices = [table["notice"].strip()]
    for source in table["source"]:
        files, title = members(source), f"{source['package']} {source['version']}"
        for part in source["part"]:
            pieces += select_pieces(part, source["package"], files)
        texts = [files[name].decode("utf-8").strip() for name in source["notices"]]
        notices += ["=" * 100 + f"\n{title}: {source['what']}\n" + "=" * 100, *texts]
    for part in table.get("written", []):
        pieces += select_pieces({"members": [], **part}, "written here", {})
    return interleave(pieces), "\n\n".join("\n".join(line.rstrip() for line in n.splitlines()) for n in notices) + "\n"


def join_pieces(pieces: list[Piece]) -> str:
    return "\n\n".join(p.text for p in pieces) + "\n"


def shares(pieces: list[Piece], key: str) -> dict[str, float]:
    """Return the shares of characters by kind, language or source; bytes would depend on the script."""
    n_chars: Counter = Counter()
    for piece in pieces:
        n_chars[getattr(piece, key)] += len(piece.text)
    return {name: n / n_chars.total() for name, n in n_chars.most_common()}


def main() -> int:
    action = sys.argv[1] if len(sys.argv) == 2 else "write"
    if len(sys.argv) > 2 or action not in ("write", "check", "shares"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return max(act(action, text) for text in TEXTS)
    except Failure as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def act(action: str, text: BuiltIn) -> int:
    """Perform the action for one text; returns the exit code."""
    pieces, notices = build(text)
    contents = {text.path: join_pieces(pieces), text.licenses: notices}
    if action == "write":
        DATA.mkdir(exist_ok=True)
        for path, content in contents.items():
            path.write_text(content, encoding="utf-8", newline="\n")
    elif action == "check":
        for path, content in contents.items():
            if not path.exists() or path.read_bytes() != content.encode():
                print(f"error: {path} does not match {text.pins}; run {Path(__file__).name}", file=sys.stderr)
                return 1
    else:
        content = contents[text.path]
        print(f"{text.name}: {len(content.encode())} bytes, {len(content)} characters, {len(pieces)} pieces")
        for key in ("kind", "language", "source"):
            print(f"{key:8}", ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares(pieces, key).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
