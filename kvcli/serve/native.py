"""What is asked of the server itself, by the names that llama-server has: health, metrics, slots, tokenize. And the
page for people."""

from __future__ import annotations

from functools import partial
from importlib import resources

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from kvcli.serve import asked, metrics, wire
from kvcli.serve.asked import Json
from kvcli.serve.failures import Failure
from kvcli.serve.replies import LONG
from kvcli.serve.serving import Engines

# The page needs nothing from elsewhere, and must not be given it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class TokenizeCall(msgspec.Struct, forbid_unknown_fields=True):
    content: str
    model: str = ""
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeCall(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str = ""


def failure(found: Failure) -> Json:
    """The body of an answer that is an error."""
    return {"error": {"code": found.status, "message": found.message, "type": found.code or "error"}}


async def page(request: Request, serving: Engines, body: bytes) -> Response:
    text = resources.files("kvcli.serve").joinpath("page.html").read_text("utf-8")
    return HTMLResponse(text, headers={"content-security-policy": POLICY, "x-content-type-options": "nosniff"})


async def health(request: Request, serving: Engines, body: bytes) -> Response:
    return wire.object_response({"status": "ok"})


async def show_metrics(request: Request, serving: Engines, body: bytes) -> Response:
    found = {each.name: (each.worker.counts, each.worker.facts()) for each in serving.host.loaded}
    return Response(metrics.text(found), media_type=metrics.MEDIA_TYPE)


async def slots(request: Request, serving: Engines, body: bytes) -> Response:
    found = [{"model": each.name, **slot} for each in serving.host.loaded for slot in each.worker.slots()]
    return wire.object_response({"slots": found})


async def tokenize(request: Request, serving: Engines, body: bytes) -> Response:
    call = asked.decoded(body, TokenizeCall)
    text = (await wire.while_connected(request, serving.host.served(call.model))).text
    how = {"add_bos": call.add_special, "parse_special": call.parse_special}
    make = partial(text.tokenizer.encode, call.content, **how)
    ids = await serving.host.beside(make, len(call.content) > LONG)
    tokens = [{"id": token, "piece": text.tokenizer.piece(token)} for token in ids] if call.with_pieces else ids
    return wire.object_response({"tokens": tokens})


async def detokenize(request: Request, serving: Engines, body: bytes) -> Response:
    call = asked.decoded(body, DetokenizeCall)
    text = (await wire.while_connected(request, serving.host.served(call.model))).text
    asked.check_ids(call.tokens, text.tokenizer.vocab_size, "tokens")
    return wire.object_response({"content": text.tokenizer.decode(call.tokens)})


ROUTES = (
    ("GET", "/", page),
    ("GET", "/health", health),
    ("GET", "/v1/health", health),
    ("GET", "/metrics", show_metrics),
    ("GET", "/slots", slots),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
)
OPEN = ("/", "/health", "/v1/health")  # need no key
