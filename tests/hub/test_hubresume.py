"""Downloads from an imitated hub with faults: they go on where they were, are checked, and leave no rests."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import servers
from conftest import KvHere
from hubcases import FILES, NAME, TOTAL, checksum, left_of, place, rests
from toyworld import CONTENT, REPO, Start, finish

from kvcli.errors import DownloadError, ModelError
from kvcli.runtime.hub import fetching, hubcache, inventory, modelfiles, store


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PAUSE_S", 0.0)


def test_kill_and_go_on(site: servers.Site, start: Start, kv_here: KvHere) -> None:
    servers.add_repository(site, REPO, FILES)
    path = f"/{REPO}/resolve/{servers.COMMIT}/{NAME}"
    site.stall.add(path)
    process = start("pull", REPO)
    assert site.halfway.wait(60), process.communicate()
    piece = hubcache.piece_path(place(), checksum(CONTENT), NAME)
    while not piece.exists() or piece.stat().st_size < 2 << 16:
        time.sleep(0.02)
    with pytest.raises(BlockingIOError), hubcache.writing(place(), checksum(CONTENT), None):
        pass
    code, out, err = kv_here("models", "rm", "-y", REPO)
    assert code == 3 and "is being downloaded" in err and piece.exists(), "not while somebody writes to it"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    have = piece.stat().st_size
    assert 2 << 16 <= have <= TOTAL // 2 and rests() == [f"{checksum(CONTENT)[:4]}.{NAME}.incomplete"]
    code, out, err = kv_here("models", "ls", "--json")
    assert [(e["model"], e["present"], e["unfinished_bytes"]) for e in json.loads(out)["models"][1:]] == [
        (f"{REPO}:Q4_K_M", False, have)
    ]
    assert f"partial: {have / 1024:.1f} KiB" in kv_here("models", "ls")[1]
    site.go.set()
    site.sent.clear()
    again = start("pull", REPO)
    code, out, err = finish(again)
    assert code == 0 and f"({TOTAL / 1024:.1f} KiB, {have / 1024:.1f} KiB of it here already)" in err
    assert Path(out.strip()).read_bytes() == CONTENT and rests() == []
    assert site.ranges_of(NAME) == [f"bytes=0-{TOTAL - 1}", f"bytes={have}-{TOTAL - 1}"]
    assert site.sent[path] == TOTAL - have


def test_progress_counts_from_what_is_here(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    left_of(CONTENT, 100_000)
    seen: list[tuple[str, int, int]] = []
    modelfiles.pull(REPO, progress=lambda *step: seen.append(step))
    downloaded = [done for stage, done, _ in seen if stage == "download"]
    assert seen[0] == ("verify", 100_000, TOTAL) and downloaded[0] > 100_000 and downloaded[-1] == TOTAL


def test_a_server_that_ignores_ranges(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    left_of(CONTENT, 100_000)
    site.ranges = False
    assert modelfiles.pull(REPO).read_bytes() == CONTENT and rests() == []


def test_a_file_that_changed_meanwhile_begins_anew(site: servers.Site, world: dict[str, str]) -> None:
    left_of(CONTENT[::-1], 100_000)
    servers.add_repository(site, REPO, FILES | {"toy-Q8_0.gguf": b"other"})
    assert modelfiles.pull(REPO).read_bytes() == CONTENT
    assert site.ranges_of(NAME) == [f"bytes=0-{TOTAL - 1}"] and rests() == [], "no download goes on with the old one"


def test_what_is_left_of_another_model_stays(site: servers.Site, world: dict[str, str]) -> None:
    left_of(CONTENT[::-1], 100_000, "toy-Q8_0.gguf")
    servers.add_repository(site, REPO, FILES)
    modelfiles.pull(REPO)
    assert rests() == [f"{checksum(CONTENT[::-1])[:4]}.toy-Q8_0.gguf.incomplete"]
    modelfiles.pull(f"{REPO}:Q8_0")
    assert site.ranges_of("toy-Q8_0.gguf") == [f"bytes=100000-{TOTAL - 1}"] and rests() == []


@pytest.mark.parametrize("length", [100_000, TOTAL, TOTAL + 5])
def test_a_piece_with_wrong_bytes_begins_anew(length: int, site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    left_of(CONTENT, 0).write_bytes(bytes(length))
    told: list[str] = []
    assert modelfiles.pull(REPO, notice=told.append).read_bytes() == CONTENT and rests() == []
    assert len(told) == (2 if length <= TOTAL else 1)
    assert length > TOTAL or f"what was here of {REPO}/{NAME} does not belong to it" in told[1]
    assert site.ranges_of(NAME)[-1] == f"bytes=0-{TOTAL - 1}"


def test_a_whole_piece_needs_no_bytes(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    left_of(CONTENT, TOTAL)
    assert modelfiles.pull(REPO).read_bytes() == CONTENT and site.gets(NAME) == 0


def test_a_damaged_file_does_not_stay(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    for path in [path for path in site.bodies if path.endswith(NAME)]:
        site.bodies[path] = CONTENT[::-1]
    with pytest.raises(DownloadError, match="arrived damaged"):
        modelfiles.pull(REPO)
    assert hubcache.models() == [] and rests() == [] and hubcache.unfinished() == []


def test_a_file_of_another_size_is_not_taken(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    for path in [path for path in site.bodies if path.endswith(NAME)]:
        site.bodies[path] = CONTENT + b"more"
    with pytest.raises(DownloadError, match=r"the server sent bytes 0-299999 of 300004: bytes 0-299999 of 300000 were"):
        modelfiles.pull(REPO)
    site.ranges = False
    with pytest.raises(DownloadError, match=r"the server says 300,004 bytes, 300,000 were expected"):
        modelfiles.pull(REPO)


def test_a_connection_that_breaks_is_made_again(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    path = f"/{REPO}/resolve/{servers.COMMIT}/{NAME}"
    site.cut.add(path)
    seen: list[int] = []

    def mend(stage: str, done: int, total: int) -> None:
        seen.append(done)
        if done >= TOTAL * 3 // 4:
            site.cut.discard(path)

    assert modelfiles.pull(REPO, progress=mend).read_bytes() == CONTENT
    assert site.ranges_of(NAME)[:2] == [f"bytes=0-{TOTAL - 1}", f"bytes={TOTAL // 2}-{TOTAL - 1}"]
    assert seen == sorted(seen), "each byte counts once"


def test_large_files_come_in_several_ranges(
    site: servers.Site, world: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.add_repository(site, REPO, FILES)
    monkeypatch.setattr(fetching, "RANGE_BYTES", 128 << 10)
    assert modelfiles.pull(REPO).read_bytes() == CONTENT
    assert site.ranges_of(NAME) == ["bytes=0-131071", "bytes=131072-262143", "bytes=262144-299999"]


@pytest.mark.slow
def test_a_list_without_sizes_and_checksums(site: servers.Site, world: dict[str, str], kv_here: KvHere) -> None:
    servers.add_repository(site, REPO, FILES, sizes=False)
    code, out, err = kv_here("pull", REPO)
    assert code == 0 and f"downloading {REPO}/{NAME} (293.0 KiB) from the hub" in err
    path = Path(out.strip())
    assert path.read_bytes() == CONTENT and site.ranges_of(NAME) == ["bytes=0-0", f"bytes=0-{TOTAL - 1}"]
    assert kv_here("pull", REPO) == (0, out, "")
    code, _, err = kv_here("models", "verify", REPO)
    assert code == 3 and "no checksum is known" in err, "the content is not named as if it were its checksum"
    modelfiles.pull("toy")
    code, out, err = kv_here("models", "verify")
    assert (code, out) == (0, "toy: ok\n") and f"no checksum is known for {REPO}:Q4_K_M" in err, (
        "the others are checked"
    )
    kv_here("models", "rm", "-y", REPO)
    with pytest.raises(DownloadError):  # broken after the size was asked for
        modelfiles.pull(REPO, notice=lambda text: site.cut.add(f"/{REPO}/resolve/{servers.COMMIT}/{NAME}"))
    (piece,) = place().glob("blobs/*.incomplete")
    have = piece.stat().st_size
    site.cut.clear()
    assert modelfiles.pull(REPO).read_bytes() == CONTENT and site.ranges_of(NAME)[-1] == f"bytes={have}-{TOTAL - 1}"


@pytest.mark.slow
def test_two_pulls_at_once(site: servers.Site, start: Start) -> None:
    servers.add_repository(site, REPO, FILES)
    path = f"/{REPO}/resolve/{servers.COMMIT}/{NAME}"
    site.stall.add(path)
    first = start("pull", REPO)
    assert site.halfway.wait(60)
    second = start("pull", REPO)
    assert second.stderr is not None and second.stderr.readline().startswith(f"kv: downloading {REPO}/{NAME}")
    assert f"another program is downloading {NAME}; waiting for it" in second.stderr.readline()
    assert second.poll() is None
    site.go.set()
    results = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], results
    assert results[0][0] == results[1][0] and Path(results[0][0].strip()).read_bytes() == CONTENT
    assert site.sent[path] == TOTAL and rests() == []


def test_a_full_disk_keeps_what_is_here(
    site: servers.Site, world: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.add_repository(site, REPO, FILES)
    monkeypatch.setattr(store, "DISK_MARGIN_BYTES", 1 << 62)
    with pytest.raises(DownloadError, match="not enough disk space") as caught:
        modelfiles.pull(REPO)
    assert "HF_HUB_CACHE" in caught.value.hint and site.gets(NAME) == 0
    monkeypatch.undo()
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    room = 150_000

    def full(path: Path, *args: Any, **options: Any) -> BinaryIO:
        file: BinaryIO = path.open(*args, **options)
        write = file.write

        def write_until_full(block: bytes) -> int:
            if os.fstat(file.fileno()).st_size + len(block) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(block)

        monkeypatch.setattr(file, "write", write_until_full, raising=False)
        return file

    monkeypatch.setattr(fetching, "open", full, raising=False)
    with pytest.raises(DownloadError, match=r"the disk is full: 128[.]0 KiB of the file are in") as caught:
        modelfiles.pull(REPO)
    assert "goes on from there" in caught.value.hint
    room = 1 << 30
    assert modelfiles.pull(REPO).read_bytes() == CONTENT and site.ranges_of(NAME)[-1].startswith("bytes=131072-")


def test_force_downloads_again(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    path = modelfiles.pull(REPO)
    path.resolve().write_bytes(bytes(TOTAL))
    left_of(CONTENT, 100_000)
    assert modelfiles.pull(REPO, force=True).read_bytes() == CONTENT
    assert site.ranges_of(NAME) == [f"bytes=0-{TOTAL - 1}"] * 2


def test_rests_are_listed_and_removed(site: servers.Site, world: dict[str, str], kv_here: KvHere) -> None:
    servers.add_repository(site, REPO, FILES)
    whole = modelfiles.pull(f"{REPO}:Q8_0")
    left_of(CONTENT, 1000)
    foreign = place() / "blobs" / f"{'ab' * 32}.1a2b3c4d.incomplete"  # as huggingface_hub leaves them
    foreign.write_bytes(bytes(2000))
    lone = whole.parent / "big-Q2_K-00001-of-00002.gguf"
    lone.write_bytes(bytes(3000))
    listed = {e["model"]: e["unfinished_bytes"] for e in json.loads(kv_here("models", "ls", "--json")[1])["models"][1:]}
    assert listed == {f"{REPO}:Q8_0": 0, f"{REPO}:Q4_K_M": 1000, f"{REPO}:Q2_K": 3000, f"{REPO}:abababababab": 2000}
    code, _, err = kv_here("models", "rm", f"{REPO}:abababababab")
    assert code == 2 and f"removing {REPO}:abababababab (unfinished) (" in err
    assert kv_here("models", "rm", "-y", f"{REPO}:abababababab")[0] == 0 and not foreign.exists()
    assert kv_here("models", "rm", "-y", f"{REPO}:q4_k_m")[0] == 0 and rests() == [] and whole.exists()
    assert kv_here("models", "rm", "-y", "--all")[0] == 0 and not place().exists()


def test_rests_of_other_programs_go_with_the_next_download(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    blobs = left_of(CONTENT, 0).parent
    dead = blobs / f"{checksum(CONTENT)}.1a2b3c4d.incomplete"
    alive = blobs / f"{checksum(CONTENT[::-1])}.5e6f7a8b.incomplete"
    for path in (dead, alive):
        path.write_bytes(b"x")
    with hubcache.writing(place(), checksum(CONTENT[::-1]), None):
        modelfiles.pull(REPO)
    assert not dead.exists() and alive.exists(), "what has a lock has a living writer"


def test_huggingface_hub_agrees(site: servers.Site, world: dict[str, str]) -> None:
    """The layout of the cache, and who may write."""
    library = pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import WeakFileLock

    servers.add_repository(site, REPO, FILES)
    path = modelfiles.pull(REPO)
    assert library.try_to_load_from_cache(REPO, NAME, cache_dir=hubcache.folder()) == str(path)
    (repo,) = library.scan_cache_dir(hubcache.folder()).repos
    assert (repo.repo_id, repo.size_on_disk, set(repo.refs)) == (REPO, TOTAL, {"main"})
    lock = hubcache.folder() / ".locks" / place().name / f"{checksum(CONTENT)}.lock"
    with WeakFileLock(lock), pytest.raises(BlockingIOError), hubcache.writing(place(), checksum(CONTENT), None):
        pass


def test_nothing_to_remove(world: dict[str, str], kv_here: KvHere) -> None:
    for name in ("toy", REPO):
        with pytest.raises(ModelError, match="is not downloaded"):
            inventory.removable(name)
    assert kv_here("models", "rm", "-y", "--all") == (0, "", "kv: there is nothing to remove\n")
    assert kv_here("models", "rm")[0] == kv_here("models", "rm", "--all", "toy")[0] == 2
