"""What `kv` keeps on this disk: of which kind, where, how much, and how each kind is cleared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcli import paths
from kvcli.cli import cachefiles
from kvcli.errors import OutputError
from kvcli.runtime.hub import hubcache, inventory, store
from kvcli.runtime.plan import overheads
from kvcli.runtime.promptcache import sessions, worth
from kvcli.runtime.promptcache.store import remove


@dataclass(frozen=True)
class Kind:
    """One kind of files. `name` is what users type, `place` a folder or file that may not exist.

    `clear` removes them; it raises what removing a single one raises (KVError), or OSError.
    """

    name: str
    title: str
    place: Path
    files: tuple[Path, ...]
    clear: Callable[[], None]

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files if path.exists())

    def as_object(self) -> dict[str, str | int]:
        """For JSON."""
        return {
            "kind": self.name,
            "path": str(self.place),
            "files": len(self.files),
            "size_bytes": self.size_bytes,
        }


def kinds(prompts: Path) -> list[Kind]:
    """Every kind; `prompts` is the folder of the store of prompt caches."""
    entries = inventory.here()
    own = [entry for entry in entries if "/" not in entry.name]
    hub = [entry for entry in entries if "/" in entry.name]
    cache, state = paths.cache_dir(), paths.state_dir()
    return [
        Kind("models", "downloaded models", store.models_dir(), _files_of(own), lambda: _remove_models(own)),
        Kind("hub", "GGUF models in the hub's cache", hubcache.folder(), _files_of(hub), lambda: _remove_models(hub)),
        _prompts(prompts),
        _sessions(),
        _folder("fingerprints", "hashes of model files", cache / "fingerprints"),
        _folder("headers", "headers of hub models", cache / "headers"),
        _folder("kernels", "compiled GPU kernels", cache / "triton"),
        _folder("history", "what was typed in kv chat", state / "history"),
        _folder("measurements", "what kv doctor measured", overheads.state_file()),
        _folder("notices", "what is said only once", state / "told"),
        _folder("settings", "the config file", paths.config_dir() / "config.toml"),
    ]


def _files_of(entries: Sequence[inventory.Entry]) -> tuple[Path, ...]:
    return tuple(path for entry in entries for path in entry.files)


def _remove_models(entries: Iterable[inventory.Entry]) -> None:
    for entry in entries:
        inventory.remove(entry)


def _prompts(root: Path) -> Kind:
    """Only files of the store: the folder may be any that the user names."""
    files = tuple(cachefiles.stored(root))

    def clear() -> None:
        for path in files:
            remove(path)
        worth.clear(root)

    return Kind("prompts", "rows of long prompts", root, files, clear)


def _sessions() -> Kind:
    names = sessions.names()
    files = tuple(sessions.path_of(name) for name in names)

    def clear() -> None:
        for name in names:
            sessions.remove(name)

    return Kind("sessions", "saved chats", sessions.folder(), files, clear)


def _folder(name: str, title: str, place: Path) -> Kind:
    """A folder, or a file, that is nobody's but ours."""
    inside = place.rglob("*") if place.is_dir() else [place]
    files = tuple(path for path in inside if path.is_file() and not path.is_symlink())

    def clear() -> None:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    return Kind(name, title, place, files, clear)


def clear(kind: Kind) -> None:
    """Remove everything of a kind. Raises OutputError and what `Kind.clear` raises of ours."""
    try:
        kind.clear()
    except OSError as error:
        where = error.filename or kind.place
        raise OutputError(f"cannot remove {where}: {error.strerror or error}", "check its owner and mode") from None
