"""One file over HTTP into a piece on disk that a later call goes on with: by ranges, checked whole at its end.

The piece holds the first bytes of the file, whatever ended the call before. Which content it is of is for the caller to
know (by its name); the checksum says at the end whether that was so, and if bytes of an earlier call were wrong all is
fetched again. Every request is for a range of at most a GiB, from the address of the file, since signed addresses of
storage expire and answers there have a greatest size.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvcli.errors import DownloadError
from kvcli.runtime.hub.ranges import content_range
from kvcli.runtime.hub.store import Progress, digest_of
from kvcli.runtime.hub.websession import BROKEN, Conversation, Interrupted, Limits, Session
from kvcli.words import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = Limits(total_s=math.inf, total_bytes=1 << 62)
RANGE_BYTES = 1 << 30
TRIES = 5  # without a byte in between
_PAUSE_S = 0.5  # before going on after an interruption; twice as long before each try that follows


@dataclass(frozen=True)
class Wanted:
    """A remote file. `sha256` is "" where nobody says it."""

    url: str
    label: str
    size: int
    sha256: str


class _Damaged(Exception):
    """The whole file has another checksum. `kept`: bytes of it that were there before this call."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept


def fetch(session: Session, wanted: Wanted, piece: Path, progress: Progress, notice: Callable[[str], None]) -> None:
    """Make `piece` the whole, checked file, beginning where it ends. Raises DownloadError; no wrong file stays."""
    try:
        try:
            _complete(session, wanted, piece, progress)
        except _Damaged as wrong:
            if not wrong.kept:
                raise
            notice(f"what was here of {wanted.label} does not belong to it: downloading all of it")
            _complete(session, wanted, piece, progress)
    except _Damaged:
        what = f"{wanted.label} arrived damaged (its checksum does not match) and was removed"
        raise DownloadError(what, "try again; if that happens again the file on the server is wrong") from None
    except DownloadError as error:
        if have := held(piece):
            error.hint += f"; the same command goes on from the {human_bytes(have)} that are here"
        raise
    except OSError as error:
        raise _unwritable(error, piece) from error


def held(piece: Path) -> int:
    """How many bytes of the file are here."""
    return piece.stat().st_size if piece.exists() else 0


def _complete(session: Session, wanted: Wanted, piece: Path, progress: Progress) -> None:
    try:
        with open(piece, "r+b" if piece.exists() else "w+b", buffering=0) as file:
            if held(piece) > wanted.size:
                file.truncate(0)
            transfer = _Transfer(session, wanted, file, progress)
            transfer.run()
            os.fsync(file.fileno())
    except BaseException:
        if not held(piece):
            piece.unlink(missing_ok=True)
        raise
    if wanted.sha256 not in ("", transfer.digest.hexdigest()):
        piece.unlink()
        raise _Damaged(transfer.kept)


class _Transfer:
    """The rest of one file, with as many requests as it takes. `digest` is of all its bytes, `kept` those of before."""

    def __init__(self, session: Session, wanted: Wanted, file: BinaryIO, progress: Progress) -> None:
        self._talk, self._wanted, self._file = Conversation(session, wanted.label), wanted, file
        self._progress = progress
        self.digest, self.kept = digest_of(file, wanted.size, progress)
        self._have = self.kept

    def run(self) -> None:
        """Raises DownloadError: refused, broken, or interrupted too often without any bytes; OSError of the disk."""
        failures = 0  # since bytes came
        try:
            while self._have < self._wanted.size:
                before, problem = self._have, None
                try:
                    self._request()
                except Interrupted as error:
                    problem = error
                failures = failures + 1 if self._have == before else 0
                if failures == TRIES:
                    raise problem or self._talk.error("the server sends nothing", BROKEN)
                if problem or failures:
                    time.sleep(_PAUSE_S * 2**failures)
        finally:
            self._talk.close()

    def _request(self) -> None:
        last = min(self._have + RANGE_BYTES, self._wanted.size) - 1
        response, _ = self._talk.get(self._wanted.url, {"Range": f"bytes={self._have}-{last}"})
        if response.status == 206:
            given = content_range(response, self._talk)
            if given != (self._have, last, self._wanted.size):
                asked = f"bytes {self._have}-{last} of {self._wanted.size} were asked for"
                raise self._talk.error(f"the server sent bytes {given[0]}-{given[1]} of {given[2]}: {asked}", BROKEN)
        else:
            self._begin_anew(response)
            last = self._wanted.size - 1
        self._take(response, last + 1 - self._have)

    def _begin_anew(self, response: http.client.HTTPResponse) -> None:
        """HTTP 200: the server ignores ranges and sends the whole file."""
        if response.length not in (None, self._wanted.size):
            claim = f"the server says {response.length:,} bytes, {self._wanted.size:,} were expected"
            raise self._talk.error(claim, "the file changed, or the server is broken; try again")
        self._file.seek(0)
        self._file.truncate(0)
        self.digest, self.kept, self._have = hashlib.sha256(), 0, 0

    def _take(self, response: http.client.HTTPResponse, n_bytes: int) -> None:
        for block in self._talk.stream(response, n_bytes):
            self._file.write(block)
            self.digest.update(block)
            self._have += len(block)
            self._progress("download", self._have, self._wanted.size)


def _unwritable(error: OSError, piece: Path) -> DownloadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk is full: {human_bytes(held(piece))} of the file are in {piece.parent}"
        return DownloadError(what, "make room; the same command then goes on from there")
    return DownloadError(
        f"cannot write to {piece.parent}: {error.strerror or error}", "check its owner and mode (ls -l)"
    )
