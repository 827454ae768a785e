"""One chat: lines come in, answers go to a sink, the rest to stderr. Knows no terminal and no editor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.answering import Job, answer, cache_facts, settle
from kvcli.errors import EXIT_INTERRUPTED, ContextOverflow, KVError, UsageError
from kvcli.interrupt import FINISH, UNWIND, Interrupts
from kvcli.options import SampleOptions
from kvcli.render import human_bytes
from kvcli.report import Result, context_full, stats_line
from kvcli.runtime.events import Usage
from kvcli.runtime.promptcaches.prefixpages import common_length
from kvcli.runtime.promptcaches.sessions import Branches
from kvcli.sinks import Sink
from kvcli.streams import say

if TYPE_CHECKING:
    from kvcli.runtime.engine import Engine
    from kvcli.runtime.text.conversation import Conversation

COMMANDS = {
    "/help": "this list (also /?)",
    "/clear": "a new conversation; the system message stays",
    "/regen": "another answer to the last message (also /retry)",
    "/undo": "take the last message and its answer back",
    "/branch [NAME]": "go on in another branch, which begins here if it is new; without a name list them",
    "/system [TEXT]": "show or set the system message",
    "/ctx": "how full the context is, and what was evicted",
    "/stats": "the last answer and the session in figures",
    "/exit": "leave (also /quit, /bye, Ctrl-D)",
    "//TEXT": "send a message that begins with a slash",
}
ALIASES = {"/?": "/help", "/retry": "/regen", "/quit": "/exit", "/bye": "/exit"}


@dataclass(frozen=True)
class ChatOptions:
    """How a chat answers."""

    model: str
    sampling: SampleOptions  # seed -1 = a new random one for every answer
    stats: bool  # a line after each answer
    script: bool  # SIGINT ends the session, not only the answer


@dataclass
class Totals:
    """Tokens of all answers of a session."""

    answers: int = 0
    prompt: int = 0
    reused: int = 0
    generated: int = 0

    def add(self, usage: Usage) -> None:
        self.answers += 1
        self.prompt += usage.prompt_tokens
        self.reused += usage.cache_read_tokens
        self.generated += usage.completion_tokens

    def __str__(self) -> str:
        share = 100 * self.reused / max(1, self.prompt)
        return (
            f"session: {self.answers} answers, reused {self.reused} of {self.prompt} prompt tokens"
            f" ({share:.1f} %), prefilled {self.prompt - self.reused}, generated {self.generated}"
        )


class ChatSession:
    """Handles one line after another. A KVError raised by `handle` leaves the session usable."""

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        options: ChatOptions,
        sink: Sink,
        interrupts: Interrupts,
        branches: Branches,
    ) -> None:
        self.engine, self.conversation, self.options = engine, conversation, options
        self.sink, self.interrupts, self.branches = sink, interrupts, branches
        self.sequence = engine.new_sequence()
        self.totals = Totals()
        self.last: Result | None = None
        self._told = False  # that tokens are being evicted
        self._regenerated = 0  # times in a row: a fixed seed must not give the same answer again

    def handle(self, line: str) -> bool:
        """Answer a message or obey a slash command; False when the session is to end.

        Raises UsageError (unknown command), ContextOverflow or ModelError (the message is forgotten then), or
        SystemExit for a SIGTERM during the answer. However it ends, the conversation is saved.
        """
        try:
            if line.startswith("//"):
                self.send(line[1:])
            elif line.startswith("/"):
                return self._command(line)
            elif line.strip():
                self.send(line)
        finally:
            self.branches.save(self.conversation)
        return True

    def send(self, text: str) -> None:
        """Answer one message. Where old tokens are evicted it must fit into the context by itself: no part of it goes
        unread. Else all of the conversation must."""
        self._regenerated = 0
        if self.engine.retention:
            self._check_length(text)
        self._answer(lambda: self.conversation.add_user(text))

    def _check_length(self, text: str) -> None:
        needed, limit = self.conversation.alone(text), self.engine.ctx_size
        if needed > limit:
            raise ContextOverflow(
                f"the message needs {needed:,} tokens with the system message, {needed - limit:,} more than the context"
                f" of {limit:,}",
                "the conversation is as it was; send less at a time",
            )

    def _answer(self, prompt: Callable[[], list[int]]) -> None:
        """Generate after the ids of `prompt`. Without a single token the conversation stays as it was."""
        before = self.conversation.snapshot()
        sampling = self.options.sampling
        if sampling.seed >= 0:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + self._regenerated)
        job = Job(self.options.model, settle(self.engine, sampling), self.sink, self.interrupts, history=True)
        self.interrupts.stage = FINISH
        try:
            result = answer(self.engine, self.sequence, prompt(), job)
        except KVError:
            self.conversation.restore(before)
            raise
        finally:
            self.interrupts.stage = UNWIND
        if result.end.finish_reason == "interrupted" and not result.end.ids:
            self.conversation.restore(before)
            say("stopped before the answer began; the conversation is as it was")
        else:
            self.conversation.record_answer(result.text, result.end.ids)
            self._account(result)
        self._after_signal()

    def _account(self, result: Result) -> None:
        if result.end.finish_reason == "context":
            say(f"{context_full(result.cache)}; /undo takes the last turn back, /clear starts again")
        if result.cache.evicted and not self._told:
            self._told = True
            say(f"the context is full: {self.engine.retention} of its tokens stay, the others are forgotten")
        if self.options.stats:
            say(stats_line(result, loaded=self.last is None))
        self.totals.add(result.end.usage)
        self.last = result

    def _after_signal(self) -> None:
        """At a terminal Ctrl-C has done its work by ending the answer; SIGTERM ends the session too."""
        code = self.interrupts.code
        self.interrupts.reset()
        if code and (self.options.script or code != EXIT_INTERRUPTED):
            raise SystemExit(code)

    def _command(self, line: str) -> bool:
        name, _, argument = line.strip().partition(" ")
        name = ALIASES.get(name, name)
        if name == "/exit":
            return False
        actions: dict[str, Callable[[], None]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/regen": self._regen,
            "/undo": self._undo,
            "/ctx": self._ctx,
            "/stats": self._stats,
        }
        if name == "/system":
            self._system(argument.strip())
        elif name == "/branch":
            self._branch(argument.strip())
        elif name not in actions:
            raise UsageError(f"unknown command {name}", "/help lists the commands; //text sends a slash")
        elif argument.strip():
            raise UsageError(f"{name} takes no argument")
        else:
            actions[name]()
        return True

    def _help(self) -> None:
        for name, text in COMMANDS.items():
            say(f"{name:<15} {text}")

    def _clear(self) -> None:
        self._told = False
        self.conversation.clear()
        self.sequence.rewind_to(0)
        say("a new conversation")

    def _regen(self) -> None:
        self._regenerated += 1
        self._answer(self.conversation.regen)

    def _undo(self) -> None:
        text = self.conversation.undo()
        self.sequence.rewind_to(common_length(self.sequence.tokens, self.conversation.tokens))
        first = text.split("\n", 1)[0]
        say(f"took back: {first[:60]}{'...' if first[60:] or first != text else ''}")
        if self.conversation.tokens and not self.sequence.tokens:
            say(f"its cache is gone: up to {len(self.conversation.tokens)} tokens are read again with the next message")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.set_system(text)
        current = self.conversation.system
        say("no system message of yours; the template may have its own" if current is None else f"system: {current}")

    def _branch(self, name: str) -> None:
        if name:
            there = self.branches.switch(name, self.conversation)
            say(f"in branch {name}" if there else f"in the new branch {name}, which begins here")
            return
        for other in sorted({self.branches.branch, *self.branches.states}):
            say(f"{'*' if other == self.branches.branch else ' '} {other}")

    def _ctx(self) -> None:
        facts = cache_facts(self.engine, self.sequence)
        limit, used = facts.limit, facts.tokens
        if facts.retention is None:
            used = min(len(self.conversation.tokens), limit)  # the token that filled it up is not in the cache
            facts = dataclasses.replace(facts, tokens=used)
        say(f"context: {used} of {limit} tokens ({100 * used / limit:.1f} %), {facts.room}")
        if facts.retention is not None:
            say(f"kept: {facts.retention}, in whole pages; what was evicted is forgotten")
        say(f"cache: {facts.pages} pages of {facts.page_size}, {human_bytes(facts.nbytes)} as {facts.types}")

    def _stats(self) -> None:
        if self.last is not None:
            say(f"last: {stats_line(self.last)}")
        say(str(self.totals))
