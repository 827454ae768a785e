"""Documents in any order: rows of a document that were computed alone take their place behind other text.

A chunk is a prompt of its own, a document behind what every prompt begins with, in 16 bits; so its rows are exact and
are stored and found like any other prompt's. In a longer prompt they are copied behind the rows before, with their keys
turned by RoPE to where they stand there. What is missing is that they saw none of those rows. A document's first rows
suffer most, as the first rows of a text take the attention that nothing else wants: they are computed in place (EPIC,
arXiv 2410.15332; whole blocks: MEPIC, arXiv 2512.16822). The result is not that of the whole prompt, and no cache may
have it; so what copies do to predictions is measured before a prompt takes any.
"""

from __future__ import annotations

from collections.abc import Sequence as Some
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from kvcli.errors import UsageError
from kvcli.kernels.reference.pointwise import rope_
from kvcli.kernels.reference.store import store
from kvcli.runtime.cache.pagerows import copies
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import CHUNKED, LATENT, RECURRENT
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.model.decoder import Attention
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

STEP = 256  # rows that are copied at a time
REPAIR = 64  # first rows of a chunk that are computed in place
GATE = 32  # rows behind them that are copied to see what that does to the predictions of others
ASKED = 8  # rows behind these that are asked for predictions: each is a product with the whole vocabulary
LIMIT = 0.2  # nats by which these may differ


@dataclass(frozen=True)
class Place:
    """Rows [lo, hi) of a chunk, numbered from its own beginning, stand at positions at + lo .. at + hi - 1."""

    chunk: int
    at: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Moved:
    """What became of a chunk in a prompt: how many of its rows were `copied`, and by how much copied rows change the
    predictions of those behind them (the mean KL divergence, in nats; None = they were not compared)."""

    place: Place
    copied: int
    divergence: float | None = None

    @property
    def passed(self) -> bool:
        """Whether its rows were compared and taken."""
        return self.copied > 0 and self.divergence is not None


def refused(engine: Engine) -> str:
    """Why rows of this model, or under these options, cannot move; "" = they can."""
    if any(group.kind in (CHUNKED, LATENT, RECURRENT) for group in engine.layout.groups):
        return "its layers do not keep keys that can be turned to another position"
    if any(isinstance(each.inner, Attention) and each.inner.how.norms_last for each in engine.model.weights.sublayers):
        return "its keys are normed behind RoPE"
    if engine.layout.joined != any(layer.turned for layer in engine.config.layers):
        return "values that are keys, too, are stored once in 16 bits, and apart in this cache type"
    if engine.retention is not None or engine.layout.selection is not None:
        return "old rows are evicted"
    return ""


def find(ids: list[int], chunks: Some[list[int]], least: int) -> list[Place]:
    """Where in a prompt the tokens of chunks stand, in the order of the prompt: of each chunk its longest stretch
    there, if it has `least` tokens. Tokens at both ends may differ, for texts that meet may share one."""
    found = []
    text = np.array(ids, np.int64)
    for number, chunk in enumerate(chunks):
        best = _longest(text, np.array(chunk, np.int64))
        if best.hi - best.lo >= least:
            found.append(Place(number, best.at, best.lo, best.hi))
    found.sort(key=lambda place: place.at + place.lo)
    kept: list[Place] = []
    for place in found:  # two chunks may have text in common
        if not kept or kept[-1].at + kept[-1].hi <= place.at + place.lo:
            kept.append(place)
    return kept


def _longest(text: np.ndarray, chunk: np.ndarray) -> Place:
    """The longest stretch that both have in common, of those that hold the chunk's middle."""
    middle, best = len(chunk) // 2, Place(0, 0, 0, 0)
    for at in np.flatnonzero(text == chunk[middle]).tolist():
        before = min(middle, at)
        same = text[at - before : at][::-1] == chunk[middle - before : middle][::-1]
        lo = middle - (int(np.argmin(same)) if not same.all() else before)
        behind = min(len(chunk) - middle, len(text) - at)
        same = text[at : at + behind] == chunk[middle : middle + behind]
        hi = middle + (int(np.argmin(same)) if not same.all() else behind)
        if hi - lo > best.hi - best.lo:
            best = Place(0, at - middle, lo, hi)
    return best


@torch.inference_mode()
def graft(engine: Engine, seq: Sequence, source: Sequence, lo: int, hi: int) -> None:
    """Append rows [lo, hi) of `source`, of 16 bits or more, to `seq`, with their keys turned to where they stand now.

    Of layers with windows those that `source` still has are copied: all that a query behind them sees. Raises
    DoesNotFit.
    """
    layers, ops = engine.config.layers, engine.model.ops  # torch stores rows on any device
    exact = seq.pool is source.pool and seq.tokens == source.tokens[:lo]  # the same rows would be computed here
    views, slots, moved = source.views(), source.pool.layout.slots, float(seq.length - lo)
    own = [(i, slot) for i, slot in enumerate(slots) if slot and layers[i].shares_kv_with is None]
    turns = {i: _rope(engine, i) for i, _ in own}
    angles = {table: table.at_positions(np.array([moved])) for table in turns.values() if table is not None}
    for start in range(lo, hi, STEP):
        tokens = source.tokens[start : min(hi, start + STEP)]
        first = seq.length
        into = seq.reserve(tokens)
        for i, (group, index) in own:
            kv, rope = into.kv(i), turns[i]
            for at, k, v in copies(views[group][index], start, start + len(tokens)):
                if rope is not None:
                    rope_(k, *(x.expand(len(k), -1).contiguous().to(k.device) for x in angles[rope]))
                if kv.rotated[0]:
                    ops.rotate_(k)
                if kv.rotated[1]:
                    ops.rotate_(v)
                store(k, v, kv, first + at - start)
            seal_step(ops, rope, kv, first, first + len(tokens))
        seq.commit(tokens)
        if seq.moved is None and not exact:
            seq.moved = first


def _rope(engine: Engine, layer: int) -> RopeTable | None:
    """What turns the keys of a layer as they are stored."""
    shape = engine.config.layers[layer]
    table = engine.model.ropes.table(shape.rope)
    return table.first(shape.turned) if table is not None and shape.turned and engine.layout.joined else table


@torch.inference_mode()
def compute(engine: Engine, seq: Sequence, ids: Some[int]) -> torch.Tensor:
    """Run `ids` as the next rows -> hidden states float32 [T, d_model]. Raises DoesNotFit."""
    start = seq.length
    steps = [(lo - start, hi - start) for lo, hi in engine.chunks(start, start + len(ids))]
    hidden = [engine.forward(seq, list(ids[lo:hi])) for lo, hi in steps]
    return torch.cat(hidden) if hidden else torch.empty(0, engine.config.d_model)


@torch.inference_mode()
def put(
    engine: Engine, seq: Sequence, ids: list[int], place: Place, alone: Engine, source: Sequence,
    repair: int = REPAIR, gate: int = GATE, limit: float = LIMIT,
) -> Moved:  # fmt: skip
    """Have the rows of a prompt up to the end of a chunk: those of the chunk copied from `source`, a sequence of the
    engine `alone`, but for the first `repair`, which are computed in place like all before them.

    With a `gate`, so are that many more and ASKED behind them, if text precedes the chunk; and these ASKED once more,
    behind copies of the `gate` rows: where that makes other predictions, by more than `limit`, no row is copied. Nor is
    one of a chunk that has no more than these, and the last token of the prompt is always left. Raises DoesNotFit.
    """
    hi = min(place.hi, len(ids) - 1 - place.at)
    first = engine is alone and place.at == place.lo == seq.length == 0  # then its rows are exact
    lo = max(0 if first else place.lo + repair, seq.length - place.at)
    tried = gate + ASKED if gate and place.at + place.lo else 0
    if lo + tried >= hi:
        return Moved(place, 0)
    compute(engine, seq, ids[seq.length : place.at + lo])
    divergence = None
    if tried:
        rows = ids[place.at + lo : place.at + lo + tried]
        blended = _behind(engine, seq, alone, source, lo, lo + gate, rows[gate:])
        divergence = _divergence(engine, compute(engine, seq, rows)[gate:], blended)
        lo += tried
        if divergence > limit:
            return Moved(place, 0, divergence)
    graft(engine, seq, source, lo, hi)
    return Moved(place, hi - lo, divergence)


def _behind(
    engine: Engine, seq: Sequence, alone: Engine, source: Sequence, lo: int, hi: int, ids: list[int]
) -> torch.Tensor:
    """Hidden states of `ids` behind copies of rows [lo, hi) of a chunk, and of `seq`, which stays as it is."""
    with closing(seq.fork()) as twin, closing(alone.new_sequence()) as again:
        if source.rewindable(hi) == hi:
            graft(engine, twin, source, lo, hi)
        else:  # its windows have let go of these rows
            compute(alone, again, source.tokens[:hi])
            graft(engine, twin, again, lo, hi)
        return compute(engine, twin, ids)


def _divergence(engine: Engine, hidden: torch.Tensor, other: torch.Tensor) -> float:
    """The mean KL divergence of the predictions behind `other` from those behind `hidden` [n, d_model], in nats."""
    base, log_p = (engine.logits(x).log_softmax(-1) for x in (hidden, other))
    return float((base.exp() * (base - log_p)).sum(-1).mean())


def check(engine: Engine) -> None:
    """Raises UsageError where rows cannot move."""
    if why := refused(engine):
        raise UsageError(f"chunks in any order are not possible with this model: {why}", "leave `chunks` out")
