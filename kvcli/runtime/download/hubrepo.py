"""GGUF files in repositories of the Hugging Face hub: choosing one by its quantization, and downloading it.

Files land in the hub's own cache, which transformers and other programs share. `huggingface_hub` is imported
only when the network is needed; HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_CACHE mean what they mean there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.errors import DownloadError
from kvcli.runtime.download.growth import watching
from kvcli.runtime.download.store import Progress, check_disk, sha256_of

_ANSWER_S = 20  # seconds until the hub must have answered a question
DEFAULT_QUANT = "Q4_K_M"
_REFERENCE = re.compile(r"(?:hf:)?([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w./-]+))?", re.ASCII)
_QUANT = re.compile(r"(?:^|[-._])((?:i?q|tq)\d\w*|bf16|f(?:p)?(?:16|32)|mxfp4\w*)$", re.IGNORECASE | re.ASCII)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NOT_MODELS = ("mmproj", "imatrix")


@dataclass(frozen=True)
class Reference:
    """`org/repo` and what follows the colon: a quantization, a file name or nothing."""

    repo: str
    quant: str

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True)
class RemoteFile:
    """One GGUF file of a repository; `sha256` is "" where the hub does not tell it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CachedFile:
    """A GGUF file in the hub's cache."""

    repo: str
    name: str
    path: Path


def parse_reference(text: str) -> Reference | None:
    """`org/repo`, `org/repo:Q8_0` or either after `hf:`; None for anything else."""
    match = _REFERENCE.fullmatch(text)
    return Reference(match[1], match[2] or "") if match else None


def quant_of(name: str) -> str:
    """'folder/model-Q4_K_M.gguf' -> 'Q4_K_M'; '' if the name does not end in a quantization."""
    match = _QUANT.search(name.rsplit("/", 1)[-1].removesuffix(".gguf"))
    return match[1].upper() if match else ""


def choose_file(names: Iterable[str], quant: str) -> str | None:
    """The file that a quantization or a file name means; without one Q4_K_M, else the only file; or None."""
    usable = [name for name in names if _is_model(name)]
    if quant:
        exact = [name for name in usable if quant in (name, name.rsplit("/", 1)[-1])]
        return next(iter(exact or [name for name in usable if quant_of(name) == quant.upper()]), None)
    standard = [name for name in usable if quant_of(name) == DEFAULT_QUANT]
    return standard[0] if standard else usable[0] if len(usable) == 1 else None


def _is_model(name: str) -> bool:
    stem = name.rsplit("/", 1)[-1].lower()
    whole = stem.endswith(".gguf") and not _PART.search(stem.removesuffix(".gguf"))
    return whole and not any(word in stem for word in _NOT_MODELS)


def cache_folder() -> Path:
    """The hub's cache, by the rules of huggingface_hub; it may not exist."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def cached_files(repo: str = "*/*") -> list[CachedFile]:
    """The GGUF files in the cache: of one repository, or of all."""
    found = []
    pattern = "models--" + repo.replace("/", "--")
    for folder in sorted(cache_folder().glob(pattern)):
        main = folder / "refs" / "main"
        commits = [main.read_text().strip()] if main.is_file() else []
        commits += sorted(path.name for path in folder.glob("snapshots/*") if path.name not in commits)
        seen = set()
        for commit in commits:
            for path in sorted((folder / "snapshots" / commit).rglob("*.gguf")):
                name = path.relative_to(folder / "snapshots" / commit).as_posix()
                if name not in seen and path.is_file() and _is_model(name):
                    seen.add(name)
                    repository = folder.name.removeprefix("models--").replace("--", "/", 1)
                    found.append(CachedFile(repository, name, path))
    return found


def cached_path(reference: Reference, any_quant: bool) -> Path | None:
    """The cached file that the reference means. `any_quant`: if it names none, any single file will do."""
    files = {file.name: file.path for file in cached_files(reference.repo)}
    name = choose_file(files, reference.quant)
    unclear = not reference.quant and name is not None and quant_of(name) != DEFAULT_QUANT
    return None if name is None or (unclear and not any_quant) else files[name]


def list_files(repo: str, revision: str | None = None) -> list[RemoteFile]:
    """The GGUF files of a repository, by default of its main branch. Raises DownloadError."""
    library = _library()
    try:
        info = library.HfApi(endpoint=_endpoint()).model_info(
            repo, revision=revision, files_metadata=True, timeout=_ANSWER_S
        )
    except Exception as error:  # the library's own, its HTTP client's and the system's
        raise explain(error, repo) from error
    files = []
    for sibling in info.siblings or ():
        if sibling.rfilename.endswith(".gguf"):
            sha256 = (sibling.lfs.sha256 if sibling.lfs else "") or ""
            files.append(RemoteFile(sibling.rfilename, sibling.size or 0, sha256))
    return files


def choose_remote(reference: Reference) -> RemoteFile:
    """The file of the repository that the reference means. Raises DownloadError naming what there is."""
    files = {file.name: file for file in list_files(reference.repo)}
    usable = [name for name in files if _is_model(name)]
    if not usable:
        what = "only files in several parts" if files else "no GGUF file"
        raise DownloadError(f"the repository {reference.repo} has {what}", "kv needs a model in one .gguf file")
    name = choose_file(files, reference.quant)
    if name is None:
        options = ", ".join(quant_of(name) or name for name in usable)
        what = f"no file for '{reference.quant}'" if reference.quant else f"no {DEFAULT_QUANT} but several others"
        raise DownloadError(
            f"the repository {reference.repo} has {what}",
            f"choose one as {reference.repo}:QUANT; there are {options}",
        )
    return files[name]


def download_to_cache(repo: str, file: RemoteFile, force: bool, progress: Progress) -> Path:
    """Download a file into the hub's cache and check it. Raises DownloadError; a wrong file does not stay."""
    check_disk(cache_folder(), file.size)
    folder = cache_folder() / ("models--" + repo.replace("/", "--"))
    with watching(folder, lambda grown: progress("download", min(grown, file.size), file.size)):
        path = _download(repo, file.name, None, force=force)
    size = path.stat().st_size
    whole = file.size in (0, size) and (not file.sha256 or sha256_of(path, progress) == file.sha256)
    if not whole:
        remove_cached(path)
        raise DownloadError(f"{file.name} of {repo} arrived damaged ({size} bytes) and was removed", "try again")
    return path


def download_to_folder(repo: str, name: str, revision: str, folder: Path) -> Path:
    """Download one file into a folder of ours. Raises DownloadError."""
    # Asked first: the download, unlike this question, retries for half a minute where there is no network.
    if name not in {file.name for file in list_files(repo, revision)}:
        raise DownloadError(f"the repository {repo} lacks {name}", "it may have been changed")
    return _download(repo, name, revision, local_dir=folder)


def _download(repo: str, name: str, revision: str | None, local_dir: Path | None = None, force: bool = False) -> Path:
    library = _library()
    options = {"cache_dir": cache_folder(), "local_dir": local_dir, "force_download": force}
    try:
        path = library.hf_hub_download(repo, name, revision=revision, endpoint=_endpoint(), **options)
    except Exception as error:  # the library's own, its HTTP client's, hf_xet's and the system's
        raise explain(error, repo) from error
    return Path(path)


def _library() -> Any:
    """huggingface_hub, which takes half a second to import, told to leave stderr to us."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()
    return huggingface_hub


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def remove_cached(path: Path) -> None:
    """Remove a file from the hub's cache, and its content unless another snapshot uses it. Raises OSError."""
    blob = path.resolve()
    path.unlink()
    folder = blob.parent.parent
    if blob.exists() and not any(other.resolve() == blob for other in folder.glob("snapshots/**/*.gguf")):
        blob.unlink()


def explain(error: Exception, repo: str) -> DownloadError:
    """What went wrong between us and the hub, in one line."""
    from huggingface_hub import errors

    token = "for a private or gated one set HF_TOKEN"
    chain = [error]
    while isinstance(cause := chain[-1].__cause__ or chain[-1].__context__, Exception):
        chain.append(cause)
    if any(isinstance(each, errors.GatedRepoError) for each in chain):
        return DownloadError(f"the repository {repo} is gated", "accept its terms on its page, then set HF_TOKEN")
    if any(isinstance(each, errors.RepositoryNotFoundError) for each in chain):
        return DownloadError(f"the hub has no {repo}, or does not show it", f"check the name; {token}")
    for each in chain:
        status = getattr(getattr(each, "response", None), "status_code", None)
        if status == 404:
            return DownloadError(f"the hub has no {repo}, or does not show it", f"check the name; {token}")
        if status in (401, 403):
            return DownloadError(f"the hub does not let us read {repo} (HTTP {status})", token)
        if isinstance(each, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
            return DownloadError(f"the repository {repo} lacks this file or revision", "it may have been changed")
        if status is not None:
            return DownloadError(f"the hub answered HTTP {status} for {repo}", "try again later")
    if any("timeout" in type(each).__name__.lower() for each in chain):
        return DownloadError("the hub did not answer in time", "check the network, or try again later")
    root = chain[-1]
    text = str(root).partition("\n")[0][:200] or type(root).__name__
    return DownloadError(f"downloading from the hub failed: {text}", "check the network, or use --offline")
