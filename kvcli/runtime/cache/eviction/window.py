"""`--evict window`: the oldest tokens go, the very first too. Models lean on those (arXiv 2309.17453): expect nonsense
once they are gone, unless the model was trained with such a window."""

from __future__ import annotations

from kvcli.runtime.cache.eviction import Policy

POLICY = Policy(evicts=True)
