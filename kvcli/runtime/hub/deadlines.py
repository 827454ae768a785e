"""HTTP connections that cannot outlast a deadline, whichever way the other side is slow. Standard library."""

from __future__ import annotations

import base64
import http.client
import io
import ipaddress
import socket
import ssl
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from kvcli.errors import DownloadError

_ADDRESSES_TRIED = 4  # of one name


class Deadline:
    """`total_s` for everything; within it, every wait for the network at most `answer_s`."""

    def __init__(self, total_s: float, answer_s: float) -> None:
        self._end, self._answer_s = time.monotonic() + total_s, answer_s

    def timeout(self) -> float:
        """Seconds that the next wait may take. Raises TimeoutError when there are none left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("out of time")
        return min(self._answer_s, left)


@dataclass(frozen=True)
class Origin:
    """Who is asked: what must be the same for a token to be sent."""

    scheme: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether this is the machine itself."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def split_url(url: str) -> tuple[Origin, str]:
    """The origin and the request target (path and query). Raises ValueError for what is no HTTP address."""
    if len(url) > 1 << 14 or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("not an address")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("not an https address")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    return Origin(parts.scheme, parts.hostname, port), target


class _TimedReader(io.RawIOBase):
    """Reads a socket; before every wait the deadline is asked how long it may be."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._raw, self._sock, self._deadline = sock.makefile("rb", buffering=0), sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.timeout())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedSocket:
    """What http.client needs of a socket, under a deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._deadline.timeout())
        self._sock.sendall(data)

    def close(self) -> None:
        self._sock.close()


class _Timed(http.client.HTTPConnection):
    """Connects within the deadline, and reads and writes through a _TimedSocket."""

    deadline: Deadline

    def connect(self) -> None:
        self._create_connection = self._dial  # where http.client makes its sockets
        self.timeout = self.deadline.timeout()
        super().connect()  # with the proxy's CONNECT, and TLS, whose whole handshake obeys one timeout
        self.sock: Any = _TimedSocket(self.sock, self.deadline)

    def _dial(self, address: tuple[str, int], *_: Any) -> socket.socket:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[:_ADDRESSES_TRIED]
        for number, (family, kind, protocol, _name, place) in enumerate(found, 1):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self.deadline.timeout())
                sock.connect(place)
                return sock
            except OSError:
                sock.close()
                if number == len(found):
                    raise
        raise OSError(f"no address for {address[0]}")


class _TimedHTTPS(_Timed, http.client.HTTPSConnection):
    """A connection over TLS, with the same limits of time; certificates are verified."""


def connect(origin: Origin, deadline: Deadline) -> http.client.HTTPConnection:
    """A connection to the origin (through HTTPS_PROXY, where that is set), not opened yet.

    Raises DownloadError for a proxy that cannot be used.
    """
    connection: _Timed
    if origin.scheme == "http":
        connection = _Timed(origin.host, origin.port)
    else:
        proxy = _proxy_for(origin.host)
        place = proxy[:2] if proxy else (origin.host, origin.port)
        connection = _TimedHTTPS(*place, context=ssl.create_default_context())
        if proxy:
            connection.set_tunnel(origin.host, origin.port, headers=proxy[2])
    connection.deadline = deadline
    return connection


def _proxy_for(host: str) -> tuple[str, int, dict[str, str]] | None:
    """Host, port and headers of the proxy that HTTPS_PROXY sets, unless NO_PROXY names the host."""
    text = urllib.request.getproxies().get("https")
    if not text or urllib.request.proxy_bypass(host):
        return None
    parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        raise DownloadError("HTTPS_PROXY is not an http://host:port address", "correct it, or set NO_PROXY")
    headers = {}
    if parts.username:
        user = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}")
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    return parts.hostname, port, headers
