"""The folders of `kv`, by the XDG base directory rules on every system (macOS too)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_warned: set[Path] = set()


def cache_dir() -> Path:
    """What may be deleted at any time: `$XDG_CACHE_HOME/kv`."""
    return _folder("XDG_CACHE_HOME", ".cache")


def data_dir() -> Path:
    """Models and sessions: `$XDG_DATA_HOME/kv`."""
    return _folder("XDG_DATA_HOME", ".local/share")


def state_dir() -> Path:
    """History and logs: `$XDG_STATE_HOME/kv`."""
    return _folder("XDG_STATE_HOME", ".local/state")


def config_dir() -> Path:
    """What a user sets: `$XDG_CONFIG_HOME/kv`."""
    return _folder("XDG_CONFIG_HOME", ".config")


def _folder(variable: str, fallback: str) -> Path:
    given = os.environ.get(variable, "")
    # A relative path is invalid by the XDG rules and would scatter files over working folders.
    root = Path(given) if os.path.isabs(given) else Path.home() / fallback
    return root / "kv"


def shown(path: Path) -> str:
    """The path for people: ~ for the home folder."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)


def make_private(folder: Path) -> None:
    """Make the folder and its missing parents, readable by this user only. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def make_or_warn(folder: Path, warn: Callable[[str], None]) -> bool:
    """Make the folder. If that fails, say so once for each and return False: the caller goes on without."""
    try:
        make_private(folder)
        if os.access(folder, os.W_OK | os.X_OK):
            return True
        reason = "it is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    if folder not in _warned:
        _warned.add(folder)
        warn(f"cannot use the folder {folder}: {reason}; going on without it")
    return False


def replace_file(path: Path, data: bytes, flush: bool = False) -> None:
    """Put `data` in place of what is at `path`, all of it or, where that fails, nothing; readable by this user only.

    `flush`: it is on the disk before it takes the place. Raises OSError.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}.", suffix=".part", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def can_be_made(folder: Path) -> bool:
    """True if the folder exists and is writable, or could be made. Changes nothing."""
    while not os.path.exists(folder) and folder != folder.parent:  # Path.exists raises where it may not look
        folder = folder.parent
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
