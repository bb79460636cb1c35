"""A local server for the parts of the Hugging Face hub's protocol that downloads and uploads need, with failures on request. Routes and
headers: huggingface_hub's hf_api.py (model_info, create_repo, create_commit), _commit_api.py, lfs.py, file_download.py and
utils/_http.py (errors)."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from .xet_server import XetHandler, XetStore

LARGE = (".gguf", ".safetensors")  # in git's large file storage, by SHA-256
TOKEN, READER = "hf_right", "hf_reader"  # the reader may not write


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    drop_after: list[int] = field(default_factory=list)  # bytes after which the next downloads of large files break off
    damaged: bool = False  # one bit of large files is changed
    revisions: tuple[str, ...] = ("main",)
    xet: bool = False  # large files use the xet protocol

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr([(name, checksum(name, content)) for name, content in self.files.items()]).encode()).hexdigest()


@functools.cache
def checksum(name: str, content: bytes) -> str:
    digest = hashlib.sha256(content) if name.endswith(LARGE) else hashlib.sha1(b"blob %d\0" % len(content) + content)
    return digest.hexdigest()


class Hub:
    """The state of the server.

    repositories: by ORG/NAME. downloads: (file, first byte) of each download. stored: uploaded large files by SHA-256. sent: the size of
    each upload. drop_sent: how many of the next uploads break off. xet: the store of the xet protocol. takes_xet: whether uploads use it.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.downloads: list[tuple[str, int]] = []
        self.stored: dict[str, bytes] = {}
        self.sent: list[int] = []
        self.drop_sent = 0
        self.xet = XetStore()
        self.takes_xet = False
        self.url = ""


class Handler(XetHandler, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    @property
    def store(self) -> XetStore:
        return self.hub.xet

    access_token = TOKEN

    def log_message(self, *_) -> None:
        pass

    def refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, content: dict, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        """Store a large file under its SHA-256."""
        if self.hub.drop_sent:
            self.hub.drop_sent -= 1
            self.rfile.read(1000)
            self.close_connection = True
            self.connection.close()
            return
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.sent.append(len(content))
        if hashlib.sha256(content).hexdigest() != self.path.rpartition("/")[2]:
            self.refuse(400)
            return
        self.hub.stored[self.path.rpartition("/")[2]] = content
        self.send_json({})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (TOKEN, READER):
            self.refuse(401)
        elif token == READER:
            self.refuse(403)
        elif self.xet_post(path, body):
            pass
        elif path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            is_new = name not in self.hub.repositories
            self.hub.repositories.setdefault(name, Repository({}))
            self.send_json({"url": f"{self.hub.url}/{name}"}, 200 if is_new else 409)
        elif path == "/api/validate-yaml":  # checks the front matter of a card
            self.send_json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            if match[2] not in self.hub.repositories[match[1]].revisions:
                self.refuse(404, "RevisionNotFound")
                return
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self.send_json({"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            request = json.loads(body)
            objects = [
                {"oid": o["oid"], "size": o["size"]}
                | ({} if o["oid"] in self.hub.stored else {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}})
                for o in request["objects"]
            ]
            is_xet = self.hub.takes_xet and "xet" in request["transfers"]
            self.send_json({"transfer": "xet" if is_xet else "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            self.commit(self.hub.repositories[match[1]], [json.loads(line) for line in body.splitlines()])
        else:
            self.refuse(404)

    def commit(self, repo: Repository, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = (self.hub.stored | self.hub.xet.sent)[value["oid"]]
        self.send_json({"success": True, "commitUrl": f"{self.hub.url}/org/name/commit/{repo.commit}", "commitOid": repo.commit, "hookOutput": ""})

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if self.xet_get(path):
            return
        if not (api or file):  # newer clients use other routes too
            self.refuse(404)
            return
        name, revision = (api or file).group(1, 2)
        repo = self.hub.repositories.get(name)
        token = self.headers.get("Authorization")
        if token not in (None, f"Bearer {TOKEN}"):
            self.refuse(401)
        elif repo is None:
            self.refuse(401 if token is None else 404, "RepoNotFound")
        elif revision not in (None, repo.commit, *repo.revisions):
            self.refuse(404, "RevisionNotFound")
        elif api:
            self.describe(name, repo)
        elif repo.gated and token is None:
            self.refuse(401, "GatedRepo")
        elif file[3] not in repo.files:
            self.refuse(404, "EntryNotFound")
        else:
            self.send_file(repo, file[3], body)

    def describe(self, name: str, repo: Repository) -> None:
        siblings = []
        for file, content in repo.files.items():
            siblings.append({"rfilename": file, "size": len(content), "blobId": checksum("", content)})
            if file.endswith(LARGE):
                siblings[-1]["lfs"] = {"sha256": checksum(file, content), "size": len(content), "pointerSize": 130}
        info = {"id": name, "sha": repo.commit, "private": False, "gated": repo.gated, "tags": [], "siblings": siblings}
        self.send_json(info)

    def send_file(self, repo: Repository, name: str, body: bool) -> None:
        content, start = repo.files[name], 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("ETag", f'"{checksum(name, content)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if repo.xet and name.endswith(LARGE):
            self.xet_headers(checksum(name, content), content)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not body:
            return
        self.hub.downloads.append((name, start))
        if name.endswith(LARGE) and repo.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if name.endswith(LARGE) and repo.drop_after:
            content = content[: start + repo.drop_after.pop(0)]
            self.close_connection = True
        self.wfile.write(content[start:])


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
