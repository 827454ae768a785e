"""`DraftModel`: another model of the same vocabulary that guesses, with a cache of its own (Leviathan et al., "Fast
inference from transformers via speculative decoding", arXiv 2211.17192).

It draws each token as the answer's own sampler does, with the random number of the same position: so the two agree
where their distributions do, and what is accepted is the token that would have come anyway.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Some
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from kvcli.errors import DoesNotFit
from kvcli.options import SampleOptions
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.engine.spec import OFF
from kvcli.runtime.engine.spec.guesses import Guesses, Session
from kvcli.runtime.engine.spec.pace import ROWS, Drafted
from kvcli.runtime.promptcache.prefix import PrefixTree
from kvcli.runtime.promptcache.prefixpages import common_length

if TYPE_CHECKING:
    from kvcli.runtime.cache.pool import PagePool
    from kvcli.runtime.cache.sequence import Sequence
    from kvcli.runtime.config import ModelConfig
    from kvcli.runtime.engine.graph.nexttoken import NextToken
    from kvcli.runtime.plan.plan import Plan
    from kvcli.runtime.text.tokenizer import Tokenizer

REMEDY = "that is the draft model: its file may be damaged; pull it again, or leave `draft` out"


class Runner(Protocol):
    """What is asked of the draft model's engine; see `Engine`."""

    config: ModelConfig
    tokenizer: Tokenizer
    pool: PagePool
    plan: Plan
    graph: NextToken | None

    def new_sequence(self) -> Sequence: ...

    def chunk_end(self, start: int, end: int) -> int: ...

    def forward(self, seq: Sequence, ids: list[int], answering: bool = False) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def synchronize(self) -> None: ...


class DraftModel:
    """The engine of a draft model, and the rows of its earlier prompts and answers, as long as there is room."""

    def __init__(self, engine: Runner, vocab_size: int) -> None:
        """`vocab_size`: of the model that it guesses for; no other ids are guessed."""
        self.engine, self.tree = engine, PrefixTree(engine.pool)
        self.vocab_size = min(vocab_size, engine.config.vocab_size)
        tree = weakref.ref(self.tree)  # the pool does not keep what keeps the pool

        def make_room(arena: int, last_resort: bool) -> None:
            if (there := tree()) is not None and not there.evict(arena) and last_resort:
                there.clear()

        engine.pool.lend(make_room, engine.plan.kv_bytes)

    def guesses(self, session: Session) -> Guesses:
        """For a new answer."""
        return DraftGuesses(session, self)

    def sampler(self, options: SampleOptions) -> Sampler:
        """Draws as these settled options say, but without DRY, which cannot take guesses back. A grammar is for whoever
        knows where the answer stands in it."""
        bias = {token: by for token, by in options.logit_bias.items() if token < self.vocab_size}
        options = replace(options, logit_bias=bias, dry_multiplier=0.0, grammar="", logprobs=None)
        return Sampler(options, {}, self.vocab_size, remedy=REMEDY)

    def last_logits(self, seq: Sequence, ids: list[int]) -> torch.Tensor:
        """Run `ids` as the next rows of `seq` in one step -> the logits [vocab] of the last one. Raises like
        `Engine.forward`."""
        if self.engine.graph and len(ids) <= 2:  # one by one they take less time
            run = self.next_logits(seq)
            return [run(token) for token in ids][-1]
        return self.engine.logits(self.engine.forward(seq, ids)[-1:])[0]

    def next_logits(self, seq: Sequence) -> Callable[[int], torch.Tensor]:
        """What runs one token after the other as the next row of `seq` -> its logits [vocab], which are there until the
        next call. Nothing else runs between the calls. Each raises like `Engine.forward`."""
        engine = self.engine
        if (graph := engine.graph) is None:
            return lambda token: engine.logits(engine.forward(seq, [token], True))[0]
        graph.unbind()
        return lambda token: graph.run(seq, token)

    def close(self) -> None:
        """Let go of the rows of earlier prompts."""
        self.tree.clear()


class DraftGuesses(Guesses):
    """What a draft model guesses of one answer. It reads the prompt when the first guess is wanted, a prefill step
    before each token, and guesses nothing until it is through."""

    def __init__(self, session: Session, draft: DraftModel) -> None:
        super().__init__(session, OFF)
        self.draft, self._drafted = draft, Drafted(session.pace)
        self._known: list[int] = []  # prompt and answer
        self._n_prompt = 0
        self._seq: Sequence | None = None
        self._sure = 0  # so many first rows of it are those of what is known
        self._pending: tuple[int, int] | None = None  # of the step that is on its way, and how many were right before
        self._full = False  # there is no room for the rows of this answer

    def follow(self, sampler: Sampler) -> None:
        self._asked_by, self._sampler = sampler, self.draft.sampler(SampleOptions(**sampler.effective))

    def more(self, ids: Some[int]) -> None:
        self._n_prompt = self._n_prompt or len(ids)
        self._known.extend(ids)

    def next(self, length: int, most: int) -> list[int]:
        found, count = list[int](), 0 if self._full else self._drafted.worth(most)
        if count:
            try:
                found = self._draft(count)
            except DoesNotFit:
                self._full = True
                self.close()
        self._asked = time.perf_counter(), length, 1 + len(found)
        self._pending = (len(found), self.accepted) if found else None
        return found

    def stepped(self, length: int) -> None:
        super().stepped(length)
        if self._pending is not None:
            drafted, before = self._pending
            self._drafted.saw(drafted, self.accepted - before)
            self._pending = None

    def over(self, answer: Some[int]) -> None:
        self.close()

    def close(self) -> None:
        """Rows are kept for later prompts, as long as nobody needs the room."""
        if self._seq is not None:
            seq = self._rows()
            self.draft.tree.insert(seq)
            seq.close()
            self._seq, self._sure = None, 0

    def _rows(self) -> Sequence:
        """The sequence with rows of what is known alone: its own, or those of an earlier prompt."""
        if self._seq is None:
            self._seq = seq = self.draft.engine.new_sequence()
            length, pages, bases = self.draft.tree.find(self._known[:-1])
            seq.adopt(self._known[:length], pages, bases)
        seq, sure = self._seq, self._sure
        seq.rewind_to(min(sure + common_length(seq.tokens[sure:], self._known[sure:-1]), max(0, len(self._known) - 1)))
        self._sure = seq.certain = seq.length
        return seq

    def _draft(self, count: int) -> list[int]:
        """So many guesses; none where rows are missing that take another step to compute. Raises DoesNotFit."""
        engine, seq, known, began = self.draft.engine, self._rows(), self._known, time.perf_counter()
        missing = known[seq.length : engine.chunk_end(seq.length, len(known))]
        reads, of_prompt = len(missing) > ROWS[-1], seq.length < self._n_prompt
        logits = self.draft.last_logits(seq, missing)
        seq.certain = self._sure = seq.length
        if reads:
            engine.synchronize()
            if not of_prompt:
                self.session.pace.spent(time.perf_counter() - began)
            began = time.perf_counter()
        if seq.length < len(known):
            return []
        found = self._drawn(seq, logits, count)
        self._drafted.took(len(found), time.perf_counter() - began)
        return found

    def _drawn(self, seq: Sequence, logits: torch.Tensor, count: int) -> list[int]:
        """The tokens that may follow what is known, by the logits [vocab] behind it, up to one that ends the text."""
        engine, text, found = self.draft.engine, self._known, list[int]()
        run, ends, size = self.draft.next_logits(seq), engine.tokenizer.eog_ids, self.draft.vocab_size
        sampler, asked = self._sampler, self._asked_by
        there = asked.constraint if asked.constrained and asked.follows else None
        sampler.constraint = grammar = there.copy(size) if there else None
        sampler.follows = grammar is not None
        try:
            while True:
                found.append(sampler.sample(logits[:size], text, len(text)))
                text.append(found[-1])
                if grammar is not None:
                    grammar.accept(found[-1])
                if len(found) == count or found[-1] in ends:
                    return found
                logits = run(found[-1])
        finally:
            del text[len(text) - len(found) :]
