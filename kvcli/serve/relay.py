"""Routes of a server whose answers another program writes: OpenAI's calls pass through as they are, those of other
interfaces are asked as such (see upstream.py)."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvcli.errors import UsageError
from kvcli.peers import http1, mapping
from kvcli.serve import anthropic, asked, native, ollama, openai, responses, wire
from kvcli.serve.failures import Refused
from kvcli.serve.serving import Serving
from kvcli.serve.upstream import CHAT, DONE, TEXT, Upstream, answer_of, gone, read

Relay = Serving[Upstream]


async def _through(target: str, request: Request, serving: Relay, body: bytes) -> Response:
    """A call as it is, with the model's name and with what holds for calls that do not say otherwise."""
    try:
        call = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"the body is not JSON: {error}") from None
    if not isinstance(call, dict) or not isinstance(call.get("model", ""), str):
        raise UsageError("the body must be an object, and `model` a text")
    upstream = serving.host
    await upstream.load(call.get("model", ""))
    sent = {**mapping.sent(serving.sampling), **call, "model": upstream.name}
    if target == CHAT and upstream.variables:
        own = call.get("chat_template_kwargs") or {}
        if not isinstance(own, dict):
            raise UsageError("`chat_template_kwargs` must be an object")
        sent["chat_template_kwargs"] = {**upstream.variables, **own}
    called = await wire.while_connected(request, upstream.begin(target, json.dumps(sent).encode()))
    answered = called.answered
    kind = answered.headers.get("content-type", "application/json")
    try:
        if answered.status == 200 and kind.startswith("text/event-stream"):
            events = http1.Events(answered)
            first = await wire.while_connected(request, _event(events))
            return wire.Stream(_pieces(first, events), called, openai.failed, kind)
        data = await wire.while_connected(request, whole(answered))
    except BaseException:
        called.close()
        raise
    called.close()
    return Response(data, answered.status, media_type=kind)


async def whole(answered: http1.Answered) -> bytes:
    """An answer that is not streamed. Raises Stopped where it ends too early, Refused where it is none."""
    try:
        data = await answered.whole()
    except http1.PeerGone:
        raise gone() from None
    if answered.status == 200:
        answer_of(data)
    return data


async def _event(events: http1.Events) -> str:
    """What the next event of a stream says. Raises Stopped where there is none, Refused for what is no answer."""
    try:
        text = await events.next()
    except http1.PeerGone:
        text = None
    if text is None:
        raise gone()
    if text != DONE:
        answer_of(text)
    return text


async def _pieces(text: str, events: http1.Events) -> wire.Pieces:
    """A stream that begins with `text`. Raises what `_event` does."""
    yield wire.event(text)
    while text != DONE:
        text = await _event(events)
        yield wire.event(text)


async def _page(target: str, request: Request, serving: Relay, body: bytes) -> Response:
    """What the program tells of itself."""
    try:
        answered = await http1.call(serving.host.socket, "GET", target)
        try:
            data = await answered.whole()
        finally:
            answered.close()
    except http1.PeerGone:
        raise gone() from None
    return Response(data, answered.status, media_type=answered.headers.get("content-type"))


async def _health(request: Request, serving: Relay, body: bytes) -> Response:
    if (answered := await _page("/health", request, serving, body)).status_code != 200:
        return answered
    return wire.object_response({"status": "ok"})


async def _tokenize(request: Request, serving: Relay, body: bytes) -> Response:
    call = asked.decoded(body, native.TokenizeCall)
    if call.parse_special:
        raise UsageError("`parse_special` cannot be used: vLLM parses special tokens of every text", "leave it out")
    await serving.host.load(call.model)
    how = {"add_special_tokens": call.add_special, "return_token_strs": call.with_pieces}
    found = await serving.host.post("/tokenize", {"model": serving.host.name, "prompt": call.content, **how})
    return wire.object_response({"tokens": read(partial(_tokens, call.with_pieces), found)})


def _tokens(with_pieces: bool, found: dict[str, Any]) -> list[Any]:
    ids = list(found["tokens"])
    pairs = zip(ids, found.get("token_strs") or [""] * len(ids), strict=True)
    return [{"id": i, "piece": p} for i, p in pairs] if with_pieces else ids


async def _detokenize(request: Request, serving: Relay, body: bytes) -> Response:
    call = asked.decoded(body, native.DetokenizeCall)
    await serving.host.load(call.model)
    found = await serving.host.post("/detokenize", {"model": serving.host.name, "tokens": call.tokens})
    return wire.object_response({"content": read(lambda found: str(found["prompt"]), found)})


async def _unknown(what: str, request: Request, serving: Relay, body: bytes) -> Response:
    raise Refused(501, f"vLLM does not tell {what}")


_NATIVE: tuple[Any, ...] = (
    ("GET", "/", native.page),
    ("GET", "/health", _health),
    ("GET", "/v1/health", _health),
    ("GET", "/metrics", partial(_page, "/metrics")),
    ("GET", "/slots", partial(_unknown, "which answers it is writing: /metrics has their number")),
    ("POST", "/tokenize", _tokenize),
    ("POST", "/detokenize", _detokenize),
)
_THROUGH: tuple[Any, ...] = (("POST", CHAT, partial(_through, CHAT)), ("POST", TEXT, partial(_through, TEXT)))
_NOT_TOLD = {"/api/ps": "how much memory a model takes", "/api/show": "what is in its file"}
_OLLAMA: tuple[Any, ...] = tuple(
    (method, path, partial(_unknown, _NOT_TOLD[path]) if path in _NOT_TOLD else handler)
    for method, path, handler in ollama.ROUTES
)
_OPENAI = tuple(route for route in openai.ROUTES if route[1] not in (CHAT, TEXT))
INTERFACES = (
    ((*_THROUGH, *_OPENAI, *responses.ROUTES), openai.failure),
    (anthropic.ROUTES, anthropic.failure),
    (_OLLAMA, ollama.failure),
    (_NATIVE, native.failure),
)
