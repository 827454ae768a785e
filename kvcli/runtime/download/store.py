"""The store of downloaded models, `$XDG_DATA_HOME/kv/models/NAME/FILE`: files appear whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcli import paths
from kvcli.errors import DownloadError
from kvcli.runtime.download.recipes import ModelFile, Recipe

Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)

DISK_MARGIN_BYTES = 1 << 30  # stays free after a download
_BLOCK = 1 << 20


def no_progress(stage: str, done: int, total: int) -> None:
    """The `Progress` of a caller that does not want any."""


def models_dir() -> Path:
    """The root of the store; it may not exist."""
    return paths.data_dir() / "models"


def stored_path(recipe: Recipe) -> Path | None:
    """Where the file of the recipe lies (perhaps under an earlier name) or would lie; None where it has no file."""
    if recipe.file is None:
        return None
    paths = [models_dir() / name / recipe.file.name for name in (recipe.name, *recipe.aliases)]
    return next((path for path in paths if path.is_file()), paths[0])


def stored_variant(recipe: Recipe) -> ModelFile | None:
    """Which of the recipe's files is in the store, judged by its size; None if it is missing or damaged."""
    path = stored_path(recipe)
    if path is None or not path.is_file():
        return None
    size = path.stat().st_size
    return next((file for file in recipe.variants if file.size == size), None)


@contextmanager
def download_folder(name: str, waiting: Callable[[], None]) -> Iterator[Path]:
    """A private folder for one download of the model `name`, removed on every way out.

    Only one process at a time has it: others call `waiting` and wait. What a killed process left in it is
    removed first. Raises DownloadError where the store cannot be written.
    """
    partial = models_dir() / name / ".partial"
    try:
        paths.make_private(partial.parent)
        paths.make_private(models_dir() / ".locks")
        lock = os.open(models_dir() / ".locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(error) from error
    try:
        _lock(lock, waiting)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            paths.make_private(partial)
        except OSError as error:
            raise _unwritable(error) from error
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)  # and with it the lock


def _lock(descriptor: int, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _unwritable(error: OSError) -> DownloadError:
    where = f" {error.filename}" if error.filename else ""
    return DownloadError(
        f"cannot write to the model folder{where}: {error.strerror}",
        "XDG_DATA_HOME sets where models are kept",
    )


def check_disk(folder: Path, size: int) -> None:
    """Raise DownloadError unless `size` bytes fit on the disk with a margin. The folder may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < size + DISK_MARGIN_BYTES:
        needed = f"{(size + DISK_MARGIN_BYTES) / (1 << 30):.1f} GiB are needed (1 GiB stays free)"
        raise DownloadError(
            f"not enough disk space at {folder}: {needed}, {free / (1 << 30):.1f} GiB are free",
            "make room, or set XDG_DATA_HOME to a folder on another disk",
        )


def install(part: Path, target: Path) -> None:
    """Move a whole file to its place, there after a power cut or not at all. Raises DownloadError."""
    try:
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unwritable(error) from error


def sha256_of(path: Path, progress: Progress = no_progress, stage: str = "verify") -> str:
    """The checksum of a file as hex digits. Raises OSError."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress(stage, done, total)
    return digest.hexdigest()
