"""`Predictions`: guesses of a layer that reads what the model made of each token; see `Predictor`.

Its rows are in a cache of their own. Row k has the token at position first + k + 1 and the model's features of the
position before: so it can be computed as soon as the model has that row and the token behind it is known. Rows of
guesses have the layer's own features, until the model has computed theirs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence as Some
from typing import TYPE_CHECKING

import torch

from kvcli.errors import DoesNotFit
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step, chunk_end
from kvcli.runtime.engine.spec.drawing import DrawnGuesses
from kvcli.runtime.engine.spec.guesses import Guesses, Session
from kvcli.runtime.engine.spec.pace import ROWS

if TYPE_CHECKING:
    from kvcli.runtime.engine.loaded import LoadedModel
    from kvcli.runtime.engine.request import Request
    from kvcli.runtime.engine.spec.guesses import Drafts
    from kvcli.runtime.engine.terms import Terms
    from kvcli.runtime.model.decoder import Decoder
    from kvcli.runtime.model.predictors import Predictor


def predictions(loaded: LoadedModel, terms: Terms, before: Drafts | None) -> Predictions | None:
    """Those of a model that was loaded with a predictor, in the memory of what guessed before; None = it has none."""
    own = terms.of_draft()
    if loaded.predictor is None or own is None:
        return None
    if isinstance(before, Predictions):
        pool = before.pool.under(own.layout, own.pool_bytes)
    else:
        pool = PagePool(own.layout, own.pool_bytes, loaded.decoder.ops.device)
    method, vocabulary = loaded.sampling_defaults["spec"], loaded.config.vocab_size
    ubatch, ends = own.setting.step(own.layout), loaded.tokenizer.eog_ids
    return Predictions(method, loaded.predictor, pool, own.plan.kv_bytes, ubatch, vocabulary, ends)


def hand_over(model: Decoder, work: list[tuple[Request, int]], hidden: torch.Tensor) -> None:
    """Tell guesses that read it what `model` made of the rows of the last step: so many of each request, one after the
    other. `hidden`: what it gave."""
    if not any(request.guesses.reads for request, _ in work):
        return
    features = torch.cat(model.tapped, 1) if model.taps else hidden
    for (request, n), own in zip(work, features.split([n for _, n in work]), strict=True):
        if request.guesses.reads:
            request.guesses.computed(request.seq.tokens, request.seq.length - n, own)


class Predictions:
    """A predictor with the memory of its rows, of which those of the last answer stay for the next prompt."""

    def __init__(
        self,
        method: str,
        predictor: Predictor,
        pool: PagePool,
        soft_bytes: int,
        ubatch: int,
        vocab_size: int,
        ends: frozenset[int],
    ) -> None:
        """`soft_bytes`: see `PagePool.lend`; `ends`: tokens that end a text; `vocab_size`: of the model."""
        self.method, self.predictor, self.pool, self.ubatch = method, predictor, pool, ubatch
        self.vocab_size, self.ends = vocab_size, ends
        self.last: Rows | None = None
        mine = weakref.ref(self)  # the pool does not keep what keeps the pool

        def make_room(arena: int, last_resort: bool) -> None:
            if (there := mine()) is not None:
                there.close()

        pool.lend(make_room, soft_bytes)

    def guesses(self, session: Session) -> Guesses:
        """For a new answer."""
        return PredictedGuesses(session, self)

    def keep(self, rows: Rows) -> None:
        """In the place of those that were kept before."""
        self.close()
        self.last = rows

    def close(self) -> None:
        """Let go of the rows of earlier prompts."""
        if self.last is not None:
            self.last.close()
            self.last = None


class Rows:
    """Rows of one text, from its position `first` on. `tokens`: whose rows the model has computed; `waiting`: features
    [n, d_model] of the last ones of them, with which no row was computed yet."""

    def __init__(self, drafts: Predictions, first: int) -> None:
        self.drafts, self.first = drafts, first
        self.seq, self.tokens = Sequence(drafts.pool), list[int]()
        self.waiting = torch.empty(0)
        self.same = 0  # so many of the tokens are known to be those of the text

    def follow(self, text: Some[int], end: int) -> bool:
        """Keep what is of this text before position `end`; False = rows are missing then."""
        first, wanted = self.first, end - self.first
        if wanted <= 0:
            return wanted == 0 and not self.tokens
        done, same = min(len(self.tokens) - len(self.waiting), wanted), min(self.same, wanted)
        if self.tokens[same:wanted] != list(text[first + same : end]):
            return False
        least = max(0, min(same, done) - 1)
        if self.seq.tokens[least:done] != list(text[first + 1 + least : first + 1 + done]):
            return False
        if self.seq.rewind_to(min(self.seq.length, done)) < done:
            return False
        self.waiting = self.waiting[: wanted - done]
        del self.tokens[wanted:]
        self.same = wanted
        return True

    def add(self, tokens: Some[int], features: torch.Tensor) -> None:
        """The model has computed these rows."""
        self.tokens.extend(tokens)
        self.waiting = torch.cat((self.waiting, features)) if len(self.waiting) else features

    def read(self, following: Some[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute the rows whose token is known: `following` is what comes behind the model's rows -> hidden state and
        features [1, d_model] of the last one; None = there are none to compute. Raises DoesNotFit."""
        done, size = len(self.tokens) - len(self.waiting), self.drafts.pool.layout.page_size
        ids = [*self.tokens[done + 1 :], *following[:1]] if len(self.waiting) else []
        self.seq.certain = self.seq.rewind_to(min(done, self.seq.length))
        found = None
        while ids:
            n = chunk_end(self.seq.length, self.seq.length + len(ids), self.drafts.ubatch, size) - self.seq.length
            hidden, features = self.run(ids[:n], self.drafts.predictor.fused(self.waiting[:n]))
            found = hidden[-1:], features[-1:]
            ids, self.waiting = ids[n:], self.waiting[n:]
        self.seq.certain = self.seq.length
        return found

    def run(self, ids: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next rows of the layer, see `Predictor.rows`. Raises DoesNotFit."""
        part = self.seq.reserve(ids)
        found = self.drafts.predictor.rows(Step((part,)), features)
        self.seq.commit(ids)
        return found

    def close(self) -> None:
        self.seq.close()


class PredictedGuesses(DrawnGuesses):
    """What a predictor guesses of one answer."""

    reads = True

    def __init__(self, session: Session, drafts: Predictions) -> None:
        super().__init__(session, drafts.vocab_size, drafts.ends)
        self.drafts = drafts
        self._rows: Rows | None = None

    def computed(self, tokens: Some[int], start: int, features: torch.Tensor) -> None:
        """See `Guesses.computed`. Of a prompt rows are read at once, so that its features need not be kept."""
        if self._full:
            return
        rows = self._rows or self._kept()
        if rows is None or not rows.follow(tokens, start):
            if rows is not None:
                rows.close()
            rows = Rows(self.drafts, start)
        self._rows = rows
        rows.add(tokens[start:], features)
        if len(rows.waiting) > ROWS[-1]:
            try:
                rows.read([])
            except DoesNotFit:
                self._full = True
                self.close()

    def _kept(self) -> Rows | None:
        """Rows of an earlier answer, which may be those of this text."""
        kept, self.drafts.last = self.drafts.last, None
        if kept is not None:
            kept.same = 0
        return kept

    def _draft(self, count: int) -> list[int]:
        """See `DrawnGuesses`; none where the model's rows were not seen."""
        rows, known, began = self._rows, self._known, time.perf_counter()
        if rows is None or not rows.follow(known, len(known) - 1):
            return []
        last = rows.read(known[-1:])
        if last is None:
            return []
        hidden, features = last
        predictor, size = self.drafts.predictor, self.drafts.pool.layout.page_size
        count = min(count, size - rows.seq.length % size)  # a page that is full is sealed, and rows are taken back

        def run(token: int) -> torch.Tensor:
            nonlocal features
            hidden, features = rows.run([token], features)
            return predictor.logits(hidden)[0]

        found = self._drawn(predictor.logits(hidden)[0], count, run)
        self._drafted.took(len(found), time.perf_counter() - began)
        return found

    def over(self, answer: Some[int]) -> None:
        """The rows are kept for the next prompt."""
        if self._rows is not None:
            self.drafts.keep(self._rows)
            self._rows = None

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None
