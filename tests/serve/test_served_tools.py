"""Calls of tools through every interface, by its own client; the model writes them because a grammar says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import jsonschema
import ollama
import openai
import pytest
from chattemplates import TEMPLATES
from serving import Server, open_engine, running

from kvcli.runtime.engine.events import Token
from kvcli.runtime.text.tools.parts import CallPart
from kvcli.serve import wire
from kvcli.serve.ollama import _Lines
from kvcli.serve.replies import Reply

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Genève"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "What it is like", "parameters": SCHEMA}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
HELLO: Any = [{"role": "user", "content": "Hello"}]
CHAT, ODD = "/v1/chat/completions", {"properties": {"b": {"type": "odd"}}}
SERVED: Any = {"max_tokens": 1, "tools": [{"type": "bash_2", "name": "b"}]}
BOTH: Any = [*SERVED["tools"], {"name": "now", "input_schema": {"type": "object"}}]
SEARCH: Any = {"messages": None, "input": "x", "tools": [{"type": "web_search"}]}
ASKED: Any = {"model": "tiny", "temperature": 0.7, "seed": 5, "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def calling() -> Iterator[Server]:
    with running(open_engine(template=TEMPLATES["qwen3"], ctx_size=2048)) as server:
        yield server


@pytest.fixture(scope="module")
def client(calling: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0)


def test_required_and_named_calls(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        found = client.chat.completions.create(messages=HELLO, tools=TOOLS, tool_choice=choice, **ASKED)
        message = found.choices[0].message
        assert found.choices[0].finish_reason == "tool_calls" and message.content is None
        assert message.tool_calls is not None and len(message.tool_calls) == 1
        call = message.tool_calls[0]
        assert call.function.name in ("get_weather", "now") and len(call.id) == 9  # type: ignore[union-attr]
    assert call.function.name == "get_weather"  # type: ignore[union-attr]
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)  # type: ignore[union-attr]


def test_a_stream_of_calls_is_what_a_whole_answer_has(client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "n": 2, "max_tokens": 300}
    asked |= {"parallel_tool_calls": True}
    whole = client.chat.completions.create(**asked).choices
    streamed: list[dict[int, list[str]]] = [{}, {}]
    reasons = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        for part in choice.delta.tool_calls or []:
            assert part.function is not None
            if part.index not in streamed[choice.index]:
                assert part.id and part.function.name
                streamed[choice.index][part.index] = [part.function.name, ""]
            streamed[choice.index][part.index][1] += part.function.arguments or ""
    for choice, pieces in zip(whole, streamed, strict=True):
        assert [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or []] == list(
            pieces.values()
        )  # type: ignore[union-attr]
    assert reasons == [choice.finish_reason for choice in whole]


def test_with_auto_a_grammar_begins_with_the_mark(calling: Server) -> None:
    """The beginning of the answer is given: from there on it is a call."""
    begun = [*HELLO, {"role": "assistant", "content": "I look.\n<tool_call>"}]
    found = calling.post("/v1/chat/completions", {**ASKED, "messages": begun, "tools": TOOLS}).json()["choices"][0]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] == "I look."
    (call,) = found["message"]["tool_calls"]
    schema = {"get_weather": SCHEMA, "now": NOW["parameters"]}[call["function"]["name"]]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_with_auto_an_answer_without_a_mark_is_free(calling: Server) -> None:
    asked = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
    none = calling.post("/v1/chat/completions", {**asked, "tools": TOOLS, "tool_choice": "none"}).json()
    plain = calling.post("/v1/chat/completions", asked).json()
    assert none["choices"] == plain["choices"] and none["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    auto = calling.post("/v1/chat/completions", {**asked, "tools": TOOLS}).json()
    assert auto["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert auto["choices"][0]["finish_reason"] == "length" and "tool_calls" not in auto["choices"][0]["message"]


def test_a_form_of_the_answer_or_a_call(calling: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    for seed in range(6):
        asked = {**ASKED, "seed": seed, "messages": HELLO, "tools": TOOLS, "response_format": form, "max_tokens": 300}
        message = calling.post("/v1/chat/completions", asked).json()["choices"][0]["message"]
        assert message.get("tool_calls") or json.loads(message["content"]) in ("yes", "no")


def test_a_conversation_with_calls_is_rendered_by_the_template(calling: Server) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "now", "arguments": '{"a": [1, "é"]}'}}
    told = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    told += [{"role": "tool", "tool_call_id": "abc", "content": "12:00"}]
    expected = '<tool_call>\n{"name": "now", "arguments": {"a": [1, "é"]}}\n</tool_call>'
    rendered: list[str] = []
    text = calling.host.loaded[0].text
    assert text.template is not None
    real = text.template.render_segments
    text.template.render_segments = lambda *a, **k: (s := real(*a, **k), rendered.append("".join(t for t, _ in s)))[0]  # type: ignore[method-assign]
    try:
        assert calling.post("/v1/chat/completions", {"messages": told, "max_tokens": 1}).status_code == 200
        blocks = [
            {"role": "user", "content": "Hello"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "x", "name": "now", "input": {"a": [1, "é"]}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "12:00"}]},
        ]
        assert calling.post("/v1/messages", {"messages": blocks, "max_tokens": 1}).status_code == 200
        items = [
            *HELLO, {"type": "function_call", "call_id": "x", "name": "now", "arguments": '{"a": [1, "é"]}'},
            {"type": "function_call_output", "call_id": "x", "output": "12:00"},
        ]  # fmt: skip
        assert calling.post("/v1/responses", {"input": items, "max_output_tokens": 1}).status_code == 200
        said = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {"a": [1, "é"]}}}]}
        lines = [*HELLO, said, {"role": "tool", "tool_name": "now", "content": "12:00"}]
        asked = {"messages": lines, "options": {"num_predict": 1}, "stream": False}
        assert calling.post("/api/chat", asked).status_code == 200
    finally:
        del text.template.render_segments
    chats = [each for each in rendered if "12:00" in each]
    assert len(chats) == 4 and len(set(chats)) == 1
    assert expected in chats[0] and "<tool_response>\n12:00\n</tool_response>" in chats[0]


def test_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **WEATHER, "strict": True}]
    asked: Any = {"model": "tiny", "input": "Hello", "tools": tools, "tool_choice": "required", "temperature": 0}
    found = client.responses.create(**asked, parallel_tool_calls=False)
    (item,) = found.output
    assert item.type == "function_call" and item.name == "get_weather" and found.status == "completed"
    jsonschema.validate(json.loads(item.arguments), SCHEMA)
    events = list(client.responses.create(**asked, parallel_tool_calls=False, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert "".join(pieces) == done.arguments == item.arguments and len(pieces) > 1
    assert events[-1].type == "response.completed" and events[-1].response.output[0].arguments == item.arguments  # type: ignore[union-attr]


def test_messages(calling: Server) -> None:
    claude = anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0)
    tools: Any = [{"name": "get_weather", "description": "What it is like", "input_schema": SCHEMA}]
    asked: Any = {"model": "tiny", "max_tokens": 200, "messages": HELLO, "tools": tools}
    asked |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"temperature": 0}}
    found = claude.messages.create(**asked)
    (block,) = found.content
    assert block.type == "tool_use" and found.stop_reason == "tool_use"
    jsonschema.validate(block.input, SCHEMA)
    with claude.messages.stream(**asked) as stream:
        last = stream.get_final_message()
    assert last.stop_reason == "tool_use" and last.content[0].type == "tool_use"
    assert last.content[0].input == block.input
    counted = claude.messages.count_tokens(model="tiny", messages=HELLO, tools=tools)
    assert counted.input_tokens == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)


def test_ollama(calling: Server) -> None:
    llama = ollama.Client(host=calling.url)
    begun: Any = [*HELLO, {"role": "assistant", "content": "<tool_call>"}]
    found = llama.chat("tiny", begun, tools=TOOLS[:1], options={"temperature": 0, "num_predict": 200})
    calls = found.message.tool_calls or []
    assert calls and calls[0].function.name == "get_weather"
    assert calls[0].function.arguments["city"] in ("Bern", "Genève")  # this client leaves out limits of numbers
    streamed = [
        call.function
        for line in llama.chat(
            "tiny", begun, tools=TOOLS[:1], stream=True, options={"temperature": 0, "num_predict": 200}
        )
        for call in line.message.tool_calls or []
    ]
    assert streamed == [call.function for call in calls]
    assert "tools" in (llama.show("tiny").capabilities or [])


@pytest.mark.parametrize(
    ("path", "more", "told"),
    [
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool 'x'"),
        (CHAT, {"tools": TOOLS, "tool_choice": "maybe"}, "'tool_choice' must be none"),
        (CHAT, {"tool_choice": "required"}, "needs 'tools'"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "'tools[0]' must be a function"),
        (CHAT, {"tools": [{"function": {"name": "a", "parameters": ODD}}]}, "cannot be followed at $.properties.b"),
        ("/v1/messages", {**SERVED, "tool_choice": {"type": "any"}}, "this server has none of the 'tools'"),
        (
            "/v1/messages",
            {**SERVED, "tools": [], "tool_choice": {"type": "any"}},
            "this server has none of the 'tools'",
        ),
        ("/v1/messages", {**SERVED, "tools": BOTH, "tool_choice": {"type": "tool", "name": "b"}}, "no tool 'b'"),
        ("/v1/messages", {"max_tokens": 1, "output_config": {"format": {"type": "text"}}}, "'output_config.format'"),
        ("/v1/responses", {**SEARCH, "tool_choice": {"type": "web_search"}}, "needs 'tools' that are functions"),
        ("/v1/responses", {**SEARCH, "tool_choice": "required"}, "needs 'tools'"),
        ("/api/chat", {"tools": [{"function": {}}], "stream": False}, "'tools[0].function.name' is missing"),
    ],
)
def test_what_cannot_be_called_is_refused(calling: Server, path: str, more: dict[str, Any], told: str) -> None:
    asked = {key: value for key, value in {"messages": HELLO, **more}.items() if value is not None}
    found = calling.post(path, asked)
    assert found.status_code == 400 and told in found.text, found.text


def test_a_template_without_tools_is_told(server: Server) -> None:
    found = server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS})
    assert found.status_code == 400 and "takes no tools" in found.json()["error"]["message"]


def test_what_coding_agents_send(calling: Server) -> None:
    """Keys that change no answer of a local model are passed over, and so are tools that a server runs itself."""
    plain: Any = {"max_tokens": 8, "messages": HELLO, "temperature": 0, "tools": BOTH[1:]}
    more = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "tools": BOTH}
    more |= {"output_config": {"effort": "high"}, "metadata": {"user_id": "x"}}
    for stream in (False, True):
        found = calling.post("/v1/messages", {**plain, **more, "stream": stream})
        assert found.status_code == 200 and found.headers["kv-tools-left-out"] == "bash_2", found.text
    told = calling.post("/v1/messages", plain)
    assert "kv-tools-left-out" not in told.headers
    assert told.json()["content"] == calling.post("/v1/messages", {**plain, **more}).json()["content"]
    tools = [{"type": "function", **NOW}, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    tools += [{"type": "namespace", "name": "mcp", "tools": []}, {"type": "x\r\ny"}]
    codex = {"input": "Hello", "max_output_tokens": 8, "client_metadata": {"x": "y"}, "tools": tools, "store": False}
    for stream in (False, True):
        found = calling.post("/v1/responses", {**codex, "stream": stream})
        assert found.status_code == 200, found.text
        assert found.headers["kv-tools-left-out"] == "web_search, custom, namespace, x??y"
    assert [tool["name"] for tool in calling.post("/v1/responses", codex).json()["tools"]] == ["now"]


def test_a_message_of_a_form(calling: Server) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    found = calling.post("/v1/messages", {"max_tokens": 200, "messages": HELLO, "output_config": config})
    assert found.status_code == 200, found.text
    jsonschema.validate(json.loads(found.json()["content"][0]["text"]), SCHEMA)


def test_characters_of_calls_and_of_thoughts_are_counted(calling: Server) -> None:
    long = "x " * 500_000
    for call in (json.dumps({"a": long}), {"a": long}):
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "now", "arguments": call}}],
        }
        found = calling.post(CHAT, {"messages": [*HELLO, message, {"role": "tool", "content": "x"}]})
        assert found.status_code == 400 and "1,000,0" in found.text and "characters" in found.text, found.text


def test_what_ollama_is_told_of_calls() -> None:
    """Whole ones, each once, also behind one that broke off."""
    form = _Lines(cast(Reply, None), "tiny", True)
    parts = [
        (CallPart(0, "f", '{"a": 1'),),
        (CallPart(1, "g", '{"b": '), CallPart(1, "", "1e999}"), CallPart(1, "", "", True)),
        (CallPart(2, "h", "{}"), CallPart(2, "", "", True)),
    ]
    sent = [json.loads(form.write(0, Token(1, "x", calls=each)))["message"].get("tool_calls", []) for each in parts]
    assert [[call["function"]["name"] for call in each] for each in sent] == [[], ["g"], ["h"]]
    assert sent[1][0]["function"]["arguments"] == {"b": sys.float_info.max}


def test_half_a_surrogate_pair_can_be_sent() -> None:
    assert wire.event({"a": "x\ud800"}).encode() == b'data: {"a":"x?"}\n\n'
