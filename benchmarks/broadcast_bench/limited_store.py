"""An object store on this machine with the part of S3's protocol that checkpoints need, as a process of its own. It has
a limited bandwidth, which all its clients share, and counts the bytes of objects that it gives out.

    python benchmarks/broadcast_bench/limited_store.py --bytes-per-s 200000000

It prints its URL, and keeps everything in memory. GET /-/given answers the bytes given out by object, as JSON. Anybody
may read and write: it listens on the loopback interface only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE_BYTES = 256 << 10
_MOMENT = "2026-01-01T00:00:00.000Z"


class Store:
    """Objects by bucket and name, and what was given out of them."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s` 0: no limit."""
        self.objects: dict[str, tuple[bytes, str]] = {}  # content, entity tag
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.given: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def pace(self, name: str, size_bytes: int) -> None:
        """Count these bytes, and wait until they may go."""
        with self.lock:
            self.given[name] += size_bytes
            now = time.monotonic()
            self._free_at_s = max(self._free_at_s, now)
            if self._bytes_per_s:
                self._free_at_s += size_bytes / self._bytes_per_s
            wait_s = self._free_at_s - now
        if wait_s > 0:
            time.sleep(wait_s)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        return

    def _parse(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).strip("/"), parse_qs(parts.query, keep_blank_values=True)

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def do_PUT(self) -> None:
        name, query = self._parse()
        body = self._body()
        with self.store.lock:
            if "uploadId" in query:
                self.store.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            else:
                self.store.objects[name] = (body, _tag(body))
        self._answer(200, ETag=_tag(body))

    def do_POST(self) -> None:
        name, query = self._parse()
        self._body()
        with self.store.lock:
            if "uploads" in query:
                upload = f"upload{len(self.store.uploads)}"
                self.store.uploads[upload] = {}
                xml = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            else:
                parts = self.store.uploads[query["uploadId"][0]]
                whole = b"".join(parts[number] for number in sorted(parts))
                tag = _tag(whole)
                self.store.objects[name] = (whole, tag)
                xml = (
                    f"<CompleteMultipartUploadResult><Key>{escape(name)}</Key><ETag>{escape(tag)}</ETag>"
                    "</CompleteMultipartUploadResult>"
                )
        self._answer(200, xml.encode())

    def do_DELETE(self) -> None:
        name, _ = self._parse()
        with self.store.lock:
            self.store.objects.pop(name, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        self._give(with_body=False)

    def do_GET(self) -> None:
        name, query = self._parse()
        if name == "-/given":
            with self.store.lock:
                self._answer(200, json.dumps(self.store.given).encode())
        elif "list-type" in query:
            self._list(name, query)
        else:
            self._give(with_body=True)

    def _give(self, *, with_body: bool) -> None:
        name, _ = self._parse()
        with self.store.lock:
            found = self.store.objects.get(name)
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"")
            return
        data, tag = found
        begin, end = 0, len(data)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            begin, end = int(wanted[1]), min(int(wanted[2] or end) + 1, end)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", tag)
        self.send_header("Last-Modified", formatdate(1_767_225_600, usegmt=True))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if with_body:
            for start in range(begin, end, _PIECE_BYTES):
                piece = memoryview(data)[start : min(start + _PIECE_BYTES, end)]
                self.store.pace(name, len(piece))
                self.wfile.write(piece)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        head = f"{bucket}/"
        found, folders = [], set()
        with self.store.lock:
            names = sorted(name[len(head) :] for name in self.store.objects if name.startswith(head + prefix))
            sizes = {name: len(self.store.objects[head + name][0]) for name in names}
            tags = {name: self.store.objects[head + name][1] for name in names}
        for name in names:
            folder, separator, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if separator:
                folders.add(prefix + folder + delimiter)
                continue
            found.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{_MOMENT}</LastModified><Size>{sizes[name]}</Size>"
                f"<ETag>{escape(tags[name])}</ETag></Contents>"
            )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        xml = (
            f"<ListBucketResult><Name>{escape(bucket)}</Name><IsTruncated>false</IsTruncated>{''.join(found)}{common}"
            "</ListBucketResult>"
        )
        self._answer(200, xml.encode(), Content_Type="application/xml")


def _tag(data: bytes) -> str:
    return f'"{hashlib.blake2b(data, digest_size=16).hexdigest()}"'


def serve(bytes_per_s: float, port: int = 0) -> ThreadingHTTPServer:
    """A server that is not yet running."""
    kept: dict[str, Any] = {"store": Store(bytes_per_s)}
    return ThreadingHTTPServer(("127.0.0.1", port), type("BoundHandler", (Handler,), kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes-per-s", type=float, default=0.0, help="given out to all clients together; 0: no limit")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    options = parser.parse_args()
    server = serve(options.bytes_per_s, options.port)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
