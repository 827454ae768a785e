"""One chat: messages come in, answers go to a sink, remarks to stderr. Knows no terminal, no editor and no commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcli.cli.answer import Job, answer, cache_facts, settle
from kvcli.cli.commands.chat import room
from kvcli.cli.commands.chat.chatoptions import ChatOptions
from kvcli.cli.commands.chat.totals import Totals
from kvcli.cli.commands.chat.transcript import first_words
from kvcli.cli.commands.chat.typedpath import path_of
from kvcli.cli.inputs import read_file
from kvcli.cli.interrupt import FINISH, UNWIND, Interrupts
from kvcli.cli.outcome import CacheFacts, Result
from kvcli.cli.report import stats_line
from kvcli.cli.sinks import Sink, WhileRead
from kvcli.cli.streams import say
from kvcli.cli.wording import as_flags
from kvcli.errors import EXIT_INTERRUPTED, ContextOverflow, KVError, UsageError
from kvcli.options import EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.promptcache import marks
from kvcli.runtime.promptcache.marks import Mark
from kvcli.runtime.promptcache.prefixpages import common_length
from kvcli.runtime.promptcache.sessions import Branches, Session
from kvcli.words import counted

if TYPE_CHECKING:
    from kvcli.notices import Tell
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.text.conversation import Conversation


TURNS = 4  # the last ones, behind which another message may begin


@dataclass(frozen=True)
class File:
    """A file that goes in front of the next message."""

    name: str
    text: str
    tokens: int


class ChatSession:
    """A conversation, the sequence that caches it, and the caches that outlive it. `close` it.

    Whatever raises a KVError leaves all of it as it was.
    """

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        options: ChatOptions,
        sink: Sink,
        interrupts: Interrupts,
        branches: Branches,
        tell: Tell,
    ) -> None:
        self.engine, self.conversation, self.options = engine, conversation, options
        self.sink, self.interrupts, self.branches, self.tell = sink, interrupts, branches, tell
        self.sampling, self.evict = options.sampling, options.evict
        self.sequence = engine.new_sequence()
        self._open_caches()
        self.totals = Totals()
        self.last: Result | None = None
        self.draft = ""  # what the user may want to change and send again
        self.files: list[File] = []  # for the next message
        self._cleared = False  # and nothing was said since
        self._told = False  # that tokens are being evicted
        self._told_partly = False  # that pages are being left out
        self._regenerated = 0  # times in a row: a fixed seed must not give the same answer again

    def _open_caches(self) -> None:
        scope = self.branches.scope or self.options.kept.scope
        kept = replace(self.options.kept, memory=True, scope=scope, chat=self.branches.saved_as, lead=self._lead())
        self.caches = self.engine.prompt_caches(kept, self.tell, self.branches.elsewhere)

    def _lead(self) -> int:
        """How many tokens come before the first message; 0 for a template that does not say."""
        try:
            return self.conversation.system_tokens()
        except KVError:
            return 0

    @property
    def _trained(self) -> int:
        """Tokens of context that the model is trained on; 0 = not known."""
        return self.engine.config.context_length

    def _least(self) -> int:
        """How many tokens a message of nothing has; 0 for a template that does not say."""
        try:
            return self.conversation.alone("")
        except KVError:
            return 0

    def _marks(self) -> list[Mark]:
        """Where messages of this chat, or of others with its system message, may start from."""
        turns = [Mark(at, marks.TURN) for at in self.conversation.turn_ends()[-TURNS:]]
        return [*([] if self.conversation.system is None else [Mark(self._lead(), marks.SYSTEM)]), *turns]

    def close(self) -> None:
        """Keep the rows of a saved chat, and let go of everything."""
        try:
            if self.branches.saved_as or self.options.kept.file:
                self.caches.save(self.sequence)
        finally:
            self.caches.close()
            self.sequence.close()
            self.branches.close()

    # --- messages

    def send(self, text: str) -> None:
        """Answer a message. Where it is refused, or stopped before the answer began, it is the draft again.

        Where old tokens are evicted it must fit into the context by itself: no part of it goes unread. Else all of the
        conversation must. Raises ContextOverflow, ModelError, and SystemExit for a SIGTERM or SIGHUP during the answer.
        """
        self._regenerated = 0
        files, turns = self.files, self.conversation.turns
        message = self.branches.attachments.join([(file.name, file.text) for file in files], text)
        self.files, self.draft = [], ""
        answered = False
        try:
            if self.engine.retention:
                room.check_message(self.engine.ctx_size, self.conversation.alone(message), self._trained)
            answered = self._answer(lambda: self.conversation.add_user(message))
        except SystemExit:
            if not self.options.script and self.conversation.turns == turns:
                self.conversation.add_user(message)  # it is asked again when the chat goes on
            raise
        finally:
            if not answered:
                self.files, self.draft = files, text

    def attach(self, name: str) -> File:
        """Put a file in front of the next message; `name` as it was typed. Raises UsageError, InputBytesError, and
        ContextOverflow for one that no message could have."""
        name = path_of(name)
        file = self._file(name, self._read(name))
        limit = self.engine.ctx_size
        free = limit - sum(other.tokens for other in self.files)
        free -= self.conversation.alone("") if self.engine.retention else len(self.conversation.tokens)
        if file.tokens > free:
            raise ContextOverflow(
                f"{name} has {counted(file.tokens, 'token')}, the context of {limit:,} has room for {max(0, free):,}",
                f"the conversation is as it was; {room.larger(limit, limit + file.tokens - free, self._trained)}",
            )
        self.files.append(file)
        return file

    def _read(self, name: str) -> str:
        """The text of a file. A Ctrl-C stops it: nobody may ever write into a pipe."""
        before, self.interrupts.stage = self.interrupts.stage, UNWIND
        try:
            return read_file(name)
        except SystemExit as error:
            if self.options.script or error.code != EXIT_INTERRUPTED:
                raise
            raise UsageError(f"{name} was not read to its end", "the conversation is as it was") from None
        finally:
            self.interrupts.stage = before

    def _file(self, name: str, text: str) -> File:
        return File(name, text, len(self.engine.tokenizer.encode(text, add_bos=False)))

    def regenerate(self) -> None:
        """Another answer to the last message. Raises UsageError where there is none."""
        before = self.conversation.messages[-1:]
        self._regenerated += 1
        answered = self._answer(self.conversation.regen)
        greedy = self.last is not None and self.last.params.temperature == 0
        whole = self.last is not None and self.last.end.finish_reason != "interrupted"
        if answered and greedy and whole and self.conversation.messages[-1:] == before:
            say("the same answer: at temperature 0 it is always the most likely one (/set temperature 0.8)")

    def undo(self) -> str:
        """Take back what was done last: the words for it. Its text is the draft. Raises UsageError."""
        if self.files:
            return f"{self.files.pop().name} does not go with the next message"
        if not self.conversation.messages and self.branches.take_back(self.conversation):
            return f"the conversation of {counted(self.conversation.turns, 'turn')} is back"
        self._take_back()
        shared = self.sequence.rewindable(common_length(self.sequence.tokens, self.conversation.tokens))
        if shared:  # else its pages may be of use in another way
            self.sequence.rewind(shared)
        return f'removed "{first_words(self.draft)}" and its answer'

    def _take_back(self) -> None:
        """Take the last message back, with its answer, to be changed and sent again. Raises UsageError."""
        files, self.draft = self.branches.attachments.part(self.conversation.undo())
        self.files = [self._file(*file) for file in files]

    def take_unanswered(self) -> str:
        """Take a message back that was being read when the chat ended; what becomes of it, "" = there was none."""
        if [message["role"] for message in self.conversation.messages[-1:]] != ["user"]:
            return ""
        self._take_back()
        if self.options.script:
            self.files, self.draft = [], ""
            return "it is left out"
        return " and ".join(["it is on the line again", *(f"{file.name} goes with it" for file in self.files)])

    def clear(self) -> str:
        """A new conversation with the same system message; the branch that the old one is now, "" = it was empty."""
        if not self.conversation.messages:
            return ""
        self._told, self._told_partly, self._cleared = False, False, True
        branch = self.branches.put_aside(self.conversation)
        self.conversation.clear()
        self.sequence.rewind_to(0)
        return branch

    def save(self) -> None:
        """Keep a saved chat as it is now; one that was cleared stays as it was until something is said."""
        self._cleared = self._cleared and not self.conversation.messages
        if not self._cleared:
            self.branches.save(self.conversation)

    def _answer(self, prompt: Callable[[], list[int]]) -> bool:
        """Generate after the ids of `prompt`. Without a single token the conversation stays as it was, and this is
        False."""
        before = self.conversation.snapshot()
        sampling = self.sampling
        if sampling.seed >= 0:
            sampling = replace(sampling, seed=sampling.seed + self._regenerated)
        sink = WhileRead(self.sink, self.interrupts.cancelled)
        job = Job(
            self.options.model, settle(self.engine.loaded, sampling), sink, self.interrupts, self.caches, history=True
        )
        self.interrupts.stage = FINISH
        try:
            ids = prompt()
            self._check_conversation(len(ids))
            job = replace(job, thinking=self.conversation.thinking(), marks=self._marks())
            result = answer(self.engine, self.sequence, ids, job)
        except BaseException:
            self.conversation.restore(before)
            self.after_signal()
            raise
        answered = result.end.finish_reason != "interrupted" or bool(result.end.ids)
        if answered:
            self.conversation.record_answer(result.text, result.end.ids, result.reasoning, result.end.raw)
            self._account(result)
        else:
            self.conversation.restore(before)
            say("stopped before the answer began; the conversation is as it was")
        self.after_signal()
        return answered

    def _check_conversation(self, n_tokens: int) -> None:
        limit = self.engine.ctx_size
        if n_tokens > limit and not self.engine.retention:
            if not self.conversation.turns:  # there is nothing to forget
                room.check_message(limit, n_tokens, self._trained)
            raise ContextOverflow(
                f"the conversation would have {n_tokens:,} tokens with this, {n_tokens - limit:,} more than the context"
                f" of {limit:,}",
                self.ways_out(n_tokens),
            )

    def ways_out(self, n_tokens: int) -> str:
        """What may be done where the context is full of a conversation of `n_tokens`."""
        keep = "" if self.branches.saved_as else "/save NAME or "
        return (
            f"{room.larger(self.engine.ctx_size, n_tokens, self._trained)}, /evict sink goes on without the oldest"
            " text, /undo takes the last turn back,"
            f" {keep}/export FILE keeps the text, /clear starts again"
        )

    def _account(self, result: Result) -> None:
        if result.ended_early:
            full = result.end.finish_reason == "context"
            say(result.ended_early + (f"; {self.ways_out(result.cache.limit + 1)}" if full else ""))
        if result.cache.evicted and not self._told:
            self._told = True
            say("; ".join(result.evicted) if result.cache.evict.budget else self._full())
        if result.partly and not self._told_partly:
            self._told_partly = True
            say("; ".join(result.partly))
        if self.options.stats:
            self.options.aside(stats_line(result, loaded=self.last is None, verbose=self.options.verbose))
        self.totals.add(result.end.usage)
        self.last = result

    def _full(self) -> str:
        return f"the context is full: {self.engine.retention} of its tokens stay, the others are forgotten"

    def await_message(self) -> None:
        """All that was said is saved. From here on a signal ends a script at once. Raises SystemExit for one that has
        come before."""
        self.interrupts.stage = UNWIND if self.options.script else FINISH  # a Ctrl-C at a terminal ends nothing
        self.after_signal()

    def after_signal(self) -> None:
        """At a terminal Ctrl-C has done its work by ending the answer, if there was one; other signals end the session
        too: raises SystemExit."""
        code = self.interrupts.code
        if code:
            self.interrupts.reset()
        if code and (self.options.script or code != EXIT_INTERRUPTED):
            raise SystemExit(code)

    # --- what holds the conversation

    def facts(self) -> CacheFacts:
        """The cache for the conversation as it is, whatever of it the sequence has at the moment."""
        facts, n_tokens = cache_facts(self.engine, self.sequence), len(self.conversation.tokens)
        if facts.evict.budget:  # rows are selected anew behind the next message, where none are there
            return facts if self.sequence.length else replace(facts, tokens=min(n_tokens, facts.limit))
        if facts.retention is None:
            return replace(facts, tokens=min(n_tokens, facts.limit))  # the token that filled it up is not in the cache
        gone = facts.retention.gap(n_tokens - 1) if n_tokens else 0
        return replace(facts, tokens=n_tokens - gone, evicted=gone)

    def unread(self) -> int:
        """Tokens of the conversation whose rows are nowhere: they are read again with the next message. Less than a
        page counts as none."""
        tokens = self.conversation.tokens
        missing = len(tokens) - self.caches.find(self.sequence, tokens)
        return missing if missing >= self.engine.layout.page_size else 0

    def tell_unread(self) -> None:
        """Say how much will be read again, if any."""
        if missing := self.unread():
            n_tokens = len(self.conversation.tokens)
            which = "all" if missing == n_tokens else f"{missing:,} of"
            why = as_flags(self.caches.kept_otherwise(self.conversation.tokens))
            told = f"{which} {counted(n_tokens, 'token')} of the conversation are read again with the next message"
            say(f"{told}: {why}" if why else told)

    def change(self, ctx_size: int, evict: EvictOptions) -> None:
        """Go on with another context (0 = as trained, or what fits) or another policy. Raises UsageError and
        DoesNotFit."""
        settled, before = evict, self.engine.doubts
        limit, n_tokens = ctx_size or self._trained, len(self.conversation.tokens)
        evicts = eviction.policy(evict.policy).retention is not None
        room.check_size(limit, self._least(), n_tokens, self.engine.ctx_size, evicts, self._trained)
        if evict.keep == eviction.WHOLE_PROMPT:
            settled = replace(evict, keep=self.conversation.system_tokens())
        self.caches.close()  # what stayed in the pool stayed there under the old terms
        try:
            self.engine = self.engine.reopened(ctx_size, settled)
            self.sequence = self.engine.carried(self.sequence)
        finally:
            self._open_caches()
        self.evict, self._told = evict, False
        self.branches.opened = replace(self.branches.opened, evict=evict)
        for notice in self.engine.terms.notices:
            if notice not in before:
                say(as_flags(notice))
        self.tell_unread()

    def set_system(self, text: str) -> None:
        """Replace the system message; the turns stay. Raises TemplateError, UsageError, ContextOverflow."""
        before = self.conversation.snapshot()
        self.conversation.set_system(text)
        try:
            self._check_conversation(len(self.conversation.tokens))
            self.begins_anew()
        except KVError:
            self.conversation.restore(before)
            raise

    def begins_anew(self) -> None:
        """The conversation may begin with other tokens than before."""
        kept = self.engine.retention.keep if self.engine.retention else 0
        if self.evict.keep == eviction.WHOLE_PROMPT and self.conversation.system_tokens() != kept:
            self.change(self.engine.ctx_size, self.evict)
        else:
            self.tell_unread()

    def save_as(self, name: str) -> None:
        """From now on this is the saved chat of that name, which must be new. Raises UsageError, OutputError."""
        loaded = self.engine.loaded
        how = loaded.tokenizer_hashes(), loaded.lora_names, self.options.kept.scope
        saved = Session(name, self.options.model, *how)
        try:
            if saved.states:
                raise UsageError(f"there is a saved chat '{name}' already", "take another name; kv chat ls lists them")
            saved.branch, saved.states = self.branches.branch, dict(self.branches.states)
            saved.attachments, saved.opened = self.branches.attachments, self.branches.opened
            saved.save(self.conversation)
        except BaseException:
            saved.close()
            raise
        self.branches.close()
        self.branches = saved
        self.caches.close()
        self._open_caches()
