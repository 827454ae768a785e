"""What models there are: the recipes, and what of them and of the hub's cache is on this disk."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kvcli.errors import CheckFailed, ModelError
from kvcli.runtime.download import hub, hubrepo, store
from kvcli.runtime.download.recipes import Recipe, find_recipe, load_recipes
from kvcli.runtime.download.store import Progress
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.planning.runnable import judge


@dataclass(frozen=True)
class Entry:
    """One model. `size` in bytes, 0 for a recipe without a file. `path` is None if it is not downloaded.

    `parameters` and `context_length` are 0 where they are not known. `problem`: why kv cannot run it by this name, ""
    = it can; `unsupported`: not by any other either. `hf`: a hub repository with files of it, or "".
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
    problem: str = ""
    unsupported: bool = False
    hf: str = ""
    damaged: bool = False  # a file is there, but not with the size it should have


def entries(shapes: bool = False) -> list[Entry]:
    """The recipes that have a file (with `shapes` all of them), then the GGUF files in the hub's cache."""
    recipes = [_of_recipe(recipe) for recipe in load_recipes().values() if shapes or recipe.file]
    return recipes + [_of_cached(file) for file in hubrepo.cached_files()]


def _of_recipe(recipe: Recipe) -> Entry:
    path = store.stored_path(recipe)
    there = path is not None and path.is_file()
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
        path=path if there else None,
        problem=recipe.problem,
        unsupported=bool(recipe.unsupported),
        hf=recipe.hf,
        damaged=there and store.stored_variant(recipe) is None,
    )


def _of_cached(file: hubrepo.CachedFile) -> Entry:
    quant = hubrepo.quant_of(file.name)
    name = f"{file.repo}:{quant or file.name}"
    arch, parameters, context, license_, problem = "", 0, 0, "", ""
    try:
        with GGUFFile.open(file.path) as opened:
            config, problem = judge(opened.metadata, opened.tensors)
            arch, license_ = (str(opened.metadata.get(f"general.{key}", "")) for key in ("architecture", "license"))
            parameters = sum(prod(tensor.shape) for tensor in opened.tensors.values())
            context = config.context_length if config else 0
    except ModelError as error:
        problem = error.message
    return Entry(
        name, file.name, "", arch, parameters, context, file.path.stat().st_size, license_, False, file.path,
        problem=problem, unsupported=bool(problem),
    )  # fmt: skip


def downloaded(name: str) -> Entry:
    """The entry of a model that is on this disk. Raises ModelError if it is not, or for a path."""
    recipe = find_recipe(name)
    reference = hubrepo.parse_reference(name)
    if recipe is not None:
        entry = _of_recipe(recipe)
        if entry.path is None:
            raise ModelError(f"{recipe.name} is not downloaded", f"kv pull {recipe.name}")
        return entry
    if hub.is_path(name):
        raise ModelError(f"'{name}' is a path, not a model of kv's", "see kv models ls")
    if reference is None:
        raise hub.unknown_name(name)
    path = hubrepo.cached_path(reference, any_quant=True)
    if path is None:
        raise ModelError(f"{name} is not downloaded", f"kv pull {name}")
    return next(_of_cached(file) for file in hubrepo.cached_files(reference.repo) if file.path == path)


def remove(entry: Entry) -> None:
    """Delete the file of a downloaded model. Raises ModelError where that fails."""
    assert entry.path is not None
    try:
        if find_recipe(entry.name):
            entry.path.unlink()
            if not any(entry.path.parent.iterdir()):
                entry.path.parent.rmdir()
        else:
            hubrepo.remove_cached(entry.path)
    except OSError as error:
        raise ModelError(f"cannot remove {entry.path}: {error.strerror or error}") from error


def verify(entry: Entry, progress: Progress) -> None:
    """Check a downloaded model against the checksum of its recipe or of the hub.

    Raises CheckFailed where it differs, ModelError where it cannot be read or no checksum is known.
    """
    assert entry.path is not None
    expected = _checksums(entry)
    if not expected:
        raise ModelError(f"no checksum is known for {entry.name}", f"{entry.path} is not named by one")
    try:
        actual = store.sha256_of(entry.path, progress)
    except OSError as error:
        raise ModelError(f"cannot read {entry.path}: {error.strerror or error}") from error
    if actual not in expected:
        raise CheckFailed(f"{entry.path} is damaged: its sha256 is {actual[:12]}…", f"kv pull --force {entry.name}")


def _checksums(entry: Entry) -> set[str]:
    recipe = find_recipe(entry.name)
    if recipe is not None:
        return {file.sha256 for file in recipe.variants}
    blob = os.path.basename(os.path.realpath(entry.path or ""))  # the hub's cache names large files by checksum
    return {blob} if re.fullmatch(r"[0-9a-f]{64}", blob) else set()
