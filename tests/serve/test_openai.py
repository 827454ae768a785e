"""OpenAI's interface, asked by its own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from serving import GREEDY, Server, alone

from kvcli.options import SampleOptions

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _text(server: Server, text: str, **options: Any) -> str:
    return alone(server.engine, text, SampleOptions(**{"temperature": 0.0, "max_tokens": 12, **options}))[0]


def test_a_chat_completion_is_what_the_engine_answers(client: openai.OpenAI, server: Server) -> None:
    found = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=12)
    assert found.choices[0].message.content == _text(server, "Hello")
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None and found.usage.completion_tokens == 12
    assert found.usage.total_tokens == found.usage.prompt_tokens + 12


def test_a_stream_has_the_same_text_and_counts(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == _text(server, "Hello")
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert chunks[0].choices[0].delta.role == "assistant"


def test_several_answers_are_those_of_their_numbers(client: openai.OpenAI, server: Server) -> None:
    found = client.chat.completions.create(messages=HELLO, model="", n=3, seed=7, temperature=1, max_tokens=8)
    wanted = [_text(server, "Hello", temperature=1.0, seed=7, max_tokens=8, sequence=n) for n in range(3)]
    assert [choice.message.content for choice in found.choices] == wanted
    assert len(set(wanted)) > 1


def test_log_probabilities_and_stops(client: openai.OpenAI, server: Server) -> None:
    whole = _text(server, "Hello")
    stop = whole[3:5]
    found = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=12, stop=[stop], logprobs=True, top_logprobs=2
    ).choices[0]
    assert found.message.content == whole[: whole.index(stop)] and found.finish_reason == "stop"
    assert found.logprobs is not None and found.logprobs.content
    for each in found.logprobs.content:
        assert each.logprob <= 0 and len(each.top_logprobs) == 2
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob)  # greedy


def test_the_beginning_of_an_answer_is_gone_on_with(server: Server) -> None:
    whole = _text(server, "Hello")
    found = server.post(
        "/v1/chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "content": whole}], "max_tokens": 4, "temperature": 0},
    ).json()
    assert found["choices"][0]["message"]["content"].startswith(whole)


def test_completions_of_texts_and_of_ids(client: openai.OpenAI, server: Server) -> None:
    tokenizer = server.engine.tokenizer
    texts = ["Once upon", "The sky"]
    found = client.completions.create(model="tiny", prompt=texts, temperature=0, max_tokens=6, echo=True)
    for text, choice in zip(texts, found.choices, strict=True):
        assert choice.text.startswith(text)
    ids = tokenizer.encode(texts[1], add_bos=True)
    by_ids = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=6, logprobs=1)
    assert texts[1] + by_ids.choices[0].text == found.choices[1].text
    assert by_ids.choices[0].logprobs is not None and len(by_ids.choices[0].logprobs.tokens or []) == 6
    streamed = client.completions.create(model="tiny", prompt=texts, temperature=0, max_tokens=6, stream=True)
    pieces = ["", ""]
    for chunk in streamed:
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [c.text.removeprefix(t) for c, t in zip(found.choices, texts, strict=True)]


def test_offsets_go_on_in_a_stream_and_times_are_of_all_prompts(server: Server) -> None:
    asked = {"model": "tiny", "prompt": ["Once upon", "The sky"], "temperature": 0, "max_tokens": 6, "logprobs": 0}
    whole = server.post("/v1/completions", asked).json()
    offsets: list[list[int]] = [[], []]
    for line in server.post("/v1/completions", {**asked, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert offsets == [choice["logprobs"]["text_offset"] for choice in whole["choices"]]
    assert all(len(found) == 6 and found[-1] > 0 for found in offsets)
    assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"] == 12
    told = whole["usage"]["prompt_tokens"] - whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert whole["timings"]["prompt_n"] == told
    echoed = server.post("/v1/completions", {**asked, "echo": True})
    assert echoed.status_code == 400 and "leave one of them out" in echoed.text


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(server: Server) -> None:
    found = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1_000_000}]})
    assert found.status_code == 400 and found.json()["error"]["code"] == "context_length_exceeded"
    assert "1,000,000 characters" in found.json()["error"]["message"]


def test_rows_of_an_earlier_call_are_reused(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "some words " * 30}]
    for _ in range(2):
        found = client.chat.completions.create(model="tiny", messages=long, temperature=0, max_tokens=2)
    assert found.usage is not None and found.usage.prompt_tokens_details is not None
    assert (found.usage.prompt_tokens_details.cached_tokens or 0) >= 64


def test_streamed_completions_that_fail_say_so(server: Server) -> None:
    asked = {"model": "tiny", "stream": True, "max_tokens": 3}
    assert server.post("/v1/completions", {**asked, "prompt": [5] * 600}).status_code == 400
    later = server.post("/v1/completions", {**asked, "prompt": [[5, 6], [5] * 600]})
    assert later.status_code == 200
    assert "context_length_exceeded" in later.text.strip().splitlines()[-1] and "[DONE]" not in later.text


def test_responses_whole_and_streamed(client: openai.OpenAI, server: Server) -> None:
    found = client.responses.create(model="tiny", input="Hello", max_output_tokens=12, temperature=0)
    assert found.output_text == _text(server, "Hello")
    assert found.status == "incomplete" and found.usage is not None and found.usage.output_tokens == 12
    events = list(
        client.responses.create(model="tiny", input=HELLO, max_output_tokens=12, temperature=0, stream=True)  # type: ignore[arg-type]
    )
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == found.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == found.output_text


def test_what_a_response_cannot_include(server: Server) -> None:
    asked = {"input": "Hello", "max_output_tokens": 1}
    assert server.post("/v1/responses", {**asked, "include": ["reasoning.encrypted_content"]}).status_code == 200
    found = server.post("/v1/responses", {**asked, "include": ["message.output_text.logprobs"]})
    assert found.status_code == 400 and "'include' has" in found.json()["error"]["message"]


def test_models_and_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == client.models.retrieve("tiny:latest").id == "tiny"
    assert client.chat.completions.create(model="tiny:latest", messages=HELLO, max_tokens=1).model == "tiny"
    assert client.chat.completions.create(model="alias", messages=HELLO, max_tokens=1).model == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'other"):
        client.models.retrieve("other:latest")
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.chat.completions.create(model="other", messages=HELLO, max_tokens=1)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("temperature", -1, "'temperature' must be 0 or more"),
        ("n", 99, "'n' must be 1 to 4"),
        ("max_tokens", "many", "'max_tokens' must be an integer, not a text"),
        ("temperature", "x", "'temperature' must be a number, not a text"),
        ("stop", [1], "'stop[0]' must be a text, not an integer"),
        ("logit_bias", {"a": 1}, "by token ids"),
        ("stop", [""], "empty text"),
        ("nonsense", 1, "'nonsense' is unknown"),
        ("stream_options", {"odd": 1}, "'stream_options.odd' is unknown"),
        ("top_logprobs", 3, "needs 'logprobs'"),
        ("stream_options", {"include_usage": True}, "needs 'stream'"),
        ("messages", [{"content": "x"}], "'messages[0].role' is missing"),
        ("functions", [{}], "cannot be used"),
        ("messages", [], "empty"),
        ("messages", [{"role": "user"}], "'messages[0].content' is missing"),
        ("messages", [{"role": "bogus", "content": "x"}], "must be one of system, developer"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "reads text only"),
        ("messages", [{"role": "user", "content": "word " * 900}], "context"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}, "cannot be followed"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: Server, key: str, value: Any, told: str) -> None:
    found = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, key: value})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert told in error["message"] and error["type"] == "invalid_request_error"


def test_the_whole_context_can_be_asked_for(server: Server) -> None:
    """Without `max_tokens` an answer goes on to the end of the context, or repeats itself."""
    text, ids = alone(server.engine, "Hello", GREEDY)
    assert server.chat("Hello", max_tokens=None)["message"]["content"] == text
    assert len(ids) > 12
