"""How many rows of two places are the same, bit for bit, by what is said of their making. No torch.

A row is a function of the tokens up to it, of its position, and of the fields that `row_fields` takes from an identity
(fingerprint.py). Which rows an eviction policy keeps decides a row only once something was evicted for it; so the first
rows are the same under every policy, window and context. How a cache of 16 bits or more is cut into pages decides
nothing where sums do not follow pages; below 16 bits it says which rows were read in 16 bits,
and where layers keep a state, where there are checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcli.codecs import CODECS
from kvcli.errors import UsageError
from kvcli.options import FORGET_NOTHING, EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.eviction import Retention

ALL = 1 << 62  # rows: however many there are
SCOPE = "scope"  # no row depends on it: it keeps prompts apart that must not be shared
VALUES, ONCE, APART = "values", "once", "apart"  # how values are stored that are keys, too
_ALWAYS = (
    "weights",
    "model_config",
    "cache_type_k",
    "cache_type_v",
    VALUES,
    "positions",
    "byte_order",
    "computed_on",
    "sums",
    SCOPE,
)
_SEALED = ("page_size", "sinks", "tail")
_STATES = "states"  # of layers that keep one: checkpoints stand at ends of pages
Identity = Mapping[str, str]


def is_sealed(identity: Identity) -> bool:
    """Whether any layer has a cache type below 16 bits."""
    names = " ".join(identity.get(name, "") for name in ("cache_type_k", "cache_type_v")).split()
    return any(CODECS[name].sealed for name in names if name in CODECS)


def is_exact(computed_on: str) -> bool:
    """Whether products were computed without rounding activations because --exact asked for it: not where kernels never
    round. `computed_on`: see `enginecaches.computed_on`."""
    if computed_on.startswith("cpu native ") and computed_on != "cpu native base":
        return not computed_on.endswith(" in fixed point")
    return computed_on.startswith("cuda ") and computed_on.endswith(" exact")


def row_fields(identity: Identity) -> dict[str, str]:
    """What its rows depend on, but for what was evicted."""
    paged = _SEALED if is_sealed(identity) else ("page_size",) if _STATES in identity else ()
    names = (*_ALWAYS, *paged)
    return {name: identity[name] for name in names if name in identity}


def alike(found: Identity, here: Identity) -> bool:
    """Whether rows of `found` are those of `here` as long as nothing is evicted, as far as `here` says anything."""
    wanted = row_fields(here)
    return {name: found.get(name) for name in wanted} == wanted


def same_rows(found: Identity, here: Identity) -> int:
    """How many of the first rows of `found` are those of `here`."""
    if not alike(found, here):
        return 0
    theirs, ours = found.get("eviction", "none"), here.get("eviction", "none")
    return ALL if theirs == ours else min(unevicted(found), unevicted(here))


def unevicted(identity: Identity) -> int:
    """How many of the first rows see all that is before them; 0 where nonsense is said."""
    try:
        if selected_by(identity):
            return 0
        evicting = retention_of(identity)
    except (KeyError, ValueError):
        return 0
    return evicting.whole if evicting else ALL


def selected_by(identity: Identity) -> str:
    """The field `eviction` of rows that were selected by score; "" = they were not."""
    text = identity.get("eviction", "none")
    return text if text.startswith("select ") else ""


def retention_of(identity: Identity) -> Retention | None:
    """What stays of a sequence; None = everything. Raises ValueError, KeyError."""
    asked = evict_options(identity.get("eviction", "none"))
    retention = eviction.policy(asked.policy).retention
    if retention is None or asked.keep is None:
        return None
    return retention(asked.keep, asked.window, int(identity["page_size"]))


def evict_options(text: str) -> EvictOptions:
    """The options behind the field `eviction` of an identity. Raises ValueError."""
    if text == "none":
        return FORGET_NOTHING
    try:
        if text.startswith("select "):
            _, policy, budget = text.split()
            eviction.policy(policy)
            return EvictOptions(policy, budget=budget)
        *name, word, keep, _, window = text.split()
        if word != "keep":
            raise ValueError(text)
        policy = name[0] if name else "sink"
        eviction.policy(policy)
        return EvictOptions(policy, int(window), int(keep))
    except UsageError as error:
        raise ValueError(str(error)) from None
