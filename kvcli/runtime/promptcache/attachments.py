"""Files that go in front of messages: a message has their text, and a chat knows which part of it is which file. No
torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

Files = list[tuple[str, str]]  # name and text of each
_BETWEEN = "\n\n"


class Attachments:
    """Which messages of a chat begin with files: the name and the length in characters of each, by the SHA-256 of the
    whole message, so that undone, repeated and copied ones are known, too."""

    def __init__(self) -> None:
        self._lengths: dict[str, list[tuple[str, int]]] = {}

    def join(self, files: Files, text: str) -> str:
        """The message that has `files` in front of `text`."""
        message = _BETWEEN.join([*(content for _, content in files), text])
        if files:
            self._lengths[_digest(message)] = [(name, len(content)) for name, content in files]
        return message

    def part(self, message: str) -> tuple[Files, str]:
        """The files that a message begins with, and the rest of it."""
        files, at = [], 0
        for name, length in self._lengths.get(_digest(message), []):
            files.append((name, message[at : at + length]))
            at += length + len(_BETWEEN)
        return files, message[at:]

    def state(self, messages: Iterable[str]) -> dict[str, Any]:
        """What is known of these messages as plain values, for JSON."""
        digests = dict.fromkeys(map(_digest, messages))
        return {digest: self._lengths[digest] for digest in digests if digest in self._lengths}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave. Raises ValueError, TypeError or AttributeError for nonsense."""
        self._lengths = {
            str(digest): [(str(name), int(length)) for name, length in files] for digest, files in state.items()
        }


def _digest(message: str) -> str:
    return hashlib.sha256(message.encode("utf-8", "surrogatepass")).hexdigest()
