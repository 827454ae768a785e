"""Models of safetensors in hub repositories, from an imitated hub: which files are meant, resumed, found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import servers
import tiny
from conftest import KvHere
from hubcases import checksum, left_of, place, rests
from safetensors.torch import load_file, save_file
from toyworld import REPO

import kvcli
from kvcli.errors import DownloadError, ModelError
from kvcli.runtime.hub import fetching, inventory, modelfiles, store

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PAUSE_S", 0.0)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A folder in two shards with their index, as it lies in a repository."""
    source = tiny.folder("llama")
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    found = {path.name: path.read_bytes() for path in source.glob("*.json")}
    for shard, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, tmp_path / shard)
        found[shard] = (tmp_path / shard).read_bytes()
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    found["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return found | {
        "README.md": b"text",
        "consolidated.safetensors": b"the same once more",
        "pytorch_model.bin": b"old",
    }


def test_a_repository_of_safetensors_is_pulled_and_runs(
    site: servers.Site, world: dict[str, str], files: dict[str, bytes], kv_here: KvHere
) -> None:
    servers.add_repository(site, REPO, files)
    planned = json.loads(kv_here("estimate", REPO, "--json")[1])["model_info"]
    assert (planned["runs"], planned["run_as"]) == (True, REPO)
    code, out, err = kv_here("pull", REPO, "--json")
    assert code == 0 and "downloading safetensors, 6 of 6 files" in err
    folder, found = Path(json.loads(out)["path"]), json.loads(out)
    assert found["file_bytes"] == sum(len(files[name]) for name in SHARDS)
    wanted = {*SHARDS, "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json"}
    assert {path.name for path in folder.iterdir()} == wanted and rests() == []
    assert all((folder / name).read_bytes() == files[name] for name in wanted)
    answers = []
    for model in (tiny.folder("llama"), folder, f"{REPO}:safetensors"):
        with kvcli.load(model, ctx=64, offline=True) as opened:
            answers.append("".join(opened.generate("The page", max_tokens=6, temperature=0)))
            assert opened.engine.loaded.file.metadata["general.name"] in ("llama", REPO.rpartition("/")[2])
    assert len(set(answers)) == 1 and answers[0]
    requests = len(site.log)
    assert modelfiles.find_model(f"{REPO}:safetensors") == modelfiles.find_model(REPO, offline=True) == folder
    assert len(site.log) == requests, "what is in the cache needs no network"
    entry = inventory.downloaded(f"{REPO}:safetensors")
    assert (entry.arch, entry.runs, entry.context_length) == ("llama", "yes", 512) and entry.parameters > 70_000
    inventory.verify(entry, store.no_progress)
    inventory.remove(entry)
    assert not place().exists()


def test_an_interrupted_shard_goes_on(site: servers.Site, world: dict[str, str], files: dict[str, bytes]) -> None:
    servers.add_repository(site, REPO, files)
    body = files[SHARDS[1]]
    left_of(body, 1000, SHARDS[1])
    assert [model.name for model in inventory.here() if model.unfinished] == [f"{REPO}:safetensors"]
    folder = modelfiles.pull(REPO)
    assert (folder / SHARDS[1]).read_bytes() == body and rests() == []
    assert [asked for asked in site.ranges_of(SHARDS[1]) if asked] == [f"bytes=1000-{len(body) - 1}"]


def test_a_damaged_shard_is_refused(site: servers.Site, world: dict[str, str], files: dict[str, bytes]) -> None:
    servers.add_repository(site, REPO, files)
    site.bodies[f"/{REPO}/resolve/{servers.COMMIT}/{SHARDS[0]}"] = files[SHARDS[0]][::-1]
    with pytest.raises(DownloadError, match="its checksum does not match"):
        modelfiles.pull(REPO)
    assert not list(place().glob(f"blobs/{checksum(files[SHARDS[0]])}"))
    assert inventory.here() == [] or all(entry.path is None for entry in inventory.here())


def test_files_of_gguf_are_meant_first(site: servers.Site, world: dict[str, str], files: dict[str, bytes]) -> None:
    servers.add_repository(site, REPO, files | {"toy-Q4_K_M.gguf": b"GGUF of some kind"})
    assert modelfiles.pull(REPO).name == "toy-Q4_K_M.gguf"
    assert (modelfiles.pull(f"{REPO}:safetensors") / SHARDS[0]).is_file()


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        (SHARDS[1], f"lacks {SHARDS[1]}"),
        ("config.json", "lacks config.json"),
        ("tokenizer.json", "has neither tokenizer.json nor tokenizer.model"),
    ],
)
def test_what_is_not_whole_is_refused(
    lacking: str, told: str, site: servers.Site, world: dict[str, str], files: dict[str, bytes]
) -> None:
    servers.add_repository(site, REPO, {name: body for name, body in files.items() if name != lacking})
    with pytest.raises(DownloadError, match=told):
        modelfiles.pull(REPO)
    assert not place().exists() or rests() == []


def test_what_cannot_run_is_refused_before_it_is_downloaded(
    site: servers.Site, world: dict[str, str], files: dict[str, bytes]
) -> None:
    config = json.loads(files["config.json"]) | {"model_type": "mamba2"}
    servers.add_repository(site, REPO, files | {"config.json": json.dumps(config).encode()})
    with pytest.raises(ModelError, match=f"kv cannot run {REPO}"):
        kvcli.load(REPO)
