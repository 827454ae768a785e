"""What a name of the hub means: `org/repo:Q4_K_M` in all its spellings, and which files of a repository are models.

No network, no disk. A model is one GGUF file or a complete set of parts; its label is its quantization, with what tells
it from others of the same one (`UD-Q4_K_XL`, `i1-Q4_K_M`, `IQ4_XS-imat`), or its file name where that says too little.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from kvcli.errors import DownloadError, ModelError
from kvcli.runtime.formats.safetensors import INDEX, SINGLE
from kvcli.runtime.formats.splitgguf import part_of

DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_QUANT = "Q4_K_M"
SAFETENSORS = "safetensors"  # the label of a repository's safetensors, which are one model
MAIN = "main"

_HOME = r"(?:hf:(?://)?|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)"
_REPO = r"[\w-][\w.-]*/[\w-][\w.-]*"
_FLAGS = re.ASCII | re.IGNORECASE
_TAGGED = re.compile(rf"({_HOME})?({_REPO})(?::([\w.+/ -]+))?/?", _FLAGS)
_FILE = re.compile(rf"({_HOME})?({_REPO})/(?:(?:resolve|blob|raw)/([^/]+)/)?([^:]+\.gguf)", _FLAGS)
_FOLDER = re.compile(rf"({_HOME})({_REPO})/tree/([^/]+)(?:/(?:.+/)?([^/]+))?/?", _FLAGS)

_VARIANT = r"ud|i1|imat(?:rix)?"
_QUANT = re.compile(
    rf"(?:^|[-._])(?:({_VARIANT})[-._])?((?:i?q|tq)\d\w*?|bf16|fp?(?:16|32)|mxfp4\w*?)(?:[-._]({_VARIANT}))?$", _FLAGS
)
# A file cut by other tools than llama-gguf-split: x.Q6_K.gguf-split-a, x.Q8_0.gguf.part1of2.
_CUT = re.compile(r"(.+\.gguf)[-._](?:split|part)[-._]?\w+", _FLAGS)
# Repackings of Q4_0 for certain processors that llama.cpp once wrote and no longer reads.
_REMOVED = re.compile(r"(Q4_0|IQ4_NL)_[48]_[48]")


@dataclass(frozen=True)
class Reference:
    """A repository, what is wanted of it (a label, a file name or "") and a branch, tag or commit."""

    repo: str
    wanted: str = ""
    revision: str = MAIN

    def __str__(self) -> str:
        if self.revision == MAIN:
            return f"{self.repo}:{self.wanted}" if self.wanted else self.repo
        place = "resolve" if self.wanted.endswith(".gguf") else "tree"
        return "/".join(filter(None, ("hf.co", self.repo, place, self.revision, self.wanted)))


@dataclass(frozen=True)
class Variant:
    """One model of a repository: its label and the names of its files, parts in order."""

    label: str
    files: tuple[str, ...]


def endpoint() -> str:
    """HF_ENDPOINT, else the public hub."""
    return os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT


def home() -> Path:
    """HF_HOME, by the rules of huggingface_hub: the folder of its cache and its token; it may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")).expanduser()


def parse_reference(text: str) -> Reference | None:
    """`org/repo[:wanted]` or `org/repo/file.gguf`, also after `hf:` or `hf.co/`, or an address of the hub; or None."""
    home = endpoint().rstrip("/") + "/"
    if text.startswith(home):
        text = "hf:" + text.removeprefix(home)
    if "://" in text or text.lower().startswith(("hf:", "hf.co/", "huggingface.co/")):
        text = re.split(r"[?#]", text, maxsplit=1)[0]
    if match := _TAGGED.fullmatch(text):
        wanted = match[3] or ""
        return Reference(match[2], "" if wanted.lower() == "latest" else wanted)
    if match := _FOLDER.fullmatch(text) or _FILE.fullmatch(text):
        return Reference(match[2], unquote(match[4] or ""), unquote(match[3] or MAIN))
    return None


def could_be_path(text: str) -> bool:
    """Whether a reference may have been meant for a path: org/repo/x.gguf."""
    match = _FILE.fullmatch(text)
    return match is not None and not match[1] and not match[3]


def quant_of(name: str) -> str:
    """'folder/model-UD-Q4_K_XL.gguf' -> 'UD-Q4_K_XL'; '' if neither the file's name nor the folder's ends in one."""
    folder, _, base = name.rpartition("/")
    match = _QUANT.search(base.removesuffix(".gguf")) or _QUANT.search(folder.rpartition("/")[2])
    if match is None:
        return ""
    before, quant, after = (match[i] or "" for i in (1, 2, 3))
    before = before.upper() if before.lower() == "ud" else before.lower()
    return "-".join(filter(None, (before, _short_float(quant.upper()), after.lower())))


def _short_float(quant: str) -> str:
    """'FP16' -> 'F16'; others as they are."""
    return re.sub(r"^FP(?=16|32)", "F", quant)


def _bare(label: str) -> str:
    """'UD-Q4_K_XL' -> 'Q4_K_XL'."""
    match = _QUANT.search(label.removesuffix(".gguf"))
    return _short_float(match[2].upper()) if match else ""


def with_folder(reference: Reference, offered: Sequence[Variant], names: Iterable[str]) -> list[Variant]:
    """The models of a repository with its safetensors, which are meant by their name, or where there is no other."""
    there = {INDEX, SINGLE}.intersection(names)
    if there and (not offered or reference.wanted.lower() == SAFETENSORS):
        return [*offered, Variant(SAFETENSORS, tuple(sorted(there)))]
    return list(offered)


def is_projector(name: str) -> bool:
    """Whether a file is the part of a model that reads pictures or sound, which is none by itself."""
    return "mmproj" in name.rsplit("/", 1)[-1].lower()


def _is_model(name: str) -> bool:
    """Of a whole file's name. One of importance matrices has no quantization in its name; a model made by them has."""
    return name.endswith(".gguf") and not is_projector(name) and ("imatrix" not in name.lower() or bool(quant_of(name)))


def variants(names: Iterable[str]) -> list[Variant]:
    """The models among the files of a repository, in the order of the list; incomplete sets of parts are none."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        whole, number, count = part_of(name) or (name, 1, 1)
        if _is_model(whole):
            groups.setdefault((whole, count), {})[number] = name
    found = [
        Variant(quant_of(whole) or whole, tuple(parts[number] for number in sorted(parts)))
        for (whole, count), parts in groups.items()
        if len(parts) == count
    ]
    labels = [variant.label for variant in found]
    return [v if labels.count(v.label) == 1 else Variant(v.files[0], v.files) for v in found]


def matching(offered: Sequence[Variant], wanted: str, loose: bool = True) -> list[Variant]:
    """The models that a label or a file name means; without one Q4_K_M, or else the only model.

    Case does not matter. `loose`: where no label is the one wanted, any variant of that quantization is (`Q4_K_M` means
    `i1-Q4_K_M`), and nothing means the only model.
    """
    asked = _short_float((wanted or DEFAULT_QUANT).upper()).lower()
    tiers = [[v for v in offered if asked in _file_names(v)], [v for v in offered if v.label.lower() == asked]]
    if loose:
        tiers.append([v for v in offered if _bare(v.label).lower() == asked])
        tiers.append(list(offered) if len(offered) == 1 and not wanted else [])
    return next((tier for tier in tiers if tier), [])


def _file_names(variant: Variant) -> set[str]:
    names = set(variant.files)
    names |= {part[0] for name in names if (part := part_of(name))}
    return {each.lower() for name in names for each in (name, name.rsplit("/", 1)[-1])}


def in_pieces(names: Iterable[str], wanted: str) -> str:
    """Why a label is not among the models of a repository though files of it are there; "" = none is."""
    asked, found = _short_float((wanted or DEFAULT_QUANT).upper()), dict[tuple[str, int], int]()
    for name in names:
        if cut := _CUT.fullmatch(name):
            if asked in (quant_of(cut[1]).upper(), _bare(cut[1])):
                joined = f"kv does not join them: download all, and write them one after the other into {cut[1]}"
                return f"it was cut into pieces such as {name}; {joined}"
        elif (part := part_of(name)) and asked in (quant_of(part[0]).upper(), _bare(part[0])):
            found[part[0], part[2]] = found.get((part[0], part[2]), 0) + 1
    return next(
        (f"{n} of the {count} parts of {whole} are there" for (whole, count), n in found.items() if n < count), ""
    )


def choose(reference: Reference, offered: Sequence[Variant], names: Iterable[str] = ()) -> Variant:
    """The one model that is meant. `names`: all files of the repository.

    Raises DownloadError naming what there is, ModelError for a format that is gone.
    """
    found, wanted = matching(offered, reference.wanted), reference.wanted
    if len(found) == 1:
        if removed := _REMOVED.fullmatch(_bare(found[0].label)):
            raise ModelError(
                f"{found[0].label} is an old format that no longer exists", f"use {reference.repo}:{removed[1]}"
            )
        return found[0]
    there = ", ".join(variant.label for variant in (found or offered)[:40]) or "no others"
    if is_projector(wanted):
        what = f"'{wanted}' is not a model by itself"
    elif found:
        what = f"'{wanted or DEFAULT_QUANT}' means several models of {reference.repo}"
    elif why := in_pieces(names, wanted):
        what = f"the repository {reference.repo} has no whole file for '{wanted or DEFAULT_QUANT}': {why}"
    elif wanted:
        what = f"the repository {reference.repo} has no file for '{wanted}'"
    else:
        what = f"the repository {reference.repo} has no {DEFAULT_QUANT} but several others"
    raise DownloadError(what, f"choose one as {reference.repo}:QUANT; there are {there}")
