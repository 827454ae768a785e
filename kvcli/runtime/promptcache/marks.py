"""Marks: places in a prompt that later prompts may start from. No torch.

Where no layer has a window, a prompt can be gone on from behind any of its rows. A window lets go of the rows before
it, so those that a prompt would need which starts from a mark are kept apart, as far as a budget goes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from kvcli.runtime.cache.layout import GroupLayout, KVLayout, PageKey
from kvcli.runtime.config import WINDOWED

USER, SYSTEM, SHARED, FILE, TURN, EVEN = "user", "system", "shared", "file", "turn", "even"
KINDS = USER, SYSTEM, SHARED, FILE, TURN, EVEN  # those to the left come first where not all can be kept
LEAST_STEP, MOST_EVEN = 1024, 8  # tokens between marks that nothing but their place tells, and how many of them
SLACK = 8  # tokens: another prompt may part a little before a mark, where tokens straddle the end of a text
MOST = 64  # marks of a prompt


@dataclass(frozen=True)
class Mark:
    """Behind the first `at` tokens of a prompt. `kind`: one of KINDS; `name`: of a file, or the marked text."""

    at: int
    kind: str
    name: str = ""


@dataclass(frozen=True)
class Breakpoint:
    """A mark, and what became of it: whether the rows before it were `reused`, and whether what later prompts need to
    start from it is `kept`."""

    mark: Mark
    reused: bool
    kept: bool


@dataclass(frozen=True)
class MovedChunk:
    """A document that was looked for alone: how many of its `tokens` the prompt has where it stands, and how many of
    these were `copied`. `kld`: by how much copies change the predictions behind them, in nats; None = not compared."""

    name: str
    tokens: int
    copied: int
    kld: float | None


class Text(Protocol):
    """What is asked of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_segments(self, segments: list[tuple[str, bool]], add_bos: bool) -> list[int]: ...


def window(arena: GroupLayout, at: int, grain: int = 1) -> range:
    """The pages of a windowed arena that a sequence needs to start behind `at` tokens, or SLACK before, or where the
    page or the block of `grain` rows begins that these are in."""
    size = arena.page_size
    unit = max(size, grain)
    return range(arena.first_page(max(0, at - SLACK) // unit * unit), -(-at // size))


def pages_of(layout: KVLayout, at: int) -> set[PageKey]:
    """Those of every arena of a layout."""
    arenas = ((i, arena) for i, arena in enumerate(layout.row_arenas) if arena.kind in WINDOWED)
    return {(i, number) for i, arena in arenas for number in window(arena, at, layout.grain)}


def settled(layout: KVLayout, marks: Iterable[Mark], end: int) -> list[Mark]:
    """Marks of a prompt of `end` tokens in the order of their places, each place once, by the first of its KINDS; less
    than a page is never read. Of more than MOST those stay that are of the first KINDS, and of one kind the latest."""
    found: dict[int, Mark] = {}
    for mark in sorted(marks, key=lambda mark: KINDS.index(mark.kind)):
        if layout.page_size <= mark.at < end:
            found.setdefault(mark.at, mark)
    kept = sorted(found.values(), key=lambda mark: (KINDS.index(mark.kind), -mark.at))[:MOST]
    return sorted(kept, key=lambda mark: mark.at)


def evenly(layout: KVLayout, end: int) -> list[Mark]:
    """Marks where a prompt of `end` tokens says nothing of where others part from it: behind every so many tokens, a
    power of two, whatever the length is, so that prompts with a common beginning have some in common. None where no
    layer has a window."""
    step = LEAST_STEP
    while end > (MOST_EVEN + 1) * step:
        step *= 2
    return [Mark(at, EVEN) for at in range(step, end, step) if pages_of(layout, at)]


def affordable(layout: KVLayout, marks: Sequence[Mark], max_bytes: int, even_bytes: int = 0) -> list[Mark]:
    """Those of which what windows leave behind takes no more than `max_bytes` together: by KINDS, then the latest
    first, as later prompts are likelier to have more in common. EVEN ones take no more than `even_bytes`."""
    kept, keys, left = list[Mark](), set[PageKey](), max_bytes
    for mark in sorted(marks, key=lambda mark: (KINDS.index(mark.kind), -mark.at)):
        left = min(left, even_bytes) if mark.kind == EVEN and (not kept or kept[-1].kind != EVEN) else left
        more = {key for key in pages_of(layout, mark.at) if key[0] < len(layout.groups)} - keys
        cost = sum(layout.arenas[arena].page_bytes for arena, _ in more)
        if cost <= left:
            kept.append(mark)
            keys |= more
            left -= cost
    return sorted(kept, key=lambda mark: mark.at)


def nearest(marks: Iterable[Mark], have: int, page_size: int) -> str:
    """The kind of the mark that a prompt goes on from whose first `have` rows are there: the nearest one, within a page
    of it; "" = from none."""
    near = [mark for mark in marks if have and abs(mark.at - have) < page_size]
    return min(near, key=lambda mark: abs(mark.at - have)).kind if near else ""


def behind(text: Text, ids: list[int], start: int, part: str, ends: Iterable[int]) -> list[int | None]:
    """How many ids stand for no more than part[:end], of each end: `part` is some text that the tokens from `start` on
    spell. None where they do not spell it letter by letter."""
    pieces = [text.token_bytes(token) for token in ids[start:]]
    at, sizes = b"".join(pieces).find(part.encode("utf-8", "surrogatepass")), list(accumulate(map(len, pieces)))
    if at < 0:
        return [None for _ in ends]
    lengths = (at + len(part[:end].encode("utf-8", "surrogatepass")) for end in ends)
    return [start + bisect_right(sizes, length) for length in lengths]


def behind_text(text: Text, ids: list[int], marked: str) -> list[Mark]:
    """A mark behind every place where the tokens spell `marked`; [] = nowhere."""
    pieces = [text.token_bytes(token) for token in ids]
    data, wanted, sizes = b"".join(pieces), marked.encode("utf-8", "surrogatepass"), list(accumulate(map(len, pieces)))
    found, at = list[Mark](), data.find(wanted)
    while at >= 0 and wanted and len(found) < MOST:
        end = at + len(wanted)
        found.append(Mark(bisect_right(sizes, end), USER, marked))
        at = data.find(wanted, end)
    return found


def of_segments(text: Text, ids: list[int], segments: list[tuple[str, bool]], system: bool) -> list[Mark]:
    """Before every message of a rendered chat but the first: of the last ones at most four, beside the first of them.
    `system`: the first one is the system message."""
    starts = [i for i, (_, trusted) in enumerate(segments) if not trusted][1:]
    found = []
    for number, i in enumerate(starts):
        if number == 0 or len(starts) - number <= 4:
            before = text.encode_segments(segments[:i], add_bos=True)
            at = next((n for n, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
            found.append(Mark(at, SYSTEM if system and number == 0 else TURN))
    return found
