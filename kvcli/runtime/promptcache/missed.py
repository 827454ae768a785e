"""Why a prompt was not found in a cache, in one line."""

from __future__ import annotations

from collections.abc import Callable

from kvcli.errors import CacheFileError
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.lookuprecord import Choice
from kvcli.runtime.promptcache.prefixpages import common_length
from kvcli.runtime.promptcache.rowsettings import differences, sentence
from kvcli.runtime.promptcache.sameness import SCOPE
from kvcli.runtime.promptcache.shelves import Shelves
from kvcli.runtime.promptcache.store import NEAR_MISSES, entries, folders
from kvcli.words import human_seconds

NO_ROOM = "the cache has no room for the rows that are stored; they are computed again"


def looks_back(policy: str) -> str:
    """Rows are there, and are computed again for their queries."""
    return f"{policy} looks at all queries of a prompt, so its rows are computed"


def behind_state(alike: int, have: int) -> str:
    """Rows that are there are computed again: a state goes on only from where a checkpoint of it is. "" = none are."""
    if alike <= have:
        return ""
    where = f"the last checkpoint, behind {have:,}" if have else "the start: there is no checkpoint"
    return f"{alike:,} tokens are those of before, and {alike - have:,} of them computed again from {where}"


def slower(tokens: int, choice: Choice) -> str:
    """Stored rows are not read, since computing them is no slower."""
    read, compute = human_seconds(choice.read_s), human_seconds(choice.compute_s)
    how = "converting" if choice.converts else "reading"
    return f"{tokens:,} tokens are stored, and computed again: that is predicted to take {compute}, {how} them {read}"


def diverges(
    name: str, shared: int, held: list[int], wanted: list[int], text_of: Callable[[list[int]], str], least: int
) -> str:
    """Where a stored prompt and this one part; `least`: tokens in common that would be of use."""
    if shared == len(wanted) and shared >= least:
        return f"{name} shares {shared:,} tokens with this prompt, but not what is needed to go on from there"
    if shared == len(wanted) or shared == len(held):
        return f"{name} shares {shared:,} tokens with this prompt, too few to be of use"
    parted = f"{text_of([held[shared]])!r}, here {text_of([wanted[shared]])!r}"
    return f"{name} shares the first {shared:,} tokens with this prompt; then it has {parted}"


def reason(store: Shelves, found: Found, prompt: list[int], text_of: Callable[[list[int]], str]) -> str:
    """Why the store had nothing, or less than it might have; "" if it could not have."""
    if other := kept_otherwise(store, found, prompt):
        return other
    if found.closest >= store.page_size:
        return f"a stored prompt shares {found.closest:,} tokens with this one, but not every page of them is there"
    if store.empty:
        return ""
    if found.closest and (found.closest_next is None or found.closest >= len(prompt)):
        return f"a stored prompt shares {found.closest:,} tokens with this one; less than a page is not read"
    parted = ""
    if found.closest_next is not None:
        parted = f" (it has {text_of([found.closest_next])!r}, this one {text_of([prompt[found.closest]])!r})"
    return f"no stored prompt begins like this one: the closest differs at token {found.closest:,}{parted}"


def kept_otherwise(store: Shelves, found: Found, prompt: list[int]) -> str:
    """Why rows that are stored are not used, though the tokens are the same: other settings, or their age; "" = none
    are."""
    shared = max(found.closest, store.page_size - 1)
    if other := _under_other_settings(store, prompt, shared):
        return other
    if found.expired > shared:
        return (
            f"a stored prompt shares {found.expired:,} tokens with this one, but has expired: it was last used longer"
            " ago than `ttl_s` allows"
        )
    return ""


def _under_other_settings(store: Shelves, prompt: list[int], least: int) -> str:
    """Of the files that share more than `least` tokens with a prompt and were stored by this model under other
    settings: what keeps the closest from being used. That has the fewest other settings, then the most tokens."""
    close: list[tuple[tuple[int, int, int], int, str]] = []  # how far off, tokens shared, what differs
    begun = (entry for folder in folders(store.root) for entry in entries(folder) if entry.parent == folder.name)
    others = (entry for entry in begun if not store.has(entry.path.parent))
    for entry in sorted(others, key=lambda e: -e.used_at)[:NEAR_MISSES]:
        try:
            with PromptCacheFile(entry.path) as file:
                contents = file.contents
        except CacheFileError:
            continue
        found = contents.identity
        if found.get(SCOPE) != store.identity.get(SCOPE):
            continue  # what is there is nobody else's business
        shared = common_length(contents.tokens, prompt)
        here = {name: value for name, value in store.identity.items() if name != "sums" or name in found}
        if shared > least and found.get("weights") == here["weights"]:
            differing, fields = differences(found, here, shared), sum(found.get(name) != here[name] for name in here)
            told = f"with {sentence(differing)}" if differing else "by an earlier version of kv, and is left alone"
            close.append(((len(differing), fields, -shared), shared, told))
    if not close:
        return ""
    _, shared, told = min(close)
    return f"a stored prompt shares {shared:,} tokens with this one, but was stored {told}"
