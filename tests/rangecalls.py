"""What the tests of remote reads share: a file of a RangeSite, and the error that reading it gives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from rangeserver import RangeHandler, RangeSite

from kvcli.errors import DownloadError
from kvcli.runtime.ranges import RemoteFile
from kvcli.runtime.websession import Limits, Session

CONTENT = random.Random(5).randbytes(200_000)
TOKEN = "hf_secretsecret"
QUICK = Limits(answer_s=0.5, total_s=1.5)
# The start of the answer to the first thousand bytes of CONTENT.
RANGE_HEAD = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-999/200000\r\nContent-Length: 1000\r\n\r\n"


def remote(site: RangeSite, size: int | None = None, limits: Limits = QUICK, version: str = "") -> RemoteFile:
    return RemoteFile(Session(site.url, TOKEN, limits), f"{site.url}/f", "org/repo/f", size, version)


def failure(file: RemoteFile, n_bytes: int = 1000) -> DownloadError:
    """The error, which must come within the limits of time."""
    start = time.monotonic()
    with pytest.raises(DownloadError) as caught:
        file.prefix(n_bytes)
    assert time.monotonic() - start < QUICK.total_s + 1
    assert "\n" not in caught.value.message and TOKEN not in caught.value.message
    assert caught.value.hint and caught.value.exit_code == 7
    return caught.value


def act(site: RangeSite, what: Callable[[RangeHandler], None]) -> None:
    site.acts["/f"] = what
