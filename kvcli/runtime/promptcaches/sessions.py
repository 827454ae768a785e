"""Chats on disk: `$XDG_DATA_HOME/kv/sessions/NAME.json` has the text and the token ids of a chat's branches. No torch.

Rows are in the store of prompt caches, where chats share what they have in common; without them a chat is read again.
A file is replaced whole after every turn, and one process at a time has it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli import paths
from kvcli.errors import OutputError, UsageError
from kvcli.runtime.formats.boundedjson import MAX_DOCUMENT_BYTES, load_object

if TYPE_CHECKING:
    from kvcli.runtime.text.conversation import Conversation

VERSION = 1
MAIN = "main"  # the branch that every chat begins with
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def folder() -> Path:
    """Where sessions lie; it may not exist."""
    return paths.data_dir() / "sessions"


def names() -> list[str]:
    """Every session, that of the last use first."""
    found = []
    with suppress(OSError):
        for path in folder().glob("*.json"):
            with suppress(FileNotFoundError):
                found.append((-path.stat().st_mtime, path.stem))
    return [name for _, name in sorted(found)]


def check_name(name: str) -> str:
    """The name. Raises UsageError for one that makes no good file name."""
    if not NAME.fullmatch(name):
        raise UsageError(f"'{name}' is no name for a session", "use letters, digits, dots, - and _, at most 64")
    return name


class Branches:
    """The branches of one chat, of which the conversation is the one at hand; in memory only."""

    def __init__(self) -> None:
        self.branch = MAIN
        self.states: dict[str, dict[str, Any]] = {}
        self.ids_fit = True  # the states' ids are those of the conversation's tokenizer

    def restore(self, conversation: Conversation) -> None:
        """Bring the conversation to where this branch is. Raises ValueError for a state that is none."""
        if self.branch in self.states:
            conversation.set_state(self.states[self.branch], self.ids_fit)

    def switch(self, name: str, conversation: Conversation) -> bool:
        """Go on in the branch of that name, which begins here if it is new; whether it was there. UsageError."""
        check_name(name)
        self.states[self.branch] = conversation.state()
        there, self.branch = name in self.states, name
        self.restore(conversation)
        return there

    def save(self, conversation: Conversation) -> None:
        """Nothing outlives the process."""

    def close(self) -> None:
        """Nothing to let go of."""


class Session(Branches):
    """One chat that is saved as it goes. `hashes`: of the tokenizer and template that its ids belong to."""

    def __init__(self, name: str, model: str, hashes: dict[str, str]) -> None:
        """Raises UsageError where the session is damaged or another process has it, OutputError for a bad folder."""
        super().__init__()
        self.name, self.model, self.hashes = check_name(name), model, hashes
        self.path = folder() / f"{name}.json"
        self._saved = b""
        try:
            paths.make_private(folder())
            self._lock = os.open(folder() / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OutputError(f"cannot use the folder {folder()}: {error.strerror or error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UsageError(f"the session {name} is open in another kv chat", "close that one first") from None
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes have it."""
        os.close(self._lock)

    def _read(self) -> None:
        if not self.path.exists():
            return
        try:
            raw = self.path.read_bytes()
            value = load_object(raw[: MAX_DOCUMENT_BYTES + 1], str(self.path), UsageError)
            if value["kv_session"] != VERSION:
                raise UsageError(f"the session {self.name} was saved by another version of kv", f"see {self.path}")
            self.branch, self.states = value["branch"], dict(value["branches"])
            if self.branch not in self.states:
                raise KeyError(self.branch)
            self.ids_fit = value["hashes"] == self.hashes
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror or error}") from None
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{self.path} is damaged", "move it away, or use another --session") from None

    def restore(self, conversation: Conversation) -> None:
        """As above. Raises UsageError for a damaged file."""
        try:
            super().restore(conversation)
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{self.path} is damaged: {error}", "move it away, or use another --session") from None

    def save(self, conversation: Conversation) -> None:
        """Replace the file where anything changed. Raises OutputError."""
        self.states[self.branch] = conversation.state()
        value = {"kv_session": VERSION, "name": self.name, "model": self.model, "hashes": self.hashes,
                 "branch": self.branch, "branches": self.states}  # fmt: skip
        data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        if data == self._saved:
            return
        try:
            paths.replace_file(self.path, data, flush=True)
        except OSError as error:
            raise OutputError(f"cannot save the session in {self.path}: {error.strerror or error}") from None
        self._saved = data
