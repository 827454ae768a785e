"""What a cache type does to a model's predictions: perplexity and divergence, measured through the cache.

All types read the same chunks of text. Every step goes through the engine's own forward pass, whose queries read
earlier pages as decode would (their own page in 16 bits, the rest sealed), so how the text is cut into steps does not
change the figures. Only hidden states of a chunk are kept; logits are made in slices over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvcli.errors import UsageError
from kvcli.runtime.cache.layout import GroupLayout, KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine

BASE = ("f16", "f16")
SLICE_ELEMENTS = 8 << 20  # logits of a slice: 32 MiB, a few times over
SLICE_ROWS = 128

Types = tuple[str, str]  # of keys and of values, canonical names
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Scoring:
    """How a text is cut and what is scored.

    Chunks of `chunk` tokens without overlap, each from an empty cache, at most `chunks` of a text (0 = all whole ones).
    Where the model adds a BOS it replaces a chunk's first token. Positions from `first` on predict their successors.
    """

    chunk: int = 512
    chunks: int = 0
    score_from: int | None = None  # None = the second half

    @property
    def first(self) -> int:
        return self.chunk // 2 if self.score_from is None else self.score_from

    @property
    def scored(self) -> int:
        """Tokens scored in a chunk."""
        return self.chunk - 1 - self.first

    def check(self) -> None:
        """Raises UsageError where nothing would be scored."""
        if self.scored < 2:
            raise UsageError(
                f"chunks of {self.chunk} tokens scored from position {self.first} leave nothing to measure",
                "use longer chunks (-c), or a smaller --score-from",
            )

    def cut(self, ids: list[int], bos: int | None) -> list[list[int]]:
        """The chunks of a text. Raises UsageError if it has not even one."""
        count = len(ids) // self.chunk
        if count < 1:
            raise UsageError(
                f"the text has {len(ids):,} tokens, one chunk needs {self.chunk:,}",
                "give more text or use shorter chunks (-c)",
            )
        count = min(count, self.chunks or count)
        head = [] if bos is None else [bos]
        starts = range(0, count * self.chunk, self.chunk)
        return [head + ids[start + len(head) : start + self.chunk] for start in starts]


@dataclass(frozen=True)
class Scores:
    """Per scored token, float32 [n]: its negative log likelihood, the divergence KL(f16 || this type) over the whole
    vocabulary in nats, and whether (1 or 0) the most likely token is that of f16."""

    nll: torch.Tensor
    kld: torch.Tensor
    same_top: torch.Tensor


@dataclass(frozen=True)
class Summary:
    """Figures of one cache type. `ppl_error` and `kld_error` are standard errors; that of PPL by the delta method."""

    tokens: int
    ppl: float
    ppl_error: float
    ppl_delta: float  # of f16, in per cent
    kld: float
    kld_error: float
    kld_p99: float
    kld_max: float
    top1: float  # per cent


@dataclass(frozen=True)
class Cost:
    """What a type stores at a given length, by the allocator's own arithmetic, the 16-bit pages included.

    `bits` is the average over the elements of all rows held; `sealed_bits` that of sealed rows, where
    there are any: not of sinks, tail and layers that stay in 16 bits.
    """

    tokens: int
    bytes_per_token: float
    bits: float
    sealed_bits: float


def measure(
    engine: Engine, texts: list[list[list[int]]], types: list[Types], protocol: Scoring, progress: Progress
) -> dict[Types, list[Scores]]:
    """Scores of every type for every text (a list of chunks), f16 always among them.

    `progress(stage, done, total)` counts tokens over all types.
    """
    types = list(dict.fromkeys((BASE, *types)))
    pools = {t: PagePool(layout_of(engine, t), device=engine.pool.device) for t in types}
    total = sum(len(chunk) for chunks in texts for chunk in chunks) * len(types)
    done = 0
    found: dict[Types, list[Scores]] = {t: [] for t in types}
    for chunks in texts:
        parts: dict[Types, list[Scores]] = {t: [] for t in types}
        for chunk in chunks:
            hidden = {}
            for t in types:
                hidden[t] = _hidden(engine, pools[t], chunk, protocol.first)
                done += len(chunk)
                progress("perplexity", done, total)
            for t, scores in _score(engine, hidden, chunk[protocol.first + 1 :]):
                parts[t].append(scores)
        for t in types:
            found[t].append(_joined(parts[t]))
    return found


def layout_of(engine: Engine, types: Types) -> KVLayout:
    """The engine's layout with other cache types."""
    like = engine.layout.groups[0]
    layout = KVLayout.build(engine.config, *types, engine.layout.page_size, sinks=like.sinks, tail=like.tail)
    return layout.evicting(engine.retention)


def summarize(scores: list[Scores], base: list[Scores]) -> Summary:
    """The figures over all texts together; `base` are the scores of f16."""
    joined, n = _joined(scores), sum(len(s.nll) for s in scores)
    ppl, reference = float(joined.nll.double().mean().exp()), float(_joined(base).nll.double().mean().exp())
    return Summary(
        n,
        ppl,
        ppl * _standard_error(joined.nll),
        100 * (ppl / reference - 1),
        float(joined.kld.double().mean()),
        _standard_error(joined.kld),
        _quantile(joined.kld, 0.99),
        float(joined.kld.max()),
        100 * float(joined.same_top.double().mean()),
    )


def cost(layout: KVLayout, tokens: int) -> Cost:
    """Of one sequence that has grown to `tokens` token by token: every page it holds, the sinks and the tail too."""
    counts = layout.arena_pages(tokens, 1)
    held = sum(n * a.page_bytes for n, a in zip(counts, layout.arenas, strict=True))
    whole = -(-tokens // layout.page_size) * layout.page_size  # positions of all pages, the last one filled up
    elements = 0
    for i, g in enumerate(layout.groups):
        arena = layout.open_arena(i)
        pages = counts[i] + (0 if arena is None else counts[arena])
        elements += _row_elements(g) * min(whole, pages * layout.page_size)
    held += sum(g.static_bytes for g in layout.groups)
    chosen = [g for g in layout.groups if g.sealed] or layout.groups
    return Cost(
        tokens,
        layout.bytes(tokens, 1) / tokens,
        8 * held / elements,
        8 * sum(g.token_bytes for g in chosen) / sum(_row_elements(g) for g in chosen),
    )


def _row_elements(group: GroupLayout) -> int:
    """Elements of a token's keys and values in all layers of the group."""
    return len(group.layers) * group.kv_heads * (group.dim_k + group.dim_v)


def _hidden(engine: Engine, pool: PagePool, ids: list[int], first: int) -> torch.Tensor:
    """Hidden states of rows first .. len - 2, read through a fresh cache: float32 [n, d_model]."""
    seq, parts = Sequence(pool), []
    try:
        for start, end in engine.chunks(0, len(ids)):
            parts.append(engine.forward(seq, ids[start:end])[max(0, first - start) :])
    finally:
        seq.close()
    return torch.cat(parts)[:-1]


@torch.inference_mode()
def _score(engine: Engine, hidden: dict[Types, torch.Tensor], targets: list[int]) -> Iterator[tuple[Types, Scores]]:
    """Compare all types with f16, slice by slice."""
    rows = max(1, min(SLICE_ROWS, SLICE_ELEMENTS // engine.config.vocab_size))
    n = len(targets)  # made here: small tensors between the slices' large ones would keep their memory from reuse
    found = {t: Scores(torch.empty(n), torch.empty(n), torch.empty(n)) for t in hidden}
    wanted = torch.tensor(targets, device=hidden[BASE].device)  # [n]
    with _torch_threads(engine.loaded.threads):
        for at in range(0, n, rows):
            end = min(n, at + rows)
            base = engine.logits(hidden[BASE][at:end]).log_softmax(-1)  # [rows, vocab_size]
            for t, states in hidden.items():
                log_p = base if t == BASE else engine.logits(states[at:end]).log_softmax(-1)
                scores, here = found[t], against(base, log_p, wanted[at:end])
                scores.nll[at:end], scores.kld[at:end], scores.same_top[at:end] = here.nll, here.kld, here.same_top
    yield from found.items()


def against(base: torch.Tensor, log_p: torch.Tensor, wanted: torch.Tensor) -> Scores:
    """Scores of predictions, log probabilities [n, vocab_size], of the tokens `wanted` [n], beside those of `base`."""
    return Scores(
        -log_p.gather(1, wanted[:, None])[:, 0],
        (base.exp() * (base - log_p)).sum(-1),
        (log_p.argmax(-1) == base.argmax(-1)).float(),
    )


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """As many threads for torch, which has one elsewhere: here it computes on many rows of whole vocabularies."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _joined(parts: list[Scores]) -> Scores:
    fields = zip(*((s.nll, s.kld, s.same_top) for s in parts), strict=True)
    return Scores(*(torch.cat(each) for each in fields))


def _standard_error(x: torch.Tensor) -> float:
    return float(x.double().std() / len(x) ** 0.5)


def _quantile(x: torch.Tensor, share: float) -> float:
    """By rank, of any number of elements."""
    return float(x.sort().values[min(len(x) - 1, int(share * len(x)))])
