"""Anthropic's and Ollama's interfaces, asked by their own clients."""

from __future__ import annotations

from math import prod
from typing import Any

import anthropic
import ollama
import pytest
from serving import Server, alone, open_engine, running, until

from kvcli.options import SampleOptions
from kvcli.words import human_count

HELLO = [{"role": "user", "content": "Hello"}]
TWELVE = SampleOptions(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llama(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_messages_whole_and_streamed(claude: anthropic.Anthropic, server: Server) -> None:
    wanted = alone(server.engine, [{"role": "system", "content": "Be brief."}, *HELLO], TWELVE)[0]
    asked = {
        "model": "tiny",
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
        "system": "Be brief.",
        "messages": HELLO,
    }
    found = claude.messages.create(**asked)
    assert found.content[0].text == wanted and found.stop_reason == "max_tokens" and found.usage.output_tokens == 12
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == wanted
        last = stream.get_final_message()
    assert last.content[0].text == wanted and last.stop_reason == "max_tokens"
    started = next(iter(claude.messages.create(**asked, stream=True))).message.usage
    assert (started.input_tokens, started.cache_read_input_tokens) == (
        last.usage.input_tokens, last.usage.cache_read_input_tokens
    )  # fmt: skip
    usage = last.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == found.usage.input_tokens + (
        found.usage.cache_read_input_tokens or 0
    )


def test_tokens_are_counted_without_an_answer(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="tiny", messages=HELLO)
    found = claude.messages.create(model="tiny", max_tokens=1, messages=HELLO)
    assert counted.input_tokens == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_is_told(claude: anthropic.Anthropic, server: Server) -> None:
    whole = alone(server.engine, "Hello", TWELVE)[0]
    stop = whole[4:6]
    found = claude.messages.create(
        model="tiny", max_tokens=12, extra_body={"temperature": 0}, messages=HELLO, stop_sequences=[stop]
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == whole[: whole.index(stop)]


def test_errors_are_the_client_s_own(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        claude.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": [image]}])  # type: ignore[list-item]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=HELLO)


def test_ollama_s_chat_and_generate(llama: ollama.Client, server: Server) -> None:
    wanted = alone(server.engine, "Hello", TWELVE)[0]
    options = {"temperature": 0, "num_predict": 12}
    found = llama.chat("tiny:latest", HELLO, options=options)
    assert found.message.content == wanted and found.done and found.done_reason == "length" and found.eval_count == 12
    lines = list(llama.chat("tiny", HELLO, options=options, stream=True))
    assert "".join(line.message.content or "" for line in lines) == wanted and lines[-1].done
    assert llama.generate("tiny", "Hello", options=options).response == wanted
    raw = llama.generate("tiny", "Once", raw=True, options=options)
    assert raw.response and raw.prompt_eval_count == len(server.engine.tokenizer.encode("Once"))


def test_ollama_s_lists(llama: ollama.Client, server: Server) -> None:
    (listed,) = llama.list().models
    assert listed.model == "tiny" and listed.size > 1000 and len(listed.digest or "") == 64
    assert llama.ps().models[0].digest == listed.digest
    assert [model.model for model in llama.ps().models] == ["tiny"]
    shown = llama.show("tiny")
    assert shown.modelinfo and shown.modified_at and shown.modelfile == "FROM tiny\n"
    count = sum(prod(tensor.shape) for tensor in server.engine.loaded.file.tensors.values())
    told = {"format": "gguf", "family": "llama", "families": ["llama"], "quantization_level": "F32"}
    told |= {"parameter_size": human_count(count).replace(" ", ""), "parent_model": ""}
    assert listed.details.model_dump() == shown.details.model_dump() == told
    with pytest.raises(ollama.ResponseError, match="no model"):
        llama.chat("other", HELLO)
    with pytest.raises(ollama.ResponseError, match="num_ctx' is 99999, and the context 512"):
        llama.chat("tiny", HELLO, options={"num_ctx": 99999})
    with pytest.raises(ollama.ResponseError, match="num_ctx' must be 1 or more, not -1"):
        llama.chat("tiny", HELLO, options={"num_ctx": -1})
    with pytest.raises(ollama.ResponseError, match="think' must be true, false, low, medium, high, max, not 'maybe'"):
        llama.generate("tiny", "Hello", think="maybe")  # type: ignore[call-overload]
    with pytest.raises(ollama.ResponseError, match="system' cannot be used with 'raw'"):
        llama.generate("tiny", "Hello", raw=True, system="Be brief.")
    with pytest.raises(ollama.ResponseError, match="num_keep' cannot be used"):
        llama.chat("tiny", HELLO, options={"num_keep": 5})
    assert llama.chat("tiny", HELLO, options={"num_ctx": 256, "num_predict": 1}).done
    with pytest.raises(ollama.ResponseError, match="no such sampling"):
        llama.chat("tiny", HELLO, options={"mirostat": 2})


def test_a_model_that_is_to_go_goes_when_it_writes_no_answer() -> None:
    others = {"tiny": open_engine, "second": lambda: open_engine("qwen2")}
    with running(most=2, others=others, sampling=SampleOptions(max_tokens=200, ignore_eos=True)) as server:

        def there() -> list[str]:
            return [model["name"] for model in server.get("/api/ps").json()["models"]]

        def gone(path: str, **call: Any) -> tuple[int, Any]:
            found = server.post(path, {"stream": False, **call})
            return found.status_code, found.json().get("done_reason")

        assert gone("/api/generate", model="second")[1] == "load" and there() == ["tiny", "second"]
        assert gone("/api/generate", model="second", keep_alive=0) == (200, "unload") and there() == ["tiny"]
        assert gone("/api/generate", model="second", keep_alive="0s") == (200, "unload")  # it is gone already
        assert gone("/api/chat", model="tiny", keep_alive=-1)[1] == "load" and there() == ["tiny"]
        assert gone("/api/generate", prompt="x", keep_alive=0, options={"num_ctx": 9999})[0] == 400
        assert there() == ["tiny"]
        assert gone("/api/generate", prompt="x", keep_alive="0m") == (200, "length")
        until(lambda: not there())
        assert server.get("/metrics").status_code == server.get("/v1/models").status_code == 200
        assert gone("/api/generate", prompt="x", keep_alive="1h30m") == (200, "length") and there() == ["tiny"]
        assert gone("/api/generate", model="none", keep_alive=0)[0] == 404
        for wrong in ("soon", "5", True, [0]):
            assert gone("/api/generate", keep_alive=wrong)[0] == gone("/api/chat", keep_alive=wrong)[0] == 400
