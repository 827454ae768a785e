"""Models of hub repositories, from an imitated hub with faults: which files are meant, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import servers
from conftest import KvHere
from estimatecases import small_file
from ggufbytes import build, entry, key, text
from hubcases import FILES, NAME, TOTAL, place, rests
from toyworld import CONTENT, REPO, Start, finish, stored

from kvcli.blockformats import FORMATS
from kvcli.errors import DownloadError
from kvcli.runtime.hub import fetching, hubcache, inventory, modelfiles, store


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PAUSE_S", 0.0)


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
