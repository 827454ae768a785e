"""`--evict sink`: the first tokens stay, as attention sinks, and a window of recent ones (arXiv 2309.17453)."""

from __future__ import annotations

from kvcli.runtime.cache.eviction import Policy

POLICY = Policy(evicts=True, keep=4, free=True)
