"""Ollama's interface: chat, generate, tags, ps, show, version. Streams are lines of JSON.

`keep_alive` is of no account, but for 0: a model stays until another one needs its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvcli.errors import KVError, UsageError
from kvcli.runtime.engine.events import End, Event, Token
from kvcli.runtime.text import grammar
from kvcli.runtime.text.tools.forms import form_of
from kvcli.runtime.text.tools.schemas import loads
from kvcli.serve import asked, calls, wire
from kvcli.serve.asked import Json
from kvcli.serve.failures import Failure, Refused
from kvcli.serve.host import Served
from kvcli.serve.replies import Answer, Answers, Question, Reply
from kvcli.serve.serving import Engines, Serving
from kvcli.words import human_count

THINKS = "low", "medium", "high", "max"
VERSION = "0.12.0"  # of the interface, which clients ask for


class Options(msgspec.Struct, forbid_unknown_fields=True):
    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: Any = None  # how the machine is used is said to `kv serve`: these are of no account
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    use_mmap: Any = None
    numa: Any = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None
    penalize_newline: bool | None = None

    def sampling(self, base: Any) -> Any:
        """Raises UsageError."""
        for name, off in (("typical_p", 1.0), ("tfs_z", 1.0), ("mirostat", 0), ("penalize_newline", True)):
            if getattr(self, name) not in (None, off):
                raise UsageError(f"`options.{name}` cannot be used: kv has no such sampling", "leave it out")
        if self.num_keep not in (None, 0, -1):
            raise UsageError(
                "`options.num_keep` cannot be used: what stays is said to kv serve", "kv serve --keep sets it"
            )
        if self.num_ctx is not None and self.num_ctx < 1:
            raise UsageError(f"`options.num_ctx` must be 1 or more, not {self.num_ctx}", "leave it out")
        limit = None if self.num_predict is None else max(self.num_predict, -1)
        seed = self.seed if self.seed is None or self.seed >= 0 else None
        return asked.options(
            base, max_tokens=limit, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            min_p=self.min_p, seed=seed, stop=asked.stops(self.stop), repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )  # fmt: skip


_TIME = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+|[+-]?[01]")  # as Go writes them


def _leaves(keep: Any) -> bool:
    """Whether a model is to go when nobody asks it anything more: 0, as a number or a time. Raises UsageError."""
    if keep is None or (isinstance(keep, (int, float)) and not isinstance(keep, bool)):
        return keep is not None and keep == 0
    if not isinstance(keep, str) or not _TIME.fullmatch(keep):
        raise UsageError(
            f"`keep_alive` is {str(keep)[:40]!r}", 'give seconds, or a time such as "5m"; 0 unloads the model'
        )
    return not re.search("[1-9]", keep)


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str = ""
    stream: bool | None = None
    options: Options | None = None
    think: bool | str | None = None
    format: Any = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def sampling(self, serving: Serving[Answers]) -> Any:
        """Raises UsageError."""
        asked.refuse({"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}, "cannot be used here; /v1 has it")
        return (self.options or Options()).sampling(serving.sampling)

    @property
    def shape(self) -> Callable[[], str] | None:
        """What the answer's form is. Raises UsageError."""
        if not self.format:
            return None
        if self.format != "json" and not isinstance(self.format, dict):
            raise UsageError('`format` must be "json" or a JSON schema')
        return asked.shaped(grammar.ANY_JSON if self.format == "json" else self.format, "format")

    @property
    def leaves(self) -> bool:
        """Whether the model is unloaded behind the answer. Raises UsageError."""
        return _leaves(self.keep_alive)

    @property
    def thinking(self) -> Any:
        """How the use of the template is changed."""
        if self.think is None:
            return None
        if isinstance(self.think, str) and self.think not in THINKS:
            raise UsageError(f"`think` must be true, false, {', '.join(THINKS)}, not {self.think[:40]!r}")
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else None
        return asked.reasoning("on" if self.think else "off", None, effort)


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Json] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self, number: int) -> Json:
        """As templates take it. Raises UsageError."""
        asked.refuse({"images": self.images}, "cannot be used: the model reads text only")
        found: Json = {"role": self.role, "content": self.content}
        found |= {"reasoning_content": self.thinking} if self.thinking else {}
        found |= (
            {"tool_calls": calls.told(self.tool_calls, f"messages[{number}].tool_calls")} if self.tool_calls else {}
        )
        found |= {"tool_call_id": self.tool_call_id} if self.tool_call_id else {}
        return found | ({"name": self.tool_name} if self.tool_name else {})


class ChatCall(_Common, kw_only=True):
    messages: list[Message] = []
    tools: list[Json] | None = None


class GenerateCall(_Common, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    context: Any = None


def failure(found: Failure) -> Json:
    """The body of an answer that is an error."""
    return {"error": found.message}


def _line(value: Json) -> str:
    return wire.dump(value) + "\n"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class _Lines:
    """The objects of one answer. `chat`: it is a message, else a text."""

    def __init__(self, reply: Reply, model: str, chat: bool) -> None:
        self.model, self.chat = model or reply.model, chat
        self.calls, self.told = calls.Calls(), 0  # calls, and the first of them that may be told

    def said(self, text: str, thinking: str, called: list[calls.Called]) -> Json:
        if self.chat:
            message: Json = {"role": "assistant", "content": text} | ({"thinking": thinking} if thinking else {})
            return {"message": message | ({"tool_calls": list(map(_call, called))} if called else {})}
        return {"response": text} | ({"thinking": thinking} if thinking else {})

    def object(self, text: str, thinking: str, end: End | None, called: list[calls.Called] = []) -> Json:  # noqa: B006
        said = self.said(text, thinking, called)
        head = {"model": self.model, "created_at": _time(None), **said, "done": end is not None}
        if end is None:
            return head
        times = end.timings
        return {
            **head,
            "done_reason": "stop" if end.finish_reason == "stop" else "length",
            "total_duration": _nanoseconds(times.ttft_s + times.decode_s),
            "load_duration": 0,
            "prompt_eval_count": end.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(times.prefill_s),
            "eval_count": end.usage.completion_tokens,
            "eval_duration": _nanoseconds(times.decode_s),
        }

    def whole(self, answer: Answer) -> Json:
        called = [call for call in answer.calls.found if call.whole]
        return self.object(answer.text, answer.reasoning, answer.end, called)

    def write(self, number: int, event: Event) -> str:
        """Calls are told when they are whole."""
        if not isinstance(event, (Token, End)):
            return ""
        for _ in self.calls.take(event.calls):
            pass
        called = [call for call in self.calls.found[self.told :] if call.whole]
        self.told = called[-1].number + 1 if called else self.told
        some = event.text or event.reasoning or called
        sent = _line(self.object(event.text, event.reasoning, None, called)) if some else ""
        return sent + (_line(self.object("", "", event)) if isinstance(event, End) else "")


def _call(call: calls.Called) -> Json:
    return {"id": call.id, "function": {"index": call.number, "name": call.name, "arguments": loads(call.text)}}


async def _answered(
    request: Request, serving: Serving[Answers], question: Question, call: _Common, chat: bool
) -> Response:
    leaves, asks = call.leaves, (call.options or Options()).num_ctx
    reply = await wire.while_connected(request, serving.host.ask(question))
    try:
        if asks is not None and asks > (most := reply.ctx_size):
            raise UsageError(f"`options.num_ctx` is {asks}, and the context {most}", "kv serve --ctx-size sets it")
        if leaves:
            await serving.host.unload(call.model)
    except KVError:
        reply.close()
        raise
    form = _Lines(reply, call.model, chat)
    if call.stream is not False:
        sent = wire.pieces(reply, "", form.write, str, "")
        return wire.Stream(sent, reply, lambda found: _line(failure(found)), "application/x-ndjson")
    async with reply:
        return wire.object_response(form.whole((await wire.while_connected(request, reply.whole()))[0]))


async def _loads(request: Request, serving: Serving[Answers], call: _Common, chat: bool) -> Response:
    """The answer to a call without a prompt, which loads a model, or unloads it. Raises KVError."""
    if call.leaves:
        await serving.host.unload(call.model)
    else:
        await wire.while_connected(request, serving.host.load(call.model))
    why, model = "unload" if call.leaves else "load", call.model
    said = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return wire.object_response({"model": model, "created_at": _time(None), **said, "done": True, "done_reason": why})


async def chat(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    call = asked.decoded(body, ChatCall)
    options = call.sampling(serving)
    if not call.messages:
        return await _loads(request, serving, call, True)
    messages = [message.plain(number) for number, message in enumerate(call.messages)]
    tools = calls.asked(call.tools, None, None)
    prompt = asked.chat(messages, call.thinking, tools)
    told, size = tools is not None, asked.chars(messages)
    question = Question(call.model, prompt, options, grammar=call.shape, tools=told, chars=size)
    return await _answered(request, serving, question, call, True)


async def generate(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    call = asked.decoded(body, GenerateCall)
    options = call.sampling(serving)
    asked.refuse({"template": call.template, "suffix": call.suffix, "images": call.images}, "cannot be used here")
    asked.refuse({"context": call.context}, "cannot be used: send the whole prompt, its rows are found again")
    if not call.prompt:
        return await _loads(request, serving, call, False)
    chats = await wire.while_connected(request, serving.host.load(call.model))
    if call.raw or not chats:
        why = "cannot be used with `raw`" if call.raw else "needs a chat template, which this model has not"
        asked.refuse({"system": call.system}, why)
        prompt: Any = asked.Raw(call.prompt)
    else:
        system = [{"role": "system", "content": call.system}] if call.system else []
        prompt = asked.chat([*system, {"role": "user", "content": call.prompt}], call.thinking)
    question = Question(call.model, prompt, options, grammar=call.shape, chars=len(call.prompt))
    return await _answered(request, serving, question, call, False)


def _details(facts: Json) -> Json:
    """What a list tells of a model's file, "" = it is not known."""
    count, arch = facts.get("parameters"), facts.get("arch", "")
    return {
        "parent_model": "", "format": facts.get("format", ""), "family": arch, "families": [arch] if arch else [],
        "parameter_size": human_count(count).replace(" ", "") if count else "",
        "quantization_level": facts.get("weight_type", ""),
    }  # fmt: skip


def _time(seconds: float | None) -> str:
    """None = now."""
    at = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return at.isoformat().replace("+00:00", "Z")


async def tags(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    models = [
        {
            "name": each["name"], "model": each["name"], "modified_at": _time(each.get("modified")),
            "size": each["file_bytes"], "digest": each["digest"], "details": _details(each),
        }
        for each in serving.host.models()
    ]  # fmt: skip
    return wire.object_response({"models": models})


async def ps(request: Request, serving: Engines, body: bytes) -> Response:
    models, listed = [], {each["name"]: each for each in serving.host.models()}
    for served in serving.host.loaded:
        engine = served.worker.engine
        size = engine.plan.total
        models.append(
            {
                "name": served.name, "model": served.name, "size": size,
                "size_vram": size if engine.device.kind == "cuda" else 0, "digest": listed[served.name]["digest"],
                "details": _details(served.facts), "expires_at": "9999-12-31T23:59:59Z",
                "context_length": engine.ctx_size,
            }
        )  # fmt: skip
    return wire.object_response({"models": models})


async def show(request: Request, serving: Engines, body: bytes) -> Response:
    call = asked.decoded(body, _Show)
    served = await wire.while_connected(request, serving.host.served(call.model or call.name))
    metadata = served.worker.engine.loaded.file.metadata
    info = {key: value for key, value in metadata.items() if isinstance(value, (str, int, float, bool))}
    template = served.text.template.source if served.text.template else ""
    told = {"template": template, "model_info": info, "license": info.get("general.license", "")}
    facts = {"details": _details(served.facts), "modified_at": _time(served.facts["modified"])}
    can: Json = {"capabilities": _capabilities(served)}
    return wire.object_response({"modelfile": f"FROM {served.name}\n", "parameters": "", **told, **facts, **can})


def _capabilities(served: Served) -> list[str]:
    template = served.text.template
    if template is None:
        return ["completion"]
    tools = template.takes_tools and form_of(template.tool_source) is not None
    thinks = template.with_options(replace(template.options, reasoning="on")).switch
    return ["completion", *(["tools"] if tools else []), *(["thinking"] if thinks else [])]


class _Show(msgspec.Struct):
    model: str = ""
    name: str = ""


async def version(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    return wire.object_response({"version": VERSION})


async def embed(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    raise Refused(501, "kv serves models that write text: there are no embeddings")


ROUTES = (
    ("POST", "/api/chat", chat),
    ("POST", "/api/generate", generate),
    ("GET", "/api/tags", tags),
    ("GET", "/api/ps", ps),
    ("POST", "/api/show", show),
    ("GET", "/api/version", version),
    ("POST", "/api/embed", embed),
    ("POST", "/api/embeddings", embed),
)
