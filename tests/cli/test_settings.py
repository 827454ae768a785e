"""Values that nobody typed: variables, the config file, variables of other programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import configcases
import pytest
from calling import Caller
from conftest import KvHere
from runcases import fixture_kv  # noqa: F401
from test_helptext import COMMANDS, options

from kvcli.cli import main, settings


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return configcases.own_file(tmp_path, monkeypatch)


def asked(kv: Caller, *args: str) -> tuple[Any, Any, Any]:
    """Load, cache and sampling options that `kv run` gets."""
    kv.engine.answers = ["x"]
    outcome = kv("run", "hello", *args)
    assert outcome.code == 0, outcome.err
    return (*kv.opened[-1], kv.engine.calls[-1][1])


def test_who_comes_first(config: Path, kv: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag, variable, table of the command, top of the file, variable of another program, default."""
    assert asked(kv)[1].ctx_size == 0
    monkeypatch.setenv("OLLAMA_CONTEXT_LENGTH", "1024")
    assert asked(kv)[1].ctx_size == 1024
    config.write_text('ctx-size = "2k"')
    assert asked(kv)[1].ctx_size == 2048
    config.write_text('ctx-size = "2k"\n[run]\nctx_size = 3072\n[chat]\nctx-size = 99')
    assert asked(kv)[1].ctx_size == 3072
    monkeypatch.setenv("KV_CTX_SIZE", "4k")
    assert asked(kv)[1].ctx_size == 4096
    assert asked(kv, "-c", "5k")[1].ctx_size == 5120


def test_every_kind_of_option_by_variable(config: Path, kv: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "MODEL": "other",
        "THREADS": "3",
        "CACHE_TYPE": "int8",
        "TEMPERATURE": "0.5",
        "STOP": "a b",
        "EXACT": "Yes",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"KV_{name}", value)
    load, cache, sample = asked(kv)
    assert (load.model, load.threads, load.exact) == ("other", 3, True)
    assert (cache.type_k, cache.type_v) == ("int8", "int8")
    assert (sample.temperature, sample.stop) == (0.5, ("a b",))
    monkeypatch.setenv("KV_EXACT", "off")
    monkeypatch.setenv("KV_THREADS", "")  # as if it were not there
    load, cache, sample = asked(kv, "-r", "c")
    assert (load.threads, load.exact, sample.stop) == (0, False, ("c",))


def test_every_kind_of_option_by_file(config: Path, kv: Caller) -> None:
    config.write_text(
        'model = "other"\nthreads = 3\ncache_type = "int8"\ntemp = 0.5\nstop = ["a b", "c"]\nexact = true\n'
    )
    load, cache, sample = asked(kv)
    assert (load.model, load.threads, load.exact, cache.type_v) == ("other", 3, True, "int8")
    assert (sample.temperature, sample.stop) == (0.5, ("a b", "c"))
    config.write_text('stop = "a b"\nno-stats = false\ntop-p = 1\nseed = 18446744073709551615\n')
    sample = asked(kv)[2]
    assert (sample.stop, sample.top_p, sample.seed) == (("a b",), 1.0, (1 << 64) - 1)


def test_stats_and_stdin(config: Path, kv: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    kv.engine.answers = ["x"] * 9
    assert kv("run", "hi", stdin=b"piped").err == ""
    monkeypatch.setenv("KV_STATS", "1")
    monkeypatch.setenv("KV_NO_STDIN", "1")
    assert "seed" in kv("run", "hi", stdin=b"piped").err
    prompts = len(kv.engine.calls)
    assert kv("run", stdin=b"piped").code == 2 and len(kv.engine.calls) == prompts
    assert kv("run", "hi", "--no-stats").err == ""
    monkeypatch.delenv("KV_STATS")
    monkeypatch.setenv("KV_NO_STATS", "0")
    assert "seed" in kv("run", "hi").err


def test_what_is_set_lower_down_and_says_the_same_counts_for_nothing(config: Path, kv: Caller) -> None:
    config.write_text('cache-type-k = "int8"\nevict = "sink"\nwindow = 128\nsystem = "Be brief."\nctx-size = 512\n')
    cache = asked(kv, "-ct", "f32", "--evict", "none")[1]
    assert (cache.type_k, cache.type_v, cache.evict.policy, cache.evict.window) == ("f32", "f32", "none", 0)
    (config.parent / "system").write_text("Be long.")
    assert asked(kv, "-sysf", str(config.parent / "system"))
    assert asked(kv, "-ctv", "f16")[1].type_k == "int8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("thread = 2", "thread in FILE is not a setting", "did you mean threads?"),
        ("repetitions = 2", "repetitions in FILE is not a setting", "kv config unset repetitions removes it"),
        ("prompt = 'x'", "prompt in FILE is not a setting", ""),
        ("[run]\ntmep = 1", "run.tmep in FILE is not a setting", "did you mean run.temp?"),
        ("[rnu]\ntemp = 1", "rnu in FILE is not a setting", "did you mean run?"),
        ("[run.x]\ntemp = 1", "run.x in FILE is not a setting", ""),
        ("temp = 'warm'", "temp in FILE must be a number, not 'warm'", ""),
        ("temp = true", "temp in FILE must be a string or a number, not true", ""),
        ("threads = [1, 2]", "threads in FILE must be a string or a number, not [1, 2]", ""),
        ("stop = [true]", "stop in FILE must be a string or a number, or a list of them, not [true]", ""),
        ("exact = 1", "exact in FILE must be true or false, not 1", ""),
        ("offline = 'yes'", 'offline in FILE must be true or false, not "yes"', ""),
        ("seed = -3", "seed in FILE ", ""),
        ("stats = true\nno-stats = true", "no-stats in FILE sets what stats in FILE sets, too", ""),
        ("model = ", "FILE is not valid TOML: ", "correct it, or go without it: KV_CONFIG=none"),
    ],
)
def test_what_is_wrong_in_the_file(text: str, message: str, hint: str, config: Path, kv: Caller) -> None:
    config.write_text(text)
    outcome = kv("run", "hello")
    told = outcome.err.replace(str(config), "FILE").splitlines()
    assert (outcome.code, outcome.out, kv.opened) == (2, "", [])
    assert told[0].startswith(f"kv: error: {message}") and told[1:] == ([f"  {hint}"] if hint else told[1:])
    assert kv("run", "--help").code == kv("--version").code == 0  # these ask nobody
    assert json.loads(kv("run", "hello", "--json").out)["error"]["code"] == 2


def test_what_is_wrong_elsewhere_in_the_file(config: Path, kv_here: KvHere) -> None:
    """Each command reads its own table and the top; a key is nowhere passed over in silence."""
    config.write_text("[chat.sl]\njson = true")
    assert kv_here("chat", "--script")[2].startswith(f"kv: error: chat.sl in {config} is not a setting\n")
    assert kv_here("chat", "ls")[2].startswith(f"kv: error: chat.sl in {config} is not a setting\n")
    config.write_text("[cache.bulid]\nraw = true\n[bench]\nrepetition = 1")
    assert kv_here("cache", "ls")[2].startswith(f"kv: error: cache.bulid in {config} is not a setting\n")
    assert kv_here("bench")[2] == (
        f"kv: error: bench.repetition in {config} is not a setting\n  did you mean bench.repetitions?\n"
    )
    assert kv_here("models", "path", "nothing")[0] == 3
    config.write_text("thread = 1")
    assert kv_here("models", "ls")[2].endswith("did you mean threads?\n")
    config.write_text("threads = 1\noffline = true")
    assert kv_here("models", "path", "nothing")[0] == 3
    config.unlink()
    config.mkdir()
    assert kv_here("models", "ls")[2].startswith(f"kv: error: cannot read {config}: Is a directory\n")


@pytest.mark.parametrize("name", ["KV_OFFLINE", "KV_EXACT", "KV_NO_STATS"])
def test_what_is_wrong_in_a_variable(name: str, kv: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "maybe")
    outcome = kv("run", "hello")
    assert (outcome.code, outcome.err) == (2, f"kv: error: {name} must be 1 or 0, not 'maybe'\n")
    monkeypatch.setenv(name, "0")
    assert kv("run", "hello").code == 0
    monkeypatch.setenv("KV_TEMP", "-1")
    assert kv("run", "hello").err.startswith("kv: error: KV_TEMP ")
    kv.engine.answers = ["x"]
    assert kv("run", "hello", "--temp", "1").code == 0


def test_measuring_takes_the_model_and_nothing_else(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of kv perplexity are no contexts, lists of types no types."""
    names = {words: {each.name for each in settings.shared(words, c.params)} for words, c in COMMANDS.items()}
    assert {"model", "threads", "device"} < names[("bench",)] & names[("perplexity",)] & names[("eval",)]
    for words in (("bench",), ("perplexity",), ("eval",), ("estimate",)):
        assert not names[words] & {"ctx_size", "cache_type", "cache_type_k", "seed", "evict", "window", "page_size"}
    assert {"ctx_size", "cache_type", "evict", "no_stdin"} < names[("cache", "build")]
    assert names[("tokenize",)] == {"model"} and "cache_dir" in names[("cache", "ls")]
    assert not names[("models", "rm")] and names[("chat", "rm")] <= {"cache_dir"} and not names[("chat", "export")]
    assert names[()] == {"verbose", "quiet", "color", "progress", "offline"}


def test_variables_of_other_programs_are_told(config: Path, kv: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OLLAMA_KV_CACHE_TYPE": "f32", "OLLAMA_HOST": "x", "KV_THREAD": "2", "KV_URL": "x"}.items():
        monkeypatch.setenv(name, value)
    assert asked(kv)[1].type_k == "f32"
    kv.engine.answers = ["x"]
    told = kv("run", "hello").err
    assert told == "kv: warning: KV_THREAD is not read: did you mean KV_THREADS?\n", "a mistake; the others need not be"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    taken = "OLLAMA_KV_CACHE_TYPE is taken for --cache-type; --cache-type and KV_CACHE_TYPE stand above it"
    unread = [
        "KV_THREAD is not read: did you mean KV_THREADS?",
        "OLLAMA_HOST is not read: kv serve --host and --port say where it listens",
    ]
    for expected in ([taken, *unread], [taken]):  # what nothing reads is told once
        kv.engine.answers = ["x"]
        told = " ".join(kv("run", "hello", "--no-stats").err.split())  # wrapped for the terminal
        assert told == " ".join(f"kv: {line}" for line in expected)
    kv.engine.answers = ["x"]
    assert kv("run", "hello", "--no-stats", "-ct", "f16").err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(main, "COMMANDS", ("run", "config"))
    assert json.loads(kv("config", "show", "--json").out)["unread"] == unread


def test_a_variable_that_is_almost_one_of_ours(config: Path, kv: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal it is said each time, also with -q and in JSON; an option of another command is none."""
    monkeypatch.setenv("KV_MODLE", "gemma-3-270m")
    monkeypatch.setenv("KV_SESSION", "one")  # of kv chat
    line = "KV_MODLE is not read: did you mean KV_MODEL?"
    for _ in range(2):
        kv.engine.answers = ["x"]
        assert kv("run", "hello", "-q").err == f"kv: warning: {line}\n"
    kv.engine.answers = ["x"]
    assert json.loads(kv("run", "hello", "--json").out)["warnings"] == [line]
    found = settings.Settings(("run",), lambda: {"threshold"}, {"KV_THRESHOLD": "1"})
    assert list(found.mistaken(["thresholds"])) == []


def test_a_variable_and_the_file_are_checked_as_what_is_typed(
    config: Path, kv: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text('device = "gpu9"')
    assert kv("run", "hello").err.startswith(f"kv: error: device in {config} must be auto, cpu, cuda or cuda:N, not")
    monkeypatch.setenv("KV_PAGE_SIZE", "17")
    outcome = kv("run", "hello", "--device", "cpu")
    assert outcome.code == 2 and outcome.err.startswith("kv: error: KV_PAGE_SIZE must be 16, 32, 64 or 128, not 17")


def test_every_value_is_checked_where_it_is_read() -> None:
    """What has no check of its own may be any text, or any number."""
    free = {
        "assistant",
        "system",
        "system-file",
        "cache-dir",
        "cache-mark",
        "branch",
        "seed of eval",
        "model of estimate",
    }
    for words, command in COMMANDS.items():
        for option in settings.settable(command.params):
            if option.callback is None and not option.is_flag:
                name = settings.name(option)
                assert {name, f"{name} of {' '.join(words)}"} & free


def test_another_config_file(config: Path, kv: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("threads = 2")
    (config.parent / "other").write_text("threads = 3")
    assert asked(kv)[0].threads == 2
    monkeypatch.setenv("KV_CONFIG", str(config.parent / "other"))
    assert asked(kv)[0].threads == 3
    monkeypatch.setenv("KV_CONFIG", "none")
    assert asked(kv)[0].threads == 0


def test_a_config_file_that_is_named_and_not_there(config: Path, kv: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = config.parent / "missing.toml"
    monkeypatch.setattr(main, "COMMANDS", ("run", "config"))
    assert json.loads(kv("config", "show", "--json").out)["unread"] == [], "the usual file need not be there"
    monkeypatch.setenv("KV_CONFIG", str(missing))
    line = f"KV_CONFIG is not read: there is no file {missing}"
    assert json.loads(kv("config", "show", "--json").out)["unread"] == [line]
    assert f"kv: warning: {line}" in kv("config", "show").err.splitlines()


def test_all_options_of_run_and_chat_are_settings_but_what_is_said_with_each_call() -> None:
    for words in (("run",), ("chat",)):
        left = set(map(settings.name, options(COMMANDS[words])))
        left -= {settings.name(option) for option in settings.shared(words, COMMANDS[words].params)}
        assert left <= {"prompt", "file", "output", "verbose", "quiet", "color", "progress", "offline"}
