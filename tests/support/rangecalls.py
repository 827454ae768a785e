"""What the tests of remote reads share: sites with a file, a folder for what is read, and the error that reading gives.

A test module that imports the fixtures has them: `site` and `other`, and `private_cache` for every test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rangeserver import RangeHandler, RangeSite, serving_ranges

from kvcli.errors import DownloadError
from kvcli.runtime.hub.ranges import RemoteFile
from kvcli.runtime.hub.websession import Limits, Session

CONTENT = random.Random(5).randbytes(200_000)
TOKEN = "hf_secretsecret"
QUICK = Limits(answer_s=0.5, total_s=1.5)  # for servers that never answer; others have time, however busy the machine
# The start of the answer to the first thousand bytes of CONTENT.
RANGE_HEAD = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-999/200000\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(autouse=True, name="private_cache")
def fixture_private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where headers are kept, nothing of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kv" / "headers"


@contextmanager
def site_with_a_file() -> Iterator[RangeSite]:
    with serving_ranges() as site:
        site.bodies["/f"] = CONTENT
        yield site


@pytest.fixture(name="site")
def fixture_site() -> Iterator[RangeSite]:
    with site_with_a_file() as site:
        yield site


@pytest.fixture(name="other")
def fixture_other() -> Iterator[RangeSite]:
    with site_with_a_file() as site:
        yield site


def remote(site: RangeSite, size: int | None = None, limits: Limits | None = None, version: str = "") -> RemoteFile:
    return RemoteFile(Session(site.url, TOKEN, limits), f"{site.url}/f", "org/repo/f", size, version)


def failure(file: RemoteFile, n_bytes: int = 1000) -> DownloadError:
    """The error that reading gives."""
    with pytest.raises(DownloadError) as caught:
        file.prefix(n_bytes)
    assert "\n" not in caught.value.message and TOKEN not in caught.value.message
    assert caught.value.hint and caught.value.exit_code == 7
    return caught.value


def act(site: RangeSite, what: Callable[[RangeHandler], None]) -> None:
    site.acts["/f"] = what
