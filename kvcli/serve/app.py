"""The application: routes of all interfaces, and what is checked of every call before one reads it."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvcli.errors import KVError
from kvcli.serve import anthropic, completions, native, ollama, openai, responses, wire
from kvcli.serve.failures import Failure, Refused
from kvcli.serve.serving import Serving

LOG = logging.getLogger("kvcli")
BODY_S = 30.0  # that a client may take to send a call
Handler = Callable[[Request, Any, bytes], Awaitable[Response]]
Worded = Callable[[Failure], dict[str, Any]]


@dataclass(frozen=True)
class Guard:
    """Who may call. `key`: None = anybody; `origins`: of pages in browsers, "*" = any; `hosts`: names that this server
    goes by, so that no page can reach it under a name of its own; None = any."""

    key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    max_body: int = 32 << 20

    def check(self, request: Request) -> None:
        """Raises Refused."""
        if self.hosts is not None and _name(request.headers.get("host", "")) not in self.hosts:
            told = "kv serve --host NAME has it answer to NAME"
            raise Refused(403, "this server does not answer to that host name", told)
        origin = request.headers.get("origin")
        if origin is not None and not self.allows(origin, request):
            raise Refused(403, "pages of other sites may not call this server", "kv serve --cors ORIGIN allows one")
        if self.key is not None and request.url.path not in native.OPEN and request.method != "OPTIONS":
            given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                raise Refused(401, "the API key is missing or wrong", "send it as Authorization: Bearer KEY")

    def allows(self, origin: str, request: Request) -> bool:
        """Whether a page from there may call: this server's own may."""
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        return origin in (own, *self.origins) or "*" in self.origins

    def headers(self, request: Request) -> dict[str, str]:
        """For a page of another site that may call."""
        origin = request.headers.get("origin")
        if origin is None or not self.origins or not self.allows(origin, request):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": request.headers.get("access-control-request-headers", "*"),
            "vary": "origin",
        }


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host.rsplit("]", 1)[0].lstrip("[") if host.startswith("[") else host.rsplit(":", 1)[0]


async def _body(request: Request, most: int) -> bytes:
    """Raises Refused for one that is too long, or takes too long; Stopped."""
    if int(request.headers.get("content-length") or 0) > most:
        raise Refused(413, f"the body is longer than {most:,} bytes", "kv serve --max-body sets it")
    data = bytearray()

    async def read() -> None:
        async for piece in request.stream():
            data.extend(piece)
            if len(data) > most:
                raise Refused(413, f"the body is longer than {most:,} bytes", "kv serve --max-body sets it")

    try:
        with anyio.fail_after(BODY_S):
            await wire.unless_over(wire.over_of(request.scope), read())
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_S:.0f} s") from None
    return bytes(data)


def _refused(found: Failure, worded: Worded, headers: dict[str, str]) -> Response:
    more = {"retry-after": "1"} if found.status in (429, 503) else {}
    return wire.object_response(worded(found), found.status, {**headers, **more})


def _endpoint(
    handler: Handler, worded: Worded, serving: Serving[Any], guard: Guard
) -> Callable[[Request], Awaitable[Response]]:
    """A call from its checks to its answer; what goes wrong is worded as its interface does."""

    async def endpoint(request: Request) -> Response:
        headers = guard.headers(request)
        try:
            guard.check(request)
            body = await _body(request, guard.max_body) if request.method == "POST" else b""
            response = await handler(request, serving, body)
            response.headers.update(headers)
            return response
        except KVError as error:
            return _refused(Failure.of(error), worded, headers)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception:
            LOG.exception("a call failed")
            return _refused(Failure(500, "an internal error, which the server's log has"), worded, headers)

    return endpoint


def _worded_for(path: str) -> Worded:
    """How the interface that a path belongs to words errors."""
    if path.startswith("/v1/messages"):
        return anthropic.failure
    if path.startswith("/api/"):
        return ollama.failure
    return openai.failure if path.startswith("/v1/") else native.failure


async def _no_route(guard: Guard, request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = {
        404: f"there is no {request.url.path[:200]} here",
        405: f"{request.method} is not allowed for {request.url.path}",
    }
    if request.method == "OPTIONS" and (headers := guard.headers(request)):
        return Response(status_code=204, headers=headers)
    return _refused(Failure(status, known.get(status, "the call failed")), _worded_for(request.url.path), {})


_INTERFACES = (
    ((*openai.ROUTES, *completions.ROUTES, *responses.ROUTES), openai.failure),
    (anthropic.ROUTES, anthropic.failure),
    (ollama.ROUTES, ollama.failure),
    (native.ROUTES, native.failure),
)


def application(serving: Serving[Any], guard: Guard, interfaces: Any = _INTERFACES) -> Starlette:
    """The ASGI application of a server. `interfaces`: routes, and how each words errors."""
    routes = [
        Route(path, _endpoint(handler, worded, serving, guard), methods=[method])
        for listed, worded in interfaces
        for method, path, handler in listed
    ]
    missing = partial(_no_route, guard)
    found = Starlette(routes=routes, exception_handlers={404: missing, 405: missing})
    found.state.over = asyncio.Event()
    return found
