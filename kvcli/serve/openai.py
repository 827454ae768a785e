"""OpenAI's interface: chat completions, and models; what completions of texts have in common with them.

Keys that say nothing of the answer (`user`, `metadata`, `store`, `service_tier`, ...) are taken and of no account; what
would change it and cannot be done is refused by name, and so are keys that nobody knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvcli.errors import UsageError
from kvcli.runtime.engine.events import End, Event, Logprobs, Token
from kvcli.runtime.text import grammar
from kvcli.serve import asked, calls, wire
from kvcli.serve.asked import Content, Json
from kvcli.serve.failures import Failure, Refused
from kvcli.serve.replies import Answer, Answers, Question, Reply
from kvcli.serve.serving import Serving

ROLES = "system", "developer", "user", "assistant", "tool"
FINISH = {"context": "length", "repetition": "length", "interrupted": "length"}
TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # of no account: nothing is padded


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: Content = None
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Json] | None = None
    audio: Json | None = None

    def plain(self, number: int) -> Json:
        """As templates take it. Raises UsageError."""
        asked.refuse({"audio": self.audio}, "is nothing that this model reads")
        if self.role not in ROLES:
            raise UsageError(f"`messages[{number}].role` must be one of {', '.join(ROLES)}, not {self.role[:40]!r}")
        if self.tool_calls and self.role != "assistant":
            raise UsageError(f"`messages[{number}].tool_calls` is for messages of the assistant")
        if self.content is None and not self.tool_calls:
            raise UsageError(f"`messages[{number}].content` is missing")
        found: Json = {
            "role": "system" if self.role == "developer" else self.role,
            "content": asked.plain(self.content, f"`messages[{number}].content`"),
        }
        if self.tool_calls:
            found["tool_calls"] = calls.told(self.tool_calls, f"messages[{number}].tool_calls")
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        return found


class Sampled(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Keys that both kinds of completions have."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    user: Any = None  # of no account, as those below
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    cache_prompt: Any = None

    def options(self, serving: Serving[Answers], **more: Any) -> Any:
        """Raises UsageError."""
        if self.stream_options is not None and not self.stream:
            raise UsageError("`stream_options` needs `stream`", "leave it out")
        seed = self.seed if self.seed is None or self.seed >= 0 else self.seed % (1 << 64)
        return asked.options(
            serving.sampling,
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            min_p=self.min_p, repeat_penalty=self.repeat_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, logit_bias=asked.bias(self.logit_bias), seed=seed,
            stop=asked.stops(self.stop), ignore_eos=self.ignore_eos, **more,
        )  # fmt: skip

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCall(Sampled, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    reasoning_budget: int | None = None
    chat_template_kwargs: Json | None = None
    response_format: Json | None = None
    tools: list[Json] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: Any = None

    def question(self, serving: Serving[Answers]) -> Question:
        """Raises UsageError."""
        asked.refuse(
            {name: getattr(self, name) for name in ("functions", "function_call", "audio", "prediction")},
            "cannot be used with this server",
        )
        asked.refuse({"web_search_options": self.web_search_options}, "cannot be used: there is no web search")
        asked.refuse({"verbosity": self.verbosity}, "cannot be used: no model here has such a switch")
        if self.modalities not in (None, ["text"]):
            raise UsageError('`modalities` must be ["text"]')
        if self.top_logprobs and not self.logprobs:
            raise UsageError("`top_logprobs` needs `logprobs`")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        options = self.options(serving, logprobs=(self.top_logprobs or 0) if self.logprobs else None)
        options = asked.options(options, max_tokens=limit)
        messages = [message.plain(number) for number, message in enumerate(self.messages)]
        effort = {"none": "off", None: None}.get(self.reasoning_effort, "on")
        variables = dict(self.chat_template_kwargs or {})
        if effort == "on":
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        thinking = asked.reasoning(effort, self.reasoning_budget, variables)
        count, shape = 1 if self.n is None else self.n, self._shape()
        tools = calls.asked(self.tools, self.tool_choice, self.parallel_tool_calls)
        prompt, size = asked.chat(messages, thinking, tools), asked.chars(messages)
        return Question(self.model, prompt, options, count, shape, tools is not None, size)

    def _shape(self) -> Callable[[], str] | None:
        """What the answer's form is. Raises UsageError."""
        given, key = self.response_format or {"type": "text"}, "response_format"
        if given.get("type") == "json_schema":
            inner = given.get("json_schema")
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
                raise UsageError(f"`{key}.json_schema.schema` must be an object")
            return asked.shaped(inner["schema"], f"{key}.json_schema.schema")
        if given.get("type") not in ("text", "json_object"):
            raise UsageError(f"`{key}.type` must be text, json_object or json_schema")
        return asked.shaped(grammar.ANY_JSON if given["type"] == "json_object" else None, key)


def failure(found: Failure) -> Json:
    """The body of an answer that is an error."""
    kind = TYPES.get(found.status, "server_error" if found.status >= 500 else "invalid_request_error")
    return {"error": {"message": found.message, "type": kind, "param": None, "code": found.code or None}}


def timings(*ends: End) -> Json:
    """As llama-server tells them: counts, milliseconds, tokens a second; of answers to several prompts, one after the
    other, the sums."""
    times = [end.timings for end in ends]
    prefilled, prefill_s = sum(each.prefill_tokens for each in times), sum(each.prefill_s for each in times)
    decoded, decode_s = sum(each.decode_tokens for each in times), sum(each.decode_s for each in times)
    return {
        "cache_n": sum(end.usage.cache_read_tokens for end in ends),
        "prompt_n": prefilled,
        "prompt_ms": prefill_s * 1e3,
        "prompt_per_second": prefilled / prefill_s if prefill_s else 0.0,
        "predicted_n": sum(end.usage.completion_tokens for end in ends),
        "predicted_ms": decode_s * 1e3,
        "predicted_per_second": decoded / decode_s if decode_s else 0.0,
    }


def _chat_logprobs(found: list[Logprobs]) -> Json:
    def one(each: Any) -> Json:
        data = each.token.encode("utf-8", "replace")
        return {"token": each.token, "logprob": max(each.logprob, -9999.0), "bytes": list(data)}

    return {"content": [{**one(each.chosen), "top_logprobs": [one(top) for top in each.top]} for each in found]}


class _Chat:
    """The objects of one chat completion."""

    def __init__(self, call: ChatCall, reply: Reply) -> None:
        self.call, self.reply = call, reply
        self.ends: list[End] = []
        self.calls: dict[int, calls.Calls] = {}  # by the numbers of answers that have begun
        self.head = {"id": wire.new_id("chatcmpl-"), "created": int(time.time()), "model": reply.model}
        self.with_usage = call.with_usage

    def whole(self, answers: list[Answer]) -> Json:
        choices = []
        for number, answer in enumerate(answers):
            called = [_call(each, each.text) for each in answer.calls.found]
            message: Json = {"role": "assistant", "content": answer.text or (None if called else ""), "refusal": None}
            message |= {"tool_calls": called} if called else {}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            choices.append(
                {
                    "index": number,
                    "message": message,
                    "logprobs": _chat_logprobs(answer.logprobs) if self.call.logprobs else None,
                    "finish_reason": finish(answer.end),
                }
            )
        told = {"usage": usage_of([each.end for each in answers]), "timings": timings(answers[0].end)}
        return {**self.head, "object": "chat.completion", "choices": choices, **told}

    def write(self, number: int, event: Event) -> str:
        """What is sent for an event."""
        if not isinstance(event, (Token, End)):
            return ""
        delta: Json = {} if number in self.calls else {"role": "assistant", "content": ""}
        delta |= {"content": event.text} if event.text else {}
        delta |= {"reasoning_content": event.reasoning} if event.reasoning else {}
        parts = self.calls.setdefault(number, calls.Calls()).take(event.calls)
        told_calls = [{"index": call.number, **_call(call, new)} for call, new in parts]
        delta |= {"tool_calls": told_calls} if told_calls else {}
        told = [event.logprobs] if isinstance(event, Token) and event.logprobs is not None else []
        sent = self._chunk(number, delta, told) if delta or told else ""
        if isinstance(event, End):
            self.ends.append(event)
            sent += self._chunk(number, {}, [], finish(event))
        return sent

    def _chunk(self, number: int, delta: Json, told: list[Logprobs], finish: str | None = None) -> str:
        choice = {"index": number, "delta": delta, "logprobs": _chat_logprobs(told) if told else None}
        more: Json = {"usage": None} if self.with_usage else {}
        more |= {"timings": timings(self.ends[-1])} if finish else {}
        choices = [{**choice, "finish_reason": finish}]
        return wire.event({**self.head, "object": "chat.completion.chunk", "choices": choices, **more})

    def end(self) -> str:
        last = {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(self.ends)}
        return (wire.event(last) if self.with_usage else "") + wire.event("[DONE]")


def _call(call: calls.Called, text: str) -> Json:
    """A call, or the next piece of it: `text` is what is told of its arguments."""
    if call.text != text:
        return {"function": {"arguments": text}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def finish(end: End) -> str:
    if end.called and end.finish_reason == "stop":
        return "tool_calls"
    return FINISH.get(end.finish_reason, end.finish_reason)


def usage_of(ends: list[End]) -> Json:
    """Of the answers to one prompt, which is read once."""
    first = min((end.usage for end in ends), key=lambda usage: usage.cache_read_tokens)
    made = sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": first.prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": first.cache_read_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(end.usage.reasoning_tokens for end in ends)},
    }


def failed(found: Failure) -> str:
    return wire.event(failure(found))


async def chat_completions(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    call = asked.decoded(body, ChatCall)
    question = call.question(serving)
    reply = await wire.while_connected(request, serving.host.ask(question))
    form = _Chat(call, reply)
    if call.stream:
        sent = wire.pieces(reply, "", form.write, form.end, ": ping\n\n")
        return wire.Stream(sent, reply, failed)
    async with reply:
        return wire.object_response(form.whole(await wire.while_connected(request, reply.whole())))


async def models(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    """Those that are loaded, then those that can be."""
    return wire.object_response({"object": "list", "data": [_model(each) for each in serving.host.models()]})


async def model(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    name = request.path_params["name"]
    wanted = serving.host.named(name)
    for each in serving.host.models():
        if each["name"] == wanted:
            return wire.object_response(_model(each))
    raise Refused(404, f"there is no model {name[:200]!r} here")


def _model(found: Json) -> Json:
    meta = {key: value for key, value in found.items() if key not in ("name", "created")}
    return {"id": found["name"], "object": "model", "created": found["created"], "owned_by": "kv", "meta": meta}


async def embeddings(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    raise Refused(501, "kv serves models that write text: there are no embeddings")


ROUTES = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/embeddings", embeddings),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
)
