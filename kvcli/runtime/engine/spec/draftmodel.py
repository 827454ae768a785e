"""`DraftModel`: another model of the same vocabulary that guesses, with a cache of its own."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from kvcli.runtime.engine.spec import DRAFT
from kvcli.runtime.engine.spec.drawing import DrawnGuesses
from kvcli.runtime.engine.spec.guesses import Guesses, Session
from kvcli.runtime.engine.spec.pace import ROWS
from kvcli.runtime.engine.tokenstream import DeviceRows
from kvcli.runtime.promptcache.prefix import PrefixTree
from kvcli.runtime.promptcache.prefixpages import common_length

if TYPE_CHECKING:
    from kvcli.runtime.cache.pool import PagePool
    from kvcli.runtime.cache.sequence import Sequence
    from kvcli.runtime.config import ModelConfig
    from kvcli.runtime.engine.graph.nexttoken import NextToken
    from kvcli.runtime.plan.plan import Plan
    from kvcli.runtime.text.tokenizer import Tokenizer


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

    method = DRAFT

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


class DraftGuesses(DrawnGuesses):
    """What a draft model guesses of one answer. It reads the prompt when the first guess is wanted, a prefill step
    before each token, and guesses nothing until it is through."""

    def __init__(self, session: Session, draft: DraftModel) -> None:
        super().__init__(session, draft.vocab_size, draft.engine.tokenizer.eog_ids)
        self.draft = draft
        self._seq: Sequence | None = None
        self._sure = 0  # so many first rows of it are those of what is known
        self._rows_on_device: DeviceRows | None = None

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
        self._sure, seq.certain = seq.length, None
        return seq

    def _draft(self, count: int) -> list[int]:
        """So many guesses; none where rows are missing that take another step to compute, or where there is no room for
        a state to go back to. Raises DoesNotFit."""
        engine, seq, known, began = self.draft.engine, self._rows(), self._known, time.perf_counter()
        missing = known[seq.length : engine.chunk_end(seq.length, len(known))]
        reads, of_prompt = len(missing) > ROWS[-1], seq.length < self._n_prompt
        logits = self.draft.last_logits(seq, missing)
        seq.certain = self._sure = seq.length
        if reads:
            engine.synchronize()
            seconds, began = time.perf_counter() - began, time.perf_counter()
            if of_prompt:
                self.reading_s += seconds
            else:
                self.session.pace.spent(seconds)
        if seq.length < len(known) or (seq.states is not None and not seq.states.can_guess()):
            return []
        if engine.graph and not self._constrained and DeviceRows.possible(self._sampler):
            self._rows_on_device = self._rows_on_device or DeviceRows(
                self._sampler, self.vocab_size, engine.graph.device
            )
            found = self._upto_end(self._rows_on_device.drawn(engine.graph, seq, logits, count))
        else:
            found = self._drawn(logits, count, self.draft.next_logits(seq))
        self._drafted.took(len(found), time.perf_counter() - began)
        return found
