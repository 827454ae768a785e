"""Model names -> files: a path, a recipe of `models/`, or a repository of the hub; downloads what is missing.

`find_model` tries, in this order: the name or alias of a recipe, a path, `org/repo[:quant]` and its other spellings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import DownloadError, ModelError, UsageError
from kvcli.runtime.hub import hubcache, hubnames, sources, store
from kvcli.runtime.hub.recipes import Recipe, find_recipe, similar
from kvcli.runtime.hub.store import Progress, no_progress
from kvcli.words import human_bytes, meant

if TYPE_CHECKING:
    from kvcli.runtime.hub.download import Approve

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
    """The .gguf file meant by `name`; a known model that is missing is downloaded after `notice` said so.

    `progress(stage, done, total)` counts bytes. `approve`: see hubdownload. Raises ModelError (no such model or file)
    or DownloadError. That the file is a GGUF file is checked by whoever opens it.
    """
    if find_recipe(name) is None and (is_path(name) or hubnames.parse_reference(name) is None):
        return check_path(name)
    try:
        return pull(name, False, offline, progress, notice, approve)
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
    recipe = find_recipe(name)
    if recipe is not None:
        return _pull_recipe(recipe, force, offline, progress or no_progress, notice or no_notice)
    if is_path(name):
        raise UsageError(f"'{name}' is a path; pull takes a model's name", "see kv models ls")
    reference = hubnames.parse_reference(name)
    if reference is None:
        raise unknown_name(name)
    return _pull_reference(reference, force, offline, progress or no_progress, notice or no_notice, approve)


def is_path(name: str) -> bool:
    """Whether a name that no recipe has means a file: it exists, looks like a path, or ends in .gguf and cannot be one
    of a repository. (`a/b/x.gguf` is file x.gguf of repository a/b, unless there is a folder a/b.)"""
    if _exists(name) or name.startswith(("/", "./", "../", "~")):
        return True
    if "://" in name:
        return False
    folder, _, base = name.rpartition("/")
    if ":" not in name and base.endswith(".gguf"):
        return folder.count("/") == 0 or _exists(folder) or hubnames.parse_reference(name) is None
    return name.count("/") > 1 and hubnames.parse_reference(name) is None


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).exists()
    except (OSError, ValueError):  # too long, or a NUL inside
        return False


def check_path(name: str) -> Path:
    """The path if a file is there. Raises ModelError saying what is there instead."""
    if not is_path(name):
        raise unknown_name(name)
    path = Path(name).expanduser()
    if not _exists(str(path)):
        raise ModelError(f"no such file: {name}", "kv models ls lists the models known by name")
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        hint = f"it holds {files[0]}" if files else "give the path of a .gguf file"
        raise ModelError(f"{name} is a directory, not a .gguf file", hint)
    return path


def unknown_name(name: str, planning: bool = False) -> ModelError:
    """The error for a name that is neither a recipe nor a path nor a repository. `planning`: any recipe would do, not
    only one that runs."""
    if "://" in name:
        hint = "kv downloads from repositories of the hub (org/repo:Q4_K_M); give the path of a file from elsewhere"
        return ModelError(f"'{name}' is not an address of a model on the hub", hint)
    close = similar(name)
    usable = [recipe.name for recipe in close if planning or not recipe.problem][:3]
    if usable:
        hint = meant(usable)
    else:
        hint = next((f"did you mean {recipe.name}? {recipe.remedy};" for recipe in close if recipe.hf), "")
    listed = "kv models ls -a lists the known ones" if planning else "kv models ls lists the names that run"
    return ModelError(f"no model named '{name}'", f"{hint} {listed}".strip())


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
        return cached.paths[0]
    if offline:
        raise _offline(str(reference), cached is not None)
    from kvcli.runtime.hub import download  # TLS and HTTP: nothing that a model that is here needs

    return download.download(reference, force, progress, notice, approve)
