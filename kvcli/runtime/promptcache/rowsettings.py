"""What rows depend on (fingerprint.py), in the names of options. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvcli.codecs import CODECS, codec
from kvcli.errors import UsageError
from kvcli.options import CacheOptions
from kvcli.runtime.promptcache.sameness import VALUES, alike, evict_options, is_sealed, unevicted

# Fields that no option sets, and what to call a file in which they are other than here.
_OTHER = {
    "weights": "the weights of another model or adapter",
    "model_config": "another model configuration",
    VALUES: "values apart from keys, or not",
    "positions": "other positions",
    "byte_order": "another byte order",
}


@dataclass(frozen=True)
class Difference:
    """A setting that differs between two places. `there` and `here` are "" for one that has no name in a few words."""

    name: str
    there: str = ""
    here: str = ""


def chosen(per_group: list[str]) -> str:
    """What the user chose: the type of the groups that keep all tokens; windows may have a larger one (see `KVLayout`).
    Raises IndexError for none."""
    return sorted(per_group, key=lambda name: (name == "0" or (name in CODECS and not CODECS[name].sealed), name))[0]


def types_of(identity: Mapping[str, str]) -> tuple[str, str]:
    """The cache types of keys and values; of small windows only where there is nothing else."""
    k, v = (chosen(identity.get(name, "").split() or ["?"]) for name in ("cache_type_k", "cache_type_v"))
    return k, v


def pair(types: tuple[str, str]) -> str:
    """'f16', or 'int8/int4' for keys and values."""
    return types[0] if types[0] == types[1] else "/".join(types)


def cache_options(identity: Mapping[str, str]) -> CacheOptions:
    """The cache options that rows were made with. Raises ValueError where nothing of the kind is said."""
    try:
        k, v = types_of(identity)
        sealed = codec(k).sealed or codec(v).sealed
        sinks, tail = (int(chosen(identity[name].split())) for name in ("sinks", "tail"))
        return CacheOptions(
            evict=evict_options(identity["eviction"]), type_k=k, type_v=v, page_size=int(identity["page_size"]),
            tail=tail if sealed else CacheOptions.tail, sinks=sinks if sealed else CacheOptions.sinks,
        )  # fmt: skip
    except (KeyError, IndexError, UsageError) as error:
        raise ValueError(str(error)) from None


def _values(identity: Mapping[str, str]) -> dict[str, str]:
    """The settings by name, as far as the identity has them and rows depend on them."""
    types = types_of(identity)
    found = {"cache type": pair(types)}
    if is_sealed(identity) or "pages" in identity.get("sums", ""):
        found["page size"] = identity.get("page_size", "?")
    if any(CODECS[name].sealed for name in types if name in CODECS):
        names = {"`sinks`": "sinks", "`tail`": "tail"}
        found |= {flag: chosen(identity[name].split() or ["?"]) for flag, name in names.items() if name in identity}
    with suppress(KeyError, ValueError):
        found["eviction"] = evict_options(identity["eviction"]).named
    if "computed_on" in identity:
        found["device"] = identity["computed_on"]
    return found


def differences(found: Mapping[str, str], expected: Mapping[str, str], tokens: int = 0) -> list[Difference]:
    """What is other in `found` than in `expected`: in a file than in this run. [] = nothing that decides the first
    `tokens` rows.

    Of several things that belong to the model only the first is named: others follow from it.
    """
    model = [name for name in expected if name in _OTHER and found.get(name) != expected[name]]
    if model:
        return [Difference(_OTHER[model[0]])]
    there, here = _values(found), _values(expected)
    if "evicting" not in expected.get("sums", "") and min(unevicted(found), unevicted(expected)) >= tokens:
        there.pop("eviction", None)
    listed = [Difference(name, there[name], value) for name, value in here.items() if there.get(name, value) != value]
    return listed or ([] if alike(found, expected) else [Difference("other settings")])


def sentence(differing: list[Difference]) -> str:
    """'page size 64, this run has 32': to stand behind "made with" or "stored with"."""
    if len(differing) == 1:
        only = differing[0]
        name = "" if only.name == "eviction" else f"{only.name} "  # its flags have names
        return f"{name}{only.there}, this run has {only.here}" if only.there else only.name
    return " and ".join(f"{each.name} {each.there} (this run: {each.here})" for each in differing)
