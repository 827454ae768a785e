"""The store of downloaded models, `$XDG_DATA_HOME/kv/models/NAME/FILE`: files appear whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvcli import paths
from kvcli.errors import DownloadError, ModelError
from kvcli.runtime.hub.recipes import ModelFile, Recipe
from kvcli.words import human_bytes

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
def file_lock(path: Path, waiting: Callable[[], None] | None) -> Iterator[None]:
    """Hold a lock that ends with the process. Calls `waiting` if another has it, and waits; None: BlockingIOError.

    Raises OSError where the file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, waiting)
            if _is_at(descriptor, path):  # the one who had it may have removed the file
                yield
                return
        finally:
            os.close(descriptor)  # and with it the lock


def _lock(descriptor: int, waiting: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is None:
            raise
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def download_folder(recipe: Recipe, waiting: Callable[[], None]) -> Iterator[Path]:
    """The folder in which the file of a recipe is gathered; a piece there (`piece_path`) stays for the next time.

    Only one process at a time has it: others call `waiting` and wait. Raises DownloadError where the store cannot be
    written.
    """
    partial = partial_folder(recipe)
    try:
        paths.make_private(partial.parent)
        paths.make_private(models_dir() / ".locks")
        with file_lock(models_dir() / ".locks" / recipe.name, waiting):
            _tidy(partial, recipe)
            paths.make_private(partial)
            try:
                yield partial
            finally:
                _tidy(partial, recipe)
    except OSError as error:
        raise _unwritable(error) from error


def partial_folder(recipe: Recipe) -> Path:
    """Where an interrupted download of the recipe left what it had; it may not exist."""
    return models_dir() / recipe.name / ".partial"


def piece_path(folder: Path, file: ModelFile) -> Path:
    """Where the bytes of a file are gathered, whatever source they come from."""
    return folder / file.sha256


def pieces(recipe: Recipe) -> tuple[Path, ...]:
    """What interrupted downloads of the recipe left for the next one."""
    found = (piece_path(partial_folder(recipe), file) for file in recipe.variants)
    return tuple(piece for piece in found if piece.is_file())


def remove(recipe: Recipe) -> None:
    """Remove the file of a recipe and what is unfinished of it. Raises OSError, ModelError while it is downloaded."""
    path = stored_path(recipe)
    assert path is not None
    lock = models_dir() / ".locks" / recipe.name
    paths.make_private(lock.parent)
    try:
        with file_lock(lock, None):
            shutil.rmtree(partial_folder(recipe), ignore_errors=True)
            path.unlink(missing_ok=True)
    except BlockingIOError:
        raise ModelError(f"{recipe.name} is being downloaded", "wait for that, or end it first") from None
    with suppress(OSError):
        path.parent.rmdir()


def _tidy(partial: Path, recipe: Recipe) -> None:
    """Remove what no later download goes on with, and the folder if that is all."""
    pieces_of_use = {piece.name for piece in pieces(recipe) if piece.stat().st_size}
    if not pieces_of_use:
        shutil.rmtree(partial, ignore_errors=True)
        return
    for path in list(partial.iterdir()):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.stem not in pieces_of_use:
            path.unlink(missing_ok=True)


def _unwritable(error: OSError) -> DownloadError:
    where = f" {error.filename}" if error.filename else ""
    return DownloadError(
        f"cannot write to the model folder{where}: {error.strerror}",
        "XDG_DATA_HOME sets where models are kept",
    )


def check_disk(folder: Path, size: int, setting: str = "XDG_DATA_HOME") -> None:
    """Raise DownloadError unless `size` bytes fit on the disk with a margin. The folder may not exist yet.

    `setting` is the variable that names another folder.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < size + DISK_MARGIN_BYTES:
        raise DownloadError(
            f"not enough disk space at {folder}: {human_bytes(size + DISK_MARGIN_BYTES)} are needed"
            f" ({human_bytes(DISK_MARGIN_BYTES)} stays free), {human_bytes(free)} are free",
            f"make room, or set {setting} to a folder on another disk",
        )


def install(part: Path, target: Path) -> None:
    """Move a whole file to its place, there after a power cut or not at all. Raises OSError."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sha256_of(path: Path, progress: Progress = no_progress) -> str:
    """The checksum of a file as hex digits. Raises OSError."""
    with path.open("rb") as file:
        digest, _ = digest_of(file, path.stat().st_size, progress)
    return digest.hexdigest()


def digest_of(file: BinaryIO, total: int, progress: Progress, stage: str = "verify") -> tuple[hashlib._Hash, int]:
    """The SHA-256 of a file from where it stands to its end, to be gone on with, and how many bytes that were. `total`
    is for `progress`: how many there will be. Raises OSError."""
    digest, done = hashlib.sha256(), 0
    while block := file.read(_BLOCK):
        digest.update(block)
        done += len(block)
        progress(stage, done, total)
    return digest, done
