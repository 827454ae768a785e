"""Messages between a command and the process that keeps its model, over a Unix socket.

A message is a header of eight bytes, "kv", the number of the protocol, what kind it is and the length of its body, then
the body; descriptors travel with the header. A request's body is marshalled: both ends run the same Python, as
`places.kind` has it. All else is text, which any version of `kv` reads.
"""

import _socket  # the part of `socket` that is compiled: importing the other takes milliseconds
import os
import sys

TYPE_CHECKING = False  # typing itself takes milliseconds, and `kv` starts here
if TYPE_CHECKING:
    from collections.abc import Sequence

PROTOCOL = 1
MOST_FDS, MOST_BYTES = 200, 64 << 20
RUN, HANDED, STATUS, STOP = b"R", b"H", b"S", b"X"  # asked: of these HANDED comes from another process of ours
PID, GO, COLD, DONE, ENDED, TOLD = b"P", b"G", b"C", b"D", b"E", b"T"  # told
_HEADER = 8


class Closed(Exception):
    """The other end is gone, or says what this version does not know."""


def connect(name: str) -> "_socket.socket":
    """To the socket of that name in `places.folder()`. Raises OSError."""
    from kvcli.keepalive import socketfolder

    path, place = socketfolder.reached(name)
    made = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    finally:
        os.close(place)
    return made


def send(conn: "_socket.socket", kind: bytes, body: bytes = b"", fds: "Sequence[int]" = ()) -> None:
    """Raises OSError."""
    header = b"kv" + bytes([PROTOCOL]) + kind + len(body).to_bytes(4, "big")
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    conn.sendmsg([header], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else [])
    conn.sendall(body)


def receive(conn: "_socket.socket") -> "tuple[bytes, bytes, list[int]]":
    """Kind, body and descriptors of the next message. Raises Closed; `TimeoutError` where the socket has a timeout."""
    fds: list[int] = []
    try:
        space = _socket.CMSG_SPACE(4 * MOST_FDS)
        header, ancillary, _, _ = conn.recvmsg(_HEADER, space, _socket.MSG_CMSG_CLOEXEC)
        for level, what, data in ancillary:
            if level == _socket.SOL_SOCKET and what == _socket.SCM_RIGHTS:
                fds += [int.from_bytes(data[i : i + 4], sys.byteorder) for i in range(0, len(data) - 3, 4)]
        header += _exactly(conn, _HEADER - len(header)) if header else b""
        length = int.from_bytes(header[4:], "big")
        if header[:3] != b"kv" + bytes([PROTOCOL]) or length > MOST_BYTES:
            raise Closed
        return header[3:4], _exactly(conn, length), fds
    except TimeoutError:
        raise
    except (Closed, OSError):
        for fd in fds:
            os.close(fd)
        raise Closed from None


def _exactly(conn: "_socket.socket", size: int) -> bytes:
    parts = []
    while size > 0:
        part = conn.recv(min(size, 1 << 20))
        if not part:
            raise Closed
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def peer(conn: "_socket.socket") -> "tuple[int, int, int]":
    """Process, user and group at the other end of a socket, as they were when it was connected."""
    data = conn.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    pid, uid, gid = (int.from_bytes(data[i : i + 4], sys.byteorder, signed=True) for i in (0, 4, 8))
    return pid, uid, gid
