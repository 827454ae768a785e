"""The first bytes of remote files by HTTP ranges: no more of them than the reader of a header asks for."""

from __future__ import annotations

import http.client
import re

from kvcli.errors import DownloadError
from kvcli.runtime.formats.boundedjson import MAX_DOCUMENT_BYTES
from kvcli.runtime.hub.headercache import Entry
from kvcli.runtime.hub.websession import BROKEN, Conversation, Session, etag_of

MAX_FILE_BYTES = 1 << 50
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)


def read_document(session: Session, url: str, label: str) -> bytes:
    """A small document, whole; an unchanged one (HTTP 304) comes from the cache. Raises DownloadError."""
    known = session.cache.get(url)
    if session.offline:
        return _offline(known, label).body
    talk = Conversation(session, label)
    try:
        response, _ = talk.get(url, {"If-None-Match": known.etag} if known else {})
        if response.status == 304 and known:
            return known.body
        if response.status != 200:
            raise talk.error(f"an unexpected answer (HTTP {response.status})", BROKEN)
        length = response.length  # what the server announced
        body = talk.read(response, MAX_DOCUMENT_BYTES + 1)
    finally:
        talk.close()
    if len(body) > MAX_DOCUMENT_BYTES:
        raise talk.error(f"it is larger than {MAX_DOCUMENT_BYTES >> 20} MiB", BROKEN)
    if length is not None and len(body) != length:
        raise talk.error(f"the answer broke off after {len(body):,} of {length:,} bytes", "try again")
    if etag := etag_of(response):
        session.cache.put(url, Entry(etag, len(body), body))
    return body


def _offline(entry: Entry | None, label: str) -> Entry:
    if entry is None:
        hint = "run the command once while online, or give a downloaded file"
        raise DownloadError(f"the header of {label} is not here, and the network may not be used (`offline`)", hint)
    return entry


def content_range(response: http.client.HTTPResponse, talk: Conversation) -> tuple[int, int, int]:
    """The first and last byte that come, and how many the file has. Raises DownloadError if the server does not say."""
    given = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(given.strip())
    if not match:
        raise talk.error(f"a range without a usable Content-Range ({given[:60]!r})", BROKEN)
    first, last, total = (int(number) for number in match.groups())
    return first, last, total


class RemoteFile:
    """A growing prefix of one remote file.

    `version` is what the repository's list says of the content ("" if nothing): a cached prefix of that
    version needs no request. Without it the first request asks whether the cached one still holds.
    """

    def __init__(self, session: Session, url: str, label: str, size: int | None = None, version: str = "") -> None:
        self._session, self._url, self.label, self._listed = session, url, label, size
        self._talk, self._final_url = Conversation(session, label), url
        self._prefix, self._total, self._etag, self._version = b"", size, "", version
        self._known = session.cache.get(url)
        self._kept = 0
        if self._known and (session.offline or (version and self._known.etag == version)):
            self._adopt(self._known)

    def _adopt(self, entry: Entry) -> None:
        self._prefix, self._total, self._etag = entry.body, entry.total, entry.etag
        self._kept = len(entry.body)

    @property
    def size(self) -> int:
        """Bytes of the whole file. Known after the first `prefix`."""
        if self._total is None:
            raise ValueError("nothing was read yet")
        return self._total

    @property
    def etag(self) -> str:
        """What names this content: the list's version, else the server's ETag, else ""."""
        return self._version or self._etag

    def prefix(self, n_bytes: int) -> bytes:
        """At least the first `n_bytes` of the file, or all of a shorter one. Raises DownloadError."""
        if not self._complete(n_bytes):
            if self._session.offline:
                _offline(None, self.label)
            self._fetch(n_bytes)
            if not self._complete(n_bytes):  # the cached prefix was confirmed, but is too short
                self._fetch(n_bytes)
        return self._prefix

    def _complete(self, n_bytes: int) -> bool:
        have = len(self._prefix)
        return have >= n_bytes or (self._total is not None and bool(have) and have >= self._total)

    def _fetch(self, stop: int) -> None:
        start = len(self._prefix)
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if start == 0 and self._known and not self._version:
            headers["If-None-Match"] = self._known.etag
        response, self._final_url = self._talk.get(self._final_url, headers)
        if response.status == 304:
            if start or not self._known:
                raise self._talk.error("an unexpected answer (HTTP 304)", BROKEN)
            self._adopt(self._known)
            return
        etag = etag_of(response)
        if start and etag != self._etag and self._etag != self._version:
            raise self._talk.error("it changed while it was read", "try again")
        if response.status == 200:
            self._take_whole(response, start, stop)
        else:
            self._take_part(response, start, stop)
        self._etag = etag

    def _take_part(self, response: http.client.HTTPResponse, start: int, stop: int) -> None:
        """HTTP 206: the answer must be what was asked, of a file of the size we know."""
        first, last, total = content_range(response, self._talk)
        self._check_total(total)
        if first != start or last != min(stop, total) - 1:
            asked = f"bytes {start}-{stop - 1} were asked for"
            raise self._talk.error(f"the server sent bytes {first}-{last}: {asked}", BROKEN)
        wanted = last - first + 1
        if response.length is not None and response.length != wanted:
            claim = f"the server announces {response.length:,} bytes for a range of {wanted:,}"
            raise self._talk.error(claim, BROKEN)
        self._append(self._talk.read(response, wanted), wanted)

    def _take_whole(self, response: http.client.HTTPResponse, start: int, stop: int) -> None:
        """HTTP 200: the server ignores ranges. Fine where the whole file was asked for, else too dear."""
        length = response.length
        if start or (length is not None and length > stop):
            size = f"{length:,} bytes" if length is not None else "the whole file"
            hint = "kv reads headers from servers that know ranges; download the file instead"
            raise self._talk.error(f"the server ignores byte ranges (HTTP 200) and would send {size}", hint)
        body = self._talk.read(response, stop + 1)
        if len(body) > stop:
            raise self._talk.error("the server ignores byte ranges (HTTP 200)", "download the file instead")
        self._check_total(len(body) if length is None else length)
        self._append(body, len(body) if length is None else length)

    def _check_total(self, total: int) -> None:
        if self._total is not None and total != self._total:
            claim = f"the server says {total:,} bytes, {self._total:,} were expected"
            raise self._talk.error(claim, "the file changed, or the server is broken; try again")
        if total > MAX_FILE_BYTES:
            raise self._talk.error(f"the server claims {total:,} bytes", BROKEN)
        self._total = total

    def _append(self, body: bytes, wanted: int) -> None:
        if len(body) != wanted:
            raise self._talk.error(f"the answer broke off after {len(body):,} of {wanted:,} bytes", "try again")
        self._prefix += body

    def keep(self, n_bytes: int) -> None:
        """The first `n_bytes` were all that was needed: cache them, and let go of the connections."""
        self._talk.close()
        if self.etag and self._kept != n_bytes:
            self._session.cache.put(self._url, Entry(self.etag, self.size, self._prefix[:n_bytes]))
