"""--hf-repo with the real Hugging Face hub client and a local server."""

import os
import socket
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from ggml_ext._base import files as base_files
from ggml_ext._base.errors import UserError
from ggml_ext._source import hub as _hub
from helpers.commands import tool
from helpers.hub_client import IS_OLD, REPO, Client, install_other_version
from helpers.hub_server import TOKEN, Repository, serving
from helpers.models import gaussian, write_gguf

FILE = "some-model-BF16.gguf"
PIECE = 10 * 1024 * 1024  # huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE

pytestmark = pytest.mark.extra_build  # needs the extra hf, and other clients


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """Return a GGUF file in BF16, 0.6 MB."""
    weights = {"blk.0.ffn_up.weight": gaussian(1024, 256)}
    return write_gguf(tmp_path_factory.mktemp("hub") / "in.gguf", weights, "BF16").read_bytes()


@pytest.fixture(scope="module")
def other_client(tmp_path_factory):
    """Install the client version that the environment lacks and return its directory."""
    return install_other_version(tmp_path_factory.mktemp("other"), "huggingface-hub>=1" if IS_OLD else "huggingface-hub<1")


@pytest.fixture(params=["installed", "other"])
def client(request, tmp_path):
    with serving() as hub:
        yield Client(hub, tmp_path, request.getfixturevalue("other_client") if request.param == "other" else None)


def test_file_is_downloaded_once(client, content):
    others = {"some-model-Q4_K_M.gguf": b"GGUF", "mmproj-BF16.gguf": b"GGUF", "config.json": b"{}"}
    client.hub.repositories[REPO] = Repository({FILE: content, **others})
    done = client.succeed()
    assert client.hub.downloads == [(FILE, 0)]
    assert f"note: {REPO}: downloading 1 files, 1 MiB, into {client.cache}" in done.stderr
    first = client.out.read_bytes()
    assert "downloading" not in client.succeed("--force").stderr
    assert client.hub.downloads == [] and client.out.read_bytes() == first


def test_split_file_of_a_revision_is_downloaded(client, tmp_path, content):
    """The parts are in a directory of the repository; the cache has links to files with other names."""
    write_gguf(tmp_path / "in.gguf", {f"blk.{i}.ffn_up.weight": gaussian(8, 256, seed=i) for i in range(2)})
    command = [tool("llama-gguf-split"), "--split", "--split-max-tensors", "1", tmp_path / "in.gguf", tmp_path / "model-q8"]
    subprocess.run(command, check=True, capture_output=True)
    parts = {f"sub/{p.name}": p.read_bytes() for p in sorted(tmp_path.glob("model-q8-*"))}
    client.hub.repositories[REPO] = Repository(parts | {FILE: content}, revisions=("main", "v2"))
    client.succeed("--hf-file", "sub/model-q8-00001-of-00002.gguf", "--revision", "v2")
    assert [name for name, _ in client.hub.downloads] == list(parts)
    assert len(client.weights()) == 2


def test_missing_repository_is_reported(client):
    client.error(f"{REPO} does not exist at {client.hub.url}", "--hf-token")
    client.error("got 'not/a/repository', must be ORG/NAME", repo="not/a/repository")


def test_missing_revision_is_reported(client, content):
    client.hub.repositories[REPO] = Repository({FILE: content})
    client.error("has no revision v7", flags=["--revision", "v7"])


def test_gated_repository_needs_a_token(client, content):
    client.hub.repositories[REPO] = Repository({FILE: content}, gated=True)
    client.error(f"{REPO} is gated", "HF_TOKEN or --hf-token")
    client.error("refuses the token", HF_TOKEN="hf_wrong")
    assert not client.blobs()
    client.succeed("--dry-run", "--hf-token", TOKEN, HF_TOKEN="hf_wrong")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return a file of more than two pieces of the client; a broken connection costs the last one."""
    weights = {"blk.0.ffn_up.weight": np.tile(gaussian(256, 1024), (42, 1))}
    content = write_gguf(tmp_path_factory.mktemp("hub") / "in.gguf", weights).read_bytes()
    assert len(content) > 2 * PIECE
    return content


def test_broken_download_continues(client, large):
    client.hub.repositories[REPO] = Repository({FILE: large}, drop_after=[PIECE + 1000])
    done = client.succeed("--dry-run")
    if client.is_old:  # newer clients continue by themselves
        assert f"trying again to get the rest of {FILE}" in done.stderr
    assert client.hub.downloads == [(FILE, 0), (FILE, PIECE)]
    assert [p.read_bytes() for p in client.blobs()] == [large]


def test_repeatedly_broken_download_fails(client, large, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep = lambda seconds: None\n")  # between tries
    path = os.pathsep.join(filter(None, [str(tmp_path), client.environment().get("PYTHONPATH")]))
    tries = _hub.N_TRIES * (1 if client.is_old else 6)  # newer clients try five times more for each of the quantizer's
    repo = client.hub.repositories[REPO] = Repository({FILE: large}, drop_after=[PIECE + 1000, *[1000] * (tries - 1)])
    then = "the download resumes" if client.is_old else "complete files are kept"
    client.error("failed", f"{_hub.N_TRIES} times for {FILE}", f"run the command again; {then}", flags=["--dry-run"], PYTHONPATH=path)
    assert len(client.hub.downloads) == tries and not repo.drop_after
    if client.is_old:
        assert client.hub.downloads == [(FILE, 0), *[(FILE, PIECE)] * (tries - 1)]
    client.succeed("--dry-run")
    assert client.hub.downloads == [(FILE, PIECE if client.is_old else 0)]
    assert [p.read_bytes() for p in client.blobs()] == [large]


def test_unreachable_server_is_reported(client):
    client.hub.url = "http://127.0.0.1:9"  # the discard port, where no server listens
    no_copy = f"{client.cache / 'hub'} has no copy of it"
    client.error(f"{REPO}: the connection to http://127.0.0.1:9 failed (Connection refused), and {no_copy}: check the network")
    client.error(f"{REPO}: HF_HUB_OFFLINE is set, and {no_copy}: unset HF_HUB_OFFLINE, or pass a GGUF file", HF_HUB_OFFLINE="1")


def test_cached_copy_works_offline(client, content):
    """Works for a branch or a commit; a file that was not downloaded is missing."""
    repo = client.hub.repositories[REPO] = Repository({FILE: content, "other-F16.gguf": content})
    client.succeed()
    first, url = client.out.read_bytes(), client.hub.url
    for why, address, flags, env in (
        ("HF_HUB_OFFLINE is set", url, (), {"HF_HUB_OFFLINE": "1"}),
        ("the connection to http://127.0.0.1:9 failed (Connection refused)", "http://127.0.0.1:9", ("--revision", repo.commit), {}),
    ):
        client.hub.url = address
        done = client.succeed("--force", *flags, **env)
        assert f"note: {REPO}: {why}: its copy in the cache is used, commit {repo.commit[:12]}\n" in done.stderr
        assert client.hub.downloads == [] and client.out.read_bytes() == first
        client.error(f"{why}, and its copy in the cache has no file no.gguf: --hf-file must be {FILE}", flags=["--hf-file", "no.gguf", "--force"], **env)
        client.error(f"{why}, and ", " has no copy of revision v2: ", flags=["--revision", "v2", "--force"], **env)


def test_incomplete_cached_checkpoint_is_refused(client):
    client.hub.repositories[REPO] = Repository({f"model-0000{i}-of-00002.safetensors": b"x" * 1000 for i in (1, 2)} | {"config.json": b"{}"})
    client.run()  # shards alone are no model
    client.cached("model-00002-of-00002.safetensors").unlink()
    client.error("its copy in the cache lacks model-00002-of-00002.safetensors, of 2 files", "download it while there is a connection", HF_HUB_OFFLINE="1")


def test_connection_error_names_its_cause():
    """requests and urllib3 wrap the system's message; httpx chains exceptions."""
    system = socket.gaierror(-2, "Name or service not known")
    layer = Exception("<urllib3.connection.HTTPSConnection object at 0x7f>: Failed to resolve 'huggingface.co'")
    layer.__cause__ = system
    retries = Exception(f"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api (Caused by {layer!r})")
    retries.reason = layer
    assert _hub.cause(OSError(retries)) == _hub.cause(layer) == "Name or service not known"
    assert _hub.cause(OSError(Exception("aborted", ConnectionResetError("Remote end closed connection")))) == "Remote end closed connection"


@pytest.mark.parametrize("error", [
    OSError("HTTPSConnectionPool(host='huggingface.co', port=443)" * 9),
    RuntimeError("I/O error: " + "x" * 400),
])
def test_long_messages_are_marked_as_cut(error):
    assert len(_hub.first_line(error)) <= 300 and _hub.first_line(error).endswith(" ...")


def test_xet_protocol_downloads(client, content):
    pytest.importorskip("hf_xet")
    client.hub.repositories[REPO] = Repository({FILE: content}, xet=True)
    client.succeed("--dry-run")
    assert not client.hub.downloads and "/xorb" in client.hub.xet.asked
    assert content in [p.read_bytes() for p in client.blobs()]  # newer clients also store the cache's version


def test_broken_xet_protocol_falls_back_to_http(client, content):
    pytest.importorskip("hf_xet")
    client.hub.repositories[REPO] = Repository({FILE: content}, xet=True)
    client.hub.xet.is_broken = True
    impatient = {f"HF_XET_CLIENT_RETRY_{k}": v for k, v in {"MAX_ATTEMPTS": "1", "BASE_DELAY": "10ms", "MAX_DURATION": "1sec"}.items()}
    client.error("hf_xet", "HF_HUB_DISABLE_XET=1", f"times for {FILE}", "run the command again", flags=["--dry-run"], **impatient)
    client.succeed("--dry-run", HF_HUB_DISABLE_XET="1")
    assert client.hub.downloads == [(FILE, 0)]


def test_full_disk_is_recognized_in_xet_errors():
    """hf_xet wraps the system's message in its own text; a retry is useless."""
    with pytest.raises(UserError, match="No space left on device; point HF_HUB_CACHE to another directory") as error, _hub.explain_errors(_hub.Repo(REPO, None, None)):
        raise OSError("I/O error: IO Error: No space left on device (os error 28)")
    assert not isinstance(error.value, _hub.ConnectionBroken)


def test_wrong_checksum_is_refused(client, content):
    repo = client.hub.repositories[REPO] = Repository({FILE: content}, damaged=True)
    client.error(f"damaged {FILE}", "checksum", "run the command again")
    assert not client.blobs()
    repo.damaged = False
    client.succeed("--dry-run")


def test_missing_space_for_the_download_is_refused(monkeypatch):
    file = SimpleNamespace(rfilename=FILE, size=3 * 2**20, lfs=None, blob_id=None)
    cache = _hub._Cache(_hub.Repo(REPO, None, None), "0" * 40, {FILE: file}, print)
    monkeypatch.setattr(base_files, "free_space", lambda path: 2 * 2**20)
    with pytest.raises(UserError, match="needs 3.00 MiB in .*, 2.00 MiB are free in .*; free some space"):
        cache.download([FILE])


def test_partial_download_counts_as_present(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--some-org--Some-Model" / "blobs"
    blobs.mkdir(parents=True)
    cache = _hub._Cache(_hub.Repo(REPO, None, None), "0" * 40, {}, print)
    assert cache._partial_bytes() == 0
    (blobs / "abc.0123abcd.incomplete").write_bytes(b"of a client 2.4 that was killed")
    assert cache._partial_bytes() == 0
    (blobs / "abc.incomplete").write_bytes(b"12345")
    assert cache._partial_bytes() == 5


def test_missing_shard_is_reported(client):
    shards = {f"model-0000{i}-of-00003.safetensors": b"x" * 1000 for i in (1, 3)}
    client.hub.repositories[REPO] = Repository({"config.json": b"{}", **shards})
    client.error("lacks model-00002-of-00003.safetensors, of 3 files")
    index = b'{"weight_map": {"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors"}}'
    client.hub.repositories[REPO].files["model.safetensors.index.json"] = index
    client.error("lacks model-00002-of-00003.safetensors, of 2 files")
    assert client.hub.downloads == [("model.safetensors.index.json", 0)]


@pytest.mark.parametrize(
    ("names", "file", "expected"),
    [
        (["a-F16.gguf", "a-BF16.gguf", "a-f32.gguf", "config.json", "model.safetensors"], None, ["a-BF16.gguf"]),
        (["a.fp16.gguf", "a-Q8_0.gguf", "config.json", "model.safetensors"], None, ["a.fp16.gguf"]),
        (["a-f32.gguf", "a-q8_0.gguf", "config.json", "model-00001-of-00001.safetensors"], None, []),
        (["a-f32.gguf", "config.json", "pytorch_model.bin"], None, []),
        (["a-f32.gguf", "a-q8_0.gguf", "config.json", "adapter_model.safetensors"], None, ["a-f32.gguf"]),
        (["a-q8_0.gguf", "a-q4_k_m.gguf", "mmproj-a-f16.gguf", "a-f16.imatrix.gguf"], None, ["a-q8_0.gguf"]),
        (["x/f16-00001-of-00002.gguf", "x/f16-00002-of-00002.gguf"], None, [f"x/f16-0000{i}-of-00002.gguf" for i in (1, 2)]),
        (["a-f16.gguf", "b-f16.gguf"], "b-f16.gguf", ["b-f16.gguf"]),
        (["a-f16.gguf", "b-f16.gguf"], None, "has 2 GGUF files in F16: choose with --hf-file from a-f16.gguf, b-f16.gguf"),
        (["a-q4_k_m.gguf", "README.md"], None, "neither a GGUF file in BF16, F16, F32 or Q8_0 nor a config.json"),
        (["README.md"], None, "nor a config.json with safetensors"),
        (["model.safetensors"], None, "nor a config.json with safetensors"),
        (["a-f16.gguf"], "b.gguf", "has no file b.gguf: --hf-file must be a-f16.gguf"),
        (["model.safetensors"], "model.safetensors", "is not a GGUF file"),
        (["a-f16-00001-of-00002.gguf"], None, "lacks a-f16-00002-of-00002.gguf"),
    ],
)
def test_file_is_chosen_from_the_repository(names, file, expected):
    repo = _hub.Repo(REPO, None, None)
    if isinstance(expected, list):
        assert _hub.choose_gguf(repo, names, file) == expected
    else:
        with pytest.raises(UserError) as e:
            _hub.choose_gguf(repo, names, file)
        assert REPO in str(e.value) and expected in str(e.value)
