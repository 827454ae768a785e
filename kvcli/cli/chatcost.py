"""What saved chats take on disk: their text, and the rows in the store that belong to one of them alone."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

from kvcli.cli import cachefiles
from kvcli.errors import CacheFileError
from kvcli.runtime.promptcache import sessions
from kvcli.runtime.promptcache.chatfiles import OWNER
from kvcli.runtime.promptcache.file import PromptCacheFile


def text_bytes(name: str) -> int:
    """The size of a chat's file; 0 where there is none yet."""
    with suppress(OSError):
        return sessions.path_of(name).stat().st_size
    return 0


def rows_of(root: Path) -> Counter[str]:
    """Bytes of the store's files by the chat that has them for itself: those that `kv chat rm` removes with it."""
    found: Counter[str] = Counter()
    for path in cachefiles.stored(root):
        with suppress(CacheFileError, OSError), PromptCacheFile(path) as file:
            if owner := file.contents.about.get(OWNER):
                found[owner] += file.status.st_size
    return found
