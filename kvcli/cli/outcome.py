"""`Outcome` and `Result`: one answer, its cache, and what is to be told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcli.cli.jsonobjects import is_json
from kvcli.cli.overflow import Cut
from kvcli.cli.toolcalls import ToolCalls
from kvcli.cli.verification import Verification
from kvcli.cli.wording import as_flags
from kvcli.errors import KVError
from kvcli.options import READ_ALL, AttendOptions, EvictOptions, SampleOptions
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.engine.events import End
from kvcli.words import human_bytes

CUT_FORM = "stop: the limit of -n; the answer is not whole, a larger -n lets it end"
_SAID_OTHERWISE = ("evicted", "quantized")  # of End.losses: with more detail, and by the cache type


@dataclass(frozen=True)
class CacheFacts:
    """The cache of one sequence. `nbytes` is what its pages take, `limit` the context size in tokens. `tail`, `sinks`:
    pages that stay in 16 bits. `evict`: as asked for.

    `tokens` are in the cache, `evicted` no longer; `retention`: what stays, None = everything until it is full.
    `page_utilization`: the share of the pages that is rows of use; None = there are none. `contiguous_bytes`: what a
    cache without pages would take for the whole context.
    """

    type_k: str
    type_v: str
    page_size: int
    pages: int
    nbytes: int
    tokens: int
    limit: int
    tail: int
    sinks: int
    evict: EvictOptions
    evicted: int = 0
    retention: Retention | None = None
    page_utilization: float | None = None
    contiguous_bytes: int = 0
    attend: AttendOptions = READ_ALL

    @property
    def room(self) -> str:
        """How many tokens may come until something happens."""
        if self.evict.budget:
            return f"{self.evicted:,} evicted by {self.evict.policy}, budget {self.evict.budget}"
        if self.retention is None:
            return f"{self.limit - self.tokens:,} until full"
        last = self.tokens + self.evicted - 1
        return f"{self.evicted:,} evicted, {self.retention.until_next(max(0, last)):,} until the next eviction"

    @property
    def types(self) -> str:
        return self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"

    @property
    def use(self) -> str:
        """How much of the pages is rows, and what a cache without pages would take."""
        whole = f"{human_bytes(self.contiguous_bytes)} without pages"
        return whole if self.page_utilization is None else f"{100 * self.page_utilization:.1f} % of it in use, {whole}"

    def __str__(self) -> str:
        reads = f", {as_flags(self.attend.named)}" if self.attend.named else ""
        return f"KV {self.types} {self.tokens:,}/{self.limit:,} tok ({self.room}) {human_bytes(self.nbytes)}{reads}"


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes that the plan says: of the whole process for the tokens now in the cache, and for a full context."""

    predicted: int
    full_context: int


@dataclass(frozen=True)
class Outcome:
    """One finished (or interrupted) answer, and its cache."""

    text: str
    end: End
    cache: CacheFacts
    params: SampleOptions  # with every default filled in
    told: list[str]

    @property
    def losses(self) -> list[str]:
        """Why the answer is not that of a cache of its types which keeps and reads everything: [] = it is."""
        return [*self.evicted, *self.partly]

    @property
    def partly(self) -> list[str]:
        """What some of its rows did not see although it is there."""
        kinds = ((loss, loss.partition(":")[0]) for loss in self.end.losses)
        return [f"lossy: {loss}" for loss, kind in kinds if kind not in _SAID_OTHERWISE]

    @property
    def evicted(self) -> list[str]:
        """What of the text was no longer seen, of the prompt and of what came after it."""
        kept, gone, evicted = self.cache.retention, self.end.prompt_evicted, self.cache.evicted
        if self.cache.evict.budget and evicted:
            of, budget = self.cache.tokens + evicted, self.cache.evict.budget
            return [f"{self.cache.evict.policy}: {self.cache.tokens:,} of {of:,} rows stay, with a budget of {budget}"]
        if kept is None:
            return []
        parts = (
            ("before the answer began", kept.keep, gone, self.end.usage.prompt_tokens),
            ("during the answer", kept.keep + gone, evicted - gone, self.cache.tokens + evicted),
        )
        return [
            f"evicted {when}: tokens {first:,} to {first + count - 1:,} of {total:,}"
            for when, first, count, total in parts
            if count > 0
        ]

    @property
    def ended_early(self) -> str:
        """Why the answer is shorter than the model would have made it and nobody asked for that; "" = it is not."""
        end, loop = self.end, self.end.loop
        if end.finish_reason == "context":
            return f"stop: context full ({self.cache.tokens:,}/{self.cache.limit:,})"
        if end.finish_reason == "length" and self.params.unattended:
            return f"stop: {len(end.ids):,} tokens, the limit where stdout is no terminal; -n sets another, -n -1 none"
        if end.finish_reason == "length" and self.params.grammar and not is_json(self.text):
            return CUT_FORM
        if end.finish_reason == "repetition" and loop is not None:
            return (
                f"stop: the answer repeats itself ({loop.tokens} tokens, {loop.times} times the same {loop.period});"
                " --repeat-penalty 1.1 makes that rarer, --no-loop-stop goes on"
            )
        return ""

    @property
    def warnings(self) -> list[str]:
        """All that the user is told, however the result is shown."""
        unwritten = (as_flags(each) for each in self.end.unwritten)
        return [*dict.fromkeys((*self.told, *unwritten, *self.losses, *filter(None, [self.ended_early])))]


@dataclass(frozen=True)
class Result(Outcome):
    """And what it took."""

    model: str
    memory: MemoryFacts
    verification: Verification | None = None  # with --verify-estimate
    cut: Cut | None = None  # of the prompt, which was too long
    error: KVError | None = None  # that the run ends with, although the answer is whole
    reasoning: str = ""  # what the model thought before it
    logprobs: list[dict[str, Any]] | None = None  # of each token, where they are asked for
    calls: ToolCalls | None = None  # None = there were no tools to call
