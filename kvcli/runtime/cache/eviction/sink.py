"""`--evict sink`: the first tokens stay, as attention sinks, and a window of recent ones (arXiv 2309.17453)."""

from __future__ import annotations

from kvcli.runtime.cache.eviction import Policy
from kvcli.runtime.cache.eviction.window import Rolling

POLICY = Policy(Rolling, keep=4, free=True, forgets="all but the first and the recent ones")
