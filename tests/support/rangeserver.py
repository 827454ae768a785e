"""An HTTP server on 127.0.0.1 that speaks byte ranges, or speaks them wrongly, as a test wants."""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    path: str
    headers: dict[str, str]  # names in lower case


@dataclass
class RangeSite:
    """Contents by path, and what a path does instead of answering properly. `sent` counts body bytes."""

    url: str = ""
    bodies: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    acts: dict[str, Callable[[RangeHandler], None]] = field(default_factory=dict)
    log: list[Request] = field(default_factory=list)
    sent: int = 0
    closing: threading.Event = field(default_factory=threading.Event)

    def ranges(self, path: str) -> list[str]:
        return [request.headers.get("range", "") for request in self.log if request.path == path]


class RangeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: RangeSite

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.site.log.append(Request(path, {name.lower(): text for name, text in self.headers.items()}))
        try:
            if path in self.site.acts:
                self.site.acts[path](self)
            elif path in self.site.bodies:
                self.answer(self.site.bodies[path], self.site.etags.get(path, ""))
            else:
                self.reply(404, b"no such thing")
        except OSError:  # the client has gone, as some tests want
            self.close_connection = True

    def reply(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        """Any answer; `length` is what Content-Length claims (-1: nothing) where that is not the truth."""
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        claimed = len(body) if length is None else length
        if claimed >= 0:
            self.send_header("Content-Length", str(claimed))
        if claimed != len(body):
            self.send_header("Connection", "close")
        self.end_headers()
        self.site.sent += len(body)
        self.wfile.write(body)

    def asked(self) -> tuple[int, int] | None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(match[1]), int(match[2])) if match else None

    def answer(self, content: bytes, etag: str = "") -> None:
        """What a good server says: 304, 206, 416 or 200."""
        extra = {"ETag": etag} if etag else {}
        asked = self.asked()
        if etag and self.headers.get("If-None-Match") == etag:
            self.reply(304, length=-1, **extra)
        elif asked is None:
            self.reply(200, content, **extra)
        elif asked[0] >= len(content):
            self.reply(416, Content_Range=f"bytes */{len(content)}")
        else:
            part = content[asked[0] : asked[1] + 1]
            given = f"bytes {asked[0]}-{asked[0] + len(part) - 1}/{len(content)}"
            self.reply(206, part, Content_Range=given, **extra)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up in the middle are what the tests are about: nothing to print."""


@contextmanager
def serving_ranges(certificate: Path | None = None) -> Iterator[RangeSite]:
    """A site on a free port while inside; over TLS with a certificate (and its key)."""
    site = RangeSite()
    handler = type("Handler", (RangeHandler,), {"site": site})
    server = _Server(("127.0.0.1", 0), handler)
    scheme = "http"
    if certificate:
        context, scheme = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "https"
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, True, do_handshake_on_connect=False)
    site.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield site
    finally:
        site.closing.set()
        server.shutdown()
        server.server_close()


def add_repository(site: RangeSite, repo: str, files: dict[str, bytes], named: bool = True) -> str:
    """Put a repository onto the site; the path of its files. `named`: the list tells each file's checksum."""
    siblings: list[dict[str, Any]] = []
    for name, body in files.items():
        entry: dict[str, Any] = {"rfilename": name, "size": len(body)}
        if named:
            digest = hashlib.sha256(body).hexdigest()
            entry |= {"blobId": digest[:40], "lfs": {"sha256": digest, "size": len(body)}}
        siblings.append(entry)
        site.bodies[f"/{repo}/resolve/{COMMIT}/{name}"] = body
    info = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
    site.bodies[f"/api/models/{repo}"] = info
    site.etags[f"/api/models/{repo}"] = f'W/"{hashlib.sha256(info).hexdigest()[:20]}"'
    return f"/{repo}/resolve/{COMMIT}"


def as_hub(site: RangeSite, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the site the hub of this process, without a token, and with caches inside `folder`."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", site.url)
