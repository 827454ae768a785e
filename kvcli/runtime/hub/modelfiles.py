"""Model names -> files: a path, a recipe of `models/`, or a repository of the hub; downloads what is missing.

What a name means is decided by `modelref.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import DownloadError, ModelError, UsageError
from kvcli.runtime.formats.safetensors import is_model_folder
from kvcli.runtime.hub import hubcache, hubnames, sources, store
from kvcli.runtime.hub.modelref import ModelRef, exists
from kvcli.runtime.hub.recipes import Recipe
from kvcli.runtime.hub.store import Progress, no_progress
from kvcli.words import human_bytes

if TYPE_CHECKING:
    from kvcli.runtime.hub.hubdownload import Approve

Notice = Callable[[str], None]  # told what is about to happen, in one line without a prefix


def no_notice(text: str) -> None:
    """The `Notice` of a caller that does not want any."""


def find_model(
    name: str,
    offline: bool = False,
    progress: Progress | None = None,
    notice: Notice | None = None,
    approve: Approve | None = None,
) -> Path:
    """The .gguf file, or the folder of safetensors, meant by `name`; a known model that is missing is downloaded after
    `notice` said so.

    `progress(stage, done, total)` counts bytes. `approve`: see hubdownload.py. Raises ModelError (no such model or
    file) or DownloadError. That the file is a GGUF file is checked by whoever opens it.
    """
    ref = ModelRef.parse(name)
    if ref.is_path:
        return check_path(name)
    if notice and is_model_folder(Path(name)):
        notice(f"{name} is the model known by that name; ./{name} is the folder here")
    try:
        return _pull(ref, False, offline, progress, notice, approve)
    except DownloadError as error:
        if hubnames.could_be_path(name):
            what = f"there is no file {name} here; taken for one of the hub: {error.message}"
            raise DownloadError(what, error.hint) from error
        raise


def pull(
    name: str,
    force: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
    notice: Notice | None = None,
    approve: Approve | None = None,
) -> Path:
    """Download a recipe or a hub file unless it is here already; with `force` even then. Returns its path.

    Raises UsageError for a path, ModelError for an unknown name, DownloadError.
    """
    ref = ModelRef.parse(name)
    if ref.is_path:
        raise UsageError(f"'{name}' is a path; pull takes a model's name", "see kv models ls")
    return _pull(ref, force, offline, progress, notice, approve)


def _pull(
    ref: ModelRef, force: bool, offline: bool, progress: Progress | None, notice: Notice | None, approve: Approve | None
) -> Path:
    progress, notice = progress or no_progress, notice or no_notice
    if ref.recipe is not None:
        return _pull_recipe(ref.recipe, force, offline, progress, notice)
    assert ref.reference is not None
    return _pull_reference(ref.reference, force, offline, progress, notice, approve)


def check_path(name: str) -> Path:
    """The path if a file is there, or a folder of safetensors. Raises ModelError saying what is there instead."""
    path = Path(name).expanduser()
    if not exists(str(path)):
        raise ModelError(f"no such file: {name}", "kv models ls lists the models known by name")
    if path.is_dir():
        if is_model_folder(path):
            return path
        files = sorted(path.glob("*.gguf"))
        hint = f"it holds {files[0]}" if files else "give a .gguf file, or a folder with model.safetensors"
        raise ModelError(f"{name} is a directory without a model", hint)
    return path


def _pull_recipe(recipe: Recipe, force: bool, offline: bool, progress: Progress, notice: Notice) -> Path:
    target = store.stored_path(recipe)
    if target is None or recipe.file is None:
        known = f"kv cannot run {recipe.name}" if recipe.unsupported else f"{recipe.name} is known by its sizes only"
        raise ModelError(f"{known}: {recipe.problem}", recipe.remedy)
    here = store.stored_variant(recipe) is not None
    if here and not force:
        return target
    if offline:
        raise _offline(recipe.name, here)
    if target.exists() and not force:
        notice(f"{target} is not the file it should be ({target.stat().st_size} bytes): downloading it again")
    waiting = f"another kv is downloading {recipe.name}; waiting for it"
    with store.download_folder(recipe, lambda: notice(waiting)) as folder:
        for piece in store.pieces(recipe) if force else ():
            piece.unlink()
        here_already = max((piece.stat().st_size for piece in store.pieces(recipe)), default=0)
        store.check_disk(folder, recipe.file.size - here_already)
        if force or not store.stored_variant(recipe):  # another process may have brought it meanwhile
            store.install(_fetch_from_any(recipe, folder, progress, notice), target)
    return target


def _offline(name: str, here: bool) -> DownloadError:
    if here:
        what = f"{name} is downloaded; --force would download it again, and --offline forbids that"
        return DownloadError(what, "leave out one of the two")
    what = f"{name} is not downloaded, and the network may not be used (`offline`)"
    return DownloadError(what, f"run kv pull {name} while online")


def _fetch_from_any(recipe: Recipe, folder: Path, progress: Progress, notice: Notice) -> Path:
    """The checked file from the first source that has it. Raises DownloadError with every source's reason."""
    reasons = []
    for source in recipe.sources:
        piece = store.piece_path(folder, source.file)
        here = f", {human_bytes(piece.stat().st_size)} of it here already" if piece.exists() else ""
        size = f"{human_bytes(source.file.size)}{here}, license {recipe.license}"
        notice(f"downloading {recipe.title} ({size}) from {source.label}")
        try:
            return sources.fetch(source, folder, progress, notice)
        except DownloadError as error:
            reasons.append(f"{source.label}: {error.message}")
    hint = "check the network, or give a .gguf file"
    if left := sum(piece.stat().st_size for piece in store.pieces(recipe)):
        hint += f"; the same command goes on from the {human_bytes(left)} that are here"
    raise DownloadError(f"could not download {recipe.name}: from " + "; from ".join(reasons), hint)


def _pull_reference(
    reference: hubnames.Reference,
    force: bool,
    offline: bool,
    progress: Progress,
    notice: Notice,
    approve: Approve | None,
) -> Path:
    cached = hubcache.find(reference, loose=offline)
    if cached is not None and not force:
        return cached.path
    if offline:
        raise _offline(str(reference), cached is not None)
    from kvcli.runtime.hub import hubdownload  # TLS and HTTP: nothing that a model that is here needs

    return hubdownload.download(reference, force, progress, notice, approve)
