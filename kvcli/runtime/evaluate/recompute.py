"""Computing the rows of a prompt-cache file again, and how far they are from those in the file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcli.errors import UsageError
from kvcli.kernels import PagedKV
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.pagefiles import take_rows
from kvcli.runtime.promptcache.prefixpages import longest
from kvcli.words import counted

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine


@dataclass(frozen=True)
class Difference:
    """`pages` sampled pages: the largest error of an element of their rows; and of the next token's distribution the
    KL divergence in nats."""

    pages: int
    max_error: float
    divergence: float

    def __str__(self) -> str:
        pages = f"{counted(self.pages, 'page')} computed again"
        return f"{pages}: max error {self.max_error:.3g}, KL divergence of the next token {self.divergence:.3g}"


@torch.inference_mode()
def compare(engine: Engine, file: PromptCacheFile, pages: int) -> Difference:
    """Prefill the file's tokens, from token 0 on, from nothing and compare. Raises UsageError for a file that cannot be
    gone on from, CacheFileError for a damaged one."""
    contents = file.contents
    layout, n = engine.layout, len(contents.tokens)
    length = longest(layout, n - 1, dict.fromkeys(contents.pages, n))
    if not length:
        told = "it has one token" if n == 1 else "other files have some of the pages that its last token sees"
        raise UsageError(told, "there is nothing to compare with")
    kept, fresh = engine.new_sequence(), engine.new_sequence()
    take_rows(kept, Found.in_file(file, n, layout.page_size), contents.tokens[:length])
    hidden = [_feed(engine, seq, contents.tokens) for seq in (kept, fresh)]
    size, worst = layout.page_size, 0.0
    numbers = random.Random(0).sample(range(-(-length // size)), min(pages, -(-length // size)))
    for number in numbers:
        for mine, theirs in zip(kept.views(), fresh.views(), strict=True):
            worst = max(worst, *(_page_error(a, b, number, n) for a, b in zip(mine, theirs, strict=True)))
    logits = [engine.logits(h[-1:])[0].double().log_softmax(0) for h in hidden]
    divergence = float((logits[1].exp() * (logits[1] - logits[0])).sum())
    kept.close()
    fresh.close()
    return Difference(len(numbers), worst, max(0.0, divergence))


def _feed(engine: Engine, seq: Sequence, tokens: list[int]) -> torch.Tensor:
    for start, end in engine.chunks(seq.length, len(tokens)):
        hidden = engine.forward(seq, tokens[start:end])
    return hidden


def _page_error(a: PagedKV, b: PagedKV, number: int, length: int) -> float:
    """The largest difference between a layer's rows in one page as the last token reads it; 0 where it is forgotten."""
    size = a.record.page_size
    first, end = number * size, min((number + 1) * size, length)
    found = [kv.find(end - 1, length - 1) for kv in (a, b)]
    rows = [kv.rows(kv.entries.memory[at], 0, end - first) for kv, at in filter(None, found)]
    return max(float((x - y).abs().max()) for x, y in zip(*rows, strict=True)) if len(rows) == 2 else 0.0
