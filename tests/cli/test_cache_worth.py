"""`kv cache stats`, `pin`, `unpin` and the tree of `ls`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import KvHere
from engines import PROMPT
from jsonchecks import check
from reusecases import ask, engine_of, files_in, store_in

from kvcli.cli import cachefiles, cachetree
from kvcli.cli.commands.cache import pinning
from kvcli.runtime.plan import overheads
from kvcli.runtime.plan.overheads import Overheads
from kvcli.runtime.promptcache import worth
from kvcli.runtime.promptcache.worth import FileWorth, ModelWorth, Uses, Worth, key_of


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A document, two questions about it, one of which goes on, and another prompt."""
    monkeypatch.setenv("KV_CACHE_DIR", str(tmp_path / "prompts"))
    document = PROMPT[:96]
    for prompt in (document, [*document, *[5] * 20], [*document, *[6] * 20], [*document, *[5] * 40], PROMPT[50:90]):
        ask(engine_of("llama"), prompt, store_in(tmp_path))
    return tmp_path / "prompts"


def test_a_tree_says_what_goes_on_from_what(root: Path, kv_here: KvHere) -> None:
    code, out, _ = kv_here("cache", "ls", "--json")
    value = json.loads(out)
    check("cache ls", value)
    by_start: dict[int, list[dict]] = {}
    for entry in value["entries"]:
        by_start.setdefault(entry["first_token"], []).append(entry)
        assert entry["starts"][-1][-1] == entry["first_token"] + entry["tokens"]
    roots = {entry["id"] for entry in by_start[0]}
    (document,) = {entry["goes_on_from"] for entry in by_start[96]}
    assert code == 0 and document in roots and by_start[112][0]["goes_on_from"] in {e["id"] for e in by_start[96]}
    assert {entry["goes_on_from"] for entry in by_start[0]} == {None}
    lines = kv_here("cache", "ls", "--tree")[1].splitlines()[1:]
    marks = [line.rstrip()[:6] for line in lines if line.startswith(("|", "`", " "))]
    assert len(lines) == 5 and sorted(mark[:3] for mark in marks if mark[3:4].isalnum()) == ["`- ", "|- "]
    assert sum(mark.startswith("| `- ") for mark in marks) == 1
    files = [cachefiles.describe(path) for path in cachefiles.stored(root)]
    assert sum(1 for _ in cachetree.rows(cachetree.trees(files))) == 5
    assert "anywhere" in lines[0]


def test_pins_are_shown_and_taken_back(root: Path, kv_here: KvHere, tmp_path: Path) -> None:
    name = cachefiles.id_of(files_in(tmp_path)[0])
    for command, pinned, words in (
        ("pin", True, "is pinned"), ("pin", True, "already"), ("unpin", False, "no longer pinned"),
        ("unpin", False, "was not before"),
    ):  # fmt: skip
        code, _, err = kv_here("cache", command, name)
        assert code == 0 and words in err
        (entry,) = (e for e in json.loads(kv_here("cache", "ls", "--json")[1])["entries"] if e["id"] == name)
        assert entry["pinned"] is pinned and (entry["expires_at"] is None) is pinned
    value = json.loads(kv_here("cache", "pin", name, "--json")[1])
    check("cache pin", value)
    assert value["entries"][0]["changed"] is True
    assert "pinned" in kv_here("cache", "ls")[1] and "pinned" in kv_here("cache", "show", name)[1]
    assert "1 pinned" in kv_here("cache", "rm", "--all", "--dry-run")[2]
    assert kv_here("cache", "rm", name, "-y")[0] == 0
    assert not list(root.rglob("*.pin"))
    assert kv_here("cache", "pin", "none")[0] == 2


@pytest.mark.parametrize("command", [("pin",), ("unpin",), ("rm", "-y")])
def test_what_is_no_stored_prompt_is_left_alone(
    command: tuple[str, ...], root: Path, kv_here: KvHere, tmp_path: Path
) -> None:
    (file, *_), mine = files_in(tmp_path), tmp_path / "mine.safetensors"
    mine.touch()
    before = sorted(tmp_path.rglob("*"))
    for path in (mine, root / worth.NAME, root / "CACHEDIR.TAG", file.parent, root):
        code, _, err = kv_here("cache", *command, str(path))
        assert code == 2 and f"{path} is no stored prompt in {root}" in err
    assert sorted(tmp_path.rglob("*")) == before
    assert kv_here("cache", *command, str(root / ".." / "prompts" / file.relative_to(root)))[0] == 0


def test_too_much_that_is_pinned_is_told(
    root: Path, kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "CACHE_SIZE", "1K")
    code, _, err = kv_here("cache", "pin", cachefiles.id_of(files_in(tmp_path)[0]))
    assert code == 0 and "more than --cache-size (1.0 KiB if not given): no other prompts stay" in err


def test_statistics(root: Path, kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def fill(record: Worth) -> None:
        record.models = {
            "k": ModelWorth("A model", "f16 on cpu", 7, 9000, 50, Uses(3, 4000, 61.5), marks={"system": 2, "even": 1}),
            "j": ModelWorth("Another", "int4 on cpu", 1, 100, marks={"system": 1}),
        }
        record.files = {
            key_of(files_in(tmp_path)[0]): FileWorth(Uses(2, 3000, 50.0), 30.0),
            "elsewhere": FileWorth(Uses(1, 1000, 11.5)),
        }

    assert worth.change(root, fill)
    code, out, err = kv_here("cache", "stats", "--json")
    value = json.loads(out)
    check("cache stats", value)
    assert (code, err) == (0, "") and [m["saved_s"] for m in value["models"]] == [61.5, 0]
    name = value["entries"][0]["id"]
    shown = dict(line.split("  ", 1) for line in kv_here("cache", "show", name)[1].splitlines())
    assert shown["to compute"].strip() == "30.0 s" and "to read" not in shown
    overheads.store("disk", Overheads(bandwidth=1e-6))
    shown = dict(line.split("  ", 1) for line in kv_here("cache", "show", name)[1].splitlines())
    assert float(shown["to read"].split()[0]) > 5
    assert shown["worth"].strip() == "2 hits, 3,000 tokens not computed again, 50.0 s saved"
    assert [e["hits"] for e in value["entries"]] == [2] and value["gone"] == {
        "hits": 1,
        "hit_tokens": 1000,
        "saved_s": 11.5,
    }
    out = kv_here("cache", "stats", "--reset")[1]
    head, table = out.splitlines()[0], [line.split() for line in out.splitlines()[2:5]]
    assert "8 look-ups, 3 hits on disk, 4,000 tokens not computed again, 61.5 s saved" in head
    assert table[1][-5:] == ["9,000", "4,000", "50", "61.5", "s"]
    assert "files that are gone: 1 hit, 11.5 s saved" in out
    assert value["models"][0]["marks"] == {"system": 2, "even": 1}
    assert "prompts went on from: the system message (3), an even place (1)\n" in out
    code, out, err = kv_here("cache", "stats")
    assert (code, out) == (0, "") and "no prompt was looked for" in err


def test_statistics_of_nothing(kv_here: KvHere, tmp_path: Path) -> None:
    code, out, err = kv_here("cache", "stats", "--cache-dir", str(tmp_path / "none"), "--reset")
    assert (code, out) == (0, "") and "there is no such folder" in err and not (tmp_path / "none").exists()
