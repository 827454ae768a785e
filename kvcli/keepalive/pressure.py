"""Whether other programs need the memory of a model that nobody uses at the moment."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from kvcli.runtime.host.memory import Memory, main_memory, parse_size

LEAST_SHARE = 0.05  # of memory, or of a GPU's, that is to be free
MOST_STALLED = 10.0  # percent of the last ten seconds in which all programs waited for memory


def is_high(root: Path = Path("/")) -> bool:
    """`root`: where /proc and /sys are looked for."""
    memory = main_memory(root)
    if memory.free < LEAST_SHARE * memory.total:
        return True
    with suppress(OSError):  # a kernel that does not tell
        found = re.search(r"^full avg10=([\d.]+)", (root / "proc/pressure/memory").read_text(), re.MULTILINE)
        return found is not None and float(found[1]) > MOST_STALLED
    return False


def is_short(card: Memory, least: str) -> bool:
    """Whether less is free of a GPU's memory than `least`, a size or a share of it; "" = LEAST_SHARE."""
    return card.free < (parse_size(least, "--yield-vram", card.total) if least else LEAST_SHARE * card.total)
