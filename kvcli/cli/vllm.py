"""`--engine vllm`: from the options of a command to a vLLM that answers, and one answer of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.cli import render
from kvcli.cli.flags import engine
from kvcli.cli.flags.grammar import GrammarFlags
from kvcli.cli.flags.prompt import PromptFlags
from kvcli.cli.flags.sampling import SampleFlags
from kvcli.cli.flags.shared import SystemFlags
from kvcli.cli.flags.template import TemplateFlags
from kvcli.cli.flags.tools import ToolFlags
from kvcli.cli.interrupt import FINISH, UNWIND, Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.cli.outcome import CUT_FORM
from kvcli.cli.sinks import TextSink
from kvcli.cli.streams import say, write_err
from kvcli.cli.toolcalls import ToolCalls
from kvcli.errors import KVError, ModelError, UsageError
from kvcli.peers import mapping, vllm
from kvcli.runtime.engine.events import End, Token
from kvcli.runtime.hub.modelref import ModelRef
from kvcli.runtime.text.tools.parts import CallPart

if TYPE_CHECKING:
    from kvcli.serve.replies import Question
    from kvcli.serve.upstream import Upstream

PATIENCE_S = 0.1  # between looks at whether a signal came


@dataclass(frozen=True)
class Opened:
    """vLLM, and how it is asked."""

    program: vllm.Program
    upstream: Upstream


def model_of(name: str) -> str:
    """What vLLM is to load: a folder, or a repository of the hub. Raises UsageError, ModelError."""
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise ModelError(f"{name} has no config.json", "--engine vllm takes a folder of safetensors")
        return os.path.abspath(name)
    ref = ModelRef.parse(name)
    if ref.reference is None or name.endswith(".gguf") or name.count(":"):
        raise UsageError(
            f"--model {name} cannot be used with vllm: it does not read GGUF files",
            "give a folder of safetensors, or a repository of the hub that has them (org/name)",
        )
    return name


@contextmanager
def opened(
    ctx: Any, model: str, most: int, interrupts: Interrupts, variables: dict[str, Any], aliases: tuple[str, ...] = ()
) -> Iterator[Opened]:
    """Start vLLM with what the options of a command mean there, and wait until it answers. `most`: calls at a time;
    `variables`: of the chat template. What it said is shown where it ends by itself. Raises UsageError, ModelError."""
    from kvcli.serve.upstream import Upstream

    invocation: Invocation = ctx.obj
    given = engine.given(ctx)
    given["--model"] = model_of(model)
    words, environment = mapping.words(given, mapping.VLLM), mapping.variables(given)
    name = Path(given["--model"]).name if os.path.isdir(model) else model
    interrupts.stage = UNWIND
    try:
        with vllm.running(words, environment, name, invocation.offline, invocation.verbose > 0) as program:
            render.notice("vLLM starts, which can take minutes; -v shows its log", invocation)
            vllm.wait(program)
            yield Opened(program, Upstream(program.socket, name, program.ctx_size, most, variables, aliases))
            if program.ended:
                raise program.failure()
    except vllm.Ended as error:
        write_err("".join(f"vllm: {line}\n" for line in error.lines))
        raise


def answer(found: Opened, question: Question, sink: TextSink, interrupts: Interrupts) -> None:
    """One answer, written to the sink as it comes; an interrupt ends it. Raises KVError."""
    asyncio.run(_answered(found.upstream, question, sink, interrupts))


async def _answered(upstream: Upstream, question: Question, sink: TextSink, interrupts: Interrupts) -> None:
    end, parts = None, list[CallPart]()
    try:
        async with await upstream.ask(question) as reply:
            interrupts.stage = FINISH
            async for found in reply.events(PATIENCE_S):
                if interrupts.cancelled():
                    break
                if found is not None and isinstance(event := found[1], (Token, End)):
                    parts += event.calls
                    if isinstance(event, End):
                        end = event
                    else:
                        sink.token(event)
    except KVError:
        sink.broken()
        raise
    sink.finish(end, ToolCalls.of(parts) if question.tools else None)
    if question.grammar is not None and end is not None and end.finish_reason == "length":
        say(CUT_FORM)


@dataclass(frozen=True)
class Asked:
    """What `kv run` asks, in the groups of its flags."""

    prompt: PromptFlags
    system: SystemFlags
    template: TemplateFlags
    sample: SampleFlags
    shape: GrammarFlags
    calls: ToolFlags

    def question(self, instruction: str | None, invocation: Invocation) -> Question:
        """Raises UsageError, InputBytesError."""
        from kvcli.serve.asked import Chat, Raw, Shape
        from kvcli.serve.calls import Asked as AskedTools
        from kvcli.serve.replies import Question

        tools = self.calls.listed(self.prompt, render.telling(invocation))
        asks = self.prompt.question(instruction, self.system, invocation, chat=True)
        options = replace(self.sample.options(attended=render.is_terminal(sys.stdout)), unattended=False)
        messages = [] if asks.system is None else [{"role": "system", "content": asks.system}]
        messages.append({"role": "user", "content": asks.prompt})
        offered = AskedTools(tools.tools, tools.asked) if tools else None
        prompt = Raw(asks.prompt) if asks.raw else Chat(messages, asks.begins, None, offered)
        schema = self.shape.schema()
        form = Shape(schema_of(*schema), schema[1]) if schema else None
        return Question("", prompt, options, grammar=form, tools=tools is not None)


def schema_of(text: str, called: str) -> dict[str, Any]:
    """Raises UsageError, with the path of what is wrong."""
    from kvcli.runtime.text import grammar

    grammar.json_schema(text, called)
    found: dict[str, Any] = json.loads(text)
    return found


def run(ctx: Any, model: str, asked: Asked, instruction: str | None, output: TextSink) -> int:
    """`kv run` with vLLM: the exit code. Raises KVError."""
    question = asked.question(instruction, ctx.obj)
    with Interrupts() as interrupts:
        with opened(ctx, model, 1, interrupts, asked.template.variables) as found:
            answer(found, question, output, interrupts)
        return interrupts.code
