"""How the words of a command line are read, and what is said of those that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import KvHere
from test_helptext import COMMANDS, options

from kvcli.cli import commandline, foreign, main
from kvcli.errors import UsageError

RUN = COMMANDS[("run",)].params


def ours(*args: str) -> list[str]:
    return commandline.Reader(RUN, "kv run").read(args)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (("-n5", "-c32k", "-t2", "-s-1"), "--predict=5 --ctx-size=32k --threads=2 --seed=-1"),
        (("-n=5", "-ub512", "-ctk=int8", "--temp=-1"), "--predict=5 --ubatch-size=512 --cache-type-k=int8 --temp=-1"),
        (("-n", "-1", "--stop", "--raw", "-f", "-"), "--predict=-1 --stop=--raw --file=-"),
        (("-vq", "-vv", "--raw"), "-vq -vv --raw"),
        (("-f./notes", "-o/tmp/x"), "--file=./notes --output=/tmp/x"),
        (("hi", "--", "-ngl", "--num-ctx"), "hi -- -ngl --num-ctx"),
        (("--ctx_size", "4k", "--cache_type_k=f16"), "--ctx-size=4k --cache-type-k=f16"),
        (("--num-ctx", "4k", "--max-model-len=8k"), "--ctx-size=4k --ctx-size=8k"),
        (("-hf", "org/x:Q8_0", "hello"), "--model=org/x:Q8_0 hello"),
        (("--kv-cache-dtype", "fp8", "--gpu-memory-utilization", "0.9"), "--cache-type=fp8 --vram-limit=0.9"),
        (("--enable-prefix-caching", "--no-perf"), "--cache --no-stats"),
        (("--num_predict=5",), "--predict=5"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_words_as_options_of_ours(given: tuple[str, ...], taken: str) -> None:
    assert [word for each in ours(*given) for word in each.split(" ")] == taken.split(" ")


@pytest.mark.parametrize(
    ("word", "message", "hint"),
    [
        ("-ngl", "-ngl is not needed: --device picks the GPU and all layers go there", "see kv run --help"),
        ("-ngl99", "-ngl is not needed: ", ""),
        ("-ngl=99", "-ngl is not needed: ", ""),
        ("--n-gpu-layers=20", "--n-gpu-layers is not needed: --device picks", ""),
        ("-fa", "-fa is not needed: ", ""),
        ("--flash-attn", "--flash-attn is not needed: ", ""),
        ("-cnv", "-cnv is the command kv chat here", ""),
        ("-nkvo", "-nkvo has no counterpart: ", ""),
        ("-no-cnv", "-no-cnv is not needed: kv run answers one prompt", "see kv run --help"),
        ("-no-display-prompt", "-no-display-prompt is not needed: only the answer", ""),
        ("-mli", '-mli is not needed: in kv chat """', ""),
        ("--num-gpu-blocks-override", "--num-gpu-blocks-override is not needed: pages", ""),
        ("--no-mmap", "--no-mmap is not needed: ", ""),
        ("--modle", "no such option: --modle", "did you mean --model"),
        ("--temprature=1", "no such option: --temprature", "did you mean --temperature?"),
        ("--ctx", "no such option: --ctx", "did you mean --ctx-size?"),
        ("-model", "no such option: -model", "did you mean --model?"),
        ("--bogus", "no such option: --bogus", "see kv run --help"),
        ("-ohello", "no such option: -ohello", "did you mean -o hello?"),
        ("-q5", "-q takes no value: -q5", "see kv run --help"),
        ("-5", "no such option: -5", "see kv run --help"),
        ("--raw=1", "--raw takes no value: --raw=1", "see kv run --help"),
    ],
)
def test_words_that_are_no_options(word: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        ours(word, "99", "hello")
    assert refused.value.message.startswith(message) and refused.value.hint.startswith(hint)


def test_a_row_of_letters_is_no_option(kv_here: KvHere) -> None:
    """-hf was -h and -f, and printed the help; -nkvo was -n kvo."""
    known = {name for param in RUN for name in (*param.opts, *param.secondary_opts)}
    for name in (name for name in (*foreign.ALIASES, *foreign.NOTES) if not name.startswith("--")):
        assert name not in known
    code, out, err = kv_here("models", "-ls")
    assert (code, out, err) == (2, "", "kv: error: no such option: -ls\n  see kv models --help\n")
    assert kv_here("--ofline", "models", "ls")[2] == "kv: error: no such option: --ofline\n  did you mean --offline?\n"


def test_the_table_of_other_programs() -> None:
    """What stands in it is not ours, and what it leads to is."""
    names = {name for path in (("run",), ("chat",)) for param in options(COMMANDS[path]) for name in param.opts}
    names |= {name for param in options(COMMANDS[("run",)]) for name in param.secondary_opts}
    assert sorted({*foreign.ALIASES, *foreign.NOTES} & names) == []
    assert set(foreign.ALIASES) & set(foreign.NOTES) == set()
    assert sorted(set(foreign.ALIASES.values()) - names) == []
    assert sorted({f"--{ours}" for ours in foreign.VARIABLES.values()} - names) == []
    assert set(foreign.COMMANDS).isdisjoint(name for name in main.COMMANDS)
    for text in (*foreign.NOTES.values(), *foreign.COMMANDS.values()):
        named = [word.strip(".,:;\"'") for word in text.split() if word.startswith("--")]
        known = {name for command in COMMANDS.values() for param in command.params for name in param.opts}
        assert [name for name in named if name not in known] == [], text


def test_a_negative_number_is_a_value_where_a_command_has_one() -> None:
    reader = commandline.Reader(COMMANDS[("config", "set")].params, "kv config set")
    assert reader.read(["seed", "-1"]) == ["--", "seed", "-1"]
    assert reader.read(["stop", "-q", "a", "-1.5", "--", "-b"]) == ["--quiet", "--", "stop", "a", "-1.5", "-b"]
    with pytest.raises(UsageError, match="no such option: -1x"):
        reader.read(["seed", "-1x"])


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("ls", "kv ls", "kv models ls lists models"),
        ("list", "kv list", "kv models ls lists models"),
        ("api", "kv api", "kv serve answers other programs"),
        ("show", "kv show", "kv inspect MODEL"),
        ("config get ctx-size", "kv config get", "kv config show lists settings, kv config show NAME shows one"),
        ("config ls", "kv config ls", "kv config show lists"),
        ("rnu", "kv rnu", "did you mean kv run?"),
        ("models list", "kv models list", "did you mean kv models ls?"),
        ("models nonsense", "kv models nonsense", "see kv models --help"),
        ("nonsense", "kv nonsense", "see kv --help"),
    ],
)
def test_commands_that_do_not_exist(words: str, message: str, hint: str, kv_here: KvHere) -> None:
    code, out, err = kv_here(*words.split())
    assert (code, out) == (2, "") and err.startswith(f"kv: error: no such command: {message}\n  {hint}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", *(f"c{i}.txt" for i in range(60))):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("run", "hello", "world"), "unexpected argument: world\n  put the text in quotes"),
        (("run", "smollm2", "hi"), "unexpected argument: hi\n  kv run -m smollm2 ... takes the model smollm2"),
        (("estimate", "smollm2", "--gpu"), "--gpu needs a value: --gpu NAME\n  see kv estimate --help"),
        (("run", "hi", "-f"), "-f needs a value: -f FILE\n  see kv run --help"),
        (
            ("cache", "show", "x", "-m", "--tokens"),
            "-m needs a value: -m MODEL, and --tokens is an option\n  see kv cache show --help",
        ),
        (("tokenize", "a", "b", "c"), "unexpected arguments: b c\n  put the text in quotes"),
        (("run", "-f", "a.txt", "b.txt", "c0.txt"), "c0.txt\n  repeat -f for each file, or cat FILES | kv run"),
        (("tokenize", "-f", "a.txt", "b.txt", "c0.txt"), "c0.txt\n  cat FILES | kv tokenize"),
        (("run", "-f", *(f"c{i}.txt" for i in range(60))), "arguments: c2.txt c3.txt c4.txt and 55 more\n  repeat -f"),
        (("models", "path", "smollm2", "x"), "unexpected argument: x\n  see kv models path --help"),
        (
            ("run", "-hello"),
            "no such option: -hello\n  see kv run --help; for a text that begins with -: kv run",
        ),
        (("run", "-5"), "no such option: -5\n"),
        (("models", "ls", "-hello"), "no such option: -hello\n  see kv models ls --help\n"),
    ],
    ids=lambda x: " ".join(x)[:30] if isinstance(x, tuple) else "",
)
def test_hints(args: tuple[str, ...], told: str, folder: Path, kv_here: KvHere) -> None:
    code, out, err = kv_here(*args)
    assert (code, out) == (2, "") and told in err and len(err) < 200
