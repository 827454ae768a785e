"""`kv config`: values are shown, set and unset in the file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import configcases
import pytest
from conftest import KvHere

from kvcli.cli import configfile, main


@pytest.fixture(autouse=True, scope="module")
def tree() -> Iterator[None]:
    """All commands are made once: `kv config` asks them for their options."""
    main.prepared[""] = main.command_of("")
    yield
    del main.prepared[""]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return configcases.own_file(tmp_path, monkeypatch)


def shown(kv_here: KvHere, *args: str) -> dict[str, tuple[Any, str, str | None]]:
    code, out, err = kv_here(*args, "config", "show", "--json")
    assert (code, err) == (0, "")
    return {each["name"]: (each["value"], each["origin"], each["source"]) for each in json.loads(out)["settings"]}


@pytest.mark.slow
def test_show_says_where_each_value_is_from(config: Path, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('model = "gemma3-270m"\nthreads = 2\n[bench]\nrepetitions = 3\n')
    monkeypatch.setenv("KV_THREADS", "3")
    monkeypatch.setenv("OLLAMA_KV_CACHE_TYPE", "f32")
    found = shown(kv_here, "--offline")
    assert found["model"] == ("gemma3-270m", "config_file", f"model in {config}")
    assert found["threads"] == ("3", "environment", "KV_THREADS")
    assert found["cache-type"] == ("f32", "other_program", "OLLAMA_KV_CACHE_TYPE")
    assert found["offline"] == (True, "command_line", None)
    assert found["temp"] == ("the model's, else 0.8", "default", None)
    assert found["bench.repetitions"] == ("3", "config_file", f"bench.repetitions in {config}")
    lines = kv_here("config", "show", "bench")[1].splitlines()
    assert [line.split() for line in lines if "repetitions" in line] == [["repetitions", "3", "config", "file"]]
    assert kv_here("config", "show", "nonsense")[:2] == (2, "")
    for name, value, origin in (
        ("bench.repetitions", "3", "config_file"),
        ("bench.offline", False, "default"),
        ("no-stats", "on a terminal", "default"),
    ):
        (one,) = json.loads(kv_here("config", "show", name, "--json")[1])["settings"]
        assert (one["name"], one["value"], one["origin"]) == (name.replace("no-", ""), value, origin)
    assert kv_here("config", "path") == (0, f"{config}\n", "")
    config.write_text("[eval]\ntrial = 3")
    assert "eval.trial in" in kv_here("config", "show")[2]


@pytest.mark.slow
def test_set_and_unset(config: Path, kv_here: KvHere) -> None:
    config.write_text("# mine\ntemperature = 0.7 # warm\n\n[bench]\n# more\nrepetitions = 3\n")
    for args in (
        ("ctx-size", "32k"),
        ("temp", "0.5"),
        ("chat.no-stats", "yes"),
        ("stop", "a b", '"'),
        ("offline", "1"),
        ("seed", "-1"),
    ):
        assert kv_here("config", "set", *args) == (0, "", "")
    assert kv_here("config", "unset", "bench.repetitions")[0] == 0
    assert config.read_text() == (
        '# mine\nctx-size = "32k"\ntemp = 0.5\nstop = ["a b", "\\""]\noffline = true\nseed = -1\n\n'
        "[bench]\n# more\n\n[chat]\nstats = false\n"
    )
    assert config.stat().st_mode & 0o777 == 0o600
    before = config.read_text()
    for args, told in {
        ("temp", "warm"): "temp must be a number, not 'warm'",
        ("offline", "maybe"): "offline must be true or false, not 'maybe'",
        ("color", "pink"): "color must be one of auto, always, never, not 'pink'",
        ("thread", "2"): "thread is not a setting\n  did you mean threads?",
        ("bench.repetition", "2"): "bench.repetition is not a setting\n  did you mean bench.repetitions?",
        ("prompt", "x"): "prompt is not a setting",
        ("temp", "1", "2"): "temp takes one value, not 2",
    }.items():
        code, out, err = kv_here("config", "set", *args)
        assert (code, out) == (2, "") and err.startswith(f"kv: error: {told}"), err
    assert config.read_text() == before
    config.write_text("stop = [\n 'a',\n]\n")
    assert "change it in an editor" in kv_here("config", "unset", "stop")[2]


REFUSED = {
    "ctx-size": ("foo", "a number of tokens"),
    "top-p": ("7", "in (0, 1]"),
    "device": ("gpu9", "auto, cpu, cuda or cuda:N"),
    "page-size": ("17", "16, 32, 64 or 128"),
    "cache-type": ("x", "'x' is not a cache type"),
    "cache-type-k": ("int8,int4", "only one cache type"),
    "kv-tail": ("2", "0 or 1"),
    "model": ("", "empty"),
    "backend": ("cuda", "one of auto, native, reference"),
    "threads": ("2000", "0 to 1,024"),
    "vram-limit": ("lots", "a size"),
    "evict": ("all", "one of none, expected, h2o, keydiff, kvzip, random, shift, sink, snapkv, tova, window"),
    "window": ("0", "0"),
    "on-overflow": ("cut", "one of error, "),
    "cache-size": ("big", "a size"),
    "cache-ttl": ("7x", "a time"),
    "cache-min-tokens": ("0", "1 or more"),
    "predict": ("5q", "a number of tokens"),
    "stop": ("", "empty"),
    "logit-bias": ("5", "a token id and a signed bias"),
    "n-samples": ("0", "1 or more"),
    "session": ("a/b", "name"),
    "bench.n-gen": ("x", "a number of tokens"),
    "bench.bandwidth": ("0", "above 0"),
    "perplexity.max-ppl-delta": ("much", "a percentage"),
    "perplexity.cache-type": ("f16,int3", "'int3' is not a cache type"),
    "eval.depths": ("0,101", "percentages"),
    "estimate.gpu": ("voodoo", "no card named"),
    "estimate.ctx-size": ("4k,x", "a number of tokens"),
    "estimate.layers": ("0", "a positive number"),
    "estimate.params": ("many", "a number of weights"),
    "estimate.units": ("mb", "one of MiB"),
    "cache.prune.max-size": ("big", "a size"),
    "cache.verify.recompute": ("-1", "0 or more"),
    "tokenize.model": ("", "empty"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "must"), [(name, *rest) for name, rest in REFUSED.items()])
def test_what_the_option_refuses_is_not_set(name: str, value: str, must: str, config: Path, kv_here: KvHere) -> None:
    config.write_text("seed = 1\n")
    code, out, err = kv_here("config", "set", name, value)
    assert (code, out) == (2, "") and must in err.splitlines()[0]
    assert config.read_text() == "seed = 1\n"


def test_what_is_not_set_cannot_be_unset(config: Path, kv_here: KvHere) -> None:
    config.write_text("seed = 1\n")
    assert kv_here("config", "unset", "temp") == (0, "", f"kv: temp is not set in {config}\n")
    assert config.read_text() == "seed = 1\n"


def test_what_is_no_setting_can_be_unset(config: Path, kv_here: KvHere) -> None:
    config.write_text("bogus_key = 1\nrepetitions = 2\n[bench]\nfoo = 2\nrepetitions = 3\n")
    assert "kv config unset bogus_key removes it" in kv_here("config", "show")[2]
    for name in ("bogus_key", "repetitions", "bench.foo"):
        assert kv_here("config", "unset", name) == (0, "", "")
    assert config.read_text() == "[bench]\nrepetitions = 3\n"
    for name in ("bogus_key", "bench.foo", "bench.repetitions.foo"):
        assert f"{name} is not a setting" in kv_here("config", "unset", name)[2]


def test_a_table_of_no_command_can_be_unset(config: Path, kv_here: KvHere) -> None:
    kept = "seed = 1  # mine\n[bench]\nrepetitions = 3\n"
    config.write_text(
        f"{kept}[my_tool.more]\na = 1\n\n[cache]\ndry-run = true\n[my_tool]\nb = [\n  2,\n]\n[bench.strange]\nc = 3\n"
    )
    assert "kv config unset my_tool removes it" in kv_here("config", "show")[2]
    for name in ("my_tool", "bench.strange"):
        assert kv_here("config", "unset", name) == (0, "", "")
    assert config.read_text() == f"{kept}[cache]\ndry-run = true\n"
    for name in ("my_tool", "bench", "bench.strange"):  # a table of a command holds settings
        assert f"{name} is not a setting" in kv_here("config", "unset", name)[2]
    config.write_text("my_tool = {a = 1}\n")
    assert "change it in an editor" in kv_here("config", "unset", "my_tool")[2]


def test_names_of_options_that_are_no_settings(config: Path, kv_here: KvHere) -> None:
    for name, meant in {"n": "predict", "num-ctx": "ctx-size", "bench.r": "bench.repetitions"}.items():
        assert (
            kv_here("config", "set", name, "20")[2] == f"kv: error: {name} is not a setting\n  did you mean {meant}?\n"
        )


@pytest.mark.slow
def test_several_processes_set_values_at_once(kv_command: list[str], kv_env: dict[str, str], tmp_path: Path) -> None:
    """None loses what another one has written."""
    names = ["seed", "threads", "top-k"]
    env = kv_env | {"KV_CONFIG": str(tmp_path / "config.toml")}
    started = [subprocess.Popen([*kv_command, "config", "set", name, "64"], env=env) for name in names]
    assert [process.wait(60) for process in started] == [0] * len(names)
    lines = (tmp_path / "config.toml").read_text().splitlines()
    assert sorted(lines) == [f"{name} = 64" for name in names]


def test_a_file_is_made_and_a_link_stays_one(config: Path, kv_here: KvHere) -> None:
    assert kv_here("config", "set", "bench.repetitions", "3")[0] == 0
    assert config.read_text() == "[bench]\nrepetitions = 3\n"
    config.rename(config.with_name("real"))
    config.symlink_to("real")
    assert kv_here("config", "set", "threads", "2")[0] == 0
    assert config.is_symlink() and config.read_text() == "threads = 2\n[bench]\nrepetitions = 3\n"


def test_one_value_in_a_text() -> None:
    text = "a = 1\n\n[t]\nb = 2\n"
    assert configfile.changed(text, ["c"], "x") == 'a = 1\nc = "x"\n\n[t]\nb = 2\n'
    assert configfile.changed(text, ["t", "c"], True) == "a = 1\n\n[t]\nb = 2\nc = true\n"
    assert configfile.changed(text, ["u", "v", "c"], 0.5) == "a = 1\n\n[t]\nb = 2\n\n[u.v]\nc = 0.5\n"
    assert configfile.changed(text, ["a"], None) == "\n[t]\nb = 2\n"
    assert configfile.changed(text, ["u", "c"], None) == text
    assert configfile.changed("", ["a"], 1) == "a = 1\n"
