"""`RowsAhead`: rows of an answer that are computed before its request asks for them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kvcli.runtime.cache.sequence import Sequence
    from kvcli.runtime.engine.sampler import Sampler
    from kvcli.runtime.engine.spec.guesses import Guesses
    from kvcli.runtime.engine.tokenstream import DeviceRows


class Seat(Protocol):
    """Of a request among those whose tokens a device chooses together."""

    def close(self) -> None:
        """Give it up: the sequence keeps no row of a token that is not in the history."""


class RowsAhead:
    """`tokens`: of a device that chooses them by itself. `seat`: among requests whose tokens are chosen together.
    `known`: while guesses are looked at, the rows that there would be without them."""

    def __init__(self) -> None:
        self.tokens: Generator[int, None, None] | None = None
        self.seat: Seat | None = None
        self.known: int | None = None
        self._rows: DeviceRows | None = None

    @property
    def by_device(self) -> bool:
        """Whether a device computes rows before it is asked for them."""
        return self.tokens is not None or self.seat is not None

    def chosen(self, sampler: Sampler, logits: torch.Tensor, first: int) -> Iterator[int] | torch.Tensor:
        """The tokens of rows of which the first one's is to stand at position `first`, where a device can choose them;
        else their logits, on the host."""
        if len(logits) == 1 or logits.device.type != "cuda":
            return logits.cpu()
        from kvcli.runtime.engine.tokenstream import DeviceRows

        if not DeviceRows.possible(sampler):
            return logits.cpu()
        self._rows = self._rows or DeviceRows(sampler, logits.shape[1], logits.device)
        return self._rows.chosen(logits, first)

    def take_back(self, seq: Sequence) -> None:
        """Give up rows that would not be there without guesses."""
        if self.known is not None and seq.length > self.known:
            seq.rewind(self.known)

    def settle(self, seq: Sequence) -> None:
        """Guesses were looked at: the rows that are left stay."""
        self.known = seq.certain = None
        if seq.states is not None:
            seq.states.settle()

    def close(self, seq: Sequence) -> None:
        """Compute none any more: `seq` keeps no row of a token that is not in the history."""
        if self.tokens is not None:
            self.tokens.close()
            self.tokens = None
        if self.seat is not None:
            seat, self.seat = self.seat, None
            seat.close()
        if self.known is not None:
            self.take_back(seq)
            self.settle(seq)


def on_host(seq: Sequence, guesses: Guesses) -> bool:
    """Whether no device may choose the tokens of an answer by itself: guesses go by each row as it is computed, or a
    row too many could not be taken back from a state, behind which there may be guesses at any time."""
    return guesses.reads or (guesses.ever and seq.states is not None)


def guessed(seq: Sequence, guesses: Guesses, length: int, most: int, ctx_size: int) -> list[int]:
    """Guesses behind `length` known tokens, at most so many, and as there is room for. Where layers keep a state, that
    before them gets a page: none where there is none."""
    found = guesses.next(length, min(most, _room(seq, length, ctx_size)) if guesses.ever else 0)
    return found if not found or seq.states is None or seq.states.can_guess() else guesses.next(length, 0)


def _room(seq: Sequence, length: int, ctx_size: int) -> int:
    """How many guesses there may be behind `length` known tokens.

    They stay in the page of the newest one, and do not fill it: what is wrong is taken back, and a page that was sealed
    could not be. None where what is taken back leaves traces among queries that were noted, where a token chooses its
    pages, or where rows are computed in blocks.
    """
    layout = seq.pool.layout
    if seq.selector is not None or layout.attend.pages or layout.grain > 1:
        return 0
    size = layout.page_size
    page = size - 2 - (length - 1) % size
    return page if seq.retention is not None else min(page, ctx_size - length)
