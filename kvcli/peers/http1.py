"""HTTP to a program on this machine that listens on a Unix socket, one call for each connection."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import h11

_PIECE = 1 << 16
SILENCE_S = 30.0  # of an answer, behind which it is asked whether anybody is there
ANSWER_S = 30.0  # that what is answered at once may take


class PeerGone(Exception):
    """Nobody answers, or no more."""


class Answered:
    """The answer to a call, whose body is still to come. Close it: what nobody reads is not computed."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: h11.Connection, socket: str
    ) -> None:
        self._reader, self._writer, self._connection, self._socket = reader, writer, connection, socket
        self.status = 0
        self.headers: dict[str, str] = {}

    async def piece(self) -> bytes:
        """What came next of the body; b"" at its end. May be cancelled, and asked again. Raises PeerGone."""
        event = await self._event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def whole(self) -> bytes:
        """Raises PeerGone."""
        found = bytearray()
        while piece := await self.piece():
            found += piece
        return bytes(found)

    def close(self) -> None:
        self._writer.close()

    async def _event(self) -> Any:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(await self._received())
            return event
        except (OSError, h11.ProtocolError) as error:
            raise PeerGone(str(error)) from None

    async def _received(self) -> bytes:
        """Whatever comes next, however long it takes, as long as the program says that it works. Raises PeerGone."""
        while True:
            try:
                return await asyncio.wait_for(self._reader.read(_PIECE), SILENCE_S)
            except asyncio.TimeoutError:
                status, _ = await asked(self._socket, "/health")
                if status >= 500:  # it answers, and what computes is gone
                    raise PeerGone("it says that it has failed") from None

    async def _begin(self) -> None:
        while not isinstance(event := await self._event(), h11.Response):
            if isinstance(event, h11.ConnectionClosed):
                raise PeerGone("it ended without an answer")
        self.status = event.status_code
        self.headers = {name.decode().lower(): value.decode("latin-1") for name, value in event.headers}


async def call(socket: str, method: str, target: str, body: bytes = b"") -> Answered:
    """Begin a call. Raises PeerGone."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(socket), ANSWER_S)
    except (OSError, asyncio.TimeoutError) as error:
        raise PeerGone(str(error) or "it takes no calls") from None
    connection = h11.Connection(h11.CLIENT)
    answered = Answered(reader, writer, connection, socket)
    headers = [("host", "localhost"), ("connection", "close"), ("content-length", str(len(body)))]
    headers += [("content-type", "application/json")] if body else []
    try:
        sent = connection.send(h11.Request(method=method, target=target, headers=headers)) or b""
        sent += (connection.send(h11.Data(data=body)) or b"") + (connection.send(h11.EndOfMessage()) or b"")
        writer.write(sent)
        await asyncio.wait_for(writer.drain(), ANSWER_S)
        await answered._begin()
    except (OSError, asyncio.TimeoutError) as error:
        writer.close()
        raise PeerGone(str(error) or "it does not read") from None
    except BaseException:
        writer.close()
        raise
    return answered


async def asked(socket: str, target: str, value: Any = None) -> tuple[int, Any]:
    """Status and JSON of a whole answer, None where it has none; `value`: what is posted. Raises PeerGone, also where
    it takes longer than ANSWER_S."""
    body = b"" if value is None else json.dumps(value).encode()
    try:
        status, data = await asyncio.wait_for(_at_once(socket, target, body), ANSWER_S)
    except asyncio.TimeoutError:
        raise PeerGone("it does not answer") from None
    with suppress(ValueError):
        return status, json.loads(data)
    return status, None


async def _at_once(socket: str, target: str, body: bytes) -> tuple[int, bytes]:
    answered = await call(socket, "POST" if body else "GET", target, body)
    try:
        return answered.status, await answered.whole()
    finally:
        answered.close()


class Events:
    """The server-sent events of an answer: what stands behind `data: ` of each."""

    def __init__(self, answered: Answered) -> None:
        self._answered, self._held, self._ended = answered, b"", False

    async def next(self) -> str | None:
        """None at the end. May be cancelled, and asked again. Raises PeerGone."""
        while True:
            line, newline, rest = self._held.partition(b"\n")
            if not newline:
                if self._ended:
                    return None
                piece = await self._answered.piece()
                self._ended, self._held = not piece, self._held + piece
                continue
            self._held = rest
            if line.startswith(b"data:"):
                return line[len(b"data:") :].strip().decode("utf-8", "replace")
