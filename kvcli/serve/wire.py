"""Streams and objects on the wire: server-sent events, lines of JSON, responses that watch their client."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvcli.errors import KVError
from kvcli.runtime.engine.events import Event
from kvcli.serve.failures import Failure
from kvcli.serve.replies import Reply
from kvcli.serve.worker import Stopped

Found = TypeVar("Found")
Pieces = AsyncIterator[str]


def dump(value: Any) -> str:
    """JSON on one line, which UTF-8 can have: halves of surrogate pairs are ?."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def object_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, "application/json")


def event(value: Any, name: str = "") -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {value if isinstance(value, str) else dump(value)}\n\n"


class Stream(StreamingResponse):
    """What is sent while it is made. It ends where the client is gone. A failure is told by `fail`, since the status is
    on the wire."""

    def __init__(
        self,
        content: Pieces,
        reply: AbstractAsyncContextManager[Any],
        fail: Callable[[Failure], str],
        media_type: str = "text/event-stream",
        headers: dict[str, str] | None = None,
        status: int = 200,
    ) -> None:
        """`reply`: what it begins with, which is closed even where nothing of it was sent."""
        super().__init__(_telling(content, fail), status, headers, media_type)
        self.reply, self._fail = reply, fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._over = over_of(scope)
        async with self.reply:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        try:
            await unless_over(self._over, super().stream_response(send))
        except Stopped as error:
            last = self._fail(Failure.of(error)).encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def _telling(content: Pieces, fail: Callable[[Failure], str]) -> Pieces:
    try:
        async for text in content:
            yield text
    except KVError as error:
        yield fail(Failure.of(error))


def over_of(scope: Scope) -> asyncio.Event:
    """What is set when the server waits no longer for answers."""
    found: asyncio.Event = scope["app"].state.over
    return found


async def unless_over(over: asyncio.Event, work: Awaitable[Found], *others: Awaitable[Any]) -> Found:
    """The outcome of `work`, which is cancelled where one of `others` ends before it. Raises Stopped where the server
    waits no longer, ClientDisconnect where one of `others` has ended."""
    task, *watched = map(asyncio.ensure_future, (work, over.wait(), *others))
    try:
        await asyncio.wait({task, *watched}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        raise Stopped("the server is stopping") if over.is_set() else ClientDisconnect
    finally:
        for each in (task, *watched):
            each.cancel()


Written = Callable[[int, Event], "str"]


async def pieces(reply: Reply, begin: str, write: Written, end: Callable[[], str], ping: str) -> Pieces:
    """The text of a stream: `begin`, what `write` makes of every event, `end`; `ping` where there is silence. Raises
    KVError."""
    async with reply:
        yield begin
        async for found in reply.events():
            if text := ping if found is None else write(*found):
                yield text
        yield end()


async def while_connected(request: Request, work: Awaitable[Found]) -> Found:
    """The outcome of `work`, which is cancelled where the client goes away, or the server does not wait for it. Raises
    ClientDisconnect, Stopped then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return await unless_over(over_of(request.scope), work, gone())
