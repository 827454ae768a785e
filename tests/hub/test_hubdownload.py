"""Models of hub repositories, from an imitated hub with faults: a download goes on, is checked, and leaves no rests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import servers
from conftest import KvHere
from estimatecases import small_file
from ggufbytes import build, entry, key, text
from toyworld import CONTENT, REPO, Start, finish, stored

from kvcli.blockformats import FORMATS
from kvcli.errors import DownloadError, ModelError
from kvcli.runtime.hub import fetching, hubcache, inventory, modelfiles, store

NAME = "toy-Q4_K_M.gguf"
FILES = {
    NAME: CONTENT,
    "toy-Q8_0.gguf": CONTENT[::-1],
    "mmproj-toy-f16.gguf": b"vision",
    "big-Q2_K-00001-of-00002.gguf": CONTENT[:90_000],
    "big-Q2_K-00002-of-00002.gguf": CONTENT[90_000:],
    "README.md": b"text",
}
TOTAL = len(CONTENT)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PAUSE_S", 0.0)


def place() -> Path:
    return hubcache.repo_folder(REPO)


def rests() -> list[str]:
    """Names of the pieces in the hub's cache, checksums cut short."""
    return sorted(path.name[:4] + path.name[path.name.index(".") :] for path in place().glob("blobs/*.incomplete"))


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def left_of(content: bytes, n_bytes: int, name: str = NAME) -> Path:
    """What a download that was interrupted after `n_bytes` leaves."""
    piece = hubcache.piece_path(place(), checksum(content), name)
    piece.parent.mkdir(parents=True, exist_ok=True)
    piece.write_bytes(content[:n_bytes])
    return piece


@pytest.mark.slow
def test_the_hub_is_the_second_source(site: servers.Site, start: Start) -> None:
    del site.bodies["/simple/toy-part0/"]
    servers.add_repository(site, REPO, {"toy.gguf": CONTENT})
    code, out, err = finish(start("pull", "toy"))
    assert code == 0, err
    assert Path(out.strip()).read_bytes() == CONTENT and stored() == ["toy/toy.gguf"]
    assert "from the hub (org/toy-GGUF)" in err


@pytest.mark.slow
def test_another_file_at_the_hub_is_refused(site: servers.Site, world: dict[str, str]) -> None:
    del site.bodies["/simple/toy-part0/"]
    servers.add_repository(site, REPO, {"toy.gguf": CONTENT[::-1]})
    with pytest.raises(DownloadError, match="its checksum does not match"):
        modelfiles.find_model("toy")
    assert list(store.models_dir().glob("toy/**/*")) == []


def test_pull_from_a_repository(site: servers.Site, world: dict[str, str], kv_here: KvHere) -> None:
    servers.add_repository(site, REPO, FILES)
    code, out, err = kv_here("pull", REPO)
    assert code == 0 and f"downloading {REPO}/{NAME} (293.0 KiB) from the hub" in err
    path = Path(out.strip())
    assert path.name == NAME and path.read_bytes() == CONTENT and stored() == [] and rests() == []
    assert modelfiles.pull(f"hf:{REPO}:q8_0").read_bytes() == CONTENT[::-1]
    requests = len(site.log)
    for spelling in (REPO, f"hf.co/{REPO}", f"{REPO}:Q4_K_M", f"{REPO}/{NAME}", f"{site.url}/{REPO}/blob/main/{NAME}"):
        assert modelfiles.find_model(spelling, offline=True) == path
        assert modelfiles.find_model(spelling) == path
    assert modelfiles.find_model(REPO.upper(), offline=True) == path, "case does not matter to the hub"
    assert len(site.log) == requests, "what is in the cache needs no network"
    assert [entry.name for entry in inventory.entries()] == ["toy", f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]
    inventory.verify(inventory.downloaded(REPO), store.no_progress)
    inventory.remove(inventory.downloaded(f"{REPO}:Q8_0"))
    assert [entry.name for entry in inventory.entries()] == ["toy", f"{REPO}:Q4_K_M"]
    inventory.remove(inventory.downloaded(REPO))
    assert not place().exists(), "nothing is left of the last model of a repository"


def test_a_revision(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    path = modelfiles.pull(f"hf.co/{REPO}/resolve/v2/{NAME}")
    assert path.read_bytes() == CONTENT and (place() / "refs" / "v2").read_text() == servers.COMMIT
    assert modelfiles.find_model(f"hf.co/{REPO}/tree/v2", offline=True) == path


def test_a_model_in_parts(site: servers.Site, world: dict[str, str], kv_here: KvHere) -> None:
    servers.add_repository(site, REPO, FILES)
    site.status[f"/{REPO}/resolve/{servers.COMMIT}/big-Q2_K-00002-of-00002.gguf"] = 404
    code, _, err = kv_here("pull", f"{REPO}:Q2_K")
    assert code == 7 and f"has no {REPO}/big-Q2_K-00002-of-00002.gguf" in err
    assert hubcache.models() == []
    site.status.clear()
    code, out, err = kv_here("pull", f"{REPO}:q2_k", "--json")
    assert code == 0 and "downloading Q2_K, 1 of 2 files (205.1 KiB) from the hub" in err
    assert json.loads(out)["bytes"] == TOTAL
    path = Path(json.loads(out)["path"])
    assert path.name == "big-Q2_K-00001-of-00002.gguf"
    assert b"".join(each.read_bytes() for each in sorted(path.parent.iterdir())) == CONTENT
    assert site.gets("big-Q2_K-00001-of-00002.gguf") == 1
    assert modelfiles.find_model(f"{REPO}/big-Q2_K-00002-of-00002.gguf", offline=True) == path, (
        "any part names the model"
    )
    assert kv_here("models", "verify", f"{REPO}:Q2_K") == (0, f"{REPO}:Q2_K: ok\n", "")
    second = (path.parent / "big-Q2_K-00002-of-00002.gguf").resolve()
    second.write_bytes(bytes(second.stat().st_size))
    assert kv_here("models", "verify", f"{REPO}:Q2_K")[0] == 8
    assert kv_here("models", "rm", "-y", f"{REPO}:Q2_K")[0] == 0 and not place().exists()


def test_parts_share_one_progress(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    seen: list[tuple[str, int, int]] = []
    modelfiles.pull(f"{REPO}:Q2_K", progress=lambda *step: seen.append(step))
    assert seen == sorted(seen) and seen[-1] == ("download", TOTAL, TOTAL) and {total for *_, total in seen} == {TOTAL}


def test_files_of_the_hub_are_listed_with_what_their_headers_say(world: dict[str, str], kv_here: KvHere) -> None:
    folder = hubcache.folder() / "models--org--small-GGUF" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    small_file(folder).rename(folder / "small-F16.gguf")
    (folder / "junk-Q4_K_M.gguf").write_bytes(b"junk")
    junk, small = (entry for entry in inventory.entries() if "/" in entry.name)
    assert (small.name, small.arch, small.context_length) == ("org/small-GGUF:F16", "llama", 512)
    assert (small.parameters, small.problem) == (2 * (64 * 64 + 64) + 100 * 64, "")
    assert junk.runs == "no" and "is not a GGUF file" in junk.problem
    rows = [line.split() for line in kv_here("models", "ls")[1].splitlines()]
    assert [row[-2:] for row in rows[2:]] == [["no", "-"], ["yes", "-"]]


@pytest.mark.parametrize(
    "fault, name, expected, hint",
    [
        ("", f"{REPO}:Q3_K_L", "has no file for 'Q3_K_L'", "there are Q4_K_M, Q8_0"),
        ("", "org/none", "has no org/none, or does not show it", "HF_TOKEN"),
        ("RepoNotFound 401", REPO, r"does not let us read org/toy-GGUF \(HTTP 401\)", "HF_TOKEN"),
        ("GatedRepo 403", REPO, "does not let us read org/toy-GGUF", "accept its terms"),
        (" 500", REPO, "answered HTTP 500", "later"),
        ("list", REPO, "answered HTTP 500", "later"),
        ("cut", REPO, "the server sends nothing", "the same command goes on from"),
    ],
)
def test_faults_of_the_hub(
    fault: str, name: str, expected: str, hint: str, site: servers.Site, world: dict[str, str]
) -> None:
    servers.add_repository(site, REPO, FILES)
    if fault == "cut":
        site.cut |= {path for path in site.bodies if path.endswith(NAME)}
    elif fault == "list":
        site.status |= {path: 500 for path in site.bodies if path.endswith(NAME)}
    elif fault:
        word, number = fault.split(" ")
        site.status[f"/api/models/{REPO}"] = int(number)
        site.headers[f"/api/models/{REPO}"] = {"X-Error-Code": word} if word else {}
    with pytest.raises(DownloadError, match=expected) as caught:
        modelfiles.pull(name)
    assert hint in caught.value.hint and "\n" not in caught.value.message
    assert hubcache.models() == [] and stored() == []


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_before_it_is_downloaded(
    site: servers.Site, world: dict[str, str], kv_here: KvHere
) -> None:
    tensor = entry("token_embd.weight", (256, 4), FORMATS["IQ4_XS"].id)
    content = build((key("general.architecture", 8, text("falcon")),), (tensor,), data=1000)
    servers.add_repository(site, REPO, {"toy-IQ4_XS.gguf": content})
    run = ("run", "hi", "--no-stdin", "-m", REPO)
    code, out, err = kv_here(*run)
    assert (code, out) == (3, "") and f"kv cannot run {REPO}/toy-IQ4_XS.gguf: " in err and "falcon" in err
    assert site.ranges_of("toy-IQ4_XS.gguf") == ["bytes=0-1048575"] and not place().exists()
    assert kv_here("pull", REPO)[0] == 0
    code, _, err = kv_here(*run)
    assert code == 3 and "falcon" in err


def test_a_name_that_might_be_a_path_says_both(site: servers.Site, world: dict[str, str]) -> None:
    with pytest.raises(
        DownloadError, match=r"there is no file org/none/x.gguf here; taken for one of the hub: .*no org"
    ):
        modelfiles.find_model("org/none/x.gguf")


@pytest.mark.slow
def test_offline_never_asks(site: servers.Site, world: dict[str, str], kv_here: KvHere) -> None:
    servers.add_repository(site, REPO, FILES)
    for name in ("toy", REPO):
        with pytest.raises(DownloadError, match="is not downloaded, and the network may not be used"):
            modelfiles.find_model(name, offline=True)
    assert site.log == []
    for name in ("toy", REPO):
        modelfiles.pull(name)
        code, _, err = kv_here("pull", name, "--force", "--offline")
        assert code == 7 and f"{name} is downloaded; --force would download it again, and --offline forbids that" in err


# --- going on ---


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


# --- the cache that others use, too ---


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
