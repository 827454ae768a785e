"""How what happens on the way reaches the user: see `render` for what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Tell:
    """How the user hears of it: losses, what takes space or time, what is good to know."""

    warn: Callable[[str], None]
    announce: Callable[[str], None]
    notice: Callable[[str], None]
