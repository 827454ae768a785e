"""`kv chat`: a conversation on the terminal, or one message after another from a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli import opening, render, report
from kvcli.chatsession import COMMANDS, ChatOptions, ChatSession
from kvcli.errors import ContextOverflow, KVError, ModelError, UsageError
from kvcli.evictflags import EvictFlags
from kvcli.flags import DEFAULT_MODEL, CacheFlags, ModelFlags, SampleFlags, SystemFlags, grouped
from kvcli.helptext import GENERATE
from kvcli.inputs import decode, drop_mark
from kvcli.interrupt import UNWIND, Interrupts, last_words
from kvcli.invocation import Invocation
from kvcli.promptcacheflags import StoreFlags
from kvcli.runtime.promptcaches import sessions
from kvcli.sinks import TextSink
from kvcli.streams import TextOut, keys_wait, say

if TYPE_CHECKING:
    from kvcli.runtime.engine import Engine
    from kvcli.runtime.text.conversation import Conversation


@dataclass(frozen=True)
class ChatFlags:
    """How the conversation is held."""

    session: Annotated[
        str | None, typer.Option("--session", metavar="NAME", help="Save the chat under this name, and go on with it.")
    ] = None
    resume: Annotated[str | None, typer.Option("--resume", metavar="NAME", help="Go on with a saved chat.")] = None
    continue_: Annotated[bool, typer.Option("--continue", help="Go on with the chat that was saved last.")] = False
    script: Annotated[bool, typer.Option("--script", help="Messages from stdin, one a line; answers on stdout.")] = (
        False
    )
    no_raw: Annotated[
        bool, typer.Option("--no-raw", help="Chat even with a base model, in the format of its architecture.")
    ] = False
    null: Annotated[bool, typer.Option("-0", "--null", help="With --script: messages end with NUL.")] = False
    stats: Annotated[
        bool | None,
        typer.Option("--stats/--no-stats", help="A line after each answer.", show_default="on a terminal"),
    ] = None
    raw_output: Annotated[
        bool, typer.Option("--raw-output", help="Let control characters of the text reach the terminal.")
    ] = False

    def session_name(self) -> str:
        """The chat that is saved; "" = none. Raises UsageError for one that is not there."""
        given = [self.session is not None, self.resume is not None, self.continue_]
        if sum(given) > 1:
            raise UsageError("--session, --resume and --continue exclude each other")
        if not any(given):
            return ""
        if self.session is not None:
            return sessions.check_name(self.session)
        saved = sessions.names()
        if not saved:
            raise UsageError("there is no saved chat", "kv chat --session NAME saves one")
        if self.continue_:
            return saved[0]
        if self.resume not in saved:
            raise UsageError(f"there is no saved chat '{self.resume}'", f"saved: {', '.join(saved[:10])}")
        return self.resume

    def check(self) -> None:
        """Raises UsageError where there is neither a terminal nor a script."""
        if self.null and not self.script:
            raise UsageError("-0 needs --script")
        if self.script:
            return
        if not render.is_terminal(sys.stdin):
            raise UsageError(
                "kv chat needs a terminal", "--script takes messages from stdin; kv run answers one prompt"
            )
        if not render.is_terminal(sys.stdout):
            raise UsageError("kv chat needs a terminal to write to", "kv run and kv chat --script write to files")


def register(app: typer.Typer) -> None:
    app.command("chat", rich_help_panel=GENERATE)(chat)


@grouped
def chat(
    ctx: typer.Context,
    model: ModelFlags,
    cache: CacheFlags,
    store: StoreFlags,
    evict: EvictFlags,
    system: SystemFlags,
    sample: SampleFlags,
    flags: ChatFlags,
) -> None:
    """Talk with a model; each turn reuses the cache of the turns before it."""
    invocation: Invocation = ctx.obj
    keys = nullcontext(lambda: None) if flags.script else keys_wait()
    with keys as give_back, Interrupts(partial(_leave, give_back), insist=flags.script) as interrupts:
        flags.check()
        load, sampling = model.options(invocation.offline), sample.options()
        cache_options = cache.options(evict.options(cache.page_size))
        message, name, kept = system.text(render.telling(invocation)), flags.session_name(), store.options(invocation)
        sink = TextSink(TextOut.stdout(flags.raw_output), invocation)
        engine = opening.open_engine(load, cache_options, invocation, interrupts)
        options = ChatOptions(load.model, sampling, report.wants_stats(flags.stats, invocation), flags.script)
        kept = replace(kept, memory=True, min_tokens=1 if name else kept.min_tokens)  # each turn of a saved chat
        conversation = _conversation(engine, message, flags.no_raw, invocation)
        with closing(_branches(name, load.model, engine, conversation, invocation)) as branches:
            if engine.keeps_prompt:
                opening.keep_prompt(engine, conversation.system_tokens(), invocation)
            with closing(engine.use_caches(kept, render.telling(invocation))) as caches:
                session = ChatSession(engine, conversation, options, sink, interrupts, branches)
                interrupts.stage = UNWIND
                try:
                    if flags.script:
                        _follow(session, b"\0" if flags.null else b"\n")
                    else:
                        _talk(session, invocation)
                finally:
                    if name:
                        caches.save(session.sequence)


def _leave(give_back: Callable[[], None], code: int) -> None:
    """Before an exit at once, which unwinds nothing."""
    give_back()
    last_words(code)


def _branches(
    name: str, model: str, engine: Engine, conversation: Conversation, invocation: Invocation
) -> sessions.Branches:
    """The branches of the session, and the conversation brought to where it was left; "" = no session."""
    if not name:
        return sessions.Branches()
    asked, session = conversation.system, sessions.Session(name, model, engine.tokenizer_hashes())
    session.restore(conversation)
    if asked is not None:
        conversation.set_system(asked)
    if conversation.messages:
        what = "" if session.ids_fit else "; it was held with another model, whose cache is of no use"
        render.announce(f"session {name}: {conversation.turns} answers so far{what}", invocation)
    return session


def _conversation(engine: Engine, system: str | None, anyway: bool, invocation: Invocation) -> Conversation:
    """`anyway`: with a base model, too. Raises ModelError for a model without a chat template."""
    from kvcli.runtime.text.conversation import Conversation

    if anyway:
        engine.chat_anyway()
    elif engine.template_note:
        if engine.template is None:
            spare = f", --no-raw chats with it in {engine.config.arch}'s format" if engine.spare_template else ""
            raise ModelError(
                "this model cannot chat: its file has no chat template, as base models have none",
                f"kv run continues text with it, kv chat -m {DEFAULT_MODEL} chats{spare}",
            )
        render.notice(engine.template_note, invocation)
    assert engine.template is not None
    return Conversation(engine.tokenizer, engine.template, system)


def _follow(session: ChatSession, end: bytes) -> None:
    """Handle the messages of stdin; the first error ends the script with its exit code."""
    for message in read_messages(end):
        if not session.handle(message):
            return


def read_messages(end: bytes) -> Iterator[str]:
    """Messages from stdin as they arrive, each ended by the byte `end`; the last one need not be.

    Raises InputBytesError; the offset counts within the message.
    """
    held = b""
    number = 0
    while block := os.read(sys.stdin.fileno(), 1 << 16):
        *messages, held = (held + block).split(end)
        for message in messages:
            number += 1
            text = decode(message.removesuffix(b"\r") if end == b"\n" else message, f"message {number}")
            yield drop_mark(text) if number == 1 else text
    if held:
        text = decode(held, f"message {number + 1}")
        yield text if number else drop_mark(text)


def _talk(session: ChatSession, invocation: Invocation) -> None:
    """Read and handle lines until Ctrl-D or /exit; errors are told and the conversation goes on."""
    from kvcli.lineeditor import LineEditor, open_history

    names = [name.split()[0] for name in COMMANDS if not name.startswith("//")]
    editor = LineEditor(open_history(partial(render.warn, invocation=invocation)), names)
    render.notice(f"{session.engine.config.name}, {session.engine.ctx_size} tokens of context; /help", invocation)
    while True:
        try:
            if not session.handle(editor.read()):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            if not editor.interrupted_text:
                say("Ctrl-D to exit")
        except KVError as error:
            more = "; /undo takes the last turn back, /clear starts again" if isinstance(error, ContextOverflow) else ""
            render.print_error(error.message, error.hint + more, invocation.color)
