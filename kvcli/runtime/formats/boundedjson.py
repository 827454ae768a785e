"""JSON from strangers: an object, parsed in time and memory that its sender does not choose."""

from __future__ import annotations

import json
from typing import Any

from kvcli.errors import KVError, ModelError

# Far above any real document; a value costs up to a hundred bytes of memory, its text as little as two.
MAX_BRACKETS = 1 << 20
MAX_COMMAS = 1 << 22
MAX_DOCUMENT_BYTES = 32 << 20  # of indexes and file lists
DAMAGED = "the file is damaged, or is not what its name says"
_INT_DIGITS = 20  # 2^64 - 1 has twenty
_MAX_DIGITS = 40  # int(1e30), which tokenizer_config.json has for "no limit", has 31


def load_object(raw: bytes, label: str, error: type[KVError] = ModelError, hint: str = DAMAGED) -> dict[str, Any]:
    """The JSON object in `raw`, of which `label` is the name in messages; `hint`: what to do where it is none.

    Raises `error` for anything but one well-formed UTF-8 object without repeated keys, with fewer than
    MAX_BRACKETS arrays and objects and MAX_COMMAS values, and integers of at most forty digits. Those of more than
    twenty, which count nothing, are floats.
    """

    def refuse(what: str) -> KVError:
        return error(f"{label} {what}", hint)

    # Brackets and commas inside strings count, too: that errs on the safe side, far from real documents.
    if raw.count(b"{") + raw.count(b"[") > MAX_BRACKETS or raw.count(b",") > MAX_COMMAS:
        raise refuse(f"holds more values than kv accepts ({len(raw):,} bytes of JSON)")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise refuse("repeats a key inside one JSON object")
        return found

    def integer(digits: str) -> float:
        if len(digits) > _MAX_DIGITS + 1:
            raise refuse(f"holds an integer of {len(digits):,} digits")
        return int(digits) if len(digits) <= _INT_DIGITS + 1 else float(digits)

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_int=integer)
    except UnicodeDecodeError:
        raise refuse("is not UTF-8 text") from None
    except RecursionError:
        raise refuse("nests too deeply") from None
    except ValueError as problem:
        raise refuse(f"is not valid JSON ({str(problem)[:80]})") from None
    if not isinstance(value, dict):
        raise refuse("is JSON, but not an object")
    return value
