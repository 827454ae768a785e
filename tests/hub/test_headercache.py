"""What was read is not read again: entries by version and ETag, private, whole or ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rangecalls import CONTENT, QUICK, TOKEN, fixture_other, fixture_private_cache, fixture_site, remote  # noqa: F401
from rangeserver import RangeSite

from kvcli.errors import DownloadError
from kvcli.runtime.hub.headercache import Entry, HeaderCache
from kvcli.runtime.hub.ranges import RemoteFile, read_document
from kvcli.runtime.hub.websession import Session

# --- the cache ---


def test_a_known_version_needs_no_request(site: RangeSite, private_cache: Path) -> None:
    first = remote(site, version="v1")
    first.prefix(5000)
    first.keep(3000)
    requests = len(site.log)
    again = remote(site, version="v1")
    assert again.prefix(3000) == CONTENT[:3000] and again.size == len(CONTENT) and again.etag == "v1"
    assert len(site.log) == requests and again._session.bytes_read == 0
    assert again.prefix(3500) == CONTENT[:3500]
    assert site.ranges("/f")[requests:] == ["bytes=3000-3499"], "what is cached is not read again"
    other_version = remote(site, version="v2")
    assert other_version.prefix(10) == CONTENT[:10]
    assert site.ranges("/f")[-1] == "bytes=0-9"


def test_an_etag_is_asked_for(site: RangeSite) -> None:
    site.etags["/f"] = '"abc"'
    first = remote(site)
    first.prefix(5000)
    first.keep(3000)
    again = remote(site)
    assert again.prefix(3000) == CONTENT[:3000] and again.etag == '"abc"'
    assert again._session.bytes_read == 0 and site.log[-1].headers["if-none-match"] == '"abc"'
    longer = remote(site)
    assert longer.prefix(4000) == CONTENT[:4000] and longer._session.bytes_read == 1000
    site.etags["/f"] = '"new"'
    site.bodies["/f"] = CONTENT[::-1]
    assert remote(site).prefix(100) == CONTENT[::-1][:100]


def test_without_an_etag_nothing_is_kept(site: RangeSite, private_cache: Path) -> None:
    file = remote(site)
    file.prefix(100)
    file.keep(100)
    assert not private_cache.exists()


def test_entries_are_private_and_whole(site: RangeSite, private_cache: Path) -> None:
    site.etags["/f"] = '"abc"'
    file = remote(site)
    file.prefix(100)
    file.keep(100)
    (entry,) = private_cache.iterdir()
    assert private_cache.stat().st_mode & 0o777 == 0o700 and entry.stat().st_mode & 0o777 == 0o600
    assert TOKEN.encode() not in entry.read_bytes()
    whole = entry.read_bytes()
    for damaged in (
        whole[:-1],
        whole + b"x",
        whole[:50],
        b"",
        b"[]\n",
        b"{}\n",
        whole.replace(b"abc", b"abd"),
        b"\n",
    ):
        entry.write_bytes(damaged)
        assert remote(site).prefix(100) == CONTENT[:100]
    assert site.ranges("/f").count("bytes=0-99") == 9


def test_offline_needs_the_cache(site: RangeSite) -> None:
    session = Session(site.url, None, QUICK, offline=True)
    with pytest.raises(DownloadError, match="may not be used \\(`offline`\\)"):
        RemoteFile(session, f"{site.url}/f", "org/repo/f").prefix(10)
    with pytest.raises(DownloadError, match="may not be used"):
        read_document(session, f"{site.url}/f", "the list")
    online = remote(site, version="v1")
    online.prefix(100)
    online.keep(100)
    requests = len(site.log)
    file = RemoteFile(session, f"{site.url}/f", "org/repo/f")
    assert file.prefix(100) == CONTENT[:100]
    with pytest.raises(DownloadError, match="may not be used"):
        file.prefix(101)
    assert len(site.log) == requests


def test_an_unwritable_cache_is_told_and_survived(
    site: RangeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in a file
    file = remote(site, version="v1")
    assert file.prefix(100) == CONTENT[:100]
    file.keep(100)
    assert len(file._session.notices) == 1 and "going on without it" in file._session.notices[0]


def test_a_full_disk_is_told_and_survived(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    told: list[str] = []
    monkeypatch.setattr(os, "replace", full)
    HeaderCache(told.append).put("u", Entry("e", 3, b"abc"))
    assert len(told) == 1 and "No space left" in told[0] and list(private_cache.iterdir()) == []


def test_the_oldest_entries_make_room(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.runtime.hub.headercache.MAX_FOLDER_BYTES", 10_000)
    cache = HeaderCache(lambda text: pytest.fail(text))
    for number in range(6):
        cache.put(f"u{number}", Entry("e", 3000, bytes(3000)))
        os.utime(cache._path(f"u{number}"), (number, number))
    there = [number for number in range(6) if cache.get(f"u{number}")]
    assert there == [3, 4, 5]
