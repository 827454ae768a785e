"""The hub's cache on this disk, which other programs share: what GGUF models are in it, what is unfinished, removing.

    models--org--repo/blobs/VERSION                     content, by its checksum
    models--org--repo/blobs/VERSION.NAME.incomplete     what a download has of it so far
    models--org--repo/blobs/VERSION.xxxxxxxx.incomplete the same of huggingface_hub, which never goes on with it
    models--org--repo/snapshots/COMMIT/NAME             links to content
    models--org--repo/refs/main                         the commit that was last seen
    .locks/models--org--repo/VERSION.lock               held with flock by whoever downloads, here as there

So a piece whose lock can be had has no living writer. HF_HOME and HF_HUB_CACHE mean what they mean elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvcli.errors import ModelError
from kvcli.runtime.formats.splitgguf import part_of
from kvcli.runtime.hub import folderfiles, hubnames, store
from kvcli.runtime.hub.hubnames import MAIN, SAFETENSORS, Reference, Variant

_UNFINISHED = ".incomplete"
_MOST_NAME_BYTES = 170  # of a file's name within the name of its piece


@dataclass(frozen=True)
class CachedModel:
    """One model of the cache: all of it, or (`finished` false) what an interrupted download left of it. `paths` are all
    its files."""

    repo: str
    label: str
    paths: tuple[Path, ...]
    finished: bool = True

    @property
    def name(self) -> str:
        """What the user types for it."""
        return f"{self.repo}:{self.label}"

    @property
    def path(self) -> Path:
        """What is opened of a whole one: its first file, or the folder of safetensors."""
        return self.paths[0].parent if self.label == SAFETENSORS else self.paths[0]

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(path.stat().st_size for path in self.paths if path.exists())


def folder() -> Path:
    """The hub's cache, by the rules of huggingface_hub; it may not exist."""
    return Path(os.environ.get("HF_HUB_CACHE") or hubnames.home() / "hub").expanduser()


def repo_folder(repo: str) -> Path:
    """Where the files of a repository are; case does not matter to the hub, so neither here. It may not exist."""
    wanted = _folder_name(repo)
    return next((each for each in _repo_folders() if each.name.lower() == wanted.lower()), folder() / wanted)


def _folder_name(repo: str) -> str:
    return "models--" + repo.replace("/", "--")


def _repo_folders() -> list[Path]:
    return sorted(folder().glob("models--*--*"))


def _repo_of(place: Path) -> str:
    return place.name.removeprefix("models--").replace("--", "/", 1)


def repository_of(path: Path) -> str:
    """org/repo of the snapshot that is this folder; "" = it is none."""
    place = path.parent.parent
    return _repo_of(place) if path.parent.name == "snapshots" and re.match("models--.+--.", place.name) else ""


# --- what is there ---


def models(repo: str = "") -> list[CachedModel]:
    """The whole models of the cache: of one repository, or of all."""
    return [model for place in _places(repo) for model in _models_in(place, MAIN)]


def _places(repo: str) -> list[Path]:
    return [repo_folder(repo)] if repo else _repo_folders()


def _models_in(place: Path, revision: str) -> list[CachedModel]:
    """The models of one repository; of a label that several snapshots have, the one of `revision` or else the first."""
    found: dict[str, CachedModel] = {}
    for snapshot in _snapshots(place, revision):
        for variant in hubnames.variants(_files(snapshot)):
            paths = tuple(snapshot / name for name in variant.files)
            found.setdefault(variant.label, CachedModel(_repo_of(place), variant.label, paths))
        if files := folderfiles.of_folder(snapshot):
            found.setdefault(SAFETENSORS, CachedModel(_repo_of(place), SAFETENSORS, files))
    return list(found.values())


def _snapshots(place: Path, revision: str) -> list[Path]:
    reference = place / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    everything = sorted(path for path in place.glob("snapshots/*") if path.is_dir())
    first = [path for path in everything if path.name == commit]
    return first + [path for path in everything if path not in first] if revision == MAIN else first


def _files(snapshot: Path) -> list[str]:
    return [path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*.gguf")) if path.is_file()]


def find(reference: Reference, loose: bool) -> CachedModel | None:
    """The whole model that is meant, if it is here. `loose`: as `hubnames.matching` has it."""
    here = _models_in(repo_folder(reference.repo), reference.revision)
    names = [Variant(model.label, _names(model)) for model in here]
    found = hubnames.matching(names, reference.wanted, loose)
    return here[names.index(found[0])] if len(found) == 1 else None


def _names(model: CachedModel) -> tuple[str, ...]:
    """The names of its files inside the repository."""
    depth = len(folder().parts) + 3  # models--..., snapshots, the commit
    return tuple("/".join(path.parts[depth:]) for path in model.paths)


def unfinished(repo: str = "") -> list[CachedModel]:
    """What interrupted downloads left: pieces of files, and parts of models of which others are missing."""
    found: dict[tuple[str, str], list[Path]] = {}
    for place in _places(repo):
        for path in _lone_parts(place):
            found.setdefault((_repo_of(place), _label(path.name)), []).append(path)
        for path in sorted(place.glob(f"blobs/*{_UNFINISHED}")):
            version, name = _piece_of(path)
            label = _label(name) if name.endswith(".gguf") else SAFETENSORS if _is_ours(name) else version[:12]
            found.setdefault((_repo_of(place), label), []).append(path)
    return [CachedModel(repo, label, tuple(paths), False) for (repo, label), paths in found.items()]


def _lone_parts(place: Path) -> list[Path]:
    whole = {path for model in _models_in(place, MAIN) for path in model.paths}
    files = {snapshot / name: name for snapshot in _snapshots(place, MAIN) for name in _files(snapshot)}
    return [path for path, name in files.items() if part_of(name) and path not in whole]


def _label(name: str) -> str:
    part = part_of(name)
    whole = part[0] if part else name
    return hubnames.quant_of(whole) or whole


def _is_ours(name: str) -> bool:
    """Whether a piece is of a download of kv's, by the file's name in it; other programs have random letters there."""
    return name.endswith((".gguf", *folderfiles.SUFFIXES))


def _piece_of(path: Path) -> tuple[str, str]:
    """The version and the file name in the name of a piece; another program's name for it where that wrote it."""
    version, _, name = path.name.removesuffix(_UNFINISHED).partition(".")
    return version, name


# --- writing ---


@contextmanager
def writing(place: Path, version: str, waiting: Callable[[], None] | None) -> Iterator[None]:
    """Be the only one who writes this content. Calls `waiting` and waits for another; without it BlockingIOError."""
    lock = place.parent / ".locks" / place.name / f"{version}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with store.file_lock(lock, waiting):
        yield


def piece_path(place: Path, version: str, name: str) -> Path:
    """Where a download of a file is gathered."""
    short = os.fsdecode(os.fsencode(name.rsplit("/", 1)[-1])[-_MOST_NAME_BYTES:])
    return place / "blobs" / f"{version}.{short}{_UNFINISHED}"


def publish(place: Path, version: str, commit: str, name: str) -> Path:
    """Link a snapshot's file to its content; the link's path. Raises OSError."""
    link = place / "snapshots" / commit / name
    link.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(place / "blobs" / version, link.parent)
    fresh = link.with_name(f".{os.getpid()}.{version[:8]}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, link)
    return link


def remember(place: Path, revision: str, commit: str) -> None:
    """Note which commit a branch or tag is, as other programs do. Raises OSError."""
    if revision == commit:
        return
    path = place / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{os.getpid()}")
    fresh.write_text(commit)
    os.replace(fresh, path)


def sweep(place: Path, versions: Iterable[str]) -> None:
    """Remove pieces that no download will go on with, and whose writers are gone. Raises OSError.

    Those are pieces of other programs, which begin anew each time, and of content that the repository has no more:
    `versions` is what it has, with "" for what its list does not name.
    """
    current = set(versions)
    for path in place.glob(f"blobs/*{_UNFINISHED}"):
        version, name = _piece_of(path)
        if not _is_ours(name) or not current & {version, ""}:
            with suppress(BlockingIOError):
                _remove_piece(place, path)


def _remove_piece(place: Path, path: Path) -> None:
    """Raises BlockingIOError if somebody is writing to it."""
    with writing(place, _piece_of(path)[0], None):
        path.unlink(missing_ok=True)


# --- removing ---


def remove(model: CachedModel) -> None:
    """Remove a model, or what is unfinished of it. Raises OSError, ModelError while it is being downloaded."""
    for path in model.paths:
        place = _place_of(path)
        if path.name.endswith(_UNFINISHED):
            try:
                _remove_piece(place, path)
            except BlockingIOError:
                raise ModelError(f"{model.name} is being downloaded", "wait for that, or end it first") from None
        else:
            remove_file(path)
        _tidy(place)


def remove_file(link: Path) -> None:
    """Remove a file, and its content unless another snapshot has it, too. Raises OSError."""
    blob, place = link.resolve(), _place_of(link)
    link.unlink()
    if blob.is_relative_to(place.resolve()) and not any(p.resolve() == blob for p in place.glob("snapshots/**/*")):
        blob.unlink(missing_ok=True)


def _place_of(path: Path) -> Path:
    return next(parent for parent in path.parents if re.match("models--", parent.name))


def _tidy(place: Path) -> None:
    """Remove folders without files; the whole repository's once nothing of its content is left."""
    left = [path for path in place.rglob("*") if not path.is_dir() and "refs" not in path.parts[len(place.parts) :]]
    if not left:
        shutil.rmtree(place, ignore_errors=True)
        return
    for path in sorted(place.glob("snapshots/**/"), reverse=True):
        if path != place / "snapshots" and not any(path.iterdir()):
            path.rmdir()
