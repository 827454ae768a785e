"""`ModelRef`: what a model's name means, decided once, in this order: the name or alias of a recipe, a path,
`org/repo[:quant]` and its other spellings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcli.errors import ModelError
from kvcli.runtime.hub.hubnames import Reference, parse_reference
from kvcli.runtime.hub.recipes import Recipe, find_recipe, similar
from kvcli.words import meant


@dataclass(frozen=True)
class ModelRef:
    """A name as it was given, and the recipe or the models of a repository that it means; a path where it means
    neither. Names of recipes whose files lie in a repository mean that, but for planning."""

    name: str
    recipe: Recipe | None = None
    reference: Reference | None = None

    @property
    def is_path(self) -> bool:
        """Whether the name is that of a file or folder; it need not exist."""
        return self.recipe is None and self.reference is None

    @classmethod
    def parse(cls, name: str, planning: bool = False) -> ModelRef:
        """What `name` means. `planning`: see `unknown_name`. Raises ModelError for one that means nothing."""
        recipe = find_recipe(name)
        if recipe is not None and recipe.offered and not planning:
            return cls(name, reference=parse_reference(recipe.offered))
        if recipe is not None or is_path(name):
            return cls(name, recipe)
        reference = parse_reference(name)
        if reference is None:
            raise unknown_name(name, planning)
        return cls(name, reference=reference)


def is_path(name: str) -> bool:
    """Whether a name that no recipe has means a file: it exists, looks like a path, or ends in .gguf and cannot be one
    of a repository. (`a/b/x.gguf` is file x.gguf of repository a/b, unless there is a folder a/b.)"""
    if exists(name) or name.startswith(("/", "./", "../", "~")):
        return True
    if "://" in name:
        return False
    folder, _, base = name.rpartition("/")
    if ":" not in name and base.endswith(".gguf"):
        return folder.count("/") == 0 or exists(folder) or parse_reference(name) is None
    return name.count("/") > 1 and parse_reference(name) is None


def exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).exists()
    except (OSError, ValueError):  # too long, or a NUL inside
        return False


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
