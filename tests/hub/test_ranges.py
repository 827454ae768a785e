"""Range reads from a local server that is honest, ignores ranges, lies, or speaks no HTTP."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

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
from rangeserver import RangeHandler, RangeSite

from kvcli.errors import DownloadError
from kvcli.runtime.hub.ranges import RemoteFile, read_document
from kvcli.runtime.hub.websession import Limits, Session

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
        RANGE_HEAD.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked") + b"zz\r\nabc",
        RANGE_HEAD.replace(b"1000", b"-5") + b"abc",
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


# --- documents ---


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
    monkeypatch.setattr("kvcli.runtime.hub.ranges.MAX_DOCUMENT_BYTES", 100_000)
    session = Session(site.url, None, QUICK)
    with pytest.raises(DownloadError, match="larger than"):
        read_document(session, f"{site.url}/f", "the list")
    assert session.bytes_read == 100_001
