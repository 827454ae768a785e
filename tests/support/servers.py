"""HTTP servers on this machine that imitate a package index and the model hub, with faults on demand."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Site:
    """What a server serves, what went wrong on purpose, and what was asked of it."""

    bodies: dict[str, bytes] = field(default_factory=dict)  # path -> body
    headers: dict[str, dict[str, str]] = field(default_factory=dict)  # path -> more headers
    status: dict[str, int] = field(default_factory=dict)  # path -> HTTP error
    cut: set[str] = field(default_factory=set)  # paths whose connection breaks at half the body
    stall: set[str] = field(default_factory=set)  # paths whose answer waits at half the body until `go`
    ranges: bool = True  # whether a range that is asked for is what is sent
    log: list[str] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)  # path and Range header of each GET
    sent: dict[str, int] = field(default_factory=dict)  # path -> bytes of bodies
    halfway: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def gets(self, ending: str) -> int:
        """How many GET requests there were for paths that end so."""
        return sum(line.startswith("GET ") and line.endswith(ending) for line in self.log)

    def ranges_of(self, ending: str) -> list[str]:
        """The ranges that were asked for of paths that end so, "" where none was."""
        return [asked for path, asked in self.asked if path.endswith(ending)]


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path, site = self.path.partition("?")[0], self.site
        site.log.append(f"{self.command} {path}")
        status = site.status.get(path, 200 if path in site.bodies else 404)
        content = site.bodies.get(path, b"") if status == 200 else b"{}"
        asked = self.headers.get("Range", "") if body else ""
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", asked) if site.ranges and status == 200 else None
        if part:
            first, last = int(part[1]), min(int(part[2]), len(content) - 1)
            given, status = f"bytes {first}-{last}/{len(content)}", 206
            content = content[first : last + 1]
        self.send_response(status)
        if part:
            self.send_header("Content-Range", given)
        for name, value in site.headers.get(path, {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not body:
            return
        site.asked.append((path, asked))
        half = len(content) // 2
        try:
            self.wfile.write(content[:half])
            self.wfile.flush()
            site.sent[path] = site.sent.get(path, 0) + half
            if path in site.stall and not site.go.is_set():
                site.halfway.set()
                site.go.wait(60)
            if path in site.cut:
                self.close_connection = True
                return
            self.wfile.write(content[half:])
            site.sent[path] += len(content) - half
        except OSError:  # the client went away, as some tests want
            self.close_connection = True


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve the site on a free port while inside."""
    handler = type("Handler", (_Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.go.set()
        server.shutdown()
        server.server_close()


def wheel(name: str, version: str, member: str, content: bytes) -> bytes:
    """A wheel that holds one file, stored without compression."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


def add_package(site: Site, name: str, version: str, body: bytes) -> str:
    """Put a wheel into the index of the site; its path."""
    file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    path = f"/files/{file}"
    site.bodies[f"/simple/{name}/"] = f'<!DOCTYPE html><a href="{path}">{file}</a>'.encode()
    site.headers[f"/simple/{name}/"] = {"Content-Type": "text/html"}
    site.bodies[path] = body
    site.headers[path] = {"Content-Type": "application/octet-stream"}
    return path


def add_repository(site: Site, repo: str, files: dict[str, bytes], sizes: bool = True) -> None:
    """Put a repository of large files onto the hub of the site. `sizes`: its list says how large they are."""
    siblings = []
    for name, body in files.items():
        digest = hashlib.sha256(body).hexdigest()
        lfs = {"sha256": digest, "size": len(body), "pointerSize": 134}
        entry = {"rfilename": name}
        siblings.append(entry | ({"size": len(body), "blobId": digest[:40], "lfs": lfs} if sizes else {}))
        for revision in ("main", COMMIT):
            path = f"/{repo}/resolve/{revision}/{name}"
            site.bodies[path] = body
            site.headers[path] = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
    info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
    for path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/v2", f"/api/models/{repo}/revision/{COMMIT}"):
        site.bodies[path] = json.dumps(info).encode()
        site.headers[path] = {"Content-Type": "application/json"}
