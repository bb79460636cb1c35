"""The built-in texts: the script makes them from pinned packages; the calibration text is evenly mixed and has nothing of the scored
texts."""

from __future__ import annotations

import re

import pytest

import calibration_text
import ggml_ext
from calibration_readers import UNWANTED
from calibration_text import CALIBRATION, EVALUATION, TEXTS, BuiltIn
from helpers.models import ROOT
from pinned import Failure

SHARES = {"prose": 0.50, "code": 0.27, "markup": 0.09, "other": 0.09, "maths": 0.05}
SHARE_TOLERANCE = 0.05  # of the text
# A third has 110,000 characters; a kind may be off by half a piece (1,500) at both ends, 0.015 more.
PREFIX_TOLERANCE = SHARE_TOLERANCE + 0.015
# Letters of each script that the text must contain.
SCRIPTS = {"Chinese characters": "[\u4e00-\u9fff]", "kana": "[\u3040-\u30ff]", "Hangul": "[\uac00-\ud7af]",
           "Cyrillic": "[\u0400-\u04ff]", "Arabic": "[\u0600-\u06ff]", "Devanagari": "[\u0900-\u097f]"}
SHINGLE = 50


def read_text(text: BuiltIn) -> str:
    return text.path.read_bytes().decode("utf-8")


def shingles(text: str) -> set[str]:
    return {text[i:i + SHINGLE] for i in range(len(text) - SHINGLE + 1)}


@pytest.fixture(scope="module")
def text() -> str:
    return read_text(CALIBRATION)


@pytest.fixture(scope="module")
def built_text():
    return build(CALIBRATION)


def build(text: BuiltIn):
    try:
        return calibration_text.build(text)
    except Failure as e:
        pytest.skip(str(e))


@pytest.mark.nightly  # downloads the packages and takes three minutes
@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t.name)
def test_committed_text_is_up_to_date(text, request):
    pieces, notices = request.getfixturevalue("built_text") if text == CALIBRATION else build(text)
    assert read_text(text) == calibration_text.join_pieces(pieces), "run scripts/build/calibration_text.py"
    assert text.licenses.read_bytes().decode() == notices


@pytest.mark.nightly
def test_shares_of_kinds_are_as_planned(built_text):
    """Checks the text and its thirds: a run with few chunks reads only the beginning."""
    pieces, _ = built_text
    third = len(pieces) // 3
    for part in (pieces, pieces[:third], pieces[third:2 * third]):
        tolerance = SHARE_TOLERANCE if part is pieces else PREFIX_TOLERANCE
        shares = calibration_text.shares(part, "kind")
        assert shares.keys() == SHARES.keys()
        for kind, share in SHARES.items():
            assert abs(shares[kind] - share) <= tolerance, f"{kind}: {shares[kind]:.3f} of {len(part)} pieces, wanted {share}"
    assert len(calibration_text.shares(pieces, "language")) > 12


@pytest.mark.nightly
def test_pieces_have_a_few_kilobytes(built_text):
    sizes = [p.n_bytes for p in built_text[0]]
    assert 300 < min(sizes) and max(sizes) < 3000 and 1000 < sum(sizes) / len(sizes) < 2000


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t.name)
def test_installed_text_equals_the_committed_one(text):
    installed = ROOT.joinpath(ggml_ext.__path__[0], "data")
    for path in (text.path, text.licenses):
        assert (installed / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("text, n_bytes", [(CALIBRATION, (300_000, 400_000)), (EVALUATION, (150_000, 220_000))], ids=lambda t: getattr(t, "name", ""))
def test_text_has_the_expected_form(text, n_bytes):
    content = read_text(text)
    assert n_bytes[0] <= len(content.encode()) <= n_bytes[1]
    assert "\r" not in content and "\t" not in content and not content.startswith("\ufeff") and content.endswith("\n")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\ufffd]", content)


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t.name)
def test_text_has_no_addresses_and_licence_notices(text):
    assert [m[0] for m in UNWANTED.finditer(read_text(text))] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_text_contains_the_script(text, script):
    assert len(re.findall(SCRIPTS[script], text)) > 500


@pytest.mark.parametrize("scored", ["heldout.txt", "evaluation.txt"])
def test_text_shares_nothing_with_a_scored_text(text, scored):
    """No 50 characters in common, except with fewer than four words, such as rules of signs and indents."""
    path = ROOT / "data" / scored if scored == "heldout.txt" else EVALUATION.path
    common = shingles(path.read_text(encoding="utf-8")) & shingles(text)
    assert [s for s in common if len(re.findall(r"\w{2,}", s)) > 3] == []


def test_missing_pinned_file_is_named():
    part = {"kind": "prose", "reader": "text", "members": ["*/nothing.txt"], "bytes": 1000}
    with pytest.raises(Failure, match=r"package has no file \['\*/nothing.txt'\]"):
        calibration_text.select_pieces(part, "package", {"a/b.txt": b"text"})


def test_part_with_too_little_text_is_named():
    part = {"kind": "prose", "reader": "text", "members": ["*.txt"], "bytes": 10000}
    with pytest.raises(Failure, match="gives 1001 bytes .* needed 10000"):
        calibration_text.select_pieces(part, "package", {"a/b.txt": b"word " * 200})
