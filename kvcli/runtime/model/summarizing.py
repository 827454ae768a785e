"""Summaries of pages: made before a step whose queries choose by them, of the pages as they stand, once for each."""

from __future__ import annotations

import numpy as np

from kvcli.kernels import Angles, PagedKV
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pagelist import Layers, PoolSummaries
from kvcli.runtime.cache.sequence import Part
from kvcli.runtime.model.decoder import Decoder


def summarize(model: Decoder, layout: KVLayout, part: Part) -> None:
    """Make the summaries that the part's queries choose by and that are not there: of pages that got full since, that
    prefill wrote, or that were read from a file."""
    for layers, group in zip(part.groups, layout.groups, strict=True):
        summarize_group(model, layers, group.layers, missing(layers))


def missing(layers: Layers) -> np.ndarray:
    """The places of entries of a group whose summaries queries choose by and are not there: int64 [n]."""
    found, memory = layers[0].entries.summaries, _unsettled(layers)
    if found is None or memory is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero(memory.missing & (found.addresses != 0))


def summarize_group(model: Decoder, layers: Layers, numbers: tuple[int, ...], which: np.ndarray) -> None:
    """Make those of these places in the layers of a group, which are these of the model."""
    if len(which):
        for kv, number in zip(layers, numbers, strict=True):
            model.ops.summarize(kv, which, _angles(model, kv, number))
    settle(layers, which)


def settle(layers: Layers, made: np.ndarray) -> None:
    """The missing ones have been made."""
    memory = _unsettled(layers)
    if memory is not None:
        memory.settle(made)


def _unsettled(layers: Layers) -> PoolSummaries | None:
    """The summaries of a group of which some may be missing; None where none are, or all pages are read."""
    found = layers[0].entries.summaries
    if layers[0].choice is None or found is None:
        return None
    assert isinstance(found.memory, PoolSummaries)
    return None if found.memory.settled else found.memory


def _angles(model: Decoder, kv: PagedKV, number: int) -> Angles | None:
    """Those of the mean that the keys of that layer lack; None where they lack none."""
    rope = model.ropes.table(model.config.layers[number].rope)
    return rope.centres(kv) if kv.basis.centre is not None and rope is not None else None
