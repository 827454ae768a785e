"""`replay`: has a model repeat the prompt that it has read, to learn which rows that takes (KVzip, arXiv 2505.23416).

The prompt goes through the model once more, in pieces, each behind a request for it; nothing is generated. A piece is
computed in a copy of the sequence that is thrown away, so the prompt's own rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

from kvcli.errors import ContextOverflow
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

PIECE = 2048  # tokens that are repeated at a time, as the paper has it
LEAST = 128  # fewer are not worth a request of their own
LEAD = 8  # tokens before a piece that the request for it names
FIRST = "\n\nRepeat all of the text above, word for word:\n\n"
LATER = '\n\nRepeat the text above, word for word, from where it says "{}":\n\n'


class Computing(Protocol):
    """What is asked of an engine; see `Engine`."""

    ctx_size: int
    tokenizer: Tokenizer

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, int]]: ...

    def forward(self, seq: Sequence, ids: list[int]) -> torch.Tensor: ...


def replay(engine: Computing, seq: Sequence) -> None:
    """Where the policy of `seq` goes by that: note the most that each row gets of any query of a repetition. Raises
    ContextOverflow where the context has no room for a piece, and DoesNotFit."""
    selector = seq.selector
    if selector is None or not selector.selection.scorer.repeats:
        return
    for ids in list(_pieces(engine, seq)):
        with closing(seq.fork()) as twin:
            assert twin.selector is not None
            twin.selector.repeated_from = seq.length
            start, end = seq.length, seq.length + len(ids)
            for lo, hi in engine.chunks(start, end):
                engine.forward(twin, ids[lo - start : hi - start])
            selector.learn(twin.selector)


def _pieces(engine: Computing, seq: Sequence) -> Iterator[list[int]]:
    """What is computed behind the prompt, in turn: a request, and the part of the prompt that it asks for."""
    tokenizer, tokens, done = engine.tokenizer, seq.tokens, 0
    left = engine.ctx_size - seq.length
    while done < len(tokens):
        words = tokenizer.decode(tokens[max(0, done - LEAD) : done])
        asked = tokenizer.encode(LATER.format(words) if done else FIRST, add_bos=False)
        room = min(PIECE, left - len(asked))
        if room < min(LEAST, len(tokens) - done):
            policy = seq.selector.selection.policy if seq.selector else ""
            raise ContextOverflow(
                f"`evict={policy}` repeats the prompt of {len(tokens):,} tokens in pieces, and the context of"
                f" {engine.ctx_size:,} has room for {max(0, left):,} more",
                f"use a larger `ctx`, by {LEAST + len(asked)} to {PIECE + len(asked):,} tokens more than the prompt",
            )
        yield asked + tokens[done : done + room]
        done += room
