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
        if layers[0].choice is not None:
            _summarize(model, layers, group.layers)


def _summarize(model: Decoder, layers: Layers, numbers: tuple[int, ...]) -> None:
    """Of the layers of a group, which are these of the model."""
    found = layers[0].entries.summaries
    assert found is not None and isinstance(found.memory, PoolSummaries)
    if found.memory.settled:
        return
    missing = np.intersect1d(found.memory.missing(), np.flatnonzero(found.addresses))
    if len(missing):
        for kv, number in zip(layers, numbers, strict=True):
            model.ops.summarize(kv, missing, _angles(model, kv, number))
    found.memory.settle(missing)


def _angles(model: Decoder, kv: PagedKV, number: int) -> Angles | None:
    """Those of the mean that the keys of that layer lack; None where they lack none."""
    rope = model.ropes.table(model.config.layers[number].rope)
    return rope.centres(kv) if kv.basis.centre is not None and rope is not None else None
