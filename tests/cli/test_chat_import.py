"""Chats that are exported and imported again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import Caller
from chatcases import asked, chat
from fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from jsonchecks import check

from kvcli.cli import chatcost
from kvcli.cli.commands.chat import importing, transcript
from kvcli.runtime.promptcache import sessions

TRICKY = "see\n## User\nas \\## System  \n   ## User\n\\\\## Assistant\n## Users"


@pytest.fixture
def kv(monkeypatch, capfdbinary, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caller = Caller(monkeypatch, capfdbinary)
    caller.engine = FakeEngine(["one", TRICKY, "three", "four", "five", "six"])
    return caller


def test_json_makes_the_same_session(kv, tmp_path):
    """Branches, tokens and files; what goes on from it is what would have gone on."""
    (tmp_path / "a.txt").write_text("attached")
    chat(kv, f"/file {tmp_path / 'a.txt'}\nfirst\n/branch b\nsecond\n", "--session", "ann", "-sys", "be kind")
    before = sessions.value_of("ann")
    file = str(tmp_path / "ann.json")
    assert kv("chat", "export", "ann", "-o", file).code == 0
    check("chat export", json.loads(Path(file).read_text()))
    taken = kv("chat", "import", file)
    assert (taken.code, taken.out) == (2, "") and "there is a saved chat 'ann' already" in taken.err
    done = kv("chat", "import", file, "--name", "eve")
    assert done.code == 0 and "saved as eve, 2 turns; kv chat --resume eve goes on with it" in done.err
    assert sessions.value_of("eve") == {**before, "name": "eve"}
    assert sessions.path_of("eve").stat().st_mode & 0o777 == 0o600
    prompts = []
    for name in ("ann", "eve"):
        kv.engine.answers = ["same"]
        assert chat(kv, "more\n", "--resume", name).code == 0
        prompts.append(asked(kv))
    assert prompts[0] == prompts[1] and TRICKY in prompts[0]
    inside = str(tmp_path / "inside.json")
    assert chat(kv, f"/export {inside}\n", "--resume", "ann").code == 0
    assert json.loads(Path(inside).read_text())["whole"] == sessions.value_of("ann")
    assert kv("chat", "rm", "ann", "-y").code == 0
    value = json.loads(kv("chat", "import", file, "--json").out)
    check("chat import", value)
    assert (value["session"], value["turns"]) == ("ann", 2) and sessions.value_of("ann") == before


def test_markdown_keeps_the_text(kv, tmp_path):
    chat(kv, "first\nsecond\n", "--session", "ann", "-sys", "be\n## System\nkind")
    file = str(tmp_path / "trip.md")
    kv("chat", "export", "ann", "--md", "-o", file)
    assert kv("chat", "import", file, "--name", "eve").code == 0
    assert sessions.read("eve").messages() == sessions.read("ann").messages()
    kv.engine.answers = ["go on"]
    outcome = chat(kv, "more\n", "--resume", "eve")
    assert outcome.code == 0 and "second" in asked(kv) and "last used with" not in outcome.err
    kv("chat", "import", file, "--name", "new")
    listed = json.loads(kv("chat", "ls", "--json").out)
    check("chat ls", listed)
    assert "  -  " in next(line for line in kv("chat", "ls").out.splitlines() if line.startswith("new"))
    assert {each["session"]: each["model"] for each in listed["sessions"]} == {
        "ann": "smollm2", "eve": "smollm2", "new": None,
    }  # fmt: skip


@given(st.lists(st.text("#\\ \nUserAistanSym", max_size=40).map(str.strip), min_size=1, max_size=4))
def test_no_text_looks_like_a_heading(texts):
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    value, _ = importing._of_markdown("x.md", transcript.as_markdown(messages, "title"))
    assert value["branches"]["main"]["messages"] == messages


def test_messages_of_other_programs(kv, tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "refusal": None}]
    for number, value in enumerate((messages, {"messages": messages, "model": "x"})):
        (tmp_path / f"talk {number}.json").write_text(json.dumps(value))
        assert kv("chat", "import", str(tmp_path / f"talk {number}.json")).code == 0
        found = sessions.read(f"talk-{number}")
        assert found.messages() == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no chat: it has no heading"),
        ("# A title\n\nand text", "is no chat: it has no heading"),
        ("{", "is no JSON"),
        ("{}", "it has no messages"),
        ("[]", "it has no messages"),
        ("[1]", "message 1 has no role and content"),
        ('[{"role": "user", "content": [1]}]', "message 1 has no role and content"),
        ('[{"role": "assistant", "content": "x"}]', "one of 'assistant', not of 'user'"),
        (
            '[{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]',
            "behind 1 message there is one of 'tool'",
        ),
        ("## Assistant\n\nx", "one of 'assistant', not of 'user'"),
        ('{"whole": {"kv_session": 9}}', "another version"),
        ('{"whole": {"kv_session": 1, "branches": 3}}', "its chat makes no sense"),
        ('{"whole": 7}', "its chat makes no sense"),
        ("\xff", "byte 0 is not UTF-8"),
    ],
)
def test_a_broken_file_is_one_clear_line(kv, tmp_path, text, message):
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("latin-1"))
    found = kv("chat", "import", str(file))
    assert found.code in (2, 3, 5, 65) and found.out == "" and message in found.err and "Traceback" not in found.err
    assert len([line for line in found.err.splitlines() if line.startswith("kv: error")]) == 1
    assert sessions.names() == []


def test_files_that_are_not_there_and_names_that_are_none(kv, tmp_path):
    assert "cannot read" in kv("chat", "import", str(tmp_path / "none.json")).err
    (tmp_path / "---.md").write_text("## User\n\nhi\n")
    assert "says no name" in kv("chat", "import", str(tmp_path / "---.md")).err
    assert "is not a name" in kv("chat", "import", str(tmp_path / "---.md"), "--name", "a/b").err


def test_what_a_chat_takes_is_told(kv, tmp_path):
    outcome = chat(kv, "first\n/branch b\n/branch\n/ctx\n", "--session", "ann")
    assert "  main: 1 turn" in outcome.err and "* b: 1 turn" in outcome.err
    assert "on disk: text " in outcome.err
    (entry,) = json.loads(kv("chat", "ls", "--json").out)["sessions"]
    assert entry["text_bytes"] == chatcost.text_bytes("ann") > 0 and entry["rows_bytes"] == 0
    assert "size" in kv("chat", "ls").out
