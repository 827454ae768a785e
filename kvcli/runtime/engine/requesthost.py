"""`Host`: what a request needs of an engine."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Protocol

from kvcli.runtime.engine.spec.guesses import Session
from kvcli.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from kvcli.runtime.cache.sequence import Sequence
    from kvcli.runtime.engine.sampler import Sampler


class Host(Protocol):
    """See `Engine`."""

    tokenizer: Tokenizer
    ctx_size: int
    load_s: float
    session: Session

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, int]]: ...

    def forward(self, seq: Sequence, ids: list[int]) -> torch.Tensor: ...

    def chunk_end(self, start: int, end: int) -> int: ...

    def select(self, seq: Sequence) -> None: ...

    def synchronize(self) -> None: ...

    def device_tokens(
        self, seq: Sequence, history: list[int], sampler: Sampler, logits: torch.Tensor
    ) -> Generator[int, None, None] | None: ...
