"""A Hugging Face hub on loopback: what huggingface_hub asks for, over real HTTP, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """One data set, `lab/texts`, and a folder `web/` of plain files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.commit = COMMIT
        self.small: set[str] = set()
        """Files in git itself: only a blob id is announced, no SHA-256."""
        self.faults: dict[str, list[str]] = defaultdict(list)
        """{path: what the next GETs of it do}: `cut`, `corrupt`, or a status."""
        self.api_faults: list[str] = []
        """Statuses of the next API answers, `401` or `403 GatedRepo`."""
        self.together: threading.Barrier | None = None
        """GETs of files wait here for each other."""
        self.requests: list[tuple[str, str, str | None]] = []
        """(method, path, Range) of every request."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[LocalHub]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(timeout=10)

    def downloads(self) -> list[str]:
        """The files that were sent, in order, one entry a GET."""
        return [path.partition("/resolve/")[2].partition("/")[2] for method, path, _ in self.requests
                if method == "GET" and "/resolve/" in path]  # fmt: skip

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range")))
        if path.startswith("/api/"):
            self._api(request, path.removeprefix("/api/"))
        elif path.startswith("/datasets/lab/texts/resolve/"):
            revision, _, name = path.removeprefix("/datasets/lab/texts/resolve/").partition("/")
            self._file(request, name, announced=True, known=revision == self.commit)
        else:
            self._file(request, path.removeprefix("/web/"), announced=False, known=path.startswith("/web/"))

    def _api(self, request: BaseHTTPRequestHandler, path: str) -> None:
        fault = self.api_faults.pop(0) if self.api_faults else ""
        if fault:
            status, _, code = fault.partition(" ")
            _send(request, int(status), b'{"error": "no"}', {"X-Error-Code": code} if code else {})
        elif path.startswith("datasets/lab/texts/revision/"):
            if path.rpartition("/")[2] in ("main", "v1", self.commit):
                _send(request, 200, json.dumps({"id": "lab/texts", "sha": self.commit, "siblings": []}).encode())
            else:
                _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path == f"datasets/lab/texts/tree/{self.commit}":
            _send(request, 200, json.dumps([self._entry(name) for name in self.files]).encode())
        else:
            _send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _entry(self, name: str) -> dict[str, object]:
        data = self.files[name]
        entry = {"type": "file", "path": name, "size": len(data), "oid": _blob_id(data)}
        if name in self.small:
            return entry
        return entry | {"lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}}

    def _file(self, request: BaseHTTPRequestHandler, name: str, *, announced: bool, known: bool) -> None:
        data = self.files.get(name)
        if data is None or not known:
            _send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        etag = _blob_id(data) if name in self.small else hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if announced:
            headers |= {"X-Repo-Commit": self.commit, "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        if request.command == "HEAD":
            _send(request, 200, data, headers)
            return
        if self.together is not None:
            self.together.wait(timeout=20)
        fault = self.faults[name].pop(0) if self.faults[name] else ""
        if fault.isdigit():
            _send(request, int(fault), b"", {})
            return
        start = 0
        if asked := request.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if fault == "corrupt":
            body = bytes(255 - byte for byte in body)
        cut_at = len(body) // 2 if fault == "cut" else None
        _send(request, 206 if asked else 200, body, headers, cut_at=cut_at)


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None, *,
    cut_at: int | None = None,
) -> None:  # fmt: skip
    """With `cut_at`, the connection breaks behind so many bytes of the body."""
    request.send_response(status)
    for key, value in ({"Content-Type": "application/json"} | (headers or {})).items():
        request.send_header(key, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body[:cut_at])
    if cut_at is not None:
        request.close_connection = True
