"""Byte-level BPE ("tokenizer.ggml.model" = "gpt2") as a `tokenizers` object built from GGUF metadata.

Measured on 2 cores: SmolLM2's 49,152 tokens and 48,900 merges are built in 0.09 s.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from kvcli.errors import ModelError
from kvcli.runtime.text.pretokenizers import PreTokenizer
from kvcli.runtime.text.vocabulary import Vocabulary


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


class ByteLevelBPE:
    """Text -> ids, without special tokens.

    Bytes whose token the vocabulary lacks are dropped, as by other implementations (SmolLM2 lacks eight, all
    of them bytes of unassigned characters or of no character).
    """

    def __init__(self, vocabulary: Vocabulary, merges: Iterable[str], rule: PreTokenizer) -> None:
        """`merges`: "left right" each, the first merges first. Raises ModelError for an unusable list."""
        ids = vocabulary.ids_by_text()
        pairs = [_pair(merge) for merge in merges]
        self._tokenizer = Tokenizer(_build(ids, pairs, rule.ignore_merges))
        cuts = [pre_tokenizers.Split(Regex(step), "isolated") for step in rule.steps]
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spelling])

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no BOS."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelError(f"tokenizer.ggml.merges holds {merge[:60]!r}, not two tokens", "the file is damaged")
    return left, right


def _build(ids: dict[str, int], pairs: list[tuple[str, str]], ignore_merges: bool) -> models.BPE:
    """The library refuses merges into tokens that are not in `ids`.

    A sound list has none, or some into control tokens, which text must not become: only then are they sought.
    """
    try:
        return models.BPE(vocab=ids, merges=pairs, ignore_merges=ignore_merges)
    except Exception:  # the library raises nothing narrower
        kept = [(a, b) for a, b in pairs if a in ids and b in ids and a + b in ids]
        return models.BPE(vocab=ids, merges=kept, ignore_merges=ignore_merges)


def piece_bytes(piece: str) -> bytes:
    """The bytes that a normal token's spelling stands for; other characters stand for their own UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        spelled = (bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in piece)
        return b"".join(spelled)
