"""What SentencePiece does to text before it looks for pieces, as a file's keys say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvcli.errors import ModelError
from kvcli.runtime.text.vocabulary import SPACE, flag

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
Normalizer = Callable[[str], str]


def normalizer_of(metadata: Mapping[str, Any]) -> Normalizer:
    """Characters are replaced by a table, runs of spaces become one and those at both ends are left out, where the
    file wants that; a literal U+2581 is a space. Raises ModelError for a table that is damaged."""
    steps: list[Normalizer] = []
    if metadata.get(_CHARSMAP) is not None:
        steps.append(CharsMap(np.asarray(metadata[_CHARSMAP]).astype(np.uint8).tobytes()))
    if flag(metadata, "remove_extra_whitespaces", False):
        steps.append(_without_extra_spaces)

    def normalize(text: str) -> str:
        for step in steps:
            text = step(text)
        return text.replace(SPACE, " ")

    return normalize


def _without_extra_spaces(text: str) -> str:
    return re.sub(" +", " ", text.lstrip(" ").rstrip(f" {SPACE}"))


class CharsMap:
    """SentencePiece's compiled table, NFKC in most files: the longest key at each place is replaced.

    Keys are found in a double array (as the darts-clone library writes it): units of 32 bits, reached from a parent by
    an offset that each has in itself, XOR the next byte of the key.
    """

    def __init__(self, table: bytes) -> None:
        """Raises ModelError for what is no table."""
        size = int.from_bytes(table[:4], "little")
        if len(table) < 8 or size % 4 or not 0 < size <= len(table) - 4:
            raise ModelError(f"{_CHARSMAP} cannot be read", "the file is damaged")
        self._units: list[int] = np.frombuffer(table, "<u4", size // 4, 4).tolist()
        self._texts = table[4 + size :]
        self._alone: dict[str, bool] = {}  # characters: no key begins with them

    def __call__(self, text: str) -> str:
        pieces, at, start = [], 0, 0
        while at < len(text):
            if self._begins_nothing(text[at]):
                at += 1
                continue
            found = self._longest(text, at)
            if found is None:
                at += 1
                continue
            pieces += [text[start:at], found[1]]
            start = at = at + found[0]
        return "".join([*pieces, text[start:]])

    def _begins_nothing(self, character: str) -> bool:
        known = self._alone.get(character)
        if known is None:
            known = self._alone[character] = self._walk(character.encode(), self._root())[0] is None
        return known

    def _longest(self, text: str, at: int) -> tuple[int, str] | None:
        """Length of the longest key at `at`, in characters, and what takes its place; None = there is none."""
        found, node = None, self._root()
        for end in range(at, len(text)):
            reached, value = self._walk(text[end].encode(), node)
            if reached is None:
                break
            node = reached
            if value is not None:
                found = end + 1 - at, value
        return None if found is None else (found[0], self._text(found[1]))

    def _root(self) -> int:
        return self._child(0, self._units[0])

    @staticmethod
    def _child(node: int, unit: int) -> int:
        """Where the children of a unit are, less their bytes."""
        return node ^ ((unit >> 10) << ((unit & 0x200) >> 6))

    def _walk(self, character: bytes, node: int) -> tuple[int | None, int | None]:
        """The node behind one more character, None where no key goes on so, and the value of the key that ends there.
        Raises ModelError for a table that leads outside itself."""
        value = None
        for byte in character:
            node ^= byte
            if node >= len(self._units):
                raise ModelError(f"{_CHARSMAP} leads outside itself", "the file is damaged")
            unit = self._units[node]
            if unit & 0x800000FF != byte:
                return None, None
            node = self._child(node, unit)
            value = self._units[node] & 0x7FFFFFFF if unit & 0x100 and node < len(self._units) else None
        return node, value

    def _text(self, offset: int) -> str:
        """The text at `offset`, up to a NUL."""
        end = self._texts.find(b"\0", offset)
        return self._texts[offset : end if end >= 0 else len(self._texts)].decode("utf-8", "replace")
