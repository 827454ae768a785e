"""How a chat begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcli.cli.streams import say
from kvcli.options import EvictOptions, PromptCacheOptions, SampleOptions


@dataclass(frozen=True)
class ChatOptions:
    """How a chat begins; `/set`, `/evict` and `/ctx` change what comes then."""

    model: str
    sampling: SampleOptions  # seed -1 = a new random one for every answer
    stats: bool  # a line after each answer
    script: bool  # SIGINT ends the session, not only the answer
    evict: EvictOptions
    kept: PromptCacheOptions
    aside: Callable[[str], None] = say  # how that line is told
    verbose: bool = False
