"""Which pages queries read where they do not read all: the plain-torch reference. Summaries of pages, too.

A page's score is the largest product of the pooled query (the mean of those of a block and of the heads of a key-value
group, in the basis of the cached keys) with one of the means of its keys, which are kept in 8 bits. Quest (arXiv
2406.10774) scores by bounds of the keys; of pages of 64 rows means find better ones.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvcli.kernels.paged import CHOICE_BLOCK, Angles, PagedKV
from kvcli.kernels.reference.sums import dot, split

LARGEST = 65504.0  # element of a mean
LARGEST_CODE, LEAST_SCALE = 127, 1e-30


def choose(q: torch.Tensor, kv: PagedKV, start: int, scale: float) -> torch.Tensor:
    """What queries q [T, heads, dim_k] at positions start.. read: bool [kv_heads, blocks, entries of `kv`], of each
    block of CHOICE_BLOCK positions. Of pages with equal scores the earlier ones are taken."""
    assert kv.choice is not None
    pooled, scores = _pooled(q, kv.record.kv_heads, start), []
    for at in range(len(kv.entries)):
        told = kv.summary(at)
        if told is None:
            scores.append(pooled.new_full(pooled.shape[:2], torch.inf))
        else:
            codes, scales = told
            scores.append((dot(split(pooled), codes.float()) * scales[:, None]).amax(-1) * scale)
    found = torch.stack(scores, -1)
    asked = ~found.isinf()
    if kv.choice.pages:
        order = found.masked_fill(~asked, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        return torch.zeros_like(asked).scatter_(-1, order[..., : kv.choice.pages], True) | ~asked
    most = found.masked_fill(~asked, -torch.inf).amax(-1, keepdim=True)
    return found >= most + math.log(kv.choice.threshold)


def _pooled(q: torch.Tensor, kv_heads: int, start: int) -> torch.Tensor:
    """The mean query of each block and head: float32 [kv_heads, blocks, dim_k]."""
    t, heads, dim = q.shape
    each = q.view(t, kv_heads, heads // kv_heads, dim).float().mean(2)
    cuts = [*range(CHOICE_BLOCK - start % CHOICE_BLOCK, t, CHOICE_BLOCK)]
    blocks = torch.tensor_split(each, cuts)
    return torch.stack([block.mean(0) for block in blocks], 1)


def summarize(kv: PagedKV, which: np.ndarray, angles: Angles | None = None) -> None:
    """Make the summaries of these entries, int64 [n]: means of their keys as they score. `angles`: of
    `PagedKV.centres`."""
    size = kv.record.page_size
    for at in which.tolist():
        told = kv.summary(at)
        assert told is not None
        codes, scales = told
        keys, _ = kv.rows(kv.entries.memory[at], 0, size)
        centre = kv.centre(at, angles)
        if centre is not None:
            keys = keys + centre
        means = keys.unflatten(1, (codes.shape[1], -1)).mean(2).clamp(-LARGEST, LARGEST)
        scales.copy_(means.abs().amax(-1) / LARGEST_CODE)
        codes.copy_((means / scales.clamp(min=LEAST_SCALE)[..., None]).round())
