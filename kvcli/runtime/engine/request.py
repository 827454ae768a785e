"""`Request`: one prompt and its answer, as a state machine. It says which rows it wants next and takes their logits; it
does not know who computes them, nor what else runs in the same step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Some

import torch

from kvcli.errors import DoesNotFit, KVError
from kvcli.options import SampleOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.answertext import AnswerText, Shown
from kvcli.runtime.engine.clock import Clock
from kvcli.runtime.engine.events import End, Event, Logprobs, Loop, Prefill, Token
from kvcli.runtime.engine.repeats import LoopDetector
from kvcli.runtime.engine.repetition import Repetition
from kvcli.runtime.engine.requestend import full, told
from kvcli.runtime.engine.requesthost import Host
from kvcli.runtime.engine.rowsahead import RowsAhead, guessed, on_host
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.promptcache.caches import LIVE_ROWS, Caches, Ledger, Reuse, Written
from kvcli.runtime.promptcache.marks import Mark
from kvcli.runtime.text.reasoning import Thinking
from kvcli.runtime.text.tools.use import ToolUse


class Request:
    """`wants` names rows; when they are in the cache of `seq`, `feed` is told so. `take_events` has what came of it.

    `twins` answer the same prompt: they go on from copies of its rows as soon as these are there, and want none until
    then. `end` or `error` is set when there will be no more events.
    """

    def __init__(
        self,
        host: Host,
        seq: Sequence,
        prompt_ids: list[int],
        options: SampleOptions,
        sampler: Sampler,
        cancelled: Callable[[], bool] = lambda: False,
        twins: Some[Request] = (),
        caches: Caches = LIVE_ROWS,
        thinking: Thinking | None = None,
        marks: Some[Mark] = (),
        tools: ToolUse | None = None,
    ) -> None:
        """Parameters are as those of `Engine.request`, which checks them."""
        self.host, self.seq, self.options = host, seq, options
        self.sampler, self.cancelled, self.twins = sampler, cancelled, twins
        self.caches, self.marks = caches, marks
        self.history = list(prompt_ids)  # prompt and answer
        self.n_prompt = len(prompt_ids)
        self.answering = False  # the prompt's rows have all been there
        self.end: End | None = None
        self.error: KVError | None = None
        self._waits = False  # for the request whose twin it is
        for twin in twins:
            twin._waits = True
        self._ledger: Ledger | None = None  # None = not begun
        self._repetition = Repetition(host, seq)  # of the prompt
        self._parked = self._abandoned = False
        self.ahead = RowsAhead()
        self.guesses = host.session.guesses(sampler.effective["spec"])
        self.guesses.follow(sampler)
        self._events: list[Event] = []
        self._thinking = thinking
        self._text = AnswerText(host.tokenizer, thinking, options.stop, tools)
        sampler.follows = not self._text.thinks
        self._thought = 0  # tokens of thinking
        self._no_call = ""  # text that looked like the beginning of one
        self._loops = LoopDetector() if sampler.effective["loop_stop"] else None
        self._loop: Loop | None = None  # that the answer is in
        self._clock = Clock()
        self._written = Written()
        self._prompt_evicted = 0  # tokens that are forgotten

    @property
    def finished(self) -> bool:
        """Whether there will be no more events but those that wait."""
        return self.end is not None or self.error is not None

    @property
    def newest(self) -> bool:
        """Whether the row of the newest token is in the cache: its logits choose the next one."""
        return self.seq.length >= len(self.history)

    @property
    def scored(self) -> int:
        """Of how many rows, the last ones, it takes the logits: that of the newest token and those of guesses."""
        return max(0, self.seq.length - len(self.history) + 1)

    @property
    def reuse(self) -> Reuse:
        """What of the prompt was there."""
        return Reuse() if self._ledger is None else self._ledger.reuse

    def take_events(self) -> list[Event]:
        """What has happened since this was asked last."""
        events, self._events = self._events, []
        return events

    # --- rows

    def wants(self, budget: int) -> list[int]:
        """Ids of the next rows of `seq`, at most `budget`, or one block (`KVLayout.grain`). [] = none for now: the
        request is over, has just looked into the caches, or waits for its twin."""
        if self.finished or self._waits or budget < 1:
            return []
        self.seq.certain = None  # the last step may not have come to its end
        try:
            if self._ledger is None:
                self._begin()
                return []
            if self._ends():
                return []
            if self._repetition.begun:
                self._repeat()
                return []
            selector, known = self.seq.selector, len(self.history)
            if self.answering and selector and selector.is_due(self.seq.length, known, self.ahead.by_device):
                self.close()
                self.host.select(self.seq)
            if self._parked:
                self._parked = False
                self.caches.resume(self.seq, self.history)
            if self.answering and (self.ahead.by_device or self.seq.length == len(self.history) - 1):
                return [*self.history[-1:], *self._guessed(budget - 1)]
        except KVError as error:
            self.fail(error)
            return []
        start, end, layout = self.seq.length, len(self.history), self.seq.pool.layout
        if layout.attend.pages:  # rows of an answer are one by one as they were, where they are computed again
            end = min(end, max(self.n_prompt, start + 1))
        budget = max(layout.grain, budget // layout.grain * layout.grain)
        return self.history[start : min(start + budget, self.host.chunk_end(start, end))]

    def _guessed(self, most: int) -> list[int]:
        """Guesses behind the newest token, at most so many."""
        length, wanted = len(self.history), self.options.max_tokens
        rest = wanted - (length - self.n_prompt) - 1 if wanted >= 0 else most
        if found := guessed(self.seq, self.guesses, length, min(most, rest), self.host.ctx_size):
            self.close()
            self.seq.rewind(length - 1)  # a device may have computed the newest row, whose logits are gone
            self.seq.certain = length - 1
        return found

    def feed(self, logits: torch.Tensor | None) -> None:
        """The rows are there. `logits` [scored, vocab], where any are `scored`."""
        try:
            if not self.answering:
                self._prefilled_to(self.seq.length)
                if self.newest:
                    self._answer(logits)
            elif self.newest:
                self._choose(logits)
        except KVError as error:
            self.fail(error)
        self.guesses.stepped(len(self.history))

    def pull(self) -> bool:
        """Where a device chooses tokens by itself: take the next one, which computes the row that was wanted. False
        where it does not. Raises DoesNotFit; the rows are wanted again then."""
        if self.ahead.tokens is None:
            return False
        try:
            self.caches.pump()
            self._accept(next(self.ahead.tokens))
        except DoesNotFit:
            self.close()
            raise
        except KVError as error:
            self.fail(error)
        self.guesses.stepped(len(self.history))
        return True

    def take(self, token: int) -> None:
        """This is the next token, which was chosen together with those of others."""
        try:
            self.caches.pump()
            self._accept(token)
        except KVError as error:
            self.fail(error)
        self.guesses.stepped(len(self.history))

    def choose(self, logits: torch.Tensor) -> None:
        """Choose the next token by the logits [vocab] of the newest row, which was computed together with others."""
        try:
            token = self.sampler.sample(logits, self.history, len(self.history))
        except KVError as error:
            self.fail(error)
            return
        self.take(token)

    def _begin(self) -> None:
        """Look for rows of the prompt."""
        self._clock.start()
        self._ledger = self.caches.restore(self.seq, self.history, self.marks)
        if self.seq.selector:
            self._ledger.expect(self.seq, self.n_prompt)
            self._repetition.expect(self.history)
        self._tell_prefill(0)

    def _prefilled_to(self, length: int) -> None:
        """Rows of the prompt were computed."""
        assert self._ledger is not None
        self._ledger.follow(self.seq)
        if self.newest:
            self.host.synchronize()
            self._clock.prefilled()
            self._prompt_evicted = self.seq.evicted
        self._tell_prefill(max(0, length - self.reuse.tokens))

    def _tell_prefill(self, done: int) -> None:
        reused = self.reuse.tokens
        self._events.append(Prefill(done, self.n_prompt - reused + self._repetition.total, reused))

    def _answer(self, logits: torch.Tensor | None) -> None:
        """The prompt is there, and `logits` [1, vocab] of its last row."""
        assert self._ledger is not None
        self._ledger.prefilled(self.seq, self._clock.prefill_s)
        if not self._repetition.begin(logits):
            self._select(logits)

    def _repeat(self) -> None:
        """Repeat some more of the prompt, or go on behind that."""
        if done := self._repetition.step():
            self._tell_prefill(self.n_prompt - self.reuse.tokens + done)
        else:
            self._select(self._repetition.logits)

    def _select(self, logits: torch.Tensor | None) -> None:
        """Let go of rows of the prompt, where a policy says so, and answer."""
        self.host.select(self.seq)
        for twin in self.twins:
            twin._join(self, logits)
        self._go_on(logits)

    def _join(self, first: Request, logits: torch.Tensor | None) -> None:
        """Begin behind the prompt of `first`, whose rows are shared."""
        self._waits, self.seq = False, first.seq.fork()
        self._ledger = self.caches.ledger(self.n_prompt)
        self._ledger.reuse = Reuse(self.n_prompt)
        self._prompt_evicted = first._prompt_evicted
        self._clock.start()
        try:
            self._go_on(logits)
        except KVError as error:
            self.fail(error)

    def _go_on(self, logits: torch.Tensor | None) -> None:
        """Answer, if a token may come at all."""
        self.answering = True
        self.guesses.more(self.history)
        if self._thinking and self._thinking.lead:
            self._tell(None, self._text.given(self._thinking.lead))
            self._begin_calls()
        if not self._ends() and not self._end_thinking():
            self._choose(logits)

    # --- tokens

    def _choose(self, logits: torch.Tensor | None) -> None:
        """The next tokens, by the logits [scored, vocab]: one, and one more for each guess that it is."""
        assert logits is not None
        self.caches.pump()
        if len(logits) == 1 and not on_host(self.seq, self.guesses):
            self.ahead.tokens = self.host.device_tokens(self.seq, self.history, self.sampler, logits[0])
            if self.ahead.tokens is not None:
                self._accept(next(self.ahead.tokens))
                return
        guesses = self.seq.tokens[len(self.history) :]
        self.guesses.drafted += len(guesses)
        rows = self.ahead.chosen(self.sampler, logits, len(self.history))
        for row, guess in zip(rows, [*guesses, -1], strict=True):
            self.ahead.known = len(self.history)
            token = row if isinstance(row, int) else self.sampler.sample(row, self.history, len(self.history))
            if token != guess:
                self.ahead.take_back(self.seq)
            self.guesses.accepted += token == guess
            if not self._accept(token) or token != guess or self._ends():
                break
        self.ahead.settle(self.seq)

    def _accept(self, token: int) -> bool:
        """This is the next token. Whether one may follow that goes by it alone."""
        self._clock.token(len(self.history) == self.n_prompt)
        if token in self.host.tokenizer.eog_ids and not self.options.ignore_eos:
            self._finish("stop")
            return False
        followed = self.sampler.constraint if self.sampler.follows and self.sampler.constrained else None
        if followed is not None:
            followed.accept(token)
        found = self.sampler.logprobs
        self._put(token, None if found is None else Logprobs.of(found, self.host.tokenizer.piece))
        if self._text.stop is not None or (followed is not None and followed.stopped):
            self._finish("stop")
        elif self._loops and (loop := self._loops.push(token)):
            self._loop = loop
            self._finish("repetition")
        elif not self._end_thinking():
            return not self._begin_calls()
        return False

    def _begin_calls(self) -> bool:
        """Where a call has begun, its grammar is followed from now on; whether that is so. The next token is chosen
        anew, if one was chosen ahead."""
        constraint, begun, ahead = self.sampler.constraint, self._text.calls_begun, self.ahead.by_device
        if constraint is None or not constraint.waits or begun in ("", self._no_call):
            return False
        if not constraint.begin(begun):
            self._no_call = begun  # until there is another mark
            return False
        self.close()
        if ahead and self.newest:
            self.seq.rewind_to(len(self.history) - 1)  # a device has computed the row, and its logits are gone
        return True

    def _put(self, token: int, logprobs: Logprobs | None = None) -> None:
        """Append a token to the answer. A grammar is for what comes behind the thinking."""
        self.history.append(token)
        self.guesses.more((token,))
        self._thought += self._text.thinks
        self._tell(token, self._text.push(token), logprobs)
        self.sampler.follows = not self._text.thinks

    def _tell(self, token: int | None, shown: Shown, logprobs: Logprobs | None = None) -> None:
        self._events.append(Token(token, shown.text, shown.reasoning, logprobs, shown.calls))

    def _end_thinking(self) -> bool:
        """Where thinking has taken its budget, end it as the model's family does; whether that is so."""
        thinking, style = self._thinking, self._text.style
        if thinking is None or style is None or not 0 <= thinking.budget <= self._thought:
            return False
        self.close()
        self._clock.token(len(self.history) == self.n_prompt)
        for token in thinking.ids(style.closing or style.close):
            if full(self):
                break
            self._put(token)
        return True

    # --- the end

    def _ends(self) -> bool:
        """End if nothing further may come; whether that is so."""
        if reason := full(self):
            self._finish(reason)
        return bool(reason)

    def park(self) -> None:
        """Give the pages back for a while. The rows are looked for in memory again, or computed again."""
        self.close()
        self.caches.park(self.seq)
        self.seq.close()
        self.guesses.close()
        self._parked = True

    def close(self) -> None:
        """Compute nothing ahead any more: `seq` has no row of a token that is not in `history`."""
        self._repetition.close()
        self.ahead.close(self.seq)

    def abandon(self) -> None:
        """It will not be gone on with. What was computed of its prompt is kept, where there is a cache for it."""
        self.close()
        self.guesses.close()
        if self._ledger is not None and not self.answering and not self._parked and not self._abandoned:
            self._abandoned = True
            self._ledger.interrupted(self.seq)

    def fail(self, error: KVError) -> None:
        """End with an error, for its twins, too, where they wait for it."""
        self.abandon()
        self.error = error
        for twin in self.twins:
            if twin._waits:
                twin.fail(error)

    def _finish(self, reason: str) -> None:
        self.close()
        if self.answering and self._ledger is not None:
            if self.seq.pool.layout.grain > 1:  # tokens are computed otherwise than prompts
                self.seq.rewind_to(self.n_prompt)
            self._written = self._ledger.answered(self.seq)
            self.guesses.over(self.history[self.n_prompt :])
        elif self._ledger is not None:
            self.abandon()
        self.end = told(self, reason)
        self._events.append(self.end)
        for twin in self.twins:
            if twin._waits:
                twin._finish(reason)
