"""GET requests to a hub: https, redirects, bounded time and bytes, and a token for one origin only."""

from __future__ import annotations

import http.client
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

import kvcli
from kvcli.errors import DownloadError
from kvcli.runtime.hub.deadlines import Deadline, Origin, connect, split_url
from kvcli.runtime.hub.headercache import HeaderCache

_BLOCK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
BROKEN = "the server, or something between, is broken; try again, or download the file"


@dataclass(frozen=True)
class Limits:
    """What a session may cost. Times in seconds: between two bytes, and for everything."""

    answer_s: float = 20
    total_s: float = 180
    total_bytes: int = 128 << 20
    redirects: int = 5


class Interrupted(DownloadError):
    """The network or the server failed in a way that may pass: asking again may help."""


class Session:
    """What all reads of one command share: the endpoint and its token, the limits, the cache, the byte count.

    The token is sent to the origin (scheme, host, port) of the endpoint, never elsewhere. https only, except
    where the endpoint itself is http on this machine.
    """

    def __init__(
        self, endpoint: str, token: str | None = None, limits: Limits | None = None, offline: bool = False
    ) -> None:
        """Raises DownloadError for an endpoint or a token that cannot be used."""
        self.endpoint, self.offline = endpoint.rstrip("/"), offline
        self.limits = limits or Limits()
        self.notices: list[str] = []
        self.cache = HeaderCache(self.notices.append)
        self.deadline = Deadline(self.limits.total_s, self.limits.answer_s)
        self.bytes_read = 0  # of bodies, over the network
        self._lock = threading.Lock()
        self._token = token
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise DownloadError("the hub's token holds characters no token has", "correct HF_TOKEN")
        try:
            self._home, _ = split_url(self.endpoint)
        except ValueError:
            raise DownloadError(f"HF_ENDPOINT is no address: {self.endpoint[:80]!r}", "correct it") from None
        if self._home.scheme == "http" and not self._home.is_loopback:
            raise DownloadError(f"HF_ENDPOINT is not https: {self.endpoint[:80]}", "kv reads https only")

    def may_ask(self, origin: Origin) -> bool:
        """https, or http on this machine for an endpoint on this machine."""
        return origin.scheme == "https" or (origin.is_loopback and self._home.scheme == "http")

    def headers_for(self, origin: Origin) -> dict[str, str]:
        common = {"User-Agent": f"kv/{kvcli.__version__}", "Accept-Encoding": "identity"}
        secret = {"Authorization": f"Bearer {self._token}"} if self._token and origin == self._home else {}
        return common | secret

    def count(self, n_bytes: int) -> None:
        """Add to `bytes_read`. Raises DownloadError beyond the limit."""
        with self._lock:
            self.bytes_read += n_bytes
            excess = self.bytes_read > self.limits.total_bytes
        if excess:
            limit = f"{self.limits.total_bytes >> 20} MiB"
            raise DownloadError(f"reading headers alone took more than {limit}", "give a downloaded file")


class Conversation:
    """Requests about one thing (`label` names it in messages): follows redirects, keeps connections open."""

    def __init__(self, session: Session, label: str) -> None:
        self._session, self.label = session, label
        self._connections: dict[Origin, http.client.HTTPConnection] = {}

    def get(self, url: str, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, str]:
        """The answer, not redirected any further, and the URL that gave it.

        Raises DownloadError: unreachable, out of time, too many redirects or one that leaves https, a status
        other than 200, 206 and 304.
        """
        for _ in range(self._session.limits.redirects + 1):
            origin, target = self._address(url)
            response = self._ask(origin, target, headers)
            if response.status not in _REDIRECTS:
                if response.status not in (200, 206, 304):
                    self.close()
                    raise refusal(response, self.label, origin.host)
                return response, url
            location = response.headers.get("Location", "")
            if response.length is None or response.length > _BLOCK:
                self.close()  # cheaper than reading what comes with the redirect
            else:
                self.read(response, _BLOCK)
            try:
                url = urllib.parse.urljoin(url, location)
            except ValueError:
                raise self.error(f"{origin.host} redirects to what is no address", BROKEN) from None
        raise self.error(f"more than {self._session.limits.redirects} redirects", BROKEN)

    def _address(self, url: str) -> tuple[Origin, str]:
        try:
            origin, target = split_url(url)
        except ValueError:
            raise self.error("the server redirects to what is no https address", BROKEN) from None
        if not self._session.may_ask(origin):
            raise self.error(f"the server redirects to {origin.host} without https", "kv reads https only")
        return origin, target

    def _ask(self, origin: Origin, target: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        sent = self._session.headers_for(origin) | headers
        while True:
            fresh = origin not in self._connections
            if fresh:
                self._connections[origin] = connect(origin, self._session.deadline)
            connection = self._connections[origin]
            try:
                connection.request("GET", target, headers=sent)
                return connection.getresponse()
            except (OSError, http.client.HTTPException, UnicodeError) as problem:
                self.close()
                if fresh or not isinstance(problem, ConnectionError):  # a kept connection may have been closed
                    raise self.explain(problem, origin.host) from problem

    def read(self, response: http.client.HTTPResponse, n_bytes: int) -> bytes:
        """The next `n_bytes` of the body, fewer where it ends. Raises DownloadError."""
        return b"".join(self.stream(response, n_bytes))

    def stream(self, response: http.client.HTTPResponse, n_bytes: int) -> Iterator[bytes]:
        """The next `n_bytes` of the body in blocks, each as soon as it is here. Raises DownloadError."""
        left = n_bytes
        while left:
            try:
                block = response.read(min(left, _BLOCK))
            except http.client.IncompleteRead as cut:
                block, left = cut.partial, len(cut.partial)
            except (OSError, http.client.HTTPException, ValueError) as problem:
                self.close()
                raise self.explain(problem, "the server") from problem
            if not block:
                break
            self._session.count(len(block))
            left -= len(block)
            yield block
        if not response.isclosed():
            self.close()

    def error(self, what: str, hint: str) -> DownloadError:
        self.close()
        return DownloadError(f"cannot read {self.label}: {what}", hint)

    def interrupted(self, what: str, hint: str) -> Interrupted:
        error = self.error(what, hint)
        return Interrupted(error.message, error.hint)

    def explain(self, problem: Exception, host: str) -> DownloadError:
        """The user's words for what the network, TLS or http.client raised."""
        hint = "check the network"
        if isinstance(problem, TimeoutError):
            return self.interrupted(f"{host} did not answer in time", "check the network, or try again later")
        if isinstance(problem, ssl.SSLCertVerificationError):
            hint = "if your network has its own certificate authority set SSL_CERT_FILE"
            return self.error(f"{host} has no valid certificate ({problem.verify_message})", hint)
        if isinstance(problem, OSError):
            return self.interrupted(f"{host}: {problem.strerror or str(problem)[:80] or 'connection lost'}", hint)
        return self.error(f"{host} does not speak HTTP properly ({type(problem).__name__})", BROKEN)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def etag_of(response: http.client.HTTPResponse) -> str:
    """The answer's ETag, "" if there is none fit to be sent back."""
    etag = response.headers.get("ETag", "")
    return etag if etag.isascii() and etag.isprintable() and len(etag) <= 256 else ""


def refusal(response: http.client.HTTPResponse, label: str, host: str) -> DownloadError:
    """The error for a status that says no."""
    status, code = response.status, response.headers.get("X-Error-Code", "")
    token = "for a private or gated repository set HF_TOKEN"
    if code == "GatedRepo" or (status == 403 and not code):
        hint = "accept its terms on its page, then set HF_TOKEN"
        return DownloadError(f"{host} does not let us read {label} (HTTP {status})", hint)
    if status in (401, 403):
        hint = f"check the name; {token}"
        return DownloadError(f"{host} does not let us read {label} (HTTP {status})", hint)
    if status in (404, 410):
        return DownloadError(f"{host} has no {label}, or does not show it", f"check the name; {token}")
    if status == 429:
        wait = response.headers.get("Retry-After", "")
        when = f"in {wait} s" if wait.isdecimal() and len(wait) < 6 else "later"
        return Interrupted(f"{host} refuses to answer for {label} now (HTTP 429)", f"try again {when}")
    kind = Interrupted if status == 408 or status >= 500 else DownloadError
    return kind(f"{host} answered HTTP {status} for {label}", "try again later")
