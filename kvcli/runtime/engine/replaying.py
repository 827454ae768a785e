"""`replay`: has a model repeat the prompt that it has read, to learn which rows that takes (KVzip, arXiv 2505.23416).

The prompt goes through the model once more, in pieces, each behind a request for it; nothing is generated. A piece is
computed in a copy of the sequence that is thrown away, so the prompt's own rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
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


def most_rows(engine: Computing, tokens: int, page_size: int) -> int:
    """How many rows there are at most of a prompt of so many tokens and a piece behind it, whose copy has a page of its
    own."""
    asked = LEAD + max(len(engine.tokenizer.encode(text.format(""), add_bos=False)) for text in (FIRST, LATER))
    return min(engine.ctx_size, tokens + min(PIECE, tokens) + asked) + page_size


def replayed(engine: Computing, seq: Sequence, prompt: list[int]) -> int:
    """How many tokens `replay` computes when `seq` has the rows of `prompt`; 0 where its policy does not go by that.
    Raises ContextOverflow where the context has no room for a piece."""
    selector = seq.selector
    if selector is None or not selector.selection.scorer.repeats or selector.due != len(prompt):
        return 0
    return sum(map(len, _pieces(engine, prompt, selector.selection.policy)))


def replay(engine: Computing, seq: Sequence) -> Generator[int, None, None]:
    """Where the policy of `seq` goes by that: note the most that each row gets of any query of a repetition. Yields how
    many tokens were computed, after each step. Raises as `replayed` does, and DoesNotFit."""
    selector, done = seq.selector, 0
    if selector is None or not replayed(engine, seq, seq.tokens):
        return
    for ids in _pieces(engine, seq.tokens, selector.selection.policy):
        with closing(seq.fork()) as twin:
            assert twin.selector is not None
            twin.selector.repeated_from = seq.length
            start, end = seq.length, seq.length + len(ids)
            for lo, hi in engine.chunks(start, end):
                engine.forward(twin, ids[lo - start : hi - start])
                yield done + hi - start
            selector.learn(twin.selector)
        done += len(ids)


def _pieces(engine: Computing, tokens: list[int], policy: str) -> Iterator[list[int]]:
    """What is computed behind the prompt, in turn: a request, and the part of the prompt that it asks for."""
    tokenizer, done = engine.tokenizer, 0
    left = engine.ctx_size - len(tokens)
    while done < len(tokens):
        words = tokenizer.decode(tokens[max(0, done - LEAD) : done])
        asked = tokenizer.encode(LATER.format(words) if done else FIRST, add_bos=False)
        room = min(PIECE, left - len(asked))
        if room < min(LEAST, len(tokens) - done):
            raise ContextOverflow(
                f"`evict={policy}` repeats the prompt of {len(tokens):,} tokens in pieces, and the context of"
                f" {engine.ctx_size:,} has room for {max(0, left):,} more",
                f"use a larger `ctx`, by {LEAST + len(asked)} to {PIECE + len(asked):,} tokens more than the prompt",
            )
        yield asked + tokens[done : done + room]
        done += room
