"""Why a prompt was not found in a cache, in one line."""

from __future__ import annotations

from collections.abc import Callable

from kvcli.errors import CacheFileError
from kvcli.runtime.promptcaches.promptcache import PromptCacheFile, first_difference
from kvcli.runtime.promptcaches.promptstore import Found, PromptStore, entries, folders

NO_ROOM = "the cache has no room for the rows that are stored; they are computed again"


def diverges(name: str, shared: int, held: list[int], wanted: list[int], text_of: Callable[[int], str]) -> str:
    """Where a stored prompt and this one part."""
    if shared == len(wanted) or shared == len(held):
        return f"{name} shares {shared:,} tokens with this prompt, too few to be of use"
    parted = f"{text_of(held[shared])!r}, here {text_of(wanted[shared])!r}"
    return f"{name} shares the first {shared:,} tokens with this prompt; then it has {parted}"


def reason(store: PromptStore, found: Found, wanted: list[int], text_of: Callable[[int], str]) -> str:
    """Why the store had nothing, or less than it might have; "" if it could not have."""
    if found.closest >= store.page_size:
        return f"a stored prompt shares {found.closest:,} tokens with this one, but not every page of them is there"
    if next(entries(store.folder), None) is None:
        return _other_settings(store)
    if found.closest and (found.closest_next is None or found.closest >= len(wanted)):
        return f"a stored prompt shares {found.closest:,} tokens with this one; less than a page is not read"
    parted = ""
    if found.closest_next is not None:
        parted = f" (it has {text_of(found.closest_next)!r}, this one {text_of(wanted[found.closest])!r})"
    return f"no stored prompt begins like this one: the closest differs at token {found.closest:,}{parted}"


def _other_settings(store: PromptStore) -> str:
    """For a store that has this model with other options only."""
    for folder in folders(store.root):
        entry = next(entries(folder), None)
        if entry is None:
            continue
        try:
            with PromptCacheFile(entry.path) as file:
                found = file.contents.identity
        except CacheFileError:
            continue
        if found.get("weights") == store.identity["weights"]:
            name = first_difference(found, store.identity)
            what = name.replace("_", " ")
            return (
                f"prompts of this model are stored with the {what} {found.get(name, '')[:40]!r}, this run has another"
            )
    return ""
