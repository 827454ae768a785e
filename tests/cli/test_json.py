"""What commands print with --json: all of it is in the schema, one name for one thing; old ones still come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny
from conftest import KvHere
from jsonchecks import SCHEMA, check, nodes

from kvcli.cli import jsonobjects, main, oldnames
from kvcli.cli.app import walk

DEFS: dict[str, Any] = SCHEMA["$defs"]
COMMANDS = {name: each for name, each in DEFS.items() if name.startswith("kv ") or name == jsonobjects.FAILURE}

# One word for one thing: what was called otherwise somewhere is not to come back.
FORBIDDEN = {
    *("bytes", "nbytes", "total", "free", "used", "size", "count", "k", "v", "types_kv", "ctx", "max_ctx", "limit"),
    *("params", "tokens_per_s", "tps_ceiling", "bandwidth", "created", "measured", "predicted", "tail", "sinks"),
    *("cache_type", "cache_type_k", "cache_type_v", "eviction", "chunk", "file", "age", "time", "speed"),
}
SUFFIXES = {"_bytes": "integer", "_tokens": "integer", "_s": "number", "_tps": "number", "_percent": "number"}


# --- the schema itself ---


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert {node["$ref"].removeprefix("#/$defs/").replace("%20", " ") for node in nodes(SCHEMA) if "$ref" in node} == (
        set(DEFS)
    ), "a definition that nothing refers to, or the other way round"


def _properties() -> Iterator[tuple[str, dict[str, Any]]]:
    for node in nodes(SCHEMA):
        if isinstance(found := node.get("properties"), dict):
            yield from found.items()


def _holds(found: dict[str, Any]) -> bool:
    """Whether it is an object or a list of objects, whose contents depend on what it belongs to."""
    if "$ref" in found:
        return _holds(DEFS[found["$ref"].removeprefix("#/$defs/")])
    kinds = found.get("type", [])
    items = found.get("items", {})
    return "anyOf" in found or "object" in kinds or "$ref" in items or items.get("type") == "object"


def test_a_word_is_defined_once() -> None:
    """A value that is no object and no list means the same everywhere."""
    own: dict[str, list[Any]] = {}
    for name, found in _properties():
        if found.get("$ref") == f"#/$defs/{name}" or "const" in found or _holds(found):
            continue
        assert name not in DEFS, f"{name} is defined, and described once more"
        own.setdefault(name, []).append(found)
    for name, each in own.items():
        assert all(found == each[0] for found in each), f"{name} has two meanings"


def test_names_obey_the_rules() -> None:
    for name, found in _properties():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name) and name not in FORBIDDEN, name
        told = DEFS[name] if found.get("$ref") == f"#/$defs/{name}" else found
        assert (
            told.get("description")
            or "$ref" in told
            or "const" in told
            or told.get("type") == "array"
            or "anyOf" in told
        ), name
        types = told.get("type", [])
        for suffix, kind in SUFFIXES.items():
            if name.endswith(suffix) and not name.endswith("_gb_s") and name != "before_gb_s":
                assert kind in ([types] if isinstance(types, str) else types), name
        if name.endswith("_at") and name != "parts_at":
            assert "string" in types and "ISO 8601" in told["description"], name


def test_every_kind_of_object_is_described() -> None:
    """In the sources a kind is written where its object is made."""
    root = Path(jsonobjects.__file__).parent
    made = re.compile(r'(?:print_json|print_path|jsonobjects\.line|jsonobjects\.finished|self\._line)\(\s*"([a-z -]+)"')
    kinds = {kind for path in root.rglob("*.py") for kind in made.findall(path.read_text("utf-8"))}
    described = {name.removeprefix("kv ") for name in COMMANDS}
    assert kinds <= described and set(oldnames.OLD_NAMES) <= described
    assert described - kinds <= {"cache prune", "failure"}  # the same as of cache rm; made in jsonobjects


# These print nothing of their own, or what is no result.
WITHOUT_JSON = {("chat",), ("serve",), ("launch",), ("config", "set"), ("config", "unset"), ("completion",)}


def test_commands_that_print_take_json() -> None:
    leaves = {words: each for words, each in walk(main._tree()) if not hasattr(each, "commands") and not each.hidden}
    without = {words for words, each in leaves.items() if not any("--json" in option.opts for option in each.params)}
    assert without <= WITHOUT_JSON


# --- what comes out ---


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.delenv("KV_CONFIG", raising=False)
    monkeypatch.setenv("KV_NO_STDIN", "1")
    return tmp_path


PROMPT = "the pages of the cache are read again and again, " * 4
TEXT = "Pack my box with five dozen liquor jugs. " * 12


def _calls(folder: Path) -> list[tuple[str, tuple[str, ...], int]]:
    model, text = str(tiny.make("llama").path), folder / "text.txt"
    text.write_text(TEXT)
    lines = folder / "lines.jsonl"
    lines.write_text('{"prompt": "hello", "id": 7, "stop": "x"}\n{"prompt": "hello", "top": 1}\n')
    run = ("run", "-m", model, "--raw", "-n", "3", "--page-size", "16", "-c", "256")
    small = ("-m", model, "--page-size", "16")
    return [
        ("run", (*run, "--json", PROMPT), 0),
        ("run", (*run, "--json", "--evict", "sink", "-c", "96", "--logit-bias", "5-inf", "--verify-estimate", "hi"), 0),
        ("run", (*run, "--json", "-c", "64", "--on-overflow", "truncate-start", PROMPT), 0),
        ("run --jsonl", (*run, "--jsonl", PROMPT), 0),
        ("run --n-samples", (*run, "--json", "--n-samples", "3", PROMPT), 0),
        ("run --batch", (*run, "--batch", str(lines)), 1),
        ("estimate", ("estimate", model, "--json"), 0),
        ("estimate", ("estimate", "llama3.1:8b", "--vram", "24G", "--bandwidth", "900", "--json", "-c", "8k"), 0),
        ("estimate", ("estimate", "--layers", "2", "--kv-heads", "2", "--head-dim", "64", "-c", "512", "--json"), 0),
        ("inspect", ("inspect", model, "--json"), 0),
        ("inspect", ("inspect", model, "--json", "--tensors"), 0),
        ("bench", ("bench", *small, "-p", "16", "-n", "4", "-r", "1", "--bandwidth", "10", "--json"), 0),
        (
            "perplexity",
            ("perplexity", *small, "-f", str(text), "-c", "64", "--chunks", "1", "-ct", "int8", "--json"),
            0,
        ),
        ("eval", ("eval", "recall", *small, "--ctx", "200", "--depths", "50", "-ct", "int8", "--json"), 0),
        ("eval", ("eval", "text", *small, "--tokens", "64", "-f", str(text), "--with", "-ct int4", "--json"), 0),
        ("tokenize", ("tokenize", "-m", model, "hello", "--json"), 0),
        ("prompt", ("prompt", "-m", model, "hello", "--json"), 0),
        ("models ls", ("models", "ls", "--json", "--all"), 0),
        ("models verify", ("models", "verify", "--json"), 0),
        ("models rm", ("models", "rm", "--all", "--json"), 0),
        ("chat ls", ("chat", "ls", "--json"), 0),
        ("config show", ("config", "show", "--json"), 0),
        ("config path", ("config", "path", "--json"), 0),
        ("storage ls", ("storage", "ls", "--json"), 0),
        ("storage rm", ("storage", "rm", "--all", "-y", "--json"), 0),
        ("version", ("--version", "--json"), 0),
        ("version", ("version", "--json"), 0),
        ("failure", ("run", "-m", "no-such-model", "--json", "hi"), 3),
        ("failure", ("run", "--json", "-c", "x", "hi"), 2),
    ]


@pytest.mark.slow
def test_what_is_printed_is_described(kv_here: KvHere, folders: Path) -> None:
    for kind, args, expected in _calls(folders):
        code, out, err = kv_here(*args)
        assert code == expected or ("--verify-estimate" in args and code == 8), (args, out, err)
        lines = out.splitlines()
        assert lines and (len(lines) == 1 or kind in ("run --jsonl", "run --batch")), args
        for line in lines:
            check(kind, json.loads(line))


def test_prompt_caches(kv_here: KvHere, folders: Path) -> None:
    model, file = ("-m", str(tiny.make("llama").path)), str(folders / "x.kvc")
    run = ("run", *model, "--raw", "-n", "1", "--page-size", "16", "--cache-min-tokens", "16", "-q")
    assert kv_here(*run, PROMPT)[0] == 0
    build = ("cache", "build", *model, "--raw", "--page-size", "16", "-o", file, "--json", PROMPT)
    explain = ("cache", "explain", file, *model, "--raw", PROMPT[:80] + "otherwise", "--json")
    for kind, args in (
        ("cache ls", ("cache", "ls", "--json")),
        ("cache path", ("cache", "path", "--json")),
        ("cache build", build),
        ("cache show", ("cache", "show", file, "--json")),
        ("cache explain", explain),
        ("cache verify", ("cache", "verify", file, *model, "--recompute", "1", "--tol", "1", "--json")),
        ("cache prune", ("cache", "prune", "--max-size", "0", "--dry-run", "--json")),
        ("cache rm", ("cache", "rm", "--all", "-y", "--json")),
    ):
        code, out, err = kv_here(*args)
        assert code == 0, (args, out, err)
        check(kind, json.loads(out))
        assert kind not in ("cache ls", "cache rm", "cache prune") or not re.search('"(size|removed)_bytes": 0', out), (
            args
        )


def test_old_names_have_the_values_of_the_new_ones() -> None:
    value = {"sampling": {"stops": ["a"]}, "kv": {"ctx_size": 5, "kv_bytes": 7}, "evict": {"keep": 4, "window": None}}
    told = oldnames.add("run", value)
    assert told["params"] == {"stops": ["a"], "stop": ["a"]} and "stop" not in told["sampling"]
    assert told["kv"] == {"ctx_size": 5, "kv_bytes": 7, "limit": 5, "bytes": 7, "keep": 4, "window": None}
    rows = {"types": [{"type_k": "f16"}, {"type_k": "int8"}]}
    assert [row["k"] for row in oldnames.add("estimate", rows)["types"]] == ["f16", "int8"]
    assert oldnames.add("run", {"prompt_cut": None}) == {"prompt_cut": None}, "nothing is made of what is not there"
    assert "sampling" in value and "params" not in value and "limit" not in value["kv"], "the object is not changed"


def test_the_schema_is_printed(kv_here: KvHere) -> None:
    code, out, err = kv_here("help", "--json-schema")
    assert (code, err) == (0, "") and json.loads(out) == SCHEMA
