"""Where later prompts can start from a file: behind which of its tokens all rows are there that are still seen. No
torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from kvcli.errors import UsageError
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.layout import GroupLayout, KVLayout, PageKey
from kvcli.runtime.config import LayerConfig
from kvcli.runtime.promptcache.file import Contents
from kvcli.runtime.promptcache.rowsettings import cache_options
from kvcli.runtime.promptcache.sameness import APART, VALUES, selected_by

_LAYER = {field.name for field in fields(LayerConfig)} - {"rope", "temperature"}  # which no size depends on


def layout_of(identity: Mapping[str, str]) -> KVLayout:
    """The layout of the rows of a file, by what it says of its making. Raises ValueError where that makes no sense."""
    try:
        described = json.loads(identity["model_config"])["layers"]
        layers = tuple(LayerConfig(**{k: v for k, v in layer.items() if k in _LAYER}) for layer in described)
        options = cache_options(identity)
        config: Any = SimpleNamespace(layers=layers)
        layout, asked = KVLayout.of_options(config, options), options.evict
        layout = layout.apart() if identity.get(VALUES) == APART else layout
        retention = eviction.policy(asked.policy).retention
        return (
            layout if retention is None else layout.evicting(retention(asked.keep or 0, asked.window, layout.page_size))
        )
    except (KeyError, TypeError, AttributeError, UsageError) as error:
        raise ValueError(str(error)) from None


def starts(contents: Contents) -> list[tuple[int, int]]:
    """Stretches of tokens behind which a prompt can go on, (first, last): at the ends of pages, and behind the last
    token; where rows were selected by score, there alone. What other files have of the tokens before this one is taken
    to be there. Raises ValueError."""
    if selected_by(contents.identity):
        return [(contents.end, contents.end)]
    layout, size = layout_of(contents.identity), int(contents.identity["page_size"])
    held, kept = [_numbers(layout, group, contents) for group in range(len(layout.groups))], set(contents.pages)
    found: list[tuple[int, int]] = []
    for length in _ends(contents, size):
        if not _has_state(layout, kept, length):
            continue
        if all(_there(g, held[i], length, contents.start // size) for i, g in enumerate(layout.groups)):
            if found and length - found[-1][1] <= size:
                found[-1] = found[-1][0], length
            else:
                found.append((length, length))
    return found


def checkpoints(contents: Contents) -> tuple[int, int]:
    """How many states a file has that prompts can go on from, and the bytes of each; (0, 0) where no layer has a state.
    Raises ValueError."""
    layout = layout_of(contents.identity)
    if layout.state_arenas is None:
        return 0, 0
    return sum(arena == layout.state_arenas[1] for arena, _ in contents.pages), layout.state_bytes


def _has_state(layout: KVLayout, kept: set[PageKey], length: int) -> bool:
    """Whether the states behind so many tokens are there; True where no layer has any."""
    if layout.state_arenas is None:
        return True
    return length % layout.page_size == 0 and (layout.state_arenas[1], length // layout.page_size - 1) in kept


def _ends(contents: Contents, size: int) -> Iterator[int]:
    """Where a prompt could end: behind each page, and behind the last token."""
    yield from range((contents.start // size + 1) * size, contents.end, size)
    if contents.tokens:
        yield contents.end


def _numbers(layout: KVLayout, group: int, contents: Contents) -> set[int]:
    """The pages of a group that a file has, in whichever form."""
    arenas = {group, layout.open_arena(group)}
    return {number for arena, number in contents.pages if arena in arenas}


def _there(group: GroupLayout, held: set[int], length: int, first: int) -> bool:
    """Whether a file whose own pages begin with `first` has all that a sequence of `length` holds of a group."""
    last = (length - 1) // group.page_size
    if not group.windowed:
        return last in held  # with all before it, in this file and in those that it goes on from
    return all(number in held for number in group.held_pages(length) if number >= first)
