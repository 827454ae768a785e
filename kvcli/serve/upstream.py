"""`Upstream`: another program answers the questions of our interfaces, asked as OpenAI's clients ask it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import msgspec

from kvcli.peers import http1, mapping
from kvcli.runtime.engine.events import End, Event, Prefill, Timings, Token, Usage
from kvcli.runtime.text.tools.parts import CallPart
from kvcli.runtime.text.tools.schemas import meant
from kvcli.serve import asked
from kvcli.serve.asked import Json
from kvcli.serve.failures import Refused
from kvcli.serve.replies import PING_S, NoModel, Question, Reply, untagged
from kvcli.serve.worker import Busy, Stopped

Given = TypeVar("Given")
Made = TypeVar("Made")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DONE = "[DONE]"  # the last event of a stream


def gone() -> Stopped:
    """What is raised where the program has ended."""
    return Stopped("vLLM does not answer any more")


def not_an_answer() -> Refused:
    """What is raised where it says what we cannot read."""
    return Refused(502, "vLLM: its answer is not one of OpenAI's interface")


class Called:
    """A call to the program, which counts among its calls until it is closed."""

    def __init__(self, upstream: Upstream, answered: http1.Answered) -> None:
        self.answered, self._upstream, self._open = answered, upstream, True

    def close(self) -> None:
        """Nobody reads any more of its answer."""
        if self._open:
            self.answered.close()
            self._upstream.busy -= 1
        self._open = False

    async def __aenter__(self) -> Called:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


@dataclass
class Upstream:
    """The program vLLM, which listens on `socket`, has one model, and is asked at most `most` things at a time.
    `variables`: of the chat template, in calls that do not say otherwise; `aliases`: other names of the model."""

    socket: str
    name: str
    ctx_size: int
    most: int
    variables: Json = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    busy: int = 0  # calls that it is answering

    # --- what interfaces ask

    async def load(self, name: str) -> bool:
        if self.named(name) != self.name:
            raise NoModel(f"there is no model {name[:200]!r} here", f"there is {self.name}")
        return True  # whether it has a chat template nobody tells: one without refuses messages

    async def unload(self, name: str) -> None:
        await self.load(name)
        raise Refused(501, "vLLM has one model, which stays until the server ends: keep_alive cannot be 0")

    def named(self, name: str) -> str:
        names = ("", self.name, *self.aliases)
        bare = untagged(name, names)
        return self.name if bare in names else bare

    def models(self) -> list[Json]:
        facts = {"title": self.name, "ctx_size": self.ctx_size, "arch": "", "file_bytes": 0, "digest": ""}
        return [{"name": self.name, "created": self.created, "loaded": True, **facts}]

    async def count(self, question: Question) -> int:
        await self.load(question.model)
        told = {"model", "messages", "prompt", "tools", "chat_template_kwargs"}
        told |= {"add_generation_prompt", "continue_final_message"}
        body = {key: value for key, value in self._body(question).items() if key in told}
        return read(lambda found: int(found["count"]), await self.post("/tokenize", body))

    async def ask(self, question: Question) -> Reply:
        await self.load(question.model)
        body = self._body(question)
        called = await self.begin(CHAT if "messages" in body else TEXT, json.dumps(body).encode())
        try:
            if called.answered.status != 200:
                raise refused(called.answered.status, await called.answered.whole())
            reply = UpstreamReply(self, question, called)
            await reply.begin()
            return reply
        except BaseException as error:
            called.close()
            raise gone() if isinstance(error, http1.PeerGone) else error from None

    # --- how it is asked

    async def begin(self, target: str, body: bytes) -> Called:
        """A call whose answer is still to come. Raises Busy, Stopped."""
        if self.busy >= self.most:
            raise Busy(f"{self.busy} calls wait already", "ask again later; kv serve --queue N sets it")
        self.busy += 1
        try:
            return Called(self, await http1.call(self.socket, "POST", target, body))
        except BaseException as error:
            self.busy -= 1
            raise gone() if isinstance(error, http1.PeerGone) else error from None

    async def post(self, target: str, value: Json) -> Json:
        """What is answered at once. Raises KVError."""
        try:
            status, found = await http1.asked(self.socket, target, value)
        except http1.PeerGone:
            raise gone() from None
        if status != 200 or not isinstance(found, dict):
            raise refused(status, json.dumps(found).encode())
        return found

    def _body(self, question: Question) -> Json:
        """Raises UsageError for what it cannot be asked."""
        body: Json = {"model": self.name, "stream": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        body |= mapping.sent(question.options)
        body |= {} if question.count == 1 else {"n": question.count}
        if isinstance(question.grammar, asked.Shape):
            schema = {"name": "answer", "schema": meant(question.grammar.schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        prompt = question.prompt
        if isinstance(prompt, asked.Raw):
            return {"max_tokens": None, **body, "prompt": prompt.prompt}  # where nothing is said it is 16 there
        assert isinstance(prompt, asked.Chat)
        body["messages"] = [*map(_message, prompt.messages)]
        if prompt.lead:
            body["messages"].append({"role": "assistant", "content": prompt.lead})
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        variables = {**self.variables, **(_variables(prompt.thinking) if prompt.thinking else {})}
        body |= {"chat_template_kwargs": variables} if variables else {}
        if prompt.tools:
            body |= _tools(prompt.tools)
        return body


def _message(message: Json) -> Json:
    """As OpenAI has it: arguments of calls are texts."""
    if not (calls := message.get("tool_calls")):
        return message
    told = []
    for call in calls:
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        told.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": told}


def _variables(asks: asked.Thinking) -> Json:
    """Those by which most templates switch thinking, and others. A budget, which clients send along, is not obeyed."""
    switch = {} if asks.mode is None else dict.fromkeys(("enable_thinking", "thinking"), asks.mode == "on")
    return {**switch, **(asks.variables or {})}


def _tools(tools: asked.Asked) -> Json:
    choice: Any = "required" if tools.choice.must else "auto"
    listed = [tool for tool in tools.tools if not tools.choice.names or tool.name in tools.choice.names]
    if len(listed) == 1 and tools.choice.names and tools.choice.must:
        choice = {"type": "function", "function": {"name": listed[0].name}}
    told = [tool.told for tool in (listed or tools.tools)]
    return {"tools": told, "tool_choice": choice, "parallel_tool_calls": tools.choice.several}


def refused(status: int, body: bytes) -> Refused:
    """What it said, as an error of ours."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        message = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        message = body.decode("utf-8", "replace")
    return Refused(status if 400 <= status < 600 else 502, f"vLLM: {' '.join(message.split())[:1000]}")


def answer_of(data: bytes | str) -> Json:
    """A whole answer, or a piece of a stream. Raises Refused for an error, and for what is neither."""
    try:
        found: Json = msgspec.json.decode(data, type=dict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise not_an_answer() from None
    if (error := found.get("error")) is not None:
        code = error.get("code") if isinstance(error, dict) else None
        raise refused(code if isinstance(code, int) and 400 <= code < 600 else 500, msgspec.json.encode(found))
    if not isinstance(found.get("choices"), list):
        raise not_an_answer()
    return found


def read(make: Callable[[Given], Made], given: Given) -> Made:
    """What `make` finds in something of an answer. Raises Refused where that is not as it should be."""
    try:
        return make(given)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise not_an_answer() from None


_ENDS = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length"}


class UpstreamReply(Reply):
    """The events of its answers. `begin` comes first."""

    def __init__(self, upstream: Upstream, question: Question, called: Called) -> None:
        super().__init__(upstream.name, upstream.ctx_size, 0, [question.options] * question.count)
        self._call, self._events = called, http1.Events(called.answered)
        self._first: Json | None = None
        self._since, self._times = time.perf_counter(), dict[int, tuple[float, float]]()
        self._ends: dict[int, tuple[str, str | None]] = {}  # why answers ended, and where
        self._made: dict[int, int] = {}  # tokens of each
        self._called: dict[int, int] = {}
        self._usage: Json = {}

    async def begin(self) -> None:
        """Wait for the first of its answer. Raises KVError."""
        self._first = await self._next()

    async def events(self, silence: float = PING_S) -> AsyncIterator[tuple[int, Event] | None]:
        yield 0, Prefill(self.prompt_tokens, self.prompt_tokens, self._reused)
        chunk: Json | None = self._first
        while chunk is not None:
            for event in read(self._of, chunk):
                yield event
            while True:
                try:
                    with anyio.fail_after(silence):
                        chunk = await self._next()
                    break
                except TimeoutError:
                    yield None
        self.close()
        if len(self._ends) < len(self.options):
            raise Stopped("vLLM ended in the middle of an answer")
        for number in sorted(self._ends):
            yield number, self._end(number)

    def close(self) -> None:
        self._call.close()

    async def _next(self) -> Json | None:
        """The next chunk; None behind the last. Raises KVError."""
        try:
            text = await self._events.next()
        except http1.PeerGone:
            raise Stopped("vLLM ended in the middle of an answer") from None
        if text is None or text == DONE:
            return None
        return read(self._chunk, text)

    def _chunk(self, text: str) -> Json:
        chunk = answer_of(text)
        if usage := chunk.get("usage"):
            self._usage = usage
            self.prompt_tokens = int(usage["prompt_tokens"])
        return chunk

    def _of(self, chunk: Json) -> list[tuple[int, Event]]:
        """The tokens that came with a chunk."""
        found: list[tuple[int, Event]] = []
        for choice in chunk["choices"]:
            number, delta = choice["index"], choice.get("delta", choice)
            text = delta.get("content") or choice.get("text") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            parts = tuple(part for call in delta.get("tool_calls") or () for part in self._parts(number, call))
            if text or thought or parts:
                now = time.perf_counter() - self._since
                self._times[number] = self._times.get(number, (now, now))[0], now
                self._made[number] = self._made.get(number, 0) + 1
                found.append((number, Token(None, text, thought, calls=parts)))
            if reason := choice.get("finish_reason"):
                stop = choice.get("stop_reason")
                self._ends[number] = _ENDS.get(reason, "interrupted"), stop if isinstance(stop, str) else None
        return found

    def _parts(self, number: int, call: Json) -> list[CallPart]:
        """What a piece of a call is: the first has the name; a call is whole where the next begins, or at the end."""
        at, function = call["index"], call.get("function") or {}
        begun = self._called.get(number, 0)
        before = [CallPart(each, "", "", True) for each in range(max(0, begun - 1), at)] if at >= begun > 0 else []
        self._called[number] = max(begun, at + 1)
        name = function.get("name") or "" if at >= begun else ""
        return [*before, CallPart(at, name, function.get("arguments") or "")]

    @property
    def _reused(self) -> int:
        return int((self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def _end(self, number: int) -> End:
        reason, stop = self._ends[number]
        one = len(self.options) == 1
        made = int(self._usage.get("completion_tokens", 0)) if one else self._made.get(number, 0)
        first, last = self._times.get(number, (0.0, 0.0))
        usage = Usage(self.prompt_tokens, self._reused, made)
        times = Timings(0.0, first, first, last - first, self.prompt_tokens - self._reused, max(0, made - 1))
        called = self._called.get(number, 0)
        last_call = (CallPart(called - 1, "", "", True),) if called and reason == "stop" else ()
        whole = called if reason == "stop" else max(0, called - 1)
        return End(reason, "", [], stop, usage, times, calls=last_call, called=whole)
