"""Options as the command line calls them: what is `ctx` in the texts of the runtime is --ctx-size here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kvcli.errors import KVError

# Fields, and values of fields, whose flags are not their names with dashes.
_OTHER = {
    "cache_type": "--cache-type",
    "ctx": "--ctx-size",
    "draft": "--draft-model",
    "mtp": "--spec mtp",
    "force_pretokenizer": "--force-pretokenizer",
    "force_types": "--force-cache-type",
    "max_bytes": "--cache-size",
    "max_tokens": "--predict",
    "memory": "--vram",
    "memory_limit": "--vram-limit",
    "sequences": "--parallel",
    "sinks": "--kv-sink",
    "tail": "--kv-tail",
    "store=None": "--no-cache",
    "temperature": "--temp",
    "ttl_s": "--cache-ttl",
    "type_k": "--cache-type-k",
    "type_v": "--cache-type-v",
    "ubatch": "--ubatch-size",
}
_SAME = """
attend backend bandwidth budget chat_template device dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
evict exact frequency_penalty gpu grammar keep logit_bias logprobs lora margin min_p model offline page_size
prefill_sparse prefill_sparse_from presence_penalty quantize raw reasoning reasoning_budget repeat_last_n repeat_penalty
seed spec stop strict_repeat threads tools top_k top_p window
"""
FLAGS = {name: f"--{name.replace('_', '-')}" for name in _SAME.split()} | _OTHER


def as_flags(text: str) -> str:
    """The text with flags in place of the fields that it names in backticks.

    >>> as_flags("`ctx` must be 0 or more; `evict=sink` keeps the first tokens")
    '--ctx-size must be 0 or more; --evict sink keeps the first tokens'
    """
    return re.sub(r"`(\w+)(?:=([^`]*))?`", _flag, text)


@contextmanager
def length_is(flag: str) -> Iterator[None]:
    """Where errors name the context: it is as long as this flag says, of a command that has no --ctx-size."""
    try:
        yield
    except KVError as error:
        error.message, error.hint = (
            re.sub(r"`ctx(?:=([^`]*))?`", lambda found: " ".join(filter(None, (flag, found[1]))), text)
            for text in (error.message, error.hint)
        )
        raise


def _flag(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    if (both := f"{name}={value}") in FLAGS:
        return FLAGS[both]
    if name not in FLAGS:
        return found[0]
    return FLAGS[name] if value is None else f"{FLAGS[name]} {value}"
