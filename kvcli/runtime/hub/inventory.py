"""What models there are: the recipes, and what of them and of the hub's cache is on this disk, finished or not."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from kvcli.errors import CheckFailed, ModelError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.hub import folderfiles, hubcache, store
from kvcli.runtime.hub.hubnames import SAFETENSORS, Reference
from kvcli.runtime.hub.modelref import ModelRef
from kvcli.runtime.hub.recipes import Recipe, find_recipe, load_recipes
from kvcli.runtime.hub.runnable import judge
from kvcli.runtime.hub.store import Progress


@dataclass(frozen=True)
class Entry:
    """One model. `size` in bytes, 0 where that is not known. `path` is None if it is not downloaded.

    `parameters` and `context_length` are 0 where they are not known. `runs`: see Recipe, "-" = nobody has seen all of
    it; `problem`: why not by this name, "" = it does. `hf`: a hub repository with files of it, or "". `files` are all
    its files on this disk; `unfinished` counts the bytes that an interrupted download left.
    """

    name: str
    title: str
    kind: str  # "base", "instruct", or "" where nobody says
    arch: str
    parameters: int
    context_length: int
    size: int
    license: str
    default: bool
    path: Path | None
    runs: str
    problem: str = ""
    hf: str = ""
    damaged: bool = False  # a file is there, but not with the size it should have
    files: tuple[Path, ...] = ()
    unfinished: int = 0
    sha256: str = ""  # that its file has to have; "" = nobody says


def entries(shapes: bool = False) -> list[Entry]:
    """The recipes that have a file (with `shapes` all of them), then the GGUF models in the hub's cache."""
    recipes = [_of_recipe(recipe) for recipe in _recipes(shapes)]
    return recipes + [_of_cached(model) for model in _cached()]


def here() -> list[Entry]:
    """What of them is on this disk, finished or not. Opens no file: of the hub's models it says less than `entries`."""
    found = [_of_recipe(recipe) for recipe in _recipes(False)] + [_unopened(model) for model in _cached()]
    return [entry for entry in found if entry.files]


def names(shapes: bool = False) -> list[str]:
    """The names of the same models. Opens no file of them."""
    return [recipe.name for recipe in _recipes(shapes)] + [model.name for model in _cached()]


def downloaded_names() -> list[str]:
    """The names of those that are on this disk as a whole."""
    recipes = [recipe.name for recipe in _recipes(False) if _file_here(recipe)]
    return recipes + [model.name for model in hubcache.models()]


def _recipes(shapes: bool) -> list[Recipe]:
    return [recipe for recipe in load_recipes().values() if shapes or recipe.file]


def _cached() -> list[hubcache.CachedModel]:
    return [*hubcache.models(), *hubcache.unfinished()]


def _file_here(recipe: Recipe) -> Path | None:
    path = store.stored_path(recipe)
    return path if path is not None and path.is_file() else None


def _of_recipe(recipe: Recipe) -> Entry:
    path, pieces = _file_here(recipe), store.pieces(recipe)
    return Entry(
        name=recipe.name,
        title=recipe.title,
        kind=recipe.kind,
        arch=str(recipe.shape.get("arch", "")),
        parameters=recipe.shape.get("params", 0),
        context_length=recipe.shape.get("context", 0),
        size=recipe.file.size if recipe.file else 0,
        license=recipe.license,
        default=recipe.default,
        path=path,
        runs=recipe.runs,
        problem=recipe.problem,
        hf=recipe.hf,
        damaged=path is not None and store.stored_variant(recipe) is None,
        files=((path,) if path else ()) + pieces,
        unfinished=sum(piece.stat().st_size for piece in pieces),
        sha256=recipe.file.sha256 if recipe.file else "",
    )


def _unopened(model: hubcache.CachedModel) -> Entry:
    path = model.path
    entry = Entry(
        name=model.name,
        title=model.repo.rpartition("/")[2] if model.label == SAFETENSORS else path.name,
        kind="",
        arch="",
        parameters=0,
        context_length=0,
        size=model.size,
        license="",
        default=False,
        path=path,
        runs="yes",
        files=model.paths,
    )
    if model.finished:
        return entry
    entry = replace(entry, title="", size=0, path=None, unfinished=model.size)
    return replace(entry, runs="-", problem="it is not whole")


def _of_cached(model: hubcache.CachedModel) -> Entry:
    entry = _unopened(model)
    if entry.path is None:
        return entry
    if model.label == SAFETENSORS:
        return replace(entry, **folderfiles.facts(entry.path))
    try:
        with GGUFFile.open(entry.path) as opened:
            config, problem = judge(opened.metadata, opened.tensors)
            entry = replace(
                entry,
                arch=str(opened.metadata.get("general.architecture", "")),
                license=str(opened.metadata.get("general.license", "")),
                parameters=sum(prod(tensor.shape) for tensor in opened.tensors.values()),
                context_length=config.context_length if config else 0,
            )
    except ModelError as error:
        problem = error.message
    return replace(entry, runs="no", problem=problem) if problem else entry


def downloaded(name: str) -> Entry:
    """The entry of a model that is on this disk. Raises ModelError if it is not, or for a path."""
    found = _named(name)
    if isinstance(found, Recipe):
        entry = _of_recipe(found)
        if entry.path is None:
            raise ModelError(f"{found.name} is not downloaded", f"kv pull {found.name}")
        return entry
    model = hubcache.find(found, loose=True)
    if model is None:
        raise ModelError(f"{name} is not downloaded", f"kv pull {name}")
    return _of_cached(model)


def _named(name: str) -> Recipe | Reference:
    ref = ModelRef.parse(name)
    found = ref.recipe or ref.reference
    if found is None:
        raise ModelError(f"'{name}' is a path, not a model of kv's", "see kv models ls")
    return found


def removable(name: str) -> list[Entry]:
    """What of a model is on this disk, finished or not. Raises ModelError if nothing is, or for a path."""
    meant = _named(name)
    if isinstance(meant, Recipe):
        found = [entry for entry in [_of_recipe(meant)] if entry.files]
    else:
        whole = hubcache.find(meant, loose=True)
        left = [model for model in hubcache.unfinished(meant.repo) if _is_meant(model, meant.wanted)]
        found = [_of_cached(model) for model in ([whole] if whole else []) + left]
    if not found:
        raise ModelError(f"{name} is not downloaded", "kv models ls lists what is here")
    return found


def _is_meant(model: hubcache.CachedModel, wanted: str) -> bool:
    """Whether what is unfinished is of the wanted model; of a repository without more words all of it is."""
    return not wanted or wanted.lower() in (model.label.lower(), *(path.name.lower() for path in model.paths))


def remove(entry: Entry) -> None:
    """Delete the files of a model, and what is unfinished of it. Raises ModelError where that fails."""
    try:
        recipe = find_recipe(entry.name)
        if recipe is not None:
            store.remove(recipe)
        else:
            repo, _, label = entry.name.partition(":")
            hubcache.remove(hubcache.CachedModel(repo, label, entry.files))
    except OSError as error:
        raise ModelError(f"cannot remove {entry.name}: {error.strerror or error}") from error


def verify(entry: Entry, progress: Progress) -> None:
    """Check a downloaded model against the checksum of its recipe or of the hub.

    Raises CheckFailed where it differs, ModelError where it cannot be read or no checksum is known.
    """
    assert entry.path is not None
    for path in entry.files if find_recipe(entry.name) is None else (entry.path,):
        _verify_file(entry, path, progress)


def _verify_file(entry: Entry, path: Path, progress: Progress) -> None:
    expected = _checksums(entry, path)
    if not expected:
        raise ModelError(f"no checksum is known for {entry.name}", f"{path} is not named by one")
    try:
        actual = store.sha256_of(path, progress)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if actual not in expected:
        raise CheckFailed(f"{path} is damaged: its sha256 is {actual[:12]}…", f"kv pull --force {entry.name}")


def _checksums(entry: Entry, path: Path) -> set[str]:
    recipe = find_recipe(entry.name)
    if recipe is not None:
        return {file.sha256 for file in recipe.variants}
    blob = os.path.basename(os.path.realpath(path))  # the hub's cache names large files by checksum
    return {blob} if re.fullmatch(r"[0-9a-f]{64}", blob) else set()
