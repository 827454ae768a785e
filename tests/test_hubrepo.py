"""GGUF files of hub repositories, from an imitated hub with faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import servers
from conftest import KvHere
from estimatecases import small_file
from toyworld import CONTENT, REPO, Start, finish, stored

from kvcli.errors import DownloadError
from kvcli.runtime.download import hub, hubrepo, inventory, store

FILES = {
    "toy-Q4_K_M.gguf": CONTENT,
    "toy-Q8_0.gguf": CONTENT[::-1],
    "mmproj-toy-f16.gguf": b"vision",
    "big-Q2_K-00001-of-00002.gguf": b"part",
    "README.md": b"text",
}


def test_the_hub_is_the_second_source(site: servers.Site, start: Start) -> None:
    del site.bodies["/simple/toy-part0/"]
    servers.add_repository(site, REPO, {"toy.gguf": CONTENT})
    code, out, err = finish(start("pull", "toy"))
    assert code == 0, err
    assert Path(out.strip()).read_bytes() == CONTENT and stored() == ["toy/toy.gguf"]
    assert "from the hub (org/toy-GGUF)" in err


def test_another_file_at_the_hub_is_refused(site: servers.Site, world: dict[str, str]) -> None:
    del site.bodies["/simple/toy-part0/"]
    servers.add_repository(site, REPO, {"toy.gguf": CONTENT[::-1]})
    with pytest.raises(DownloadError, match="the checksum is wrong"):
        hub.find_model("toy")
    assert stored() == []


def test_pull_from_a_repository(site: servers.Site, world: dict[str, str], start: Start) -> None:
    servers.add_repository(site, REPO, FILES)
    code, out, err = finish(start("pull", REPO))
    assert code == 0, err
    path = Path(out.strip())
    assert path.name == "toy-Q4_K_M.gguf" and path.read_bytes() == CONTENT and stored() == []
    assert hub.pull(f"hf:{REPO}:q8_0").read_bytes() == CONTENT[::-1]
    requests = len(site.log)
    for spelling in (REPO, f"hf:{REPO}", f"{REPO}:Q4_K_M", f"{REPO}:toy-Q4_K_M.gguf"):
        assert hub.find_model(spelling, offline=True) == path
        assert hub.find_model(spelling) == path
    assert len(site.log) == requests, "what is in the cache needs no network"
    assert [entry.name for entry in inventory.entries()] == ["toy", f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]
    inventory.verify(inventory.downloaded(REPO), store.no_progress)
    inventory.remove(inventory.downloaded(f"{REPO}:Q8_0"))
    assert [entry.name for entry in inventory.entries()] == ["toy", f"{REPO}:Q4_K_M"]


def test_files_of_the_hub_are_listed_with_what_their_headers_say(world: dict[str, str], kv_here: KvHere) -> None:
    folder = hubrepo.cache_folder() / "models--org--small-GGUF" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    small_file(folder).rename(folder / "small-F16.gguf")
    (folder / "junk-Q4_K_M.gguf").write_bytes(b"junk")
    junk, small = (entry for entry in inventory.entries() if "/" in entry.name)
    assert (small.name, small.arch, small.context_length) == ("org/small-GGUF:F16", "llama", 512)
    assert (small.parameters, small.problem) == (2 * (64 * 64 + 64) + 100 * 64, "")
    assert junk.unsupported and "is not a GGUF file" in junk.problem
    rows = [line.split() for line in kv_here("models", "ls")[1].splitlines()]
    assert [row[-2:] for row in rows[2:]] == [["no", "-"], ["yes", "-"]]


@pytest.mark.parametrize(
    "fault, name, expected, hint",
    [
        ("", f"{REPO}:Q3_K_L", "has no file for 'Q3_K_L'", "there are Q4_K_M, Q8_0"),
        ("", "org/none", "the hub has no org/none", "HF_TOKEN"),
        ("RepoNotFound 401", REPO, "the hub has no org/toy-GGUF, or does not show it", "HF_TOKEN"),
        ("GatedRepo 403", REPO, "org/toy-GGUF is gated", "accept its terms"),
        (" 401", REPO, r"does not let us read org/toy-GGUF \(HTTP 401\)", "HF_TOKEN"),
        (" 500", REPO, "the hub answered HTTP 500", "later"),
        ("cut", REPO, "downloading from the hub failed", "network"),
    ],
)
def test_faults_of_the_hub(
    fault: str, name: str, expected: str, hint: str, site: servers.Site, world: dict[str, str]
) -> None:
    servers.add_repository(site, REPO, FILES)
    if fault == "cut":
        site.cut |= {path for path in site.bodies if path.endswith("toy-Q4_K_M.gguf")}
    elif fault:
        word, number = fault.split(" ")
        site.status[f"/api/models/{REPO}"] = int(number)
        site.headers[f"/api/models/{REPO}"] = {"X-Error-Code": word} if word else {}
    with pytest.raises(DownloadError, match=expected) as caught:
        hub.pull(name)
    assert hint in caught.value.hint and "\n" not in caught.value.message
    assert hubrepo.cached_files() == [] and stored() == []


def test_offline_never_asks(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    for name in ("toy", REPO):
        with pytest.raises(DownloadError, match="is not downloaded, and the network may not be used"):
            hub.find_model(name, offline=True)
    assert site.log == []


def test_a_hub_that_does_not_answer() -> None:
    assert "did not answer in time" in hubrepo.explain(TimeoutError("read"), REPO).message


def test_a_damaged_hub_file_does_not_stay(site: servers.Site, world: dict[str, str]) -> None:
    servers.add_repository(site, REPO, FILES)
    for path in [path for path in site.bodies if path.endswith("toy-Q4_K_M.gguf")]:
        site.bodies[path] = CONTENT[::-1]
    with pytest.raises(DownloadError, match="arrived damaged"):
        hub.pull(REPO)
    assert hubrepo.cached_files() == []


@pytest.mark.parametrize(
    "quant, expected",
    [
        ("", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4_K", None),
        ("Q8_0", "sub/m.Q8_0.gguf"),
        ("bf16", "m-bf16.gguf"),
        ("m.Q8_0.gguf", "sub/m.Q8_0.gguf"),
        ("UD-Q2_K_XL", None),
        ("Q6_K", None),
    ],
)
def test_choosing_a_file(quant: str, expected: str | None) -> None:
    names = [
        "m-Q4_K_M.gguf",
        "sub/m.Q8_0.gguf",
        "m-bf16.gguf",
        "m-Q6_K-00001-of-00002.gguf",
        "mmproj-m-Q6_K.gguf",
    ]
    assert hubrepo.choose_file(names, quant) == expected


def test_one_file_needs_no_quantization() -> None:
    assert hubrepo.choose_file(["only.gguf", "README.md"], "") == "only.gguf"
    assert hubrepo.choose_file(["a-Q8_0.gguf", "b-Q6_K.gguf"], "") is None


def test_references() -> None:
    assert hubrepo.parse_reference("hf:a/b:Q8_0") == hubrepo.Reference("a/b", "Q8_0")
    assert hubrepo.parse_reference("a/b") == hubrepo.Reference("a/b", "")
    for text in ("a", "a/b/c", "../b", "./b", "a/b:", "/a", "a b/c", "https://a/b"):
        assert hubrepo.parse_reference(text) is None, text
