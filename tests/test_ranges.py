"""Range reads against a local server: honest, broken, hostile, slow. Every failure is one DownloadError, soon."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rangeserver import RangeHandler, RangeSite, serving_ranges

from kvcli.errors import DownloadError
from kvcli.runtime.headercache import Entry, HeaderCache
from kvcli.runtime.ranges import RemoteFile, read_document
from kvcli.runtime.websession import Limits, Session
from kvcli.runtime.wire import Origin, split_url

CONTENT = random.Random(5).randbytes(200_000)
TOKEN = "hf_secretsecret"
QUICK = Limits(answer_s=0.5, total_s=1.5)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kv" / "headers"


@pytest.fixture
def site() -> Iterator[RangeSite]:
    with serving_ranges() as site:
        site.bodies["/f"] = CONTENT
        yield site


@pytest.fixture
def other() -> Iterator[RangeSite]:
    with serving_ranges() as site:
        site.bodies["/f"] = CONTENT
        yield site


def remote(site: RangeSite, size: int | None = None, limits: Limits = QUICK, version: str = "") -> RemoteFile:
    return RemoteFile(Session(site.url, TOKEN, limits), f"{site.url}/f", "org/repo/f", size, version)


def failure(file: RemoteFile, n_bytes: int = 1000) -> DownloadError:
    """The error, which must come within the limits of time."""
    start = time.monotonic()
    with pytest.raises(DownloadError) as caught:
        file.prefix(n_bytes)
    assert time.monotonic() - start < QUICK.total_s + 1
    assert "\n" not in caught.value.message and TOKEN not in caught.value.message
    assert caught.value.hint and caught.value.exit_code == 7
    return caught.value


def act(site: RangeSite, what: Callable[[RangeHandler], None]) -> None:
    site.acts["/f"] = what


# --- honest servers ---


def test_a_prefix_grows_by_what_is_missing(site: RangeSite) -> None:
    file = remote(site)
    assert file.prefix(8) == CONTENT[:8] and file.size == len(CONTENT)
    assert file.prefix(5) == CONTENT[:8]
    assert file.prefix(5000) == CONTENT[:5000]
    assert file.prefix(1 << 40) == CONTENT == file.prefix(1 << 41)
    assert site.ranges("/f") == ["bytes=0-7", "bytes=8-4999", f"bytes=5000-{(1 << 40) - 1}"]
    assert file._session.bytes_read == site.sent == len(CONTENT)


def test_one_connection_serves_all_requests_of_a_file(site: RangeSite) -> None:
    ports = set()

    def note(handler: RangeHandler) -> None:
        ports.add(handler.client_address[1])
        handler.answer(CONTENT)

    act(site, note)
    file = remote(site)
    for n_bytes in (10, 100, 1000, 100_000):
        assert file.prefix(n_bytes) == CONTENT[:n_bytes]
    assert len(ports) == 1


def test_a_connection_closed_between_requests_is_opened_again(site: RangeSite) -> None:
    def close_after(handler: RangeHandler) -> None:
        handler.answer(CONTENT)
        handler.close_connection = True  # without saying so

    act(site, close_after)
    file = remote(site)
    assert file.prefix(10) == CONTENT[:10]
    time.sleep(0.05)
    assert file.prefix(20) == CONTENT[:20]


def test_chunked_ranges(site: RangeSite) -> None:
    def chunked(handler: RangeHandler) -> None:
        start, stop = handler.asked() or (0, 0)
        part = CONTENT[start : stop + 1]
        given = f"bytes {start}-{stop}/{len(CONTENT)}"
        handler.send_response(206)
        handler.send_header("Content-Range", given)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for at in range(0, len(part), 100):
            piece = part[at : at + 100]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    act(site, chunked)
    file = remote(site)
    assert file.prefix(1000) == CONTENT[:1000] and file.prefix(2000) == CONTENT[:2000]


def test_a_small_file_may_come_whole(site: RangeSite) -> None:
    act(site, lambda handler: handler.reply(200, b"small"))
    file = remote(site)
    assert file.prefix(1000) == b"small" and file.size == 5
    act(site, lambda handler: handler.reply(200, b"small", length=-1))
    assert remote(site).prefix(1000) == b"small"


# --- servers that ignore ranges or lie ---


def test_ignored_ranges_stop_before_the_body(site: RangeSite) -> None:
    act(site, lambda handler: handler.reply(200, CONTENT * 50))
    file = remote(site)
    error = failure(file)
    assert "ignores byte ranges (HTTP 200) and would send 10,000,000 bytes" in error.message
    assert file._session.bytes_read == 0


def test_ignored_ranges_without_a_length_stop_after_what_was_asked(site: RangeSite) -> None:
    act(site, lambda handler: handler.reply(200, CONTENT * 50, length=-1))
    file = remote(site)
    assert "ignores byte ranges" in failure(file).message
    assert file._session.bytes_read == 1001


def test_ignored_ranges_in_the_middle(site: RangeSite) -> None:
    file = remote(site)
    file.prefix(10)
    act(site, lambda handler: handler.reply(200, CONTENT))
    assert "ignores byte ranges" in failure(file).message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "without a usable Content-Range"),
        ("bytes 0-999/*", "without a usable Content-Range"),
        ("bytes */200000", "without a usable Content-Range"),
        ("pages 0-999/200000", "without a usable Content-Range"),
        ("bytes 0-999/" + "9" * 30, "without a usable Content-Range"),
        ("bytes 0-999/9999999999999999999", "200,000 were expected"),
        ("bytes 0-999/100", "200,000 were expected"),
        ("bytes 0-998/200000", "sent bytes 0-998: bytes 0-999 were asked for"),
        ("bytes 1-1000/200000", "sent bytes 1-1000"),
        ("bytes 0-1000/200000", "sent bytes 0-1000"),
        ("bytes 5-4/200000", "sent bytes 5-4"),
    ],
)
def test_wrong_content_ranges(given: str, expected: str, site: RangeSite) -> None:
    act(site, lambda handler: handler.reply(206, CONTENT[:1000], Content_Range=given))
    assert expected in failure(remote(site, len(CONTENT))).message


def test_an_absurd_size(site: RangeSite) -> None:
    act(site, lambda handler: handler.reply(206, bytes(1000), Content_Range=f"bytes 0-999/{10**18}"))
    assert "claims 1,000,000,000,000,000,000 bytes" in failure(remote(site)).message


def test_a_size_that_changes_between_requests(site: RangeSite) -> None:
    file = remote(site)
    file.prefix(10)
    site.bodies["/f"] = CONTENT + b"x"
    assert "200,000 were expected" in failure(file).message


def test_a_content_that_changes_between_requests(site: RangeSite) -> None:
    site.etags["/f"] = '"one"'
    file = remote(site)
    file.prefix(10)
    site.etags["/f"] = '"two"'
    assert "changed while it was read" in failure(file).message


@pytest.mark.parametrize("length", [999, 1001, 10**15])
def test_lengths_that_contradict_the_range(length: int, site: RangeSite) -> None:
    given = f"bytes 0-999/{len(CONTENT)}"
    act(site, lambda handler: handler.reply(206, CONTENT[:1000], length=length, Content_Range=given))
    assert f"announces {length:,} bytes for a range of 1,000" in failure(remote(site)).message


def test_a_body_that_breaks_off(site: RangeSite) -> None:
    given = f"bytes 0-999/{len(CONTENT)}"
    act(site, lambda handler: handler.reply(206, CONTENT[:400], length=1000, Content_Range=given))
    assert "broke off after 400 of 1,000 bytes" in failure(remote(site)).message


def test_a_whole_body_that_breaks_off(site: RangeSite) -> None:
    act(site, lambda handler: handler.reply(200, b"half", length=8))
    assert "broke off after 4 of 8 bytes" in failure(remote(site)).message
    with pytest.raises(DownloadError, match="broke off after 4 of 8 bytes"):
        read_document(Session(site.url), f"{site.url}/f", "the list")


def test_bytes_are_limited(site: RangeSite) -> None:
    file = remote(site, limits=Limits(total_bytes=100_000))
    assert "took more than" in failure(file, 150_000).message
    assert file._session.bytes_read < 100_000 + (1 << 17)


# --- not HTTP, not there, not now ---


def _raw(answer: bytes) -> Callable[[RangeHandler], None]:
    def send(handler: RangeHandler) -> None:
        handler.wfile.write(answer)
        handler.close_connection = True

    return send


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 206 " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 206 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-999/200000\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-999/200000\r\nContent-Length: -5\r\n\r\nabc",
        b"HTTP/1.1 304 Not Modified\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_answers_that_are_no_http(answer: bytes, site: RangeSite) -> None:
    act(site, _raw(answer))
    assert failure(remote(site)).message.startswith(("cannot read org/repo/f: ", "127.0.0.1 answered HTTP 999"))


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    file = RemoteFile(Session(f"http://127.0.0.1:{port}"), f"http://127.0.0.1:{port}/f", "org/repo/f")
    assert "127.0.0.1: Connection refused" in failure(file).message


@pytest.mark.parametrize(
    ("status", "headers", "message", "hint"),
    [
        (401, {}, "does not let us read org/repo/f (HTTP 401)", "HF_TOKEN"),
        (403, {}, "does not let us read org/repo/f (HTTP 403)", "accept its terms"),
        (403, {"X_Error_Code": "GatedRepo"}, "(HTTP 403)", "accept its terms"),
        (401, {"X_Error_Code": "RepoNotFound"}, "(HTTP 401)", "check the name"),
        (404, {}, "has no org/repo/f", "check the name"),
        (416, {}, "answered HTTP 416", "try again later"),
        (429, {"Retry_After": "17"}, "refuses to answer for org/repo/f now (HTTP 429)", "try again in 17 s"),
        (429, {"Retry_After": "soon\x1b[31m"}, "(HTTP 429)", "try again later"),
        (500, {}, "answered HTTP 500", "try again later"),
        (503, {}, "answered HTTP 503", "try again later"),
    ],
)
def test_refusals(status: int, headers: dict[str, str], message: str, hint: str, site: RangeSite) -> None:
    act(site, lambda handler: handler.reply(status, b"<html>" * 10_000, **headers))
    error = failure(remote(site))
    assert message in error.message and hint in error.hint
    assert len(site.log) == 1, "one refusal is enough"


# --- slow servers ---


def _drip(site: RangeSite, first: bytes, drop: bytes, every_s: float) -> Callable[[RangeHandler], None]:
    def send(handler: RangeHandler) -> None:
        handler.wfile.write(first)
        handler.close_connection = True
        while not site.closing.wait(every_s):
            handler.wfile.write(drop)

    return send


RANGE_HEAD = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-999/200000\r\nContent-Length: 1000\r\n\r\n"


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
    assert "did not answer in time" in failure(remote(site)).message
    assert time.monotonic() - start >= QUICK.total_s - 0.1


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 206 OK\r\n", RANGE_HEAD])
def test_silence_ends_sooner(first: bytes, site: RangeSite) -> None:
    act(site, _drip(site, first, b"", 60))
    start = time.monotonic()
    assert "did not answer in time" in failure(remote(site)).message
    assert time.monotonic() - start < QUICK.answer_s + 0.5


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
    file = RemoteFile(Session(url, TOKEN, QUICK), f"{url}/f", "f")
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
        error = failure(RemoteFile(Session("https://hub.example", TOKEN, QUICK), "https://hub.example/f", "f"))
        thread.join(5)
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
        assert "did not answer in time" in failure(remote(site)).message
        act(site, _to(f"{other.url}/f"))
        assert "redirects to 127.0.0.1 without https" in failure(remote(site)).message
        assert not other.log


# --- the cache ---


def test_a_known_version_needs_no_request(site: RangeSite, private_cache: Path) -> None:
    first = remote(site, version="v1")
    first.prefix(5000)
    first.keep(3000)
    requests = len(site.log)
    again = remote(site, version="v1")
    assert again.prefix(3000) == CONTENT[:3000] and again.size == len(CONTENT) and again.etag == "v1"
    assert len(site.log) == requests and again._session.bytes_read == 0
    assert again.prefix(3500) == CONTENT[:3500]
    assert site.ranges("/f")[requests:] == ["bytes=3000-3499"], "what is cached is not read again"
    other_version = remote(site, version="v2")
    assert other_version.prefix(10) == CONTENT[:10]
    assert site.ranges("/f")[-1] == "bytes=0-9"


def test_an_etag_is_asked_for(site: RangeSite) -> None:
    site.etags["/f"] = '"abc"'
    first = remote(site)
    first.prefix(5000)
    first.keep(3000)
    again = remote(site)
    assert again.prefix(3000) == CONTENT[:3000] and again.etag == '"abc"'
    assert again._session.bytes_read == 0 and site.log[-1].headers["if-none-match"] == '"abc"'
    longer = remote(site)
    assert longer.prefix(4000) == CONTENT[:4000] and longer._session.bytes_read == 1000
    site.etags["/f"] = '"new"'
    site.bodies["/f"] = CONTENT[::-1]
    assert remote(site).prefix(100) == CONTENT[::-1][:100]


def test_without_an_etag_nothing_is_kept(site: RangeSite, private_cache: Path) -> None:
    file = remote(site)
    file.prefix(100)
    file.keep(100)
    assert not private_cache.exists()


def test_entries_are_private_and_whole(site: RangeSite, private_cache: Path) -> None:
    site.etags["/f"] = '"abc"'
    file = remote(site)
    file.prefix(100)
    file.keep(100)
    (entry,) = private_cache.iterdir()
    assert private_cache.stat().st_mode & 0o777 == 0o700 and entry.stat().st_mode & 0o777 == 0o600
    assert TOKEN.encode() not in entry.read_bytes()
    whole = entry.read_bytes()
    for damaged in (
        whole[:-1],
        whole + b"x",
        whole[:50],
        b"",
        b"[]\n",
        b"{}\n",
        whole.replace(b"abc", b"abd"),
        b"\n",
    ):
        entry.write_bytes(damaged)
        assert remote(site).prefix(100) == CONTENT[:100]
    assert site.ranges("/f").count("bytes=0-99") == 9


def test_offline_needs_the_cache(site: RangeSite) -> None:
    session = Session(site.url, None, QUICK, offline=True)
    with pytest.raises(DownloadError, match="may not be used \\(--offline\\)"):
        RemoteFile(session, f"{site.url}/f", "org/repo/f").prefix(10)
    with pytest.raises(DownloadError, match="may not be used"):
        read_document(session, f"{site.url}/f", "the list")
    online = remote(site, version="v1")
    online.prefix(100)
    online.keep(100)
    requests = len(site.log)
    file = RemoteFile(session, f"{site.url}/f", "org/repo/f")
    assert file.prefix(100) == CONTENT[:100]
    with pytest.raises(DownloadError, match="may not be used"):
        file.prefix(101)
    assert len(site.log) == requests


def test_an_unwritable_cache_is_told_and_survived(
    site: RangeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in a file
    file = remote(site, version="v1")
    assert file.prefix(100) == CONTENT[:100]
    file.keep(100)
    assert len(file._session.notices) == 1 and "going on without it" in file._session.notices[0]


def test_a_full_disk_is_told_and_survived(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    told: list[str] = []
    monkeypatch.setattr(os, "replace", full)
    HeaderCache(told.append).put("u", Entry("e", 3, b"abc"))
    assert len(told) == 1 and "No space left" in told[0] and list(private_cache.iterdir()) == []


def test_the_oldest_entries_make_room(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.runtime.headercache.MAX_FOLDER_BYTES", 10_000)
    cache = HeaderCache(lambda text: pytest.fail(text))
    for number in range(6):
        cache.put(f"u{number}", Entry("e", 3000, bytes(3000)))
        os.utime(cache._path(f"u{number}"), (number, number))
    there = [number for number in range(6) if cache.get(f"u{number}")]
    assert there == [3, 4, 5]


def test_documents(site: RangeSite) -> None:
    site.bodies["/d"], site.etags["/d"] = b'{"a": 1}', 'W/"1"'
    session = Session(site.url, TOKEN, QUICK)
    assert read_document(session, f"{site.url}/d", "the list") == b'{"a": 1}' and session.bytes_read == 8
    assert read_document(session, f"{site.url}/d", "the list") == b'{"a": 1}' and session.bytes_read == 8
    site.bodies["/d"], site.etags["/d"] = b"{}", 'W/"2"'
    assert read_document(session, f"{site.url}/d", "the list") == b"{}"
    site.acts["/d"] = lambda handler: handler.reply(206, b"{}", Content_Range="bytes 0-1/2")
    with pytest.raises(DownloadError, match="unexpected answer \\(HTTP 206\\)"):
        read_document(session, f"{site.url}/d", "the list")


def test_documents_are_limited(site: RangeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.runtime.ranges.MAX_DOCUMENT_BYTES", 100_000)
    session = Session(site.url, None, QUICK)
    with pytest.raises(DownloadError, match="larger than"):
        read_document(session, f"{site.url}/f", "the list")
    assert session.bytes_read == 100_001
