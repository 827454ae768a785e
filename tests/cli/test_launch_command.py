"""`kv launch`: an agent is started with a server of its own, and told of it."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
import tiny
from conftest import KvHere
from serving import TEMPLATE

from kvcli.cli.agents import AGENTS, KEY, Place
from kvcli.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLACE = Place("http://127.0.0.1:7", "secret", 'a "model"', 4096)

# An agent that asks as the real one does, from what it was told, and notes all of it.
SCRIPT = """#!{python}
import json, os, sys, tomllib
from urllib.request import Request, urlopen
told = dict(os.environ)
if "claude" in sys.argv[0]:
    url, key, model = told["ANTHROPIC_BASE_URL"] + "/v1/messages", told["ANTHROPIC_AUTH_TOKEN"], told["ANTHROPIC_MODEL"]
    body = {{"model": model, "max_tokens": 4, "temperature": 0, "messages": [{{"role": "user", "content": "hello"}}]}}
elif "codex" in sys.argv[0]:
    options = tomllib.loads("\\n".join(sys.argv[i + 1] for i, word in enumerate(sys.argv) if word == "-c"))
    provider = options["model_providers"][options["model_provider"]]
    url, key, model = provider["base_url"] + "/responses", told[provider["env_key"]], options["model"]
    body = {{"model": model, "max_output_tokens": 4, "temperature": 0, "input": "hello", "store": False}}
else:
    options = json.loads(told["OPENCODE_CONFIG_CONTENT"])
    name, _, model = options["model"].partition("/")
    settings = options["provider"][name]["options"]
    url, key = settings["baseURL"] + "/chat/completions", settings["apiKey"]
    body = {{"model": model, "max_tokens": 4, "temperature": 0, "messages": [{{"role": "user", "content": "hello"}}]}}
head = {{"Authorization": "Bearer " + key, "Content-Type": "application/json"}}
answer = json.load(urlopen(Request(url, json.dumps(body).encode(), head), timeout=60))
print(json.dumps({{"url": url, "usage": answer["usage"], "words": sys.argv[1:], "model": model}}))
sys.exit(7)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in AGENTS:
        path = folder / name
        path.write_text(SCRIPT.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the scripted agent reads TOML")
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_answered_and_its_exit_code_returned(name: str, programs: Path, kv_here: KvHere) -> None:
    template = str(programs / "template.jinja")
    options = ("-m", str(tiny.make("llama").path), "-c", "256", "--chat-template", template)
    code, out, err = kv_here("launch", *options, name, "--verbose", "-n", "a b")
    assert code == 7, err
    told = json.loads(out)
    assert told["model"] == "llama" and told["words"][-3:] == ["--verbose", "-n", "a b"]
    used = {**told["usage"]}
    assert used.get("output_tokens", used.get("completion_tokens")) == 4
    with pytest.raises(OSError):  # the server has ended with it
        urlopen(told["url"], timeout=5)


def test_programs_that_cannot_be_started(
    kv_here: KvHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: Path
) -> None:
    assert kv_here("launch", "emacs")[0] == 2
    monkeypatch.setenv("OPENCODE_CONFIG_CONTENT", "[1]")
    code, _, err = kv_here("launch", "-m", "no-such-model", "opencode")
    assert code == 2 and "OPENCODE_CONFIG_CONTENT" in err
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    code, _, err = kv_here("launch", "claude")
    assert code == 2 and "claude is not installed" in err


def test_what_claude_is_told() -> None:
    told = AGENTS["claude"](PLACE, {"ANTHROPIC_API_KEY": "of the user"})
    assert told.words == () and told.variables["ANTHROPIC_API_KEY"] == ""
    assert {v for n, v in told.variables.items() if n.endswith("_MODEL")} == {'a "model"'}


def test_what_codex_is_told_is_toml() -> None:
    told = AGENTS["codex"](PLACE, {})
    options = tomllib.loads("\n".join(told.words[1::2]))
    assert set(told.words[::2]) == {"-c"} and told.variables == {KEY: "secret"}
    assert options["model"] == 'a "model"' and options["model_context_window"] == 4096
    provider = options["model_providers"][options["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:7/v1" and provider["env_key"] == KEY


def test_what_opencode_is_told_leaves_what_the_user_says() -> None:
    before = {"OPENCODE_CONFIG_CONTENT": '{"theme": "x", "provider": {"mine": {"npm": "y"}}}'}
    found = json.loads(AGENTS["opencode"](PLACE, before).variables["OPENCODE_CONFIG_CONTENT"])
    assert found["theme"] == "x" and set(found["provider"]) == {"mine", "kv"} and found["model"] == 'kv/a "model"'
    for wrong in ("[1]", "{", '{"provider": 1}'):
        with pytest.raises(UsageError, match="OPENCODE_CONFIG_CONTENT"):
            AGENTS["opencode"](PLACE, {"OPENCODE_CONFIG_CONTENT": wrong})


def test_options_of_the_program_are_not_those_of_kv(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = kv_here("launch", "-m", "x.gguf", "codex", "exec", "--json")
    assert (code, out) == (2, "") and "codex is not installed" in err
