"""Prompt-cache files for people: found by id or path, and told as cells of a table or as JSON."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvcli.errors import CacheFileError, UsageError
from kvcli.options import CacheOptions, EvictOptions
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.runtime.hub.recipes import load_recipes
from kvcli.runtime.promptcache import lookuprecord
from kvcli.runtime.promptcache.file import Contents, PromptCacheFile
from kvcli.runtime.promptcache.rowsettings import cache_options, pair, types_of
from kvcli.runtime.promptcache.sameness import SCOPE, is_exact
from kvcli.runtime.promptcache.startpoints import checkpoints, starts
from kvcli.runtime.promptcache.store import SUFFIX, entries, folders, is_pinned
from kvcli.runtime.promptcache.worth import FileWorth, Worth, key_of

ID_LENGTH = 10
_OF_MODEL = ("weights", "tokenizer", "template", "model_config", "positions", "byte_order")
_NAMES = {name: f"{name}_hash" for name in ("weights", "tokenizer", "template")}  # in JSON


def id_of(path: Path) -> str:
    """How a file of the store is called: the first digits of the hash of its contents."""
    return path.name.removesuffix(SUFFIX).split("-")[-1][:ID_LENGTH]


def stored(root: Path) -> list[Path]:
    """Every file of the store, the one used last first."""
    found = [entry for folder in folders(root) for entry in entries(folder)]
    return [entry.path for entry in sorted(found, key=lambda e: (-e.used_at, e.path))]


def locate(name: str, root: Path) -> Path:
    """The file that a user means by a path or the beginning of an id. Raises UsageError."""
    if Path(name).exists():
        return Path(name)
    if "/" in name:
        raise UsageError(f"there is no file {name}", "kv cache ls lists ids of stored prompts")
    if len(name) < 4:
        raise UsageError(f"'{name}' is too short for an id", "give at least 4 digits of one in kv cache ls, or a path")
    found = [path for path in stored(root) if id_of(path).startswith(name.lower())]
    if len(found) != 1:
        many = f"{len(found)} stored prompts have ids that begin with '{name}'"
        raise UsageError(many if found else f"there is no file and no stored prompt '{name}'", "kv cache ls lists ids")
    return found[0]


def of_store(names: Iterable[str], root: Path, what: str) -> list[Path]:
    """The files of the store that a user means, each once. `what`: what kv does with them. Raises UsageError, also for
    any other file or folder, wherever it is."""
    files, there = list(dict.fromkeys(locate(name, root) for name in names)), {path.name for path in stored(root)}
    for file in files:
        if file.name not in there or file.parent.resolve().parent != root.resolve():
            raise UsageError(f"{file} is no stored prompt in {root}", f"kv {what} files of the store only")
    return files


def label(path: Path, root: Path) -> str:
    """What `kv cache` calls a file: its id, or the path of one that is not in the store at `root`."""
    return id_of(path) if root in path.absolute().parents else str(path)


@dataclass(frozen=True)
class Described:
    """What a file says of itself. `used_at`: seconds since the epoch; `problem`: why it says nothing. `worth`: what is
    recorded of it. `read_s`: how long it takes to read, as predicted; None = not known."""

    path: Path
    size: int
    used_at: float
    contents: Contents | None = None
    problem: str = ""
    pinned: bool = False
    worth: FileWorth = field(default_factory=FileWorth)
    read_s: float | None = None

    @property
    def about(self) -> dict[str, str]:
        return self.contents.about if self.contents else {}

    @property
    def identity(self) -> dict[str, str]:
        return self.contents.identity if self.contents else {}

    @cached_property
    def options(self) -> CacheOptions | None:
        """The cache options that it was made with; None where it says nothing of the kind."""
        try:
            return cache_options(self.identity)
        except ValueError:
            return None

    @property
    def title(self) -> str:
        """Its model as people call it."""
        return self.about.get("model", "")

    @property
    def model(self) -> str:
        """What -m takes to name its model; "" where it has no name known here."""
        return _names_by_title().get(self.title, "")

    @property
    def model_id(self) -> str:
        """Tells apart what does not depend on options: the model's file and how it is read."""
        values = [self.identity.get(name, "") for name in _OF_MODEL]
        return hashlib.sha256("\n".join(values).encode()).hexdigest()[:ID_LENGTH] if self.identity else ""

    @property
    def tokens(self) -> str:
        """How many tokens, or which of a longer prompt: '2,048', '1,024-2,048'."""
        c = self.contents
        return "-" if c is None else f"{c.start:,}-{c.end:,}" if c.start else f"{c.end:,}"

    @property
    def settings(self) -> str:
        """The cache types, and what else is not as by default: 'int4', 'f16 page 32 evict 4+384'."""
        if self.contents is None:
            return "damaged"
        found = [pair(types_of(self.identity))]
        if (o := self.options) is not None:
            values = {"page": (o.page_size, CacheOptions.page_size), "sink": (o.sinks, CacheOptions.sinks)}
            values["tail"] = o.tail, CacheOptions.tail
            found += [f"{name} {value}" for name, (value, default) in values.items() if value != default]
            stays = f"{o.evict.policy} {o.evict.budget}" if o.evict.budget else f"{o.evict.keep}+{o.evict.window}"
            found += [f"evict {stays}"] if o.evict.policy != "none" else []
        found += [f"scope {self.scope}"] if self.scope else []
        found += ["exact"] if self.exact else []
        device = self.identity.get("computed_on", "").split(" ")[0]
        return " ".join([*found, *([device] if device not in ("", "cpu") else [])])

    @property
    def scope(self) -> str:
        """The scope that it is kept in; "" = the one of everything else."""
        return self.identity.get(SCOPE, "")

    @property
    def exact(self) -> bool:
        """Whether its rows were computed as with --exact."""
        return is_exact(self.about.get("computed_on", ""))

    @property
    def source(self) -> str:
        """Where its text is from: names of files, or a chat; "" = from the command line, or not said."""
        if "chat" in self.about:
            return f"chat {self.about['chat']}".strip()
        return self.about.get("source", "")

    @property
    def prompt(self) -> str:
        """What tells it apart for people: the source, and the first words."""
        words = self.about.get("begins", "-")
        return f"{self.source}: {words}" if self.source else words

    @cached_property
    def starts(self) -> list[tuple[int, int]] | None:
        """Behind which tokens later prompts can go on, see `starting.starts`; None where that is not known."""
        try:
            return None if self.contents is None else starts(self.contents)
        except ValueError:
            return None

    @property
    def checkpoints(self) -> tuple[int, int] | None:
        """How many states it has, and the bytes of each, see `starting.checkpoints`; None where that is not known."""
        try:
            return None if self.contents is None else checkpoints(self.contents)
        except ValueError:
            return None

    @property
    def starting(self) -> str:
        """The same in words: 'anywhere', 'at 448-1,024, 2,560-3,109', 'nowhere'."""
        found, c = self.starts, self.contents
        if found is None or c is None:
            return "-"
        size = self.options.page_size if self.options else 0
        if found and found[0][0] <= c.start + size and found[-1] == (found[0][0], c.end):
            return "anywhere"
        spans = [f"{first:,}-{last:,}" if first < last else f"{last:,}" for first, last in found]
        return f"at {', '.join(spans)}" if spans else "nowhere"

    def as_json(self, ttl_s: float, goes_on_from: Path | None = None) -> dict[str, Any]:
        """Everything but what belongs to the model, see `model_json`. `goes_on_from`: another file of the store."""
        about, c, o = self.about, self.contents, self.options
        type_k, type_v = types_of(self.identity) if c else (None, None)
        lossless, _, losses = about.get("lossless", "").partition(": ")
        return {
            "id": id_of(self.path),
            "path": str(self.path),
            "size_bytes": self.size,
            "model": self.model or None,
            "model_title": self.title or None,
            "model_id": self.model_id or None,
            "first_token": c.start if c else None,
            "tokens": len(c.tokens) if c else None,
            "pages": len(c.pages) if c else None,
            "checkpoints": self.checkpoints[0] if self.checkpoints else None,
            "type_k": type_k,
            "type_v": type_v,
            "page_size": o.page_size if o else None,
            "kv_sink": o.sinks if o else None,
            "kv_tail": o.tail if o else None,
            "evict": _evicted(o.evict) if o else None,
            "lossless": lossless == "yes" if c else None,
            "losses": losses.split("; ") if losses else [],
            "scope": self.scope or None,
            "exact": self.exact if c else None,
            "source": about.get("source"),
            "chat": about.get("chat"),
            "begins": about.get("begins"),
            "computed_on": about.get("computed_on"),
            "prefill_s": _seconds(about.get("prefill_s", "")),
            "kv_version": about.get("kv_version"),
            "created_at": about.get("created"),
            "used_at": _utc(self.used_at),
            "expires_at": None if self.pinned else _utc(self.used_at + ttl_s),
            "pinned": self.pinned,
            "goes_on_from": None if goes_on_from is None else id_of(goes_on_from),
            "starts": None if self.starts is None else [list(each) for each in self.starts],
            "hits": self.worth.uses.hits,
            "hit_tokens": self.worth.uses.tokens,
            "saved_s": round(self.worth.uses.saved_s, 3),
            "compute_s": None if self.worth.cost_s is None else round(self.worth.cost_s, 3),
            "predicted_read_s": None if self.read_s is None else round(self.read_s, 6),
            "problem": self.problem or None,
        }

    def model_json(self) -> dict[str, Any]:
        """What files of one model have in common."""
        found: dict[str, Any] = {_NAMES.get(name, name): self.identity.get(name) for name in _OF_MODEL}
        with suppress(CacheFileError):  # else it stays a string
            found["model_config"] = load_object(found["model_config"].encode(), str(self.path), CacheFileError)
        return {"model": self.model or None, "model_title": self.title or None, **found}


@functools.cache
def _names_by_title() -> dict[str, str]:
    """Models known by name; behind the comma of a recipe's title stands the type of the weights."""
    return {recipe.title.partition(", ")[0]: name for name, recipe in load_recipes().items()}


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def describe(path: Path, record: Worth | None = None) -> Described:
    """What is told of a file, whole or not, and of what is recorded of it. Raises UsageError if it is not there."""
    try:
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"cannot look at {path}: {error.strerror or error}") from None
    known = record.files.get(key_of(path), FileWorth()) if record else FileWorth()
    contents, problem = None, ""
    try:
        with PromptCacheFile(path) as file:
            contents = file.contents
    except CacheFileError as error:
        problem = error.message
    read_s = None
    if record and contents is not None:
        read_s = lookuprecord.read_seconds(record, contents.identity, contents.payload_bytes)
    return Described(path, status.st_size, status.st_mtime, contents, problem, is_pinned(path), known, read_s)


def check_pages(path: Path) -> int:
    """Read every page of a file against its checksum; how many there are. Raises CacheFileError."""
    with PromptCacheFile(path) as file:
        for key in file.contents.pages:
            file.copy(key)
        return len(file.contents.pages)


def _evicted(asked: EvictOptions) -> dict[str, Any]:
    return {**asdict(asked), "window": asked.window or None, "budget": asked.budget or None}
