"""Slow servers, redirects, TLS and proxies: bounded time, and a token that never leaves home."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rangecalls import (  # noqa: F401
    CONTENT,
    QUICK,
    RANGE_HEAD,
    TOKEN,
    act,
    failure,
    fixture_other,
    fixture_private_cache,
    fixture_site,
    remote,
)
from rangeserver import RangeHandler, RangeSite, serving_ranges

from kvcli.errors import DownloadError
from kvcli.runtime.hub.deadlines import Origin, split_url
from kvcli.runtime.hub.ranges import RemoteFile
from kvcli.runtime.hub.websession import Limits, Session

# --- slow servers ---


def _drip(site: RangeSite, first: bytes, drop: bytes, every_s: float) -> Callable[[RangeHandler], None]:
    def send(handler: RangeHandler) -> None:
        handler.wfile.write(first)
        handler.close_connection = True
        while not site.closing.wait(every_s):
            handler.wfile.write(drop)

    return send


@pytest.mark.parametrize(
    ("first", "drop"),
    [
        (b"HTTP/1.1 206 OK", b"x"),
        (b"HTTP/1.1 206 OK\r\nX: ", b"y"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (RANGE_HEAD, b"z"),
    ],
)
def test_a_byte_now_and_then_ends_at_the_deadline(first: bytes, drop: bytes, site: RangeSite) -> None:
    act(site, _drip(site, first, drop, 0.05))
    start = time.monotonic()
    assert "did not answer in time" in failure(remote(site, limits=Limits(answer_s=60, total_s=1.5))).message
    assert time.monotonic() - start >= 1.4


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 206 OK\r\n", RANGE_HEAD])
def test_silence_ends_sooner(first: bytes, site: RangeSite) -> None:
    act(site, _drip(site, first, b"", 600))
    start = time.monotonic()
    assert "did not answer in time" in failure(remote(site, limits=Limits(answer_s=0.5, total_s=120))).message
    assert time.monotonic() - start < 60


def test_a_server_that_never_accepts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert "did not answer in time" in failure(RemoteFile(Session(url, None, QUICK), f"{url}/f", "f")).message


def test_silence_instead_of_a_tls_handshake() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        assert "did not answer in time" in failure(RemoteFile(Session(url, None, QUICK), f"{url}/f", "f")).message


def test_no_tls_where_it_should_be(site: RangeSite) -> None:
    url = site.url.replace("http:", "https:")
    file = RemoteFile(Session(url, TOKEN), f"{url}/f", "f")
    assert failure(file).message.startswith("cannot read f: 127.0.0.1")
    assert not site.log


# --- redirects and the token ---


def _to(location: str, status: int = 302) -> Callable[[RangeHandler], None]:
    return lambda handler: handler.reply(status, b"go on", Location=location)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_token_stays_at_home(status: int, site: RangeSite, other: RangeSite) -> None:
    act(site, _to(f"{other.url}/f?signature=abc", status))
    file = remote(site)
    assert file.prefix(100) == CONTENT[:100]
    assert file.prefix(200) == CONTENT[:200]
    assert [request.headers.get("authorization") for request in site.log] == [f"Bearer {TOKEN}"]
    assert len(other.log) == 2, "the second range goes where the first one was found"
    for request in other.log:
        assert TOKEN not in str(request.headers) and "authorization" not in request.headers
        assert "cookie" not in request.headers


def test_the_token_does_not_come_back_by_another_name(site: RangeSite) -> None:
    port = site.url.rpartition(":")[2]
    site.acts["/f"] = _to(f"http://localhost:{port}/g")
    site.bodies["/g"] = CONTENT
    assert remote(site).prefix(100) == CONTENT[:100]
    assert [("authorization" in r.headers, r.path) for r in site.log] == [(True, "/f"), (False, "/g")]


def test_redirects_at_home_keep_the_token(site: RangeSite) -> None:
    site.bodies["/moved/f"] = CONTENT
    act(site, _to("/moved/f", 307))
    assert remote(site).prefix(100) == CONTENT[:100]
    assert [r.headers.get("authorization") for r in site.log] == [f"Bearer {TOKEN}"] * 2


def test_redirect_loops(site: RangeSite, other: RangeSite) -> None:
    act(site, _to(f"{other.url}/f"))
    act(other, _to(f"{site.url}/f"))
    assert "more than 5 redirects" in failure(remote(site)).message
    assert len(site.log) + len(other.log) == 6
    assert not any("authorization" in request.headers for request in other.log)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("", "more than 5 redirects"),
        ("http://example.com/f", "redirects to example.com without https"),
        ("ftp://127.0.0.1/f", "no https address"),
        ("file:///etc/passwd", "no https address"),
        ("https://user:word@127.0.0.1/f", "no https address"),
        ("https://127.0.0.1:99999/f", "no https address"),
        ("https://[::1/f", "no address"),
        ("https:///f", "no https address"),
        ("/caf\xe9", "no https address"),
        ("/with space", "no https address"),
        ("/" + "x" * 20_000, "no https address"),
    ],
)
def test_redirects_to_elsewhere(location: str, expected: str, site: RangeSite) -> None:
    act(site, _to(location))
    assert expected in failure(remote(site)).message


def test_a_redirect_with_an_endless_body(site: RangeSite) -> None:
    site.bodies["/g"] = CONTENT
    act(site, lambda handler: handler.reply(302, CONTENT * 50, length=-1, Location="/g"))
    file = remote(site)
    assert file.prefix(100) == CONTENT[:100] and file._session.bytes_read == 100


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "caf\xe9", "\x1b[31m"])
def test_tokens_that_cannot_be_sent(token: str) -> None:
    with pytest.raises(DownloadError, match="holds characters no token has") as caught:
        Session("https://example.com", token)
    assert token not in caught.value.message


@pytest.mark.parametrize("endpoint", ["http://example.com", "http://127.0.0.1.example.com", "http://10.0.0.1"])
def test_endpoints_need_https(endpoint: str) -> None:
    with pytest.raises(DownloadError, match="HF_ENDPOINT is not https"):
        Session(endpoint)


@pytest.mark.parametrize("endpoint", ["example.com", "ftp://example.com", "https://", "https://u@h", "https://h:x"])
def test_endpoints_must_be_addresses(endpoint: str) -> None:
    with pytest.raises(DownloadError, match="HF_ENDPOINT is no address"):
        Session(endpoint)


def test_origins() -> None:
    assert split_url("https://Hub.Example/a?b=c#d") == (Origin("https", "hub.example", 443), "/a?b=c")
    assert split_url("http://[::1]:8080") == (Origin("http", "::1", 8080), "/")
    assert Origin("http", "::1", 80).is_loopback and Origin("http", "127.9.9.9", 80).is_loopback
    assert not Origin("http", "0.0.0.0", 80).is_loopback and not Origin("http", "localhost.", 80).is_loopback


def test_a_proxy_is_asked_for_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        seen: list[bytes] = []

        def refuse() -> None:
            peer, _ = listener.accept()
            with peer:
                seen.append(peer.recv(4096))
                peer.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        for name in ("NO_PROXY", "no_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:p%40ss@127.0.0.1:{listener.getsockname()[1]}")
        error = failure(RemoteFile(Session("https://hub.example", TOKEN), "https://hub.example/f", "f"))
        thread.join(60)
    assert seen[0].startswith(b"CONNECT hub.example:443 HTTP/1.") and TOKEN.encode() not in seen[0]
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==\r\n" in seen[0]
    assert "407" in error.message and "p@ss" not in error.message


# --- TLS ---


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody trusts, with its key in the same file."""
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command to make a certificate")
    key, path = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ("-subj", "/CN=kv test", "-addext", "subjectAltName=IP:127.0.0.1")
    words = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    subprocess.run(["openssl", *words, "-keyout", key, "-out", path], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


def test_tls(certificate: Path, other: RangeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with serving_ranges(certificate) as site:
        site.bodies["/f"] = CONTENT
        error = failure(remote(site))
        assert "has no valid certificate" in error.message and "SSL_CERT_FILE" in error.hint
        assert not site.log, "nothing is sent to a stranger"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        file = remote(site)
        assert file.prefix(1000) == CONTENT[:1000] and file.prefix(2000) == CONTENT[:2000]
        assert [request.headers["authorization"] for request in site.log] == [f"Bearer {TOKEN}"] * 2
        act(site, _drip(site, RANGE_HEAD, b"z", 0.05))
        assert "did not answer in time" in failure(remote(site, limits=QUICK)).message
        act(site, _to(f"{other.url}/f"))
        assert "redirects to 127.0.0.1 without https" in failure(remote(site)).message
        assert not other.log
