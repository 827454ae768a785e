"""`--engine vllm`, over a program that behaves as vLLM does: what it is started with, what it is asked, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from conftest import ROOT
from staying import is_alive, until

pytestmark = pytest.mark.slow
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


class Vllm:
    """`kv` where a program called vllm is in PATH."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.command, self.folder, self.seen_at = command, folder, folder / "seen"
        for name in ("bin", "tiny", "broken"):
            (folder / name).mkdir()
        for name in ("tiny", "broken"):
            (folder / name / "config.json").write_text("{}")
        program = folder / "bin/vllm"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/support/fakevllm.py "$@"\n')
        program.chmod(0o755)
        path = f"{folder}/bin:{environment['PATH']}"
        self.environment = environment | {"PATH": path, "FAKE_VLLM_SEEN": str(self.seen_at), "KV_CONFIG": "none"}

    def start(self, *args: str, **more: str) -> subprocess.Popen[str]:
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*self.command, *args], env=self.environment | more, cwd=self.folder, **pipes)

    def run(self, *args: str, **more: str) -> tuple[int, str, str]:
        with self.start(*args, **more) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def serve(self, *args: str, **more: str) -> tuple[subprocess.Popen[str], str]:
        """The process, and its address."""
        process = self.start("serve", "--engine", "vllm", "-m", "tiny", "--port", "0", *args, **more)
        assert process.stderr is not None
        while not (found := re.search(r"http://\S+", line := process.stderr.readline())):
            assert line, "it did not start"
        return process, found[0]

    @property
    def started(self) -> dict[str, Any]:
        return json.loads(self.seen_at.read_text().splitlines()[0])

    @property
    def asked(self) -> dict[str, Any]:
        """The last call."""
        return json.loads(self.seen_at.read_text().splitlines()[-1])

    def is_gone(self) -> bool:
        return not any(map(is_alive, self.started["pids"]))


@pytest.fixture(scope="module")
def vllm(kv_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KV_", "HF_"))}
    return Vllm(kv_command, kept | {"KV_CONFIG": "none"}, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def served(vllm: Vllm) -> Iterator[str]:
    process, address = vllm.serve("--temp", "0.5", "--alias", "other")
    yield address
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "") and "stopped" in err
    assert vllm.is_gone()


def test_one_answer(vllm: Vllm) -> None:
    options = ("-c", "1k", "-ct", "fp8", "--no-cache", "-ub", "128", "--tp", "2", "--pp", "4", "--nodes", "2")
    more = ("--cpu-offload", "4GiB", "--vram-limit", "0.5", "--page-size", "32", "--no-stats")
    how = ("-n", "3", "--top-k", "7", "--repeat-penalty", "1.1", "-r", "X", "--logit-bias", "5+1", "-sys", "Be brief.")
    code, out, err = vllm.run("run", "--engine", "vllm", "-m", "tiny", *options, *more, *how, "one two three four")
    assert (code, out) == (0, "one two three \n"), err
    words, folder = vllm.started["words"], str(vllm.folder / "tiny")
    assert words[words.index("serve") + 1] == folder and words[words.index("--served-model-name") + 1] == "tiny"
    pairs = {
        "--max-model-len": "1024", "--kv-cache-dtype": "fp8_e4m3", "--max-num-batched-tokens": "128",
        "--tensor-parallel-size": "2", "--pipeline-parallel-size": "4", "--distributed-executor-backend": "ray",
        "--cpu-offload-gb": "4", "--gpu-memory-utilization": "0.5", "--block-size": "32",
    }  # fmt: skip
    assert {name: words[words.index(name) + 1] for name in pairs} == pairs
    assert "--no-enable-prefix-caching" in words
    body = vllm.asked["body"]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    told = {"max_tokens": 3, "top_k": 7, "repetition_penalty": 1.1, "stop": ["X"], "logit_bias": {"5": 1.0}}
    assert {name: body[name] for name in told} == told and "temperature" not in body
    assert vllm.is_gone()


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["-m", "tiny", "--evict", "sink"], 2, "--evict cannot be used with vllm: it forgets nothing"),
        (["-m", "tiny", "-ct", "int5"], 2, "int5 is no type of vllm"),
        (["-m", "smollm2"], 2, "it does not read GGUF files"),
        (["-m", "smollm2", "--engine", "llama.cpp"], 2, "kv estimate MODEL --print-args llama-server prints"),
        (["-m", "broken"], 3, "vLLM ended with exit code 1\n  ValueError: this model is broken"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (["-m", "tiny", "-ctk", "fp8"], 2, "one type for keys and values"),
                (["-m", "tiny", "--json"], 2, "does not tell what its cache holds"),
                (["-m", "tiny", "--vram-limit", "6G"], 2, "vLLM takes a share"),
                (["-m", "bin"], 3, "bin has no config.json"),
                (["-m", "tiny", "--tp", "3", "--nodes", "2"], 2, "--nodes 2 does not divide the 3 GPUs"),
            )
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_vllm_cannot_mean(vllm: Vllm, args: list[str], code: int, told: str) -> None:
    found, out, err = vllm.run("run", "--engine", "vllm", *args, "hello")
    assert found == code and told in err + out, err
    assert ("vllm: ValueError" in err) == ("broken" in args)


def test_settings_that_it_cannot_mean_are_told(vllm: Vllm) -> None:
    args = ("run", "--engine", "vllm", "-m", "tiny", "hello you")
    code, out, err = vllm.run(*args, KV_THREADS="3", KV_CTX_SIZE="512", KV_PROGRESS="off")
    assert (code, out) == (0, "hello you \n") and vllm.started["words"].count("512") == 1
    assert "a setting changes nothing: --threads cannot be used with vllm" in err
    assert "needs --engine vllm" in vllm.run("run", "-m", "tiny", "--tp", "2", "x")[2]
    assert "not in PATH" in vllm.run(*args, PATH="/usr/bin")[2]


def test_every_option_has_a_meaning(vllm: Vllm) -> None:
    """Or a reason why it has none."""
    from kvcli.cli.main import command_of
    from kvcli.peers.mapping import TABLE

    process = {"--help", "--verbose", "--quiet", "--color", "--progress", "--offline", "--version"}
    for name in ("run", "serve"):
        params = command_of(name).commands[name].params
        names = {next(o for o in p.opts if o.startswith("--")) for p in params if p.param_type_name == "option"}
        assert names - process - set(TABLE) == set()


def test_openai_passes_through(vllm: Vllm, served: str) -> None:
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "red green blue"}]
    stream = client.chat.completions.create(model="other", messages=messages, stream=True, seed=4)
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "red green blue "
    assert len(chunks) == 6
    asked = vllm.asked["body"]
    assert (asked["model"], asked["temperature"], asked["seed"]) == ("tiny", 0.5, 4)
    whole = client.chat.completions.create(model="tiny", messages=messages, extra_body={"some_key": 1})
    assert whole.choices[0].message.content == "red green blue " and vllm.asked["body"]["some_key"] == 1
    done = client.completions.create(model="tiny", prompt="a b", stream=True)
    assert "".join(each.choices[0].text for each in done if each.choices) == "a b "
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "refuse"}])
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        client.chat.completions.create(model="none", messages=messages)
    assert [each.id for each in client.models.list()] == ["tiny"]
    response = client.responses.create(model="tiny", input="one two", temperature=0)
    assert response.output_text == "one two " and response.usage and response.usage.input_tokens == 7


def test_anthropic_is_translated(vllm: Vllm, served: str) -> None:
    client = anthropic.Anthropic(base_url=served, api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "red green blue"}]}
    whole = client.messages.create(**asked, system="Be brief.", stop_sequences=["X"])
    assert whole.content[0].text == "red green " and whole.usage.output_tokens == 2  # type: ignore[union-attr]
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (3, 4)
    body = vllm.asked["body"]
    assert body["messages"][0]["content"] == "Be brief." and body["stop"] == ["X"] and body["temperature"] == 0.5
    thinking: Any = {"type": "enabled", "budget_tokens": 100}
    with client.messages.stream(**asked, thinking=thinking) as stream:
        assert "".join(stream.text_stream) == "red green "
        kinds = [block.type for block in stream.get_final_message().content]
    assert kinds == ["thinking", "text"] and vllm.asked["body"]["chat_template_kwargs"]["enable_thinking"]
    tools: Any = [{"name": "f", "input_schema": TOOL["parameters"]}]
    found = client.messages.create(**asked, tools=tools, tool_choice={"type": "any"})
    assert found.stop_reason == "tool_use" and found.content[0].input == {"a": 1}  # type: ignore[union-attr]
    assert vllm.asked["body"]["tool_choice"] == "required"
    assert client.messages.count_tokens(model="tiny", messages=asked["messages"]).input_tokens == 3
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        client.messages.create(model="tiny", max_tokens=2, messages=[{"role": "user", "content": "refuse"}])


def test_ollama_is_translated(vllm: Vllm, served: str) -> None:
    client = ollama.Client(host=served)
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "red green blue"}]}
    assert "".join(each.message.content or "" for each in client.chat(**asked, stream=True)) == "red green blue "
    schema = {"type": "object", "properties": {}}
    assert client.chat(**asked, options={"num_predict": 1}, format=schema).message.content == "red "
    assert vllm.asked["body"]["response_format"]["json_schema"]["schema"] == schema
    called = client.chat(**asked, tools=[{"type": "function", "function": TOOL}]).message.tool_calls
    assert called and called[0].function.arguments == {"a": 1}
    assert client.generate("tiny", words := "a b " * 12, raw=True).response == words  # as long as the context allows
    with pytest.raises(ollama.ResponseError, match="repeat_last_n"):
        client.chat(**asked, options={"repeat_last_n": 3})
    assert [each.model for each in client.list().models] == ["tiny"]


def test_what_is_asked_of_the_server_itself(served: str) -> None:
    def post(path: str, body: Any) -> Any:
        return httpx.post(served + path, json=body, trust_env=False).json()

    assert httpx.get(served + "/health", trust_env=False).json() == {"status": "ok"}
    assert "vllm:num_requests_running" in httpx.get(served + "/metrics", trust_env=False).text
    assert httpx.get(served + "/slots", trust_env=False).status_code == 501
    assert post("/tokenize", {"content": "a b", "with_pieces": True})["tokens"][1] == {"id": 1, "piece": "b"}
    assert post("/detokenize", {"tokens": [1, 2]}) == {"content": "1 2"}
    assert "not JSON" in httpx.post(served + "/v1/completions", content="{", trust_env=False).json()["error"]["message"]


def test_it_ends_with_the_server(vllm: Vllm) -> None:
    process, _ = vllm.serve()
    process.kill()
    process.communicate()
    until(vllm.is_gone)


def test_a_client_that_goes_away_ends_its_answer(vllm: Vllm) -> None:
    process, address = vllm.serve("--parallel", "1", "--queue", "0", FAKE_VLLM_PAUSE="0.1")
    asked = {"messages": [{"role": "user", "content": "word " * 60}], "stream": True}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=asked, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        busy = httpx.post(f"{address}/v1/messages", json={**asked, "max_tokens": 1}, trust_env=False)
        assert busy.status_code == 429
    time.sleep(0.2)
    assert httpx.post(f"{address}/api/generate", json={"prompt": "a b", "stream": False}, trust_env=False).is_success
    process.terminate()
    process.communicate(timeout=30)
    assert vllm.is_gone()


def test_where_vllm_ends_by_itself_so_does_the_server(vllm: Vllm) -> None:
    process, address = vllm.serve()
    asked = {"messages": [{"role": "user", "content": "die"}]}
    found = httpx.post(f"{address}/v1/chat/completions", json=asked, trust_env=False, timeout=30)
    assert found.status_code == 503 and "vLLM does not answer" in found.json()["error"]["message"]
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3 and "vLLM ended with exit code 3" in err
