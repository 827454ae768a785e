"""Chats on disk: `$XDG_DATA_HOME/kv/sessions/NAME.json` has the text and the token ids of a chat's branches. No torch.

Rows are in the store of prompt caches, where chats share what they have in common; without them a chat is read again.
A file is replaced whole after every turn, and one process at a time has it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli import paths
from kvcli.codecs import CODECS
from kvcli.errors import OutputError, UsageError
from kvcli.options import FORGET_NOTHING, EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.formats.boundedjson import MAX_DOCUMENT_BYTES, load_object
from kvcli.runtime.promptcache.attachments import Attachments

if TYPE_CHECKING:
    from kvcli.runtime.text.conversation import Conversation

VERSION = 1
MAIN = "main"  # the branch that every chat begins with
CLEARED = "cleared"  # a branch that has what /clear took away
CLEARED_IN = "cleared_in"  # in the state of such a branch: the branch where that was
MAX_ID = 1 << 31  # of a token
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


def check_name(name: str, of: str = "chat") -> str:
    """The name of a chat, or of what `of` says. Raises UsageError for one that makes no good file name."""
    if not NAME.fullmatch(name):
        raise UsageError(f"'{name}' is not a name for a {of}", "use letters, digits, dots, - and _, at most 64")
    return name


class Branches:
    """The branches of one chat, of which the conversation is the one at hand; in memory only."""

    def __init__(self) -> None:
        self.branch, self.scope = MAIN, ""  # of the store, where the rows of a saved chat are kept
        self.states: dict[str, dict[str, Any]] = {}
        self.attachments, self.opened = Attachments(), AS_DEFAULT

    @property
    def saved_as(self) -> str:
        """The session's name; "" = it is in memory only."""
        return ""

    def restore(self, conversation: Conversation, branch: str = "") -> None:
        """Bring the conversation to where a branch is, by default the one at hand. Raises ValueError for a state that
        is none."""
        if (name := branch or self.branch) in self.states:
            conversation.set_state(self.states[name])

    def put_aside(self, conversation: Conversation) -> str:
        """Keep a conversation that is about to be cleared as a branch of its own; the name of that one."""
        names = (CLEARED if number == 1 else f"{CLEARED}-{number}" for number in count(1))
        name = next(name for name in names if name != self.branch and name not in self.states)
        self.states[name] = {**conversation.state(), CLEARED_IN: self.branch}
        return name

    def take_back(self, conversation: Conversation) -> bool:
        """Bring back what was cleared last in this branch, which then is no branch of its own any more; False where
        nothing was. Raises TemplateError, and ValueError for a state that is none."""
        cleared = (name for name in reversed(self.states) if self.states[name].get(CLEARED_IN) == self.branch)
        name = next(cleared, "")
        if name:
            self.restore(conversation, name)
            del self.states[name]
        return bool(name)

    def switch(self, name: str, conversation: Conversation) -> bool:
        """Go on in the branch of that name, which begins here if it is new; whether it was there. Raises UsageError
        and TemplateError, with nothing changed."""
        check_name(name, "branch")
        self.states[self.branch] = conversation.state()
        before, there, self.branch = self.branch, name in self.states, name
        try:
            self.restore(conversation)
        except BaseException:
            self.branch = before
            raise
        return there

    def elsewhere(self) -> Iterator[list[int]]:
        """The token ids of the branches that are not the one at hand, as far as they make sense."""
        for name, state in self.states.items():
            with suppress(KeyError, TypeError):
                ids = [token for chunk in state["chunks"] for token in chunk["ids"]]
                if name != self.branch and all(isinstance(token, int) and 0 <= token < MAX_ID for token in ids):
                    yield ids

    def value(self, conversation: Conversation) -> dict[str, Any] | None:
        """All that a saved chat is now, as its file has it; None for one in memory only."""
        return None

    def save(self, conversation: Conversation) -> None:
        """Nothing outlives the process."""

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True)
class Opened:
    """With which context, cache types and eviction a chat was opened, or went on; 0 and "auto" = by default."""

    ctx_size: int = 0
    type_k: str = "auto"
    type_v: str = "auto"
    evict: EvictOptions = FORGET_NOTHING

    @property
    def types(self) -> str:
        """Both as one option has them; "" = by default."""
        if self.type_k == self.type_v:
            return "" if self.type_k == "auto" else self.type_k
        return f"{self.type_k}/{self.type_v}"


AS_DEFAULT = Opened()


def _opened(value: Any) -> Opened:
    """Raises TypeError for nonsense."""
    evict = EvictOptions(**value.get("evict", {}))
    found = Opened(**{**value, "evict": evict})
    names = ("auto", *CODECS)
    if not isinstance(found.ctx_size, int) or found.ctx_size < 0 or not {found.type_k, found.type_v} <= {*names}:
        raise TypeError("opened")
    kinds = isinstance(evict.window, int), isinstance(evict.keep, int | None), isinstance(evict.budget, str)
    if evict.policy not in eviction.names() or not all(kinds):
        raise TypeError("evict")
    return found


@dataclass(frozen=True)
class Saved:
    """What a session's file has. `saved_at`: time of its last change."""

    name: str
    model: str
    hashes: dict[str, str]
    branch: str
    states: dict[str, dict[str, Any]]
    attachments: Attachments
    saved_at: float
    lora: tuple[str, ...] = ()  # the adapters that the chat was held with, as --lora names them
    scope: str = ""  # of the store, in which its rows are kept
    opened: Opened = AS_DEFAULT

    def messages(self, branch: str = "") -> list[dict[str, str]]:
        """The messages of a branch, "" = the one at hand, with the system message in front. Raises UsageError."""
        if branch and branch not in self.states:
            raise UsageError(f"{self.name} has no branch '{branch}'", f"it has {', '.join(sorted(self.states))}")
        state = self.states[branch or self.branch]
        system = [] if state["system"] is None else [{"role": "system", "content": state["system"]}]
        return [*system, *state["messages"]]


def path_of(name: str) -> Path:
    """The file of a session, which may not exist. Raises UsageError for what is no name."""
    return folder() / f"{check_name(name)}.json"


def read(name: str) -> Saved:
    """Raises UsageError for a session that is not there or damaged."""
    return _read(name)[0]


def value_of(name: str) -> dict[str, Any]:
    """All that a session's file has: what `create` makes the same session of. Raises UsageError."""
    return _read(name)[1]


def _read(name: str) -> tuple[Saved, dict[str, Any]]:
    """What a session's file says, and all that it has. Raises UsageError."""
    path = path_of(name)
    try:
        with path.open("rb") as file:
            raw, saved_at = file.read(MAX_DOCUMENT_BYTES + 1), os.fstat(file.fileno()).st_mtime
        value = load_object(raw, str(path), UsageError)
        if value["kv_session"] != VERSION:
            raise UsageError(f"the chat {name} was saved by another version of kv", f"see {path}")
        found = parsed(name, value, saved_at)
    except FileNotFoundError:
        others = ", ".join(names()[:10])
        raise UsageError(
            f"there is no saved chat '{name}'", f"saved: {others}" if others else "none is saved"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageError(f"{path} is damaged", "move it away, or use another name") from None
    return found, value


def parsed(name: str, value: dict[str, Any], saved_at: float) -> Saved:
    """What a session's file says. Raises KeyError, TypeError, ValueError and AttributeError for nonsense."""
    attachments = Attachments()
    attachments.set_state(value.get("files", {}))
    states = dict(value["branches"])
    lora = tuple(value.get("lora", ()))
    if not all(isinstance(each, str) for each in lora):
        raise TypeError("lora")
    scope = value.get("scope", "")
    if scope:
        check_name(scope, "scope")
    model, hashes, branch = (value[key] for key in ("model", "hashes", "branch"))
    found = Saved(
        name, model, hashes, branch, states, attachments, saved_at, lora, scope, _opened(value.get("opened", {}))
    )
    for branch in ("", *found.states):
        if not all(isinstance(m["role"] + m["content"], str) for m in found.messages(branch)):
            raise TypeError(branch)
    return found


def create(name: str, value: dict[str, Any]) -> None:
    """A new session of what `value_of` gave, under this name. Raises UsageError where there is one already or another
    process has it, OutputError."""
    lock = _lock(name)
    try:
        if path_of(name).exists():
            raise UsageError(
                f"there is a saved chat '{name}' already", "--name gives another name; kv chat rm removes it"
            )
        data = json.dumps({**value, "name": name}, ensure_ascii=False).encode("utf-8", "replace")
        paths.replace_file(path_of(name), data, flush=True)
    except OSError as error:
        raise OutputError(f"cannot save the chat in {path_of(name)}: {error.strerror or error}") from None
    finally:
        os.close(lock)


def remove(name: str) -> None:
    """Delete a session. Raises UsageError where it is not there or another process has it, OutputError."""
    lock = _lock(name)
    try:
        try:
            path_of(name).unlink()
        finally:
            _lock_file(name).unlink(missing_ok=True)
    except FileNotFoundError:
        raise UsageError(f"there is no saved chat '{name}'", "kv chat ls lists them") from None
    except OSError as error:
        raise OutputError(f"cannot remove {path_of(name)}: {error.strerror or error}") from None
    finally:
        os.close(lock)


def _lock_file(name: str) -> Path:
    return folder() / f".{check_name(name)}.lock"


def _lock(name: str) -> int:
    """The open lock file of a session, which nobody else has. Raises UsageError, OutputError."""
    path = _lock_file(name)
    while True:
        try:
            paths.make_private(folder())
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OutputError(f"cannot use the folder {folder()}: {error.strerror or error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UsageError(f"the chat {name} is open in another kv chat", "close that one first") from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)  # `remove` has just deleted it


class Session(Branches):
    """One chat that is saved as it goes. `hashes`: of the tokenizer and template that its ids belong to.

    `held_with`: the model that a chat was held with whose ids are not of use here; "" = they are. `other_lora`: the
    adapters that it was held with where these are others; None = they are the same.
    """

    def __init__(
        self, name: str, model: str, hashes: dict[str, str], lora: Sequence[str] = (), scope: str = ""
    ) -> None:
        """`lora`: the adapters beside the model, as --lora names them; `scope`: see `Branches`, "" = as it was. Raises
        UsageError where the session is damaged or another process has it, OutputError for a bad folder."""
        super().__init__()
        self.scope = scope
        self.name, self.model, self.hashes = check_name(name), model, hashes
        self.path, self.held_with, self.lora = path_of(name), "", list(lora)
        self.other_lora: Sequence[str] | None = None
        self._saved = b""
        self._untouched: dict[str, Any] | None = None  # how a new chat begins
        self._lock = _lock(name)
        try:
            if self.path.exists():
                self._take(read(name))
        except BaseException:
            self.close()
            raise

    @property
    def saved_as(self) -> str:
        return self.name

    def _take(self, saved: Saved) -> None:
        self.branch, self.states, self.attachments = saved.branch, saved.states, saved.attachments
        self.scope = self.scope or saved.scope
        if list(saved.lora) != self.lora:
            self.other_lora = saved.lora
        if saved.hashes != self.hashes:
            self.held_with = saved.model
            for state in self.states.values():
                state["chunks"] = []

    def close(self) -> None:
        """Let other processes have it; once is enough. A chat in which nothing was said leaves nothing."""
        if self._lock >= 0:
            if not self.path.exists():
                with suppress(OSError):
                    _lock_file(self.name).unlink()
            os.close(self._lock)
            self._lock = -1

    def restore(self, conversation: Conversation, branch: str = "") -> None:
        """As above. Raises UsageError for a damaged file."""
        if not self.states and self._untouched is None:
            self._untouched = conversation.state()
        try:
            super().restore(conversation, branch)
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{self.path} is damaged: {error}", "move it away, or use another --session") from None

    def value(self, conversation: Conversation) -> dict[str, Any]:
        """As above."""
        self.states[self.branch] = conversation.state()
        texts = (message["content"] for state in self.states.values() for message in state["messages"])
        return {"kv_session": VERSION, "name": self.name, "model": self.model, "lora": self.lora,
                "scope": self.scope, "opened": asdict(self.opened), "hashes": self.hashes,
                "branch": self.branch, "branches": self.states,
                "files": self.attachments.state(texts)}  # fmt: skip

    def save(self, conversation: Conversation) -> None:
        """Replace the file where anything changed; there is none before that. Raises OutputError."""
        value = self.value(conversation)
        if not self._saved and list(self.states.values()) == [self._untouched]:
            return
        data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        if data == self._saved:
            return
        try:
            paths.replace_file(self.path, data, flush=True)
        except OSError as error:
            raise OutputError(f"cannot save the chat in {self.path}: {error.strerror or error}") from None
        self._saved = data
