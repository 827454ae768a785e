"""`--evict none`: nothing is forgotten, and an answer ends where the context is full."""

from __future__ import annotations

from kvcli.runtime.cache.eviction import Policy

POLICY = Policy()
