"""OpenAI's newer interface, responses, without a memory: each call has the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvcli.errors import UsageError
from kvcli.runtime.engine.events import End, Event, Token
from kvcli.runtime.text import grammar
from kvcli.serve import asked, calls, wire
from kvcli.serve.asked import Content, Json
from kvcli.serve.failures import Failure
from kvcli.serve.replies import Answer, Answers, Question, Reply
from kvcli.serve.serving import Serving


class Item(msgspec.Struct):
    """A part of the conversation: a message, a call of a function, or what came of one; what else there may be is
    refused by its type."""

    role: str = ""
    content: Content = None
    type: str = "message"
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = None

    def plain(self, number: int) -> Json:
        """As templates take it. Raises UsageError."""
        path = f"input[{number}]"
        if self.type == "function_call" and self.name:
            call = calls.one_told(self.call_id, self.name, self.arguments, path)
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            content = asked.plain(self.output, f"`{path}.output`")
            return {"role": "tool", "tool_call_id": self.call_id, "content": content}
        if self.type != "message" or not self.role:
            known = "there are messages, function_call and function_call_output"
            raise UsageError(f"`{path}` is of type {self.type[:40]!r}", known)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": asked.plain(self.content, f"`{path}.content`")}


def _joined(messages: list[Json]) -> list[Json]:
    """Calls in the message of the assistant that they belong to."""
    found: list[Json] = []
    for message in messages:
        if "tool_calls" in message and found and found[-1]["role"] == "assistant":
            found[-1] = {**found[-1], "tool_calls": [*found[-1].get("tool_calls", ()), *message["tool_calls"]]}
        else:
            found.append(message)
    return found


class Reasoning(msgspec.Struct):
    effort: str | None = None


class Format(msgspec.Struct):
    """The form of the answer. Names and descriptions of schemas are of no account."""

    type: str = "text"
    schema: Json | None = None


class Text(msgspec.Struct):
    format: Format | None = None


class Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input: str | list[Item]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: Any = None  # of no account: nothing is padded
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: list[Json] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    max_tool_calls: Any = None
    include: list[str] | None = None
    client_metadata: Any = None  # of no account, as those below
    store: Any = None
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def functions(self) -> list[Json]:
        """The tools that the model is told of: others are run by a server."""
        return [tool for tool in self.tools or () if tool.get("type", "function") == "function"]

    @property
    def left_out(self) -> list[str]:
        """Types of the others."""
        return [str(tool["type"]) for tool in self.tools or () if tool.get("type", "function") != "function"]

    def question(self, serving: Serving[Answers]) -> Question:
        """Raises UsageError."""
        asked.refuse(
            {name: getattr(self, name) for name in ("previous_response_id", "conversation")},
            "cannot be used: this server keeps no conversations; send the whole one as `input`",
        )
        asked.refuse({"prompt": self.prompt, "background": self.background}, "cannot be used with this server")
        asked.refuse({"top_logprobs": self.top_logprobs}, "cannot be used here; chat completions have it")
        if more := set(self.include or ()) - {"reasoning.encrypted_content"}:  # of which there is none
            raise UsageError(f"`include` has {min(more)[:60]!r}, which cannot be had here", "leave it out")
        asked.refuse({"max_tool_calls": self.max_tool_calls}, "cannot be used: it is of tools that a server has itself")
        if self.truncation not in (None, "disabled"):
            raise UsageError('`truncation` must be "disabled"', "kv serve --evict says what is forgotten")
        if not self.input:
            raise UsageError("`input` is empty", "give a text, or at least one item")
        listed = [Item("user", self.input)] if isinstance(self.input, str) else self.input
        messages = _joined([item.plain(number) for number, item in enumerate(listed) if item.type != "reasoning"])
        if self.instructions:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        options = asked.options(
            serving.sampling, max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p
        )
        effort = self.reasoning.effort if self.reasoning else None
        mode = {"none": "off", None: None}.get(effort, "on")
        thinking = asked.reasoning(mode, None, {"reasoning_effort": effort} if mode == "on" else None)
        tools = calls.asked(self.functions, self.tool_choice, self.parallel_tool_calls)
        prompt = asked.chat(messages, thinking, tools)
        told, size = tools is not None, asked.chars(messages)
        return Question(self.model, prompt, options, grammar=self._shape(), tools=told, chars=size)

    def _shape(self) -> Callable[[], str] | None:
        """What the answer's form is. Raises UsageError."""
        given = (self.text.format if self.text else None) or Format()
        if given.type == "json_schema" and given.schema is not None:
            return asked.shaped(given.schema, "text.format.schema")
        if given.type not in ("text", "json_object"):
            raise UsageError("`text.format` must be of type text, json_object, or json_schema with a `schema`")
        return asked.shaped(grammar.ANY_JSON if given.type == "json_object" else None, "text.format")


class _Response:
    """The objects of one response: items of reasoning, messages and calls."""

    def __init__(self, call: Call, reply: Reply, options: Any) -> None:
        self.head = {
            "id": wire.new_id("resp_"), "object": "response", "created_at": int(time.time()), "error": None,
            "incomplete_details": None, "instructions": call.instructions, "metadata": call.metadata or {},
            "model": reply.model, "parallel_tool_calls": call.parallel_tool_calls is not False,
            "temperature": options.temperature, "tools": call.functions,
            "tool_choice": call.tool_choice or ("auto" if call.functions else "none"), "top_p": options.top_p,
            "max_output_tokens": call.max_output_tokens, "previous_response_id": None, "store": False,
            "truncation": "disabled",
        }  # fmt: skip
        self.number, self.answer, self.calls = 0, Answer(), calls.Calls()
        self.items: list[Json] = []  # that are done
        self.open: Json | None = None

    # --- whole

    def whole(self, answer: Answer) -> Json:
        thought, text = answer.reasoning, answer.text
        items = [self._reasoning(thought)] if thought else []
        called = [_called(call, call.text) for call in answer.calls.found]
        items += [self._message(text)] if text or not called else []
        return self._done([*items, *called], answer.end)

    def _done(self, items: list[Json], end: End) -> Json:
        cut = end.finish_reason in ("length", "context", "repetition", "interrupted")
        usage = end.usage
        return {
            **self.head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cache_read_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _message(self, text: str, id: str = "") -> Json:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        id = id or wire.new_id("msg_")
        return {"id": id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}

    def _reasoning(self, text: str, id: str = "") -> Json:
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": id or wire.new_id("rs_"), "type": "reasoning", "summary": [], "content": content}

    # --- as a stream

    def _send(self, kind: str, **told: Any) -> str:
        sent = wire.event({"type": kind, "sequence_number": self.number, **told}, kind)
        self.number += 1
        return sent

    def begin(self) -> str:
        response = {**self.head, "status": "in_progress", "output": [], "usage": None}
        return self._send("response.created", response=response) + self._send("response.in_progress", response=response)

    def write(self, number: int, event: Event) -> str:
        """What is sent for an event."""
        if not isinstance(event, (Token, End)):
            return ""
        sent = ""
        for kind, text in (("reasoning", event.reasoning), ("message", event.text)):
            if text:
                sent += self._open(kind) + self._delta(kind, text)
        for call, new in self.calls.take(event.calls):
            sent += self._open_call(call) if call.text == new else ""
            sent += self._delta("function_call", new)
        self.answer.take(event)
        if isinstance(event, End) and not self.items and self.open is None:
            sent += self._open("message")
        return sent

    @property
    def _place(self) -> Json:
        assert self.open is not None
        return {"item_id": self.open["id"], "output_index": len(self.items), "content_index": 0}

    def _open(self, kind: str) -> str:
        """Begin an item, if it is not the one that is open."""
        if self.open is not None and self.open["type"] == kind:
            return ""
        sent = self._close()
        self.open = self._message("") if kind == "message" else self._reasoning("")
        item = {**self.open, "status": "in_progress", "content": []}
        sent += self._send("response.output_item.added", output_index=len(self.items), item=item)
        if kind == "message":
            sent += self._send("response.content_part.added", **self._place, part=self.open["content"][0])
        return sent

    def _open_call(self, call: calls.Called) -> str:
        """Begin the item of a call."""
        sent = self._close()
        self.open = _called(call, "")
        item = {**self.open, "status": "in_progress"}
        return sent + self._send("response.output_item.added", output_index=len(self.items), item=item)

    def _delta(self, kind: str, text: str) -> str:
        assert self.open is not None
        if kind == "function_call":
            self.open["arguments"] += text
            place = {"item_id": self.open["id"], "output_index": len(self.items)}
            return self._send("response.function_call_arguments.delta", **place, delta=text)
        self.open["content"][0]["text"] += text
        if kind == "message":
            return self._send("response.output_text.delta", **self._place, delta=text, logprobs=[])
        return self._send("response.reasoning_text.delta", **self._place, delta=text)

    def _close(self) -> str:
        """End the item that is open."""
        if self.open is None:
            return ""
        item, part = self.open, self.open.get("content", [{}])[0]
        if item["type"] == "function_call":
            told = {"item_id": item["id"], "output_index": len(self.items), "name": item["name"]}
            sent = self._send("response.function_call_arguments.done", **told, arguments=item["arguments"])
        elif item["type"] == "message":
            sent = self._send("response.output_text.done", **self._place, text=part["text"], logprobs=[])
            sent += self._send("response.content_part.done", **self._place, part=part)
        else:
            sent = self._send("response.reasoning_text.done", **self._place, text=part["text"])
        sent += self._send("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self.open = None
        return sent

    def end(self) -> str:
        sent, end = self._close(), self.answer.end
        response = self._done(self.items, end)
        return sent + self._send(f"response.{response['status']}", response=response)

    def failed(self, found: Failure) -> str:
        return self._send("error", message=found.message, code=found.code or None, param=None)


def _called(call: calls.Called, arguments: str) -> Json:
    told = {"call_id": call.id, "name": call.name, "arguments": arguments, "status": "completed"}
    return {"id": f"fc_{call.id}", "type": "function_call", **told}


async def responses(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    call = asked.decoded(body, Call)
    question, headers = call.question(serving), calls.left_out(call.left_out)
    reply = await wire.while_connected(request, serving.host.ask(question))
    form = _Response(call, reply, reply.options[0])
    if call.stream:
        sent = wire.pieces(reply, form.begin(), form.write, form.end, ": ping\n\n")
        return wire.Stream(sent, reply, form.failed, headers=headers)
    async with reply:
        whole = form.whole((await wire.while_connected(request, reply.whole()))[0])
    return wire.object_response(whole, headers=headers)


ROUTES = (("POST", "/v1/responses", responses),)
