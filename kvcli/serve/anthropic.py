"""Anthropic's interface: messages, and counting of tokens.

`cache_control` changes nothing: rows of prompts are always kept, and found wherever a later prompt begins the same. Nor
does `context_management`: nothing of a conversation is taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvcli.errors import UsageError
from kvcli.runtime.engine.events import End, Event, Prefill, Token, Usage
from kvcli.runtime.text.tools.schemas import loads
from kvcli.runtime.text.tools.use import NO_ARGUMENTS, Tool, ToolChoice, check_names
from kvcli.serve import asked, calls, wire
from kvcli.serve.asked import Json
from kvcli.serve.failures import Failure
from kvcli.serve.replies import Answer, Answers, Question, Reply
from kvcli.serve.serving import Serving

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
REASONS = {"length": "max_tokens", "context": "max_tokens", "repetition": "max_tokens", "interrupted": "max_tokens"}


class Block(msgspec.Struct):
    """A block of content; `cache_control` and citations are of no account."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Json | None = None
    tool_use_id: str = ""
    content: str | list[Block] = ""


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[Block]

    def plain(self, number: int) -> list[Json]:
        """As templates take it: results of tools are messages of their own. Raises UsageError."""
        if self.role not in ("user", "assistant", "system"):
            raise UsageError(f"`messages[{number}].role` must be user or assistant, not {self.role[:40]!r}")
        path = f"messages[{number}].content"
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [_result(block, path) for block in self.content if block.type == "tool_result"]
        called = [block for block in self.content if block.type == "tool_use"]
        thoughts = "".join(block.thinking for block in self.content if block.type == "thinking")
        rest = [block for block in self.content if block.type not in _APART]
        for what, found, role in (("tool_use", called, "assistant"), ("tool_result", results, "user")):
            if found and self.role != role:
                raise UsageError(f"`{path}` has a block of type {what}, which is for messages of the {role}")
        if results and not rest:
            return results
        message: Json = {"role": self.role, "content": _plain(rest, f"`{path}`")}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        if called:
            message["tool_calls"] = [calls.one_told(each.id, each.name, each.input, path) for each in called]
        return [*results, message]


_APART = "thinking", "redacted_thinking", "tool_use", "tool_result"


def _result(block: Block, path: str) -> Json:
    """What came of a call. Raises UsageError."""
    content = block.content if isinstance(block.content, str) else _plain(block.content, f"`{path}`")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _plain(blocks: list[Block], path: str) -> str:
    for block in blocks:
        if block.type != "text":
            raise UsageError(f"{path} has a block of type {block.type[:40]!r}", "the model reads text only")
    return "\n".join(block.text for block in blocks)


class ThinkingKey(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: Any = None


class ToolKey(msgspec.Struct):
    """A tool; `cache_control` and examples are of no account."""

    name: str = ""
    description: str = ""
    input_schema: Json | None = None
    type: str | None = None
    strict: bool = False

    @property
    def is_of_server(self) -> bool:
        """Whether it is one that a server runs itself, which this one does not have."""
        return self.type not in (None, "custom")

    def tool(self, number: int) -> Tool:
        """Raises UsageError."""
        called = f"`tools[{number}].input_schema`"
        return Tool(self.name, self.description, self.input_schema or NO_ARGUMENTS, self.strict, called)


class ChoiceKey(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def choice(self) -> ToolChoice | None:
        """None = nothing is to be called. Raises UsageError."""
        several = not self.disable_parallel_tool_use
        if self.type == "tool" and self.name:
            return ToolChoice(True, (self.name,), False)
        found = {"auto": ToolChoice(several=several), "any": ToolChoice(True, (), several), "none": None}
        if self.type not in found:
            raise UsageError("`tool_choice.type` must be auto, any, none, or tool with a `name`")
        return found[self.type]


class Format(msgspec.Struct):
    type: str
    schema: Json | None = None


class OutputKey(msgspec.Struct):
    """How an answer is; `effort` is of no account."""

    format: Format | None = None

    def shape(self) -> Callable[[], str] | None:
        """What the answer's form is. Raises UsageError."""
        if self.format is None:
            return None
        if self.format.type != "json_schema" or self.format.schema is None:
            raise UsageError("`output_config.format` must be of type json_schema, with a `schema`")
        return asked.shaped(self.format.schema, "output_config.format.schema")


class CountCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What makes a prompt."""

    messages: list[Message]
    model: str = ""
    system: str | list[Block] | None = None
    thinking: ThinkingKey | None = None
    tools: list[ToolKey] | None = None
    tool_choice: ChoiceKey | None = None
    output_config: OutputKey | None = None
    cache_control: Any = None  # of no account, see above
    context_management: Any = None  # neither

    def question(self, base: Any) -> Question:
        """Raises UsageError."""
        messages = [each for number, message in enumerate(self.messages) for each in message.plain(number)]
        system = self.system if isinstance(self.system, str) else _plain(self.system or [], "`system`")
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        tools = self._tools()
        prompt, size = asked.chat(messages, self._reasoning(), tools), asked.chars(messages)
        shape = self.output_config.shape() if self.output_config else None
        return Question(self.model, prompt, base, grammar=shape, tools=tools is not None, chars=size)

    @property
    def left_out(self) -> list[str]:
        """Types of tools that the model is not told of."""
        return [str(each.type) for each in self.tools or () if each.is_of_server]

    def _tools(self) -> calls.Asked | None:
        """Raises UsageError."""
        listed = self.tools or []
        tools = tuple(each.tool(number) for number, each in enumerate(listed) if not each.is_of_server)
        check_names(tools)
        choice = self.tool_choice.choice() if self.tool_choice else ToolChoice()
        if choice and choice.must and not tools:
            raise UsageError("`tool_choice` asks for a call, and this server has none of the `tools`")
        return calls.Asked(tools, choice) if choice and tools else None

    def _reasoning(self) -> Any:
        """Raises UsageError."""
        if self.thinking is None:
            return None
        modes = {"enabled": "on", "disabled": "off", "adaptive": "on"}
        if self.thinking.type not in modes:
            raise UsageError(f"`thinking.type` must be one of {', '.join(modes)}, not {self.thinking.type[:40]!r}")
        if (self.thinking.budget_tokens or 0) < 0:
            raise UsageError("`thinking.budget_tokens` must be 0 or more")
        return asked.reasoning(modes[self.thinking.type], self.thinking.budget_tokens)


class MessagesCall(CountCall, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Any = None  # of no account, as those below
    service_tier: Any = None
    container: Any = None
    mcp_servers: list[Json] | None = None

    def asks(self, serving: Serving[Answers]) -> Question:
        """Raises UsageError."""
        asked.refuse({"mcp_servers": self.mcp_servers, "container": self.container}, "cannot be used with this server")
        options = asked.options(
            serving.sampling, max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p,
            top_k=self.top_k, stop=asked.stops(self.stop_sequences),
        )  # fmt: skip
        return self.question(options)


def failure(found: Failure) -> Json:
    """The body of an answer that is an error."""
    kind = TYPES.get(found.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": found.message}, "request_id": wire.new_id("req_")}


def _usage(found: Usage) -> Json:
    return {
        "input_tokens": found.prompt_tokens - found.cache_read_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": found.cache_read_tokens,
        "output_tokens": found.completion_tokens,
    }


def _stop(end: End) -> Json:
    ended = "tool_use" if end.called else "end_turn"
    reason = "stop_sequence" if end.stop else REASONS.get(end.finish_reason, ended)
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _use(call: calls.Called, given: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _input(text: str) -> Json:
    """The arguments of a call; {} where it was cut."""
    try:
        found = loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Message:
    """The objects of one message: blocks of thinking, of text, and of calls."""

    def __init__(self, reply: Reply) -> None:
        self.head = {"id": wire.new_id("msg_"), "type": "message", "role": "assistant", "model": reply.model}
        self.prompt_tokens = reply.prompt_tokens
        self.kind = ""  # of the block that is open
        self.calls = calls.Calls()
        self.blocks = 0
        self.begun = False
        self.ended: End | None = None

    def whole(self, answer: Answer) -> Json:
        thought = [{"type": "thinking", "thinking": answer.reasoning, "signature": ""}] if answer.reasoning else []
        called = [_use(call, _input(call.text)) for call in answer.calls.found]
        text = [{"type": "text", "text": answer.text}] if answer.text or not called else []
        content = [*thought, *text, *called]
        return {**self.head, "content": content, **_stop(answer.end), "usage": _usage(answer.end.usage)}

    def begin(self, reused: int) -> str:
        """`reused`: tokens of the prompt whose rows were in a cache."""
        usage = _usage(Usage(self.prompt_tokens, reused, 0))
        self.begun = True
        message: Json = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return wire.event({"type": "message_start", "message": message}, "message_start")

    def write(self, number: int, event: Event) -> str:
        """What is sent for an event."""
        sent = "" if self.begun else self.begin(event.reused if isinstance(event, Prefill) else 0)
        if not isinstance(event, (Token, End)):
            return sent
        for kind, key, text in (("thinking", "thinking", event.reasoning), ("text", "text", event.text)):
            if text:
                sent += self._open(kind) + self._delta({"type": f"{kind}_delta", key: text})
        for call, new in self.calls.take(event.calls):
            sent += self._open(f"tool_use {call.id}", _use(call, {}))
            sent += self._delta({"type": "input_json_delta", "partial_json": new})
        if isinstance(event, End):
            self.ended = event
            sent += self._open("text") if not self.blocks else ""
        return sent

    def _open(self, kind: str, block: Json | None = None) -> str:
        """Begin a block of this kind, if it is not the one that is open. `block`: as which; None = of a text."""
        if self.kind == kind:
            return ""
        sent = self._close()
        self.kind = kind
        empty = {"type": kind, "thinking": "", "signature": ""} if kind == "thinking" else {"type": kind, "text": ""}
        block = block or empty
        start = {"type": "content_block_start", "index": self.blocks, "content_block": block}
        self.blocks += 1
        return sent + wire.event(start, "content_block_start")

    def _delta(self, delta: Json) -> str:
        told = {"type": "content_block_delta", "index": self.blocks - 1, "delta": delta}
        return wire.event(told, "content_block_delta")

    def _close(self) -> str:
        if not self.kind:
            return ""
        return wire.event({"type": "content_block_stop", "index": self.blocks - 1}, "content_block_stop")

    def end(self) -> str:
        assert self.ended is not None
        told = {"type": "message_delta", "delta": _stop(self.ended), "usage": _usage(self.ended.usage)}
        return self._close() + wire.event(told, "message_delta") + wire.event({"type": "message_stop"}, "message_stop")


def _failed(found: Failure) -> str:
    return wire.event(failure(found), "error")


PING = wire.event({"type": "ping"}, "ping")


async def messages(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    call = asked.decoded(body, MessagesCall)
    if call.max_tokens < 1:
        raise UsageError("`max_tokens` must be 1 or more")
    reply = await wire.while_connected(request, serving.host.ask(call.asks(serving)))
    form, headers = _Message(reply), calls.left_out(call.left_out)
    if call.stream:
        sent = wire.pieces(reply, "", form.write, form.end, PING)
        return wire.Stream(sent, reply, _failed, headers=headers)
    async with reply:
        whole = form.whole((await wire.while_connected(request, reply.whole()))[0])
    return wire.object_response(whole, headers=headers)


async def count_tokens(request: Request, serving: Serving[Answers], body: bytes) -> Response:
    question = asked.decoded(body, CountCall).question(serving.sampling)
    count = await wire.while_connected(request, serving.host.count(question))
    return wire.object_response({"input_tokens": count})


ROUTES = (("POST", "/v1/messages", messages), ("POST", "/v1/messages/count_tokens", count_tokens))
