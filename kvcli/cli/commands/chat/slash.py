"""The commands that a chat takes between messages: lines that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvcli.cli import chatcost
from kvcli.cli.answer import settle
from kvcli.cli.commands.chat import hints, slashset, transcript
from kvcli.cli.commands.chat.session import ChatSession
from kvcli.cli.flags.shared import parse_tokens
from kvcli.cli.report import full_stats
from kvcli.cli.streams import say, wrapped, write_err
from kvcli.cli.wording import as_flags
from kvcli.cli.wrapping import columns, fill
from kvcli.errors import KVError, UsageError
from kvcli.options import EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.promptcache.sessions import path_of
from kvcli.words import counted, human_bytes

REASONING = ("on", "off", "auto")
WORDS_TO_LEAVE = ("exit", "quit")  # typed alone at a terminal


def is_command(line: str) -> bool:
    """Whether a line is no message."""
    return line.startswith("/") and not line.startswith("//")


def as_message(text: str) -> str:
    """What is to be typed to send a text."""
    return f"/{text}" if text.startswith("/") else text


def handle(session: ChatSession, line: str) -> bool:
    """Answer a message or obey a command; False when the session is to end.

    Raises KVError, after which the session goes on, and SystemExit for a signal that ends the process. However it ends,
    the conversation is saved.
    """
    try:
        if is_command(line):
            return _obey(session, line)
        if line.startswith("//"):
            session.send(line[1:])
        elif not session.options.script and line.strip().lower() in WORDS_TO_LEAVE:
            return False
        elif line.strip():
            session.send(line)
    except KVError as error:
        error.message, error.hint = hints.to_type(error.message), hints.to_type(error.hint)
        raise
    finally:
        session.save()
        session.await_message()
    return True


@dataclass(frozen=True)
class Command:
    """`argument`: what it is called, in brackets where it may be left out; "" = there is none."""

    name: str
    argument: str
    text: str
    run: Callable[[ChatSession, str], None]
    other_names: tuple[str, ...] = ()
    values: Callable[[ChatSession], Iterable[str] | None] = lambda session: ()  # of the argument; None = files


def _obey(session: ChatSession, line: str) -> bool:
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    command = _command(name)
    if command is None and name not in LEAVING:
        raise UsageError(
            f"unknown command {name}", hints.of_command(name, NAMES, (*slashset.names(), *slashset.OTHER_NAMES))
        )
    if argument and (command is None or not command.argument):
        raise UsageError(f"{name} takes no argument", hints.TO_SEND)
    if command is None:
        return False
    if not argument and command.argument and not command.argument.startswith("["):
        raise UsageError(f"{name} needs {command.argument}", f"{name} {command.argument}: {command.text}")
    command.run(session, argument)
    return True


def _command(name: str) -> Command | None:
    return next((c for c in COMMANDS if name == c.name or name in c.other_names), None)


def values(session: ChatSession, name: str) -> Iterable[str] | None:
    """What may stand behind a command; None = names of files."""
    command = _command(name)
    return () if command is None else command.values(session)


def _help(session: ChatSession, argument: str) -> None:
    rows = [(f"{c.name} {c.argument}".strip(), c.text + _also(c.other_names)) for c in COMMANDS]
    rows += [(LEAVING[0], f"leave{_also((*LEAVING[1:], *WORDS_TO_LEAVE, 'Ctrl-D'))}")]
    rows += [("//TEXT", "send a message that begins with a slash")]
    width = max(len(names) for names, _ in rows)
    lines = "".join(wrapped(f"  {names:<{width}}  {text}\n", " " * (width + 4)) for names, text in rows)
    write_err(lines + fill(KEYS, min(80, columns(sys.stderr))))


def _also(names: tuple[str, ...]) -> str:
    return f" (also {', '.join(names)})" if names else ""


def _clear(session: ChatSession, argument: str) -> None:
    branch = session.clear()
    say("a new conversation" + (f"; /undo brings the old one back, which is branch {branch} now" if branch else ""))


def _undo(session: ChatSession, argument: str) -> None:
    say(session.undo())
    if session.files:
        _file(session, "")
    session.tell_unread()


def _history(session: ChatSession, argument: str) -> None:
    messages = session.conversation.messages
    if argument:
        if not argument.isdecimal() or int(argument) < 1:
            raise UsageError(f"/history takes a number of turns, not '{argument}'")
        messages = messages[-2 * int(argument) :]
    text = transcript.shown(messages, session.branches.attachments)
    write_err(wrapped(text) or "kv: nothing was said yet\n")


def _file(session: ChatSession, name: str) -> None:
    if name:
        session.attach(name)
    for file in session.files:
        say(f"{file.name} ({counted(file.tokens, 'token')}) goes in front of the next message")
    if not session.files:
        say("no file goes with the next message")


def _system(session: ChatSession, text: str) -> None:
    if text:
        session.set_system(text)
    current = session.conversation.system
    say("no system message of yours; the template may have its own" if current is None else f"system: {current}")


def _reasoning(session: ChatSession, asked: str) -> None:
    conversation = session.conversation
    if asked:
        if asked not in REASONING:
            raise UsageError(f"/reasoning is {', '.join(REASONING)}, not '{asked}'")
        options = replace(conversation.template.options, reasoning=asked)
        conversation.template = conversation.template.with_options(options)
    template, thinking = conversation.template, conversation.thinking()
    known = template.switch or template.options.reasoning == "auto" or (thinking and thinking.styles)
    say(f"reasoning: {template.options.reasoning}" + ("" if known else ", which changes nothing for this model"))


def _set(session: ChatSession, argument: str) -> None:
    word, value = slashset.parted(argument)
    name = slashset.name_of(word) if word else ""
    if value:
        sampling = slashset.changed(session.sampling, name, value.strip())
        with _called(word):
            settle(session.engine.loaded, sampling)
        session.sampling = sampling
    asked, settled = session.sampling, settle(session.engine.loaded, session.sampling)
    if name:
        say(f"{slashset.shown_as(name)}: {slashset.described(name, asked, settled)}")
    else:
        write_err("".join(wrapped(f"  {line}\n", "  ") for line in slashset.lines(asked, settled)))


@contextmanager
def _called(name: str) -> Iterator[None]:
    """Inside, an error that begins with the name of an option begins with this one: what was typed."""
    try:
        yield
    except UsageError as error:
        flag, _, rest = as_flags(error.message).partition(" ")
        error.message = f"{name} {rest}" if flag.startswith("--") else error.message
        raise


def _ctx(session: ChatSession, size: str) -> None:
    if size:
        wanted = parse_tokens(size, "/ctx")
        session.change(wanted, session.evict)
        session.branches.opened = replace(session.branches.opened, ctx_size=wanted)
    facts = session.facts()
    limit, used = facts.limit, facts.tokens
    say(f"context: {used:,} of {limit:,} tokens ({100 * used / limit:.1f} %), {facts.room}")
    if facts.retention is not None:
        say(f"kept: {facts.retention}, in whole pages; what was evicted is forgotten")
    pages = f"{counted(facts.pages, 'page')} of {facts.page_size}"
    say(f"cache: {pages}, {human_bytes(facts.nbytes)} as {facts.types}, {facts.use}")
    if told := _on_disk(session):
        say(told)
    if not size:
        session.tell_unread()


def _on_disk(session: ChatSession) -> str:
    """What a saved chat takes there; "" for one that is not saved."""
    name, root = session.branches.saved_as, session.options.kept.store
    if not name:
        return ""
    rows = "" if root is None else f", rows of it alone {human_bytes(chatcost.rows_of(root).get(name, 0))}"
    return f"on disk: text {human_bytes(chatcost.text_bytes(name))}{rows}"


def _evict(session: ChatSession, policy: str) -> None:
    if len(policy.split()) > 1:
        told = "kv chat --window N, --keep N and --budget N set how much stays; /evict then goes on with that policy"
        raise UsageError(f"/evict takes a policy alone, not '{policy}'", told)
    if policy and policy != session.evict.policy:
        asked = session.options.evict
        if policy in eviction.scoring() and asked.policy != policy:
            raise UsageError(
                f"/evict {policy} needs a budget", f"kv chat --evict {policy} --budget 50% begins with one"
            )
        with _called("/evict"):
            session.change(session.engine.ctx_size, asked if asked.policy == policy else EvictOptions(policy))
    elif retention := session.engine.retention:
        say(f"{session.evict.policy}: {retention} of the tokens stay, in whole pages; older ones are forgotten")
    elif selection := session.engine.layout.selection:
        say(selection.notice())
    if session.engine.retention is None and session.engine.layout.selection is None:
        say("nothing is forgotten; an answer ends where the context is full")


def _save(session: ChatSession, name: str) -> None:
    if name and name != session.branches.saved_as:
        session.save_as(name)
    saved_as = session.branches.saved_as
    if not saved_as:
        raise UsageError("/save needs a NAME", "the chat is saved under it after every turn from now on")
    say(f"saved as {saved_as} after every turn, in {path_of(saved_as)}; kv chat --resume {saved_as} goes on with it")


def _export(session: ChatSession, name: str) -> None:
    conversation = session.conversation
    if not conversation.messages:
        raise UsageError("there is nothing to export yet")
    system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    messages = [*system, *conversation.messages]
    branches = session.branches
    named = branches.saved_as, branches.branch, branches.value(conversation)
    path = transcript.export(name, messages, session.options.model, *named)
    say(f"wrote {counted(conversation.turns, 'turn')} to {path}")


def _branch(session: ChatSession, name: str) -> None:
    branches = session.branches
    if name:
        there = branches.switch(name, session.conversation)
        say(f"in branch {name}" if there else f"in the new branch {name}, which begins here")
        session.begins_anew()
        return
    counts = {name: transcript.turns(state["messages"]) for name, state in branches.states.items()}
    counts[branches.branch] = session.conversation.turns
    for other, count in sorted(counts.items()):
        say(f"{'*' if other == branches.branch else ' '} {other}: {counted(count, 'turn')}")


def _stats(session: ChatSession, argument: str) -> None:
    if session.last is not None:
        say(f"last: {full_stats(session.last)}")
    say(str(session.totals))


COMMANDS = (
    Command("/help", "", "this list", _help, ("/?",)),
    Command("/history", "[N]", "the conversation, or its last N turns", _history),
    Command("/regen", "", "another answer to the last message", lambda s, _: s.regenerate(), ("/retry",)),
    Command("/undo", "", "take the last turn back, to change its text", _undo),
    Command("/clear", "", "a new conversation; the old one becomes a branch", _clear),
    Command("/file", "[PATH]", "put a file in front of the next message", _file, values=lambda s: None),
    Command("/system", "[TEXT]", "show or replace the system message", _system),
    Command(
        "/reasoning",
        "[MODE]",
        "on, off or auto: whether the model thinks first",
        _reasoning,
        values=lambda s: REASONING,
    ),
    Command(
        "/set",
        "[KEY VALUE]",
        "show or change temperature, top_k, n, seed, ...",
        _set,
        values=lambda s: slashset.names(),
    ),
    Command(
        "/branch",
        "[NAME]",
        "list branches; begin one here, or go on in one",
        _branch,
        values=lambda s: sorted({s.branches.branch, *s.branches.states}),
    ),
    Command("/save", "[NAME]", "save the chat after every turn, under this name", _save),
    Command("/export", "FILE", "write the conversation to a new file, .md or .json", _export, values=lambda s: None),
    Command("/ctx", "[N]", "how full the context is; another size for it", _ctx),
    Command(
        "/evict",
        "[POLICY]",
        "a policy of --evict: what to forget, and when",
        _evict,
        values=lambda s: eviction.names(),
    ),
    Command("/stats", "", "the last answer and the session in figures", _stats),
)
LEAVING = ("/exit", "/quit", "/bye")
NAMES = (*(command.name for command in COMMANDS), *LEAVING)

KEYS = (
    '\nSeveral lines in a message: between """ and """, after a \\ at a line\'s end, or with Alt-Enter or Ctrl-J; what'
    " is pasted stays together. Ctrl-C stops an answer, Ctrl-X Ctrl-E opens $EDITOR, Ctrl-R searches what was sent,"
    " Ctrl-Z suspends.\n"
)
