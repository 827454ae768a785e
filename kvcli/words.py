"""Words for messages: sizes, counts, plurals, and what somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'. Powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_count(count: float) -> str:
    """134515008 -> '134.5 M'. Powers of 1000."""
    for unit in ("", " K", " M", " B"):
        if abs(count) < 999.95 or unit == " B":
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    raise AssertionError("unreachable")


def human_time(seconds: float) -> str:
    """'20 s', '5 min', '3 h', '6 d', rounded."""
    seconds = max(0.0, seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60))
    return next((f"{seconds / size:.0f} {unit}" for unit, size in units if seconds >= size), f"{seconds:.0f} s")


def human_seconds(seconds: float) -> str:
    """'0.42 s', '12.3 s', '5 min', '3 h': with digits where they say something."""
    return human_time(seconds) if seconds >= 120 else f"{seconds:.{1 if seconds >= 10 else 2}f} s"


def counted(number: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """a; a and b; a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def near(word: str, known: Iterable[str], most: int = 1, alike: float = 0.6) -> list[str]:
    """The names most like a word, the likest first. `alike`: from 0 to 1."""
    return difflib.get_close_matches(word, list(known), most, alike)


def meant(names: Iterable[str]) -> str:
    """'did you mean a or b?'; "" for no names."""
    offered = " or ".join(names)
    return f"did you mean {offered}?" if offered else ""
