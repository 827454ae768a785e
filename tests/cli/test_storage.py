"""`kv storage`: all that is kept, by kind, and clearing it; what is not kv's own stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import servers
from conftest import KvHere
from toyworld import CONTENT, REPO

from kvcli import paths
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.hub import hubcache, modelfiles, store
from kvcli.runtime.hub.recipes import load_recipes
from kvcli.runtime.plan import overheads
from kvcli.runtime.promptcache import sessions

KINDS = ["models", "hub", "prompts", "sessions", "fingerprints", "headers", "kernels", "history", "measurements"]
KINDS += ["notices", "settings"]


@pytest.fixture
def full(site: servers.Site, world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk with something of every kind, and the folder of prompts with a file that is not of the store."""
    servers.add_repository(site, REPO, {"toy-Q8_0.gguf": CONTENT})
    modelfiles.pull(REPO)
    prompts = tmp_path / "prompts"
    monkeypatch.setenv("KV_CACHE_DIR", str(prompts))
    toy = store.stored_path(load_recipes()["toy"])
    assert toy is not None
    for path, size in {
        toy: len(CONTENT),
        prompts / ("a" * 32) / f"{'0' * 32}-{'1' * 32}-{'2' * 32}.safetensors": 1000,
        prompts / "thesis.txt": 1,
        sessions.path_of("trip"): 20,
        paths.cache_dir() / "fingerprints" / "a.json": 30,
        paths.cache_dir() / "headers" / "b": 70,
        paths.cache_dir() / "triton" / "x" / "kernel.so": 40,
        paths.state_dir() / "history": 50,
        overheads.state_file(): 60,
        paths.state_dir() / "told": 80,
        paths.config_dir() / "config.toml": 90,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n" * size)
    return prompts


def listed(kv_here: KvHere) -> dict[str, tuple[int, int]]:
    """Kind -> files and bytes."""
    code, out, err = kv_here("storage", "ls", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["total_bytes"] == sum(row["size_bytes"] for row in found["storage"])
    assert [row["kind"] for row in found["storage"]] == KINDS
    return {row["kind"]: (row["files"], row["size_bytes"]) for row in found["storage"]}


def test_everything_is_listed_and_cleared(full: Path, kv_here: KvHere) -> None:
    assert listed(kv_here) == {
        "models": (1, len(CONTENT)),
        "hub": (1, len(CONTENT)),
        "prompts": (1, 1000),
        "sessions": (1, 20),
        "fingerprints": (1, 30),
        "headers": (1, 70),
        "kernels": (1, 40),
        "history": (1, 50),
        "measurements": (1, 60),
        "notices": (1, 80),
        "settings": (1, 90),
    }
    lines = kv_here("storage", "ls")[1].splitlines()
    assert lines[1].split()[:4] == ["models", "1", "293.0", "KiB"] and str(store.models_dir()) in lines[1]
    assert lines[-1].split()[:2] == ["total", "11"]
    code, _, err = kv_here("storage", "rm", "kernels", "history")
    assert code == 2 and "removing kernels (1 file, 40 B), history (1 file, 50 B) needs confirmation" in err
    told = "kv: removed kernels (1 file, 40 B)\nkv: removed history (1 file, 50 B)\n"
    assert kv_here("storage", "rm", "-y", "kernels", "history") == (0, "", told)
    left = listed(kv_here)
    assert left["kernels"] == left["history"] == (0, 0) and left["sessions"] == (1, 20)
    assert kv_here("storage", "rm", "-y", "--all")[0] == 0
    assert set(listed(kv_here).values()) == {(0, 0)} and not hubcache.repo_folder(REPO).exists()
    assert [path.name for path in full.rglob("*") if path.is_file()] == ["thesis.txt"], "what is not of the store stays"
    assert kv_here("storage", "rm", "-y", "--all") == (0, "", "kv: there is nothing to remove\n")


def test_sizes_are_told_without_opening_a_model(full: Path, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GGUFFile, "open", None)
    assert listed(kv_here)["hub"] == (1, len(CONTENT))


def test_what_is_in_use_is_not_cleared(full: Path, kv_here: KvHere) -> None:
    with hubcache.writing(hubcache.repo_folder(REPO), "ab" * 32, None):
        (hubcache.repo_folder(REPO) / "blobs" / f"{'ab' * 32}.x.gguf.incomplete").write_bytes(b"x")
        code, _, err = kv_here("storage", "rm", "-y", "hub")
    assert code == 3 and f"{REPO}:x.gguf is being downloaded" in err


def test_wrong_kinds(full: Path, kv_here: KvHere) -> None:
    code, _, err = kv_here("storage", "rm", "-y", "models", "everything")
    assert code == 2 and "there is no kind 'everything'" in err and "the kinds are models, hub" in err
    assert kv_here("storage", "rm", "-y")[0] == kv_here("storage", "rm", "-y", "--all", "models")[0] == 2
    assert listed(kv_here)["models"] == (1, len(CONTENT))
