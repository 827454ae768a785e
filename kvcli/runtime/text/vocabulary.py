"""The vocabulary of a GGUF file: token texts, their kinds, and the ids that mean something. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcli.errors import ModelError
from kvcli.runtime.text.placeholders import count_tokens

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "\u2581"  # stands for a space inside pieces of SentencePiece
BYTE_TEXTS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # its tokens of single bytes

# Texts of tokens after which a turn or a document is over. They end an answer whatever the file says of their kind:
# converters type them as they find them, and a model that was tuned with another end of turn still writes this one.
END_TEXTS = frozenset(
    {
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<turn|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|end_turn|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
        "<|call|>",
        "<|role_end|>",
        "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
    }
)

_HARMONY = {"<|return|>", "<|call|>"}

# Texts of tokens that begin turns, and of those that code models mark a gap, a file or a repository with: no text of a
# user becomes one, and an answer does not show them.
MARK_TEXTS = frozenset(
    {
        "<|im_start|>",
        "<|im_sep|>",
        "<start_of_turn>",
        "<|turn>",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|START_OF_TURN_TOKEN|>",
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        *(
            f"<{bar}fim{gap}{part}{bar}>"
            for bar in ("", "|")
            for gap in "_-"
            for part in ("prefix", "suffix", "middle")
        ),
        *(f"<{bar}{name}{bar}>" for bar in ("", "|") for name in ("fim_pad", "repo_name", "reponame", "file_sep")),
        *(f"<|code_{part}|>" for part in ("prefix", "suffix", "middle")),
        *(f"<｜fim▁{part}｜>" for part in ("begin", "hole", "end")),
        *(f"{space}<{part}>" for space in ("", "▁") for part in ("PRE", "SUF", "MID")),
    }
)

# </s> is also HTML's end of struck-out text. Where the vocabulary has another such tag, as Gemma's has </u>, it is a
# word.
_HTML_NEIGHBOUR = {"</s>": "</u>"}


# Ids of BOS, EOS and the unknown token where a file does not say, by the kind of its tokenizer: SentencePiece's.
_ASSUMED: dict[str, tuple[int | None, int | None, int | None]] = {"llama": (1, 2, 0), "t5": (None, 1, 2)}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id.

    `control` is what text becomes only where it is trusted: tokens that the file types so, names as BOS, EOS and the
    like, or whose text is that of an end or mark above; the unknown token, too. `swallowing`: those of them that take
    white space behind them away.
    """

    tokens: list[str]
    kinds: np.ndarray  # [n] int32, values as above
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    control: frozenset[int]
    user_defined: tuple[int, ...]
    eog_ids: frozenset[int]  # end of generation
    swallowing: frozenset[int] = frozenset()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Raises ModelError for a missing or malformed vocabulary."""
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        del tokens[count_tokens(tokens) :]
        kinds = _kinds(metadata, len(tokens))
        assumed = _ASSUMED.get(str(metadata.get("tokenizer.ggml.model")), (None, None, None))
        bos, eos, unk = (
            _special_id(metadata, name, len(tokens), default)
            for name, default in zip(("bos", "eos", "unknown"), assumed, strict=True)
        )
        ends = {_special_id(metadata, name, len(tokens), None) for name in ("eot", "eom")} | {eos}
        named = (ends | {bos, unk}) - {None}
        known = _known(tokens)
        control = {*np.flatnonzero((kinds == CONTROL) | (kinds == UNKNOWN)).tolist(), *named, *known}
        user_defined = [i for i in np.flatnonzero(kinds == USER_DEFINED).tolist() if i not in control]
        if metadata.get("tokenizer.ggml.model") in _ASSUMED:  # those of SentencePiece are texts like others
            for i in user_defined:
                tokens[i] = tokens[i].replace(SPACE, " ")
        ends |= {i for i in control if tokens[i] in END_TEXTS}
        if {tokens[i] for i in control} >= _HARMONY:  # messages end with it, and the last of an answer with these
            ends -= {i for i in control if tokens[i] == "<|end|>" and i != eos}
        return cls(
            tokens,
            kinds,
            bos,
            eos,
            unk,
            frozenset(control),
            tuple(user_defined),
            frozenset(i for i in ends if i is not None),
            _swallowing(metadata, tokens, control),
        )

    def ids_by_text(self) -> dict[str, int]:
        """Text -> id of all tokens that any text may become: all but `control`. The first of equals wins."""
        last = len(self.tokens) - 1
        ids = dict(zip(reversed(self.tokens), range(last, -1, -1), strict=True))
        for i in self.control:
            if ids.get(self.tokens[i]) == i:
                del ids[self.tokens[i]]
        return ids


def _known(tokens: list[str]) -> set[int]:
    """Ids of tokens that are control tokens by their text."""
    known = END_TEXTS | MARK_TEXTS
    found = {i for i, text in enumerate(tokens) if text in known}
    texts = {tokens[i] for i in found}
    words = {text for text, neighbour in _HTML_NEIGHBOUR.items() if text in texts and neighbour in tokens}
    return {i for i in found if tokens[i] not in words}


# Phi-3's tokenizer takes white space away behind its control tokens, these aside; a GGUF file does not say so.
_PHI3_LEAVES = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Whether the tokenizer is Phi-3's: its SentencePiece vocabulary has tokens of turns. (Phi-4's is another.)"""
    if metadata.get("tokenizer.ggml.model") != "llama":
        return False
    name = str(metadata.get("general.name", "")).lower().replace(" ", "-").replace("_", "-")
    return metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _swallowing(metadata: Mapping[str, Any], tokens: list[str], control: set[int]) -> frozenset[int]:
    if (named := metadata.get("tokenizer.kv.swallowing")) is not None:
        return frozenset(control.intersection(np.asarray(named).ravel().tolist()))
    return frozenset(i for i in control if tokens[i] not in _PHI3_LEAVES) if _is_phi3(metadata) else frozenset()


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
