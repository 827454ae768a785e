"""`kv chat`: a conversation on the terminal, or one message after another from a script; and `kv chat ls` and others
for conversations that are saved.

`session.py` holds a conversation, `slash.py` has the commands typed in it, `lineeditor.py` reads what is typed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from kvcli.cli import engines, keeping, render, report
from kvcli.cli.answer import settle
from kvcli.cli.app import App
from kvcli.cli.commands.chat import importing, messages, reopening, savedchats, slash, transcript
from kvcli.cli.commands.chat.chatoptions import ChatOptions
from kvcli.cli.commands.chat.flags import ChatFlags
from kvcli.cli.commands.chat.group import ChatGroup
from kvcli.cli.commands.chat.session import ChatSession
from kvcli.cli.flags.attending import AttendFlags
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.keeping import KeepFlags
from kvcli.cli.flags.promptcache import FileFlags, StoreFlags
from kvcli.cli.flags.sampling import SampleFlags
from kvcli.cli.flags.shared import DEFAULT_MODEL, CacheFlags, DraftFlags, ModelFlags, SystemFlags, grouped
from kvcli.cli.flags.template import TemplateFlags, ThinkingFlags
from kvcli.cli.helptext import GENERATE
from kvcli.cli.interrupt import Interrupts, last_words
from kvcli.cli.invocation import Invocation
from kvcli.cli.sinks import TextSink, TurnSink
from kvcli.cli.streams import TextOut, keys_wait, say, typed_so_far, wrapped, write_err
from kvcli.errors import KVError, ModelError, UsageError
from kvcli.runtime.promptcache import sessions
from kvcli.words import counted

if TYPE_CHECKING:
    from kvcli.notices import Tell
    from kvcli.options import LoadOptions
    from kvcli.runtime.engine.loaded import LoadedModel
    from kvcli.runtime.text.conversation import Conversation
    from kvcli.runtime.text.modeltext import ModelText

EXAMPLES = """
kv chat --session trip
kv chat --resume trip
kv chat ls
kv chat show trip
kv chat rm trip
kv chat export trip -o trip.md
kv chat import trip.json --name trip2
printf 'Hello.\\nAnd in French?\\n' | kv chat --script
"""


def register(app: typer.Typer) -> None:
    group = App(cls=ChatGroup)
    group.callback(invoke_without_command=True, epilog=EXAMPLES)(chat)
    for command in (savedchats.ls, savedchats.show, savedchats.export, importing.import_, savedchats.rm):
        group.command(command.__name__.rstrip("_"), rich_help_panel="Saved chats")(command)
    app.add_typer(group, name="chat", rich_help_panel=GENERATE)


@grouped
def chat(
    ctx: typer.Context,
    model: ModelFlags,
    staying: KeepFlags,
    draft: DraftFlags,
    cache: CacheFlags,
    store: StoreFlags,
    named: FileFlags,
    evict: EvictFlags,
    attend: AttendFlags,
    system: SystemFlags,
    template: TemplateFlags,
    thought: ThinkingFlags,
    sample: SampleFlags,
    flags: ChatFlags,
) -> None:
    """Talk with a model. Each turn reuses the cache of the turns before it.

    Enter sends a message. One of several lines stands between \"\"\" and \"\"\"; or end a line with a backslash, or
    press Alt-Enter or Ctrl-J. What is pasted stays together. /help lists commands, such as /undo, /set, /save and
    /file; Ctrl-D or /exit leaves.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    invocation: Invocation = ctx.obj
    keys = nullcontext(lambda: None) if flags.script else keys_wait()
    leave = partial(_leave, invocation)
    with keys as give_back, Interrupts(partial(leave, give_back), insist=flags.script) as interrupts:
        flags.check()
        early = "" if flags.script else typed_so_far()
        load, sampling = model.options(invocation.offline), sample.options(render.is_terminal(sys.stdout))
        load = draft.add_to(load, sample.spec)
        keeping.find_process(load, staying.seconds, False, invocation)
        name = flags.session_name()
        cache, evict = reopening.as_saved(ctx, cache, evict, name, load.model, invocation)
        evict_options = evict.options(cache.page_size)
        cache_options = cache.options(evict_options, attend.options(evict_options))
        message = system.text(render.telling(invocation))
        stats = report.wants_stats(flags.stats, invocation)
        aside, kept = partial(render.aside, invocation=invocation), named.add_to(store.options(invocation))
        if named.prompt_cache_all:
            render.notice("--prompt-cache-all changes nothing: kv chat keeps the rows of answers anyway", invocation)
        how = aside, invocation.verbose > 0
        options = ChatOptions(load.model, sampling, stats, flags.script, evict_options, kept, *how)
        out = TextOut.stdout(flags.raw_output)
        sink = TurnSink(out, invocation) if flags.json else TextSink(out, invocation)
        load = replace(load, chat_anyway=flags.no_raw, chat=template.options(False, thought.reasoning_budget))
        loaded = engines.load_model(load, cache_options, invocation, interrupts)
        keeping.stay(loaded, load, staying, invocation)
        if invocation.verbose:
            say(report.sampling_line(settle(loaded, sampling)))
        conversation = _conversation(loaded.text, loaded.config.arch, message, flags.no_raw, invocation)
        thinking = conversation.thinking()
        engines.tell_of_template(loaded.text.template, bool(thinking and thinking.styles), invocation)
        with closing(_branches(name, load, loaded, kept.scope)) as branches:
            branches.restore(conversation)
            branches.opened = reopening.opened_with(cache_options)
            told = _replace_system(conversation, message)
            engine = engines.engine_of(
                loaded, invocation, conversation.system_tokens() if loaded.terms.keeps_prompt else 0
            )
            engines.tell_of_guesses(engine, sampling, invocation)
            tell = _telling(invocation)
            with closing(ChatSession(engine, conversation, options, sink, interrupts, branches, tell)) as session:
                session.await_message()
                _greet(session, told, invocation)
                if flags.script:
                    _follow(session, messages.of_stdin(flags.null))
                else:
                    _talk(session, invocation, flags.no_history, early)


def _refuse_options(ctx: typer.Context) -> None:
    """Options of a conversation are of no use to the commands about saved ones. Raises UsageError."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(str(param.name))
        if source is not None and source.name == "COMMANDLINE" and param.expose_value:
            raise UsageError(
                f"{param.opts[-1]} cannot be used with kv chat {ctx.invoked_subcommand}",
                f"see kv chat {ctx.invoked_subcommand} --help",
            )


def _leave(invocation: Invocation, give_back: Callable[[], None], code: int) -> None:
    """Before an exit at once, which unwinds nothing."""
    give_back()
    last_words(code, invocation.json, text="".join(invocation.answer))


def _telling(invocation: Invocation) -> Tell:
    """As for `kv run`; but nobody asked for anything to be found, so that it was not is said with -v only."""
    tell = render.telling(invocation)
    return tell if invocation.verbose else replace(tell, notice=lambda message: None)


def _conversation(
    model: ModelText, arch: str, system: str | None, anyway: bool, invocation: Invocation
) -> Conversation:
    """`anyway`: with a base model, too. Raises ModelError for a model without a chat template."""
    from kvcli.runtime.text.conversation import Conversation

    if model.note and not anyway:
        if model.template is None:
            spare = f", --no-raw chats with it in {arch}'s format" if model.has_spare else ""
            raise ModelError(
                "this model cannot chat: its file has no chat template, as base models have none",
                f"kv run continues text with it, kv chat -m {DEFAULT_MODEL} chats{spare}",
            )
        render.notice(model.note, invocation)
    assert model.template is not None
    return Conversation(model.tokenizer, model.template, system)


def _branches(name: str, load: LoadOptions, loaded: LoadedModel, scope: str) -> sessions.Branches:
    """Those of the saved chat; "" = of one in memory."""
    if not name:
        return sessions.Branches()
    return sessions.Session(name, load.model, loaded.tokenizer_hashes(), loaded.lora_names, scope)


def _replace_system(conversation: Conversation, asked: str | None) -> str:
    """Have the system message of the command line in place of that of a saved chat; what to say of it."""
    before = conversation.system
    if asked is None or asked == before:
        return ""
    conversation.set_system(asked)
    return "" if not conversation.messages else "its system message is replaced by the one of this command line"


def _greet(session: ChatSession, told: str, invocation: Invocation) -> None:
    """What a chat begins with: the model, or where a saved chat was left."""
    tell = partial(render.announce, invocation=invocation)
    conversation, engine = session.conversation, session.engine
    unanswered = session.take_unanswered()
    if not session.options.script:
        title = render.one_line(engine.loaded.title)
        render.notice(f"{title}, {engine.ctx_size:,} tokens of context; /help lists commands", invocation)
    if unanswered:
        tell(f"the last message of session {session.branches.saved_as} got no answer; {unanswered}")
    if not conversation.messages:
        return
    branches, turns = session.branches, counted(conversation.turns, "turn")
    if (others := getattr(branches, "other_lora", None)) is not None:
        held = " ".join(f"--lora {each}" for each in others) or "no LoRA adapter"
        tell(f"session {branches.saved_as} was held with {held}; this command line says otherwise")
    if not session.options.script and not invocation.quiet:
        write_err(wrapped(transcript.last_turn(conversation.messages, branches.attachments)) + "\n")
    branch = "" if branches.branch == sessions.MAIN else f", branch {branches.branch}"
    tell(f"session {branches.saved_as}{branch}: {turns} so far" + ("; /history shows them" if turns else ""))
    if held_with := getattr(branches, "held_with", ""):
        tell(f"it was last used with {held_with} and continues with {session.options.model}")
    if branches.scope and branches.scope != session.options.kept.scope:
        tell(f"its rows are kept in the scope {branches.scope}, as before")
    if told:
        tell(told)
    n_tokens = len(conversation.tokens)
    if n_tokens > engine.ctx_size and not engine.retention:
        tell(f"its {n_tokens:,} tokens are more than the context of {engine.ctx_size:,}: {session.ways_out(n_tokens)}")
    elif not invocation.quiet:
        session.tell_unread()


def _follow(session: ChatSession, script: Iterable[messages.Piece]) -> None:
    """Handle the messages of a script; the first error, which names its message, ends it with its exit code."""
    for name, message in script:
        try:
            if not slash.handle(session, message):
                return
        except KVError as error:
            error.message = f"{name}: {error.message}"
            raise


def _talk(session: ChatSession, invocation: Invocation, no_history: bool, early: str) -> None:
    """Read and handle lines until Ctrl-D or /exit; errors are told and the conversation goes on. `early`: what was
    typed before there was a prompt."""
    from kvcli.cli.commands.chat import lineeditor

    history = lineeditor.open_history(partial(render.warn, invocation=invocation), no_history)
    completer = lineeditor.CommandCompleter(slash.NAMES, partial(slash.values, session))
    editor = lineeditor.LineEditor(history, completer, lambda: session.interrupts.code, early)
    explained = False
    while True:
        session.after_signal()
        draft, session.draft = session.draft, ""
        if draft and not explained:
            explained = True
            render.step(
                "the last message is on the line again: Enter sends it, typing replaces it, arrow keys keep it",
                invocation,
            )
        try:
            line = editor.read(slash.as_message(draft))
            if slash.is_command(line):
                session.draft = draft  # it waits until the command is obeyed
            if not slash.handle(session, line):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            if not editor.interrupted_text:
                say("Ctrl-D to exit")
        except KVError as error:
            render.print_error(error.message, error.hint, invocation.color)
