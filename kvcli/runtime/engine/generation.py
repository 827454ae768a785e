"""`Generation`: one prompt and its answer, as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import torch

from kvcli.options import SampleOptions
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.events import End, Event, Loop, Prefill, Timings, Token, Usage
from kvcli.runtime.engine.repeats import LoopDetector
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.promptcache.caches import Caches, Reuse, Written
from kvcli.runtime.text.stops import StopMatcher
from kvcli.runtime.text.tokenizer import StreamDecoder, Tokenizer


class Runner(Protocol):
    """What a generation needs of an engine; see `Engine`."""

    tokenizer: Tokenizer
    ctx_size: int
    ubatch: int
    load_s: float
    caches: Caches

    @property
    def retention(self) -> Retention | None: ...

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, int]]: ...

    def forward(self, seq: Sequence, ids: list[int]) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def synchronize(self) -> None: ...

    def tokens(
        self, seq: Sequence, history: list[int], sampler: Sampler, logits: torch.Tensor
    ) -> Generator[int, None, None]: ...


class Generation:
    """One call of `Engine.generate`."""

    def __init__(self, engine: Runner, seq: Sequence, prompt_ids: list[int], options: SampleOptions,
                 sampler: Sampler, cancelled: Callable[[], bool]) -> None:  # fmt: skip
        self.engine, self.seq, self.options = engine, seq, options
        self.sampler, self.cancelled = sampler, cancelled
        self.history = list(prompt_ids)
        self.n_prompt = len(prompt_ids)
        self.decoder = StreamDecoder(engine.tokenizer, continues=True)
        self.matcher = StopMatcher(options.stop)
        self.loops = LoopDetector() if sampler.effective["loop_stop"] else None
        self.loop: Loop | None = None  # that the answer is in
        self.began = self.first = self.last = time.perf_counter()
        self.prefill_s = 0.0
        self.reuse = Reuse()
        self.written = Written()
        self.prompt_evicted = 0  # tokens that are forgotten

    def events(self) -> Iterator[Event]:
        logits = yield from self._prefill()
        if logits is None:
            yield self._end("interrupted")
            return
        self.engine.caches.prefilled(self.seq, self.prefill_s)
        tokens = self.engine.tokens(self.seq, self.history, self.sampler, logits)
        try:
            reason = yield from self._answer(tokens)
        finally:
            tokens.close()
        self.written = self.engine.caches.answered(self.seq)
        yield self._end(reason)

    def _answer(self, tokens: Iterator[int]) -> Generator[Token, None, str]:
        """Events of the tokens, and why there are no more."""
        while True:
            reason = self._full()
            if reason:
                return reason
            self.engine.caches.pump()
            token = next(tokens)
            self.last = time.perf_counter()
            if len(self.history) == self.n_prompt:
                self.first = self.last
            if token in self.engine.tokenizer.eog_ids and not self.options.ignore_eos:
                return "stop"
            self.history.append(token)
            yield Token(token, self.matcher.push(self.decoder.push(token)))
            if self.matcher.stop is not None:
                return "stop"
            if self.loops and (loop := self.loops.push(token)):
                self.loop = loop
                return "repetition"

    def _full(self) -> str:
        """Why no further token may come, or ''."""
        if self.cancelled():
            return "interrupted"
        if 0 <= self.options.max_tokens <= len(self.history) - self.n_prompt:
            return "length"
        # Where old rows are evicted, positions go on behind the context; those inside the cache do not.
        if len(self.history) > self.engine.ctx_size and self.engine.retention is None:
            return "context"
        return ""

    def _prefill(self) -> Generator[Prefill, None, torch.Tensor | None]:
        """Run what the sequence lacks of the prompt. Returns the logits [vocab], None when cancelled."""
        engine, seq, prompt = self.engine, self.seq, self.history
        self.reuse = engine.caches.restore(seq, prompt)
        reused = self.reuse.tokens
        total = self.n_prompt - reused
        yield Prefill(0, total, reused)
        logits = None
        for start, end in engine.chunks(reused, self.n_prompt):
            if self.cancelled():
                return None
            hidden = engine.forward(seq, prompt[start:end])
            engine.caches.follow(seq)
            if end == self.n_prompt:
                logits = engine.logits(hidden[-1:])[0]
                engine.synchronize()
                self.prefill_s, self.prompt_evicted = time.perf_counter() - self.began, seq.evicted
            yield Prefill(end - reused, total, reused)
        return logits

    def _end(self, reason: str) -> End:
        # An answer that was cut short may end inside a character, which is no text yet.
        tail = self.decoder.flush() if reason == "stop" else ""
        text = self.matcher.push(tail) + self.matcher.flush()
        ids = self.history[self.n_prompt :]
        timings = Timings(
            load_s=self.engine.load_s,
            prefill_s=self.prefill_s,
            ttft_s=self.first - self.began,
            decode_s=self.last - self.first,
            prefill_tokens=self.n_prompt - self.reuse.tokens,
            decode_tokens=max(0, len(ids) - 1),
        )
        reuse, losses = self.reuse, self.seq.losses()
        usage = Usage(self.n_prompt, reuse.tokens, len(ids), reuse.disk, self.written.tokens, reuse.reason)
        told = self.prompt_evicted, losses, self.loop, self.written.failures
        return End(reason, text, ids, self.matcher.stop, usage, timings, *told)
