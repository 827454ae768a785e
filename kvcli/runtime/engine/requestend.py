"""The end of a request: why nothing further may come, and the last event."""

from __future__ import annotations

from typing import Any

from kvcli.runtime.engine.events import End, Usage
from kvcli.runtime.promptcache.caches import Ledger

INTERRUPTED = "interrupted"


def full(request: Any) -> str:
    """Why nothing further may come of a `Request`, or ''."""
    if request.cancelled():
        return INTERRUPTED
    if not request.answering:
        return ""
    if 0 <= request.options.max_tokens <= len(request.history) - request.n_prompt:
        return "length"
    # Where old rows are evicted, positions go on behind the context; those inside the cache do not.
    if len(request.history) - request.seq.evicted > request.host.ctx_size and request.seq.retention is None:
        return "context"
    return ""


def told(request: Any, reason: str) -> End:
    """What there is to say of the request, which ends for this reason."""
    text, reasoning, calls = request._text.rest(reason == "stop")
    ids, reuse = request.history[request.n_prompt :], request.reuse
    tried, ledger = request.guesses, request._ledger or Ledger(reuse)
    timings = request._clock.timings(request.host.load_s, request.n_prompt - reuse.tokens, len(ids), tried.reading_s)
    usage = Usage(
        request.n_prompt, reuse.tokens, len(ids), reuse.disk, request._written.tokens, reuse.reason, request._thought,
        reuse.choice, reuse.how, ledger.breakpoints(), ledger.chunks(), tried.drafted, tried.accepted, tried.steps,
    )  # fmt: skip
    lost = request._prompt_evicted, request.seq.losses(), request._loop, request._written.failures
    raw, called = request._text.raw, request._text.calls
    return End(reason, text, ids, request._text.stop, usage, timings, *lost, reasoning, raw, calls, called)
