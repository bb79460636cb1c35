"""What hf_xet needs of a store that is addressed by content, to download and to upload. A file is one xorb here, and its name is its
SHA-256, where the protocol has a hash of hashes: clients do not check it. Routes and formats: the specification of the xet protocol
(huggingface.co/docs/xet: api, auth, xorb)."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass, field

import lz4.frame

CHUNK = 65536
STORED, LZ4, GROUPED_LZ4 = range(3)  # how a chunk is compressed, which clients choose by its bytes


@dataclass
class XetStore:
    """files: to be downloaded, by hash; sent: what came, by SHA-256; asked: routes in the order in which they were asked for; is_broken:
    everything is refused."""

    files: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    is_broken: bool = False


def packed(content: bytes) -> bytes:
    """The xorb of a file: chunks, each behind a version, both lengths in three bytes and the compression between them."""
    chunks = [content[i : i + CHUNK] for i in range(0, len(content), CHUNK)]
    return b"".join(b"\0" + len(c).to_bytes(3, "little") + bytes([STORED]) + len(c).to_bytes(3, "little") + c for c in chunks)


def unpacked(xorb: bytes) -> bytes:
    """The content of a xorb, without what may stand behind its chunks."""
    content, at = b"", 0
    while xorb[at : at + 1] == b"\0":
        n, compression = int.from_bytes(xorb[at + 1 : at + 4], "little"), xorb[at + 4]
        content += unpacked_chunk(xorb[at + 8 : at + 8 + n], compression)
        at += 8 + n
    return content


def unpacked_chunk(data: bytes, compression: int) -> bytes:
    if compression == STORED:
        return data
    data = lz4.frame.decompress(data)
    if compression == LZ4:
        return data
    assert compression == GROUPED_LZ4  # the first bytes of all groups of four, then the second ones, and so on
    content, at = bytearray(len(data)), 0
    for i in range(4):
        n = len(range(i, len(data), 4))
        content[i::4] = data[at : at + n]
        at += n
    return bytes(content)


class XetHandler:
    """Of requests, beside hub_server.Handler, which has say() and refuse()."""

    store: XetStore
    access_token: str

    def xet_headers(self, file_hash: str, content: bytes) -> None:
        """That a file is to be had by this protocol."""
        self.store.files[file_hash] = content
        self.send_header("X-Xet-Hash", file_hash)
        self.send_header("X-Xet-Refresh-Route", f"{self.hub.url}/api/models/any/any/xet-read-token/main")

    def xet_get(self, path: str) -> bool:
        """Whether it was answered."""
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/xet-(read|write)-token/[^/]+", path):
            self._token()
        elif found := re.fullmatch(r"/v1/reconstructions/(\w{64})", path):
            self._reconstruction(self.store.files[found[1]], found[1])
        elif found := re.fullmatch(r"/xorb/(\w{64})", path):
            self._xorb(packed(self.store.files[found[1]]))
        else:
            return False
        self.store.asked.append(path.rpartition("/")[0])
        return True

    def xet_post(self, path: str, body: bytes) -> bool:
        if re.fullmatch(r"/v1/xorbs/default/\w{64}", path):
            content = unpacked(body)
            self.store.sent[hashlib.sha256(content).hexdigest()] = content
            self.say({"was_inserted": True})
        elif path in ("/v1/shards", "/shards"):  # what files consist of; /v2/shards answers otherwise, and is refused
            self.say({"result": 1})
        else:
            return False
        self.store.asked.append(path)
        return True

    def _token(self) -> None:
        """In headers for older clients, in the body for newer ones. The store is this server."""
        found = {"casUrl": self.hub.url, "accessToken": self.access_token, "exp": int(time.time()) + 3600}
        names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
        self.say(found, headers=dict(zip(names, map(str, found.values()), strict=True)))

    def _reconstruction(self, content: bytes, name: str) -> None:
        """The whole file, whatever range is asked for: they are less than a range."""
        if self.store.is_broken:
            self.refuse(500)
            return
        chunks = {"start": 0, "end": -(-len(content) // CHUNK)}
        url = {"range": chunks, "url": f"{self.hub.url}/xorb/{name}", "url_range": {"start": 0, "end": len(packed(content)) - 1}}
        term = {"hash": name, "unpacked_length": len(content), "range": chunks}
        self.say({"offset_into_first_range": 0, "terms": [term], "fetch_info": {name: [url]}})

    def _xorb(self, xorb: bytes) -> None:
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(xorb)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(xorb[first : last + 1])
