"""The parts of a content-addressed store that hf_xet needs to download and upload. A file is one xorb, named by its SHA-256; the
protocol uses a hash of hashes, which clients do not check. Routes and formats: the specification of the xet protocol
(huggingface.co/docs/xet: api, auth, xorb)."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass, field

import lz4.frame

CHUNK = 65536
STORED, LZ4, GROUPED_LZ4 = range(3)  # the compression of a chunk, which clients choose by its bytes


@dataclass
class XetStore:
    """The state of the store. files: downloads by hash. sent: uploads by SHA-256. asked: the requested routes in order. is_broken: refuse
    every request."""

    files: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    is_broken: bool = False


def pack_xorb(content: bytes) -> bytes:
    """Pack a file into a xorb: chunks, each after a header of version, length, compression and unpacked length."""
    chunks = [content[i : i + CHUNK] for i in range(0, len(content), CHUNK)]
    return b"".join(b"\0" + len(c).to_bytes(3, "little") + bytes([STORED]) + len(c).to_bytes(3, "little") + c for c in chunks)


def unpack_xorb(xorb: bytes) -> bytes:
    """Unpack the content of a xorb, without what may follow its chunks."""
    content, offset = b"", 0
    while xorb[offset : offset + 1] == b"\0":
        n, compression = int.from_bytes(xorb[offset + 1 : offset + 4], "little"), xorb[offset + 4]
        content += unpack_chunk(xorb[offset + 8 : offset + 8 + n], compression)
        offset += 8 + n
    return content


def unpack_chunk(data: bytes, compression: int) -> bytes:
    if compression == STORED:
        return data
    data = lz4.frame.decompress(data)
    if compression == LZ4:
        return data
    assert compression == GROUPED_LZ4  # all first bytes of groups of four, then all second bytes, and so on
    content, offset = bytearray(len(data)), 0
    for i in range(4):
        n = len(range(i, len(data), 4))
        content[i::4] = data[offset : offset + n]
        offset += n
    return bytes(content)


class XetHandler:
    """The routes of the xet protocol for hub_server.Handler, which has send_json() and refuse()."""

    store: XetStore
    access_token: str

    def xet_headers(self, file_hash: str, content: bytes) -> None:
        """Add the headers of a file that this protocol delivers."""
        self.store.files[file_hash] = content
        self.send_header("X-Xet-Hash", file_hash)
        self.send_header("X-Xet-Refresh-Route", f"{self.hub.url}/api/models/any/any/xet-read-token/main")

    def xet_get(self, path: str) -> bool:
        """Answer a request of this protocol; return False for others."""
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/xet-(read|write)-token/[^/]+", path):
            self._token()
        elif match := re.fullmatch(r"/v1/reconstructions/(\w{64})", path):
            self._reconstruction(self.store.files[match[1]], match[1])
        elif match := re.fullmatch(r"/xorb/(\w{64})", path):
            self._xorb(pack_xorb(self.store.files[match[1]]))
        else:
            return False
        self.store.asked.append(path.rpartition("/")[0])
        return True

    def xet_post(self, path: str, body: bytes) -> bool:
        if re.fullmatch(r"/v1/xorbs/default/\w{64}", path):
            content = unpack_xorb(body)
            self.store.sent[hashlib.sha256(content).hexdigest()] = content
            self.send_json({"was_inserted": True})
        elif path in ("/v1/shards", "/shards"):  # clients upload file descriptions here and accept that /v2/shards is refused
            self.send_json({"result": 1})
        else:
            return False
        self.store.asked.append(path)
        return True

    def _token(self) -> None:
        """Send the token in headers for older clients and in the body for newer ones. The store is this server."""
        token = {"casUrl": self.hub.url, "accessToken": self.access_token, "exp": int(time.time()) + 3600}
        names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
        self.send_json(token, headers=dict(zip(names, map(str, token.values()), strict=True)))

    def _reconstruction(self, content: bytes, name: str) -> None:
        """Describe the complete file for any range: files are smaller than a range."""
        if self.store.is_broken:
            self.refuse(500)
            return
        chunks = {"start": 0, "end": -(-len(content) // CHUNK)}
        url = {"range": chunks, "url": f"{self.hub.url}/xorb/{name}", "url_range": {"start": 0, "end": len(pack_xorb(content)) - 1}}
        term = {"hash": name, "unpacked_length": len(content), "range": chunks}
        self.send_json({"offset_into_first_range": 0, "terms": [term], "fetch_info": {name: [url]}})

    def _xorb(self, xorb: bytes) -> None:
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(xorb)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(xorb[first : last + 1])
