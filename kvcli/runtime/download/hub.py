"""Model names -> files: a path, a recipe of `models/`, or a repository of the hub; downloads what is missing.

`find_model` tries, in this order: the name or alias of a recipe, a path, `org/repo[:quant]`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvcli.errors import DownloadError, ModelError, UsageError
from kvcli.runtime.download import hubrepo, sources, store
from kvcli.runtime.download.recipes import Recipe, find_recipe, similar
from kvcli.runtime.download.store import Progress, no_progress

Notice = Callable[[str], None]  # told what is about to happen, in one line without a prefix


def no_notice(text: str) -> None:
    """The `Notice` of a caller that does not want any."""


def find_model(
    name: str, offline: bool = False, progress: Progress | None = None, notice: Notice | None = None
) -> Path:
    """The .gguf file meant by `name`; a known model that is missing is downloaded after `notice` said so.

    `progress(stage, done, total)` counts bytes. Raises ModelError (no such model or file) or DownloadError.
    That the file is a GGUF file is checked by whoever opens it.
    """
    recipe = find_recipe(name)
    reference = hubrepo.parse_reference(name)
    if recipe is None and (reference is None or is_path(name)):
        return check_path(name)
    return pull(name, False, offline, progress, notice)


def pull(
    name: str,
    force: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Path:
    """Download a recipe or a hub file unless it is here already; with `force` even then. Returns its path.

    Raises UsageError for a path, ModelError for an unknown name, DownloadError.
    """
    recipe = find_recipe(name)
    if recipe is not None:
        return _pull_recipe(recipe, force, offline, progress or no_progress, notice or no_notice)
    if is_path(name):
        raise UsageError(f"'{name}' is a path; pull takes a model's name", "see kv models ls")
    reference = hubrepo.parse_reference(name)
    if reference is None:
        raise unknown_name(name)
    return _pull_reference(reference, force, offline, progress or no_progress, notice or no_notice)


def is_path(name: str) -> bool:
    """Whether a name that no recipe has means a file: it ends in .gguf, looks like a path or exists."""
    if _exists(name):
        return True
    if ":" in name and hubrepo.parse_reference(name):
        return False
    return name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


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
    close = similar(name)
    usable = [recipe.name for recipe in close if planning or not recipe.problem][:3]
    if usable:
        hint = f"did you mean {' or '.join(usable)}?"
    else:
        hint = next((f"did you mean {recipe.name}? {recipe.remedy};" for recipe in close if recipe.hf), "")
    listed = "kv models ls -a lists the known ones" if planning else "kv models ls lists the names that run"
    return ModelError(f"no model named '{name}'", f"{hint} {listed}".strip())


def _pull_recipe(recipe: Recipe, force: bool, offline: bool, progress: Progress, notice: Notice) -> Path:
    target = store.stored_path(recipe)
    if target is None or recipe.file is None:
        known = f"kv cannot run {recipe.name}" if recipe.unsupported else f"{recipe.name} is known by its sizes only"
        raise ModelError(f"{known}: {recipe.problem}", recipe.remedy)
    if not force and store.stored_variant(recipe):
        return target
    if target.exists() and not force:
        notice(f"{target} is not the file it should be ({target.stat().st_size} bytes): downloading it again")
    if offline:
        raise DownloadError(
            f"{recipe.name} is not downloaded, and the network may not be used (--offline)",
            f"run kv pull {recipe.name} while online",
        )
    store.check_disk(target.parent, recipe.file.size)
    waiting = f"another kv is downloading {recipe.name}; waiting for it"
    with store.download_folder(recipe.name, lambda: notice(waiting)) as folder:
        if force or not store.stored_variant(recipe):  # another process may have brought it meanwhile
            part = _fetch_from_any(recipe, folder, progress, notice)
            store.install(part, target)
    return target


def _fetch_from_any(recipe: Recipe, folder: Path, progress: Progress, notice: Notice) -> Path:
    """The checked file from the first source that has it. Raises DownloadError with every source's reason."""
    reasons = []
    for number, source in enumerate(recipe.sources):
        size = f"{source.file.size / (1 << 20):.0f} MiB"
        notice(f"downloading {recipe.title} ({size}, license {recipe.license}) from {source.label}")
        place = folder / str(number)
        place.mkdir()
        try:
            return sources.fetch(source, place, progress)
        except DownloadError as error:
            reasons.append(f"{source.label}: {error.message}")
    raise DownloadError(
        f"could not download {recipe.name}: from " + "; from ".join(reasons),
        "check the network, or give a .gguf file",
    )


def _pull_reference(
    reference: hubrepo.Reference, force: bool, offline: bool, progress: Progress, notice: Notice
) -> Path:
    cached = None if force else hubrepo.cached_path(reference, any_quant=offline)
    if cached is not None:
        return cached
    if offline:
        raise DownloadError(
            f"{reference} is not downloaded, and the network may not be used (--offline)",
            f"run kv pull {reference} while online",
        )
    file = hubrepo.choose_remote(reference)
    notice(f"downloading {file.name} ({file.size / (1 << 20):.0f} MiB) from the hub ({reference.repo})")
    return hubrepo.download_to_cache(reference.repo, file, force, progress)
