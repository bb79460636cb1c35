"""ggml-ext upload and quantize --upload with the real Hugging Face hub client and a local server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ggml_ext._commands.uploading import UploadOptions, quality_section, read_card
from helpers.commands import run_quantize
from helpers.errors import check_error
from helpers.hub_client import Client
from helpers.hub_server import READER, TOKEN, Repository, serving
from helpers.models import gaussian, write_gguf

REPO = "some-org/made-here"

pytestmark = pytest.mark.extra_build  # needs the extra hf, and other clients


@pytest.fixture
def client(tmp_path):
    with serving() as hub:
        yield Client(hub, tmp_path)


@pytest.fixture
def model(tmp_path):
    return write_gguf(tmp_path / "model-q8.gguf", {"blk.0.ffn_up.weight": gaussian(64, 256)}, "Q8_0")


def upload(client, *args, token: str | None = TOKEN):
    command = [sys.executable, "-m", "ggml_ext", "upload", *map(str, args), *(["--hf-token", token] if token else [])]
    return subprocess.run(command, capture_output=True, text=True, env=client.environment(), timeout=300)


def test_file_and_card_are_uploaded(client, model, tmp_path):
    """A file that the repository has is not sent again."""
    (tmp_path / "card.md").write_text("---\nlicense: mit\n---\n\n# Model\n")
    done = upload(client, model, REPO, "--model-card", tmp_path / "card.md")
    assert done.returncode == 0 and f"{client.hub.url}/{REPO}" in done.stdout, done.stderr
    repo = client.hub.repositories[REPO]
    assert repo.files == {"model-q8.gguf": model.read_bytes(), "README.md": (tmp_path / "card.md").read_bytes()}
    assert upload(client, model, REPO).returncode == 0
    by_xet = [len(content) for content in client.hub.xet.sent.values()]  # newer clients send every large file so
    assert (client.hub.sent or by_xet) == [model.stat().st_size]


def test_xet_protocol_uploads(client, model):
    pytest.importorskip("hf_xet")
    client.hub.takes_xet = True
    done = upload(client, model, REPO)
    assert done.returncode == 0, done.stderr
    assert not client.hub.sent and client.hub.repositories[REPO].files == {"model-q8.gguf": model.read_bytes()}


def test_broken_upload_is_retried(client, model):
    client.hub.drop_sent = 2
    done = upload(client, model, REPO)
    assert done.returncode == 0, done.stderr
    assert client.hub.repositories[REPO].files["model-q8.gguf"] == model.read_bytes()


def test_unreachable_server_is_reported(client, model):
    done = subprocess.run([sys.executable, "-m", "ggml_ext", "upload", model, REPO, "-q"], capture_output=True, text=True, env=client.environment(HF_HUB_OFFLINE="1"))
    check_error(done, f"{REPO}: HF_HUB_OFFLINE is set: unset it")


def test_bad_tokens_are_refused_first(client, model, tmp_path):
    """Nothing is written."""
    check_error(upload(client, model, REPO, token=READER), REPO, "refuses to write there (403)", "--hf-token")
    check_error(upload(client, model, REPO, token="hf_wrong"), "refuses to write there (401)")
    check_error(upload(client, model, REPO, token=None), "--hf-token")
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(64, 256)})
    done = run_quantize(source, tmp_path / "out.gguf", "--type", "itq3_s", "--upload", REPO, "--hf-token", READER, "-q", env=client.environment())
    check_error(done, "refuses to write there")
    assert not (tmp_path / "out.gguf").exists() and client.hub.repositories == {}


def test_bad_names_are_refused(client, model, tmp_path):
    check_error(upload(client, model, "a b/c"), "ORG/NAME", "a b/c")
    check_error(upload(client, tmp_path / "no.gguf", REPO), "no.gguf")
    check_error(upload(client, model, REPO, "--model-card", tmp_path / "no.md"), "--model-card", "no.md")
    client.hub.repositories[REPO] = Repository({})
    check_error(upload(client, model, REPO, "--revision", "other", "-q"), "no such branch", "--revision")


def test_quantize_uploads(client, tmp_path):
    """The card has the measured figures."""
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(64, 256)})
    out = tmp_path / "out.gguf"
    done = run_quantize(source, out, "--type", "itq3_s", "--upload", REPO, "--hf-token", TOKEN, env=client.environment())
    assert done.returncode == 0 and f"{client.hub.url}/{REPO}" in done.stdout, done.stderr
    files = client.hub.repositories[REPO].files
    assert files["out.gguf"] == out.read_bytes() and "NMSE" in files["README.md"].decode() and TOKEN not in files["README.md"].decode()


def test_card_has_the_quality(tmp_path):
    def row(label, **figures):
        return {"label": label, "bpw": 3.06, "statistics": figures}

    report = {"base": row("f16.gguf", **{"Mean PPL(Q)": [11.0, 0.1]}), "models": [row("q.gguf", **{"Mean PPL(Q)": [11.2, 0.1], "Mean KLD": [0.01234, 0.0001]})],
             "chunks": 90, "ctx_size": 512, "text": {"name": "built-in"}}
    (tmp_path / "q.json").write_text(json.dumps(report))
    section = quality_section(tmp_path / "q.json")
    assert "| q.gguf | 3.06 | 11.200 ± 0.100 | 0.01234 ± 0.00010 |  |" in section and "90 chunks of 512 tokens of built-in text of ggml-ext" in section
    (tmp_path / "card.md").write_text("# Card\n")
    card = read_card(UploadOptions(file=tmp_path / "m.gguf", repo=REPO, model_card=tmp_path / "card.md", quality=tmp_path / "q.json"))
    assert card.startswith("# Card\n\n## Quality\n") and card.endswith("\n")
