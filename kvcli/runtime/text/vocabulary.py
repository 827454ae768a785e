"""The vocabulary of a GGUF file: token texts, their kinds, and the ids that mean something. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcli.errors import ModelError

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Texts of control tokens after which a turn or a document is over, for files that name only one end token.
END_TEXTS = frozenset(
    {
        "</s>",
        "<eos>",
        "<EOT>",
        "[EOT]",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<｜end▁of▁sentence｜>",
    }
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id. `control` (the unknown token too) is what text becomes only where it is trusted."""

    tokens: list[str]
    kinds: np.ndarray  # [n] int32, values as above
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    control: frozenset[int]
    user_defined: tuple[int, ...]
    eog_ids: frozenset[int]  # end of generation

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Raises ModelError for a missing or malformed vocabulary."""
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        kinds = _kinds(metadata, len(tokens))
        sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
        bos, eos, unk = (
            _special_id(metadata, name, len(tokens), default if sentencepiece else None)
            for name, default in (("bos", 1), ("eos", 2), ("unknown", 0))
        )
        ends = {_special_id(metadata, name, len(tokens), None) for name in ("eot", "eom")} | {eos}
        named = (ends | {bos, unk}) - {None}
        control = {*np.flatnonzero((kinds == CONTROL) | (kinds == UNKNOWN)).tolist(), *named}
        user_defined = [i for i in np.flatnonzero(kinds == USER_DEFINED).tolist() if i not in control]
        ends |= {i for i in control if tokens[i] in END_TEXTS}
        return cls(
            tokens,
            kinds,
            bos,
            eos,
            unk,
            frozenset(control),
            tuple(user_defined),
            frozenset(i for i in ends if i is not None),
        )

    def ids_by_text(self) -> dict[str, int]:
        """Text -> id of all tokens that any text may become: all but `control`. The first of equals wins."""
        last = len(self.tokens) - 1
        ids = dict(zip(reversed(self.tokens), range(last, -1, -1), strict=True))
        for i in self.control:
            if ids.get(self.tokens[i]) == i:
                del ids[self.tokens[i]]
        return ids


def numbers(metadata: Mapping[str, Any], key: str, count: int, dtype: type) -> np.ndarray | None:
    """The array of `key` cut to `count` values, None if the file lacks it. ModelError if it is shorter."""
    if key not in metadata:
        return None
    try:
        values: np.ndarray = np.asarray(metadata[key], dtype)
    except (TypeError, ValueError):
        raise ModelError(f"{key} is not an array of numbers", "the file is damaged") from None
    if values.ndim != 1 or len(values) < count:
        raise ModelError(f"{key} has {values.size:,} values for {count:,} tokens", "the file is damaged")
    return values[:count]


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """The boolean tokenizer.ggml.`name`. Raises ModelError for another type."""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"tokenizer.ggml.{name} is {value!r}, not true or false", "the file is damaged")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if values is None or len(values) == 0:
        raise ModelError(f"the file has no vocabulary ({key} is missing)", "use a GGUF file with a tokenizer")
    strings = list(values)
    if not isinstance(strings[0], str):
        raise ModelError(f"{key} is not an array of strings", "the file is damaged")
    return strings


def _kinds(metadata: Mapping[str, Any], count: int) -> np.ndarray:
    kinds = numbers(metadata, "tokenizer.ggml.token_type", count, np.int32)
    return np.full(count, NORMAL, np.int32) if kinds is None else kinds


def _special_id(metadata: Mapping[str, Any], name: str, count: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key, default)
    if value is None or (key not in metadata and value >= count):
        return None
    if type(value) is not int or not 0 <= value < count:
        raise ModelError(f"{key} is {value!r}, the vocabulary has {count:,} tokens", "the file is damaged")
    return value
