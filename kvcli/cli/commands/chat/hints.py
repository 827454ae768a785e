"""What people who come from other programs type in a chat, and what there is instead."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvcli.cli.wording import as_flags
from kvcli.words import meant, near

TO_SEND = "a line that begins with // is sent as a message, without the first /"
_COMMANDS = {
    "load open resume continue session sessions": "kv chat --resume NAME goes on with a chat of kv chat ls",
    "model models": "kv chat -m MODEL --resume NAME goes on with another model, kv models ls lists models",
    "new reset restart start forget": "/clear begins a new conversation",
    "show info status": "/set shows the settings, /system the system message, /ctx how full the context is",
    "edit back rewind": "/undo brings the last message back to be changed",
    "again redo rerun": "/regen answers the last message again",
    "read attach add open_file upload": "/file PATH puts a file in front of the next message",
    "write copy": "/export FILE writes the conversation to a new file",
    "prompt sys": "/system TEXT replaces the system message",
    "context num_ctx tokens": "/ctx shows how full the context is, /ctx N changes its size",
    "parameter parameters params options config": "/set shows all settings, /set temperature 0.3 changes one",
    "list ls log messages": "/history shows the conversation, kv chat ls lists saved chats",
    "fork": "/branch NAME begins a branch here",
    "multiline ml paste": 'a message of several lines stands between """ and """; what is pasted stays together',
    "q x leave end logout": "/exit leaves",
    "h man commands": "/help lists the commands",
    "think nothink thinking": "/reasoning on or off says whether the model thinks before it answers",
    "stop cancel": "Ctrl-C stops an answer, /set stop TEXT ends answers at a text",
    "usage perf": "/stats shows the last answer in figures",
}
_BEGINS = frozenset({"budget", "cache_type", "keep", "page_size", "sinks", "tail", "type_k", "type_v", "window"})
_SETTINGS = {
    "parameter param option": "without that word: /set temperature 0.3",
    "system": "/system TEXT replaces the system message",
    "num_ctx ctx ctx_size context n_ctx": "/ctx N changes the size of the context",
    "num_keep keep window evict": "/evict POLICY says what is forgotten",
    "verbose quiet stats noverbose": "kv chat --stats and --no-stats, -v and -q say how much is shown",
    "history nohistory": "kv chat --no-history keeps nothing of what is typed",
    "think nothink thinking": "/reasoning on or off says whether the model thinks before it answers",
    "model": "kv chat -m MODEL --resume NAME goes on with another model",
    "format json": "answers are text; /export FILE.json writes the conversation as JSON",
    "wordwrap nowordwrap wrap": "kv chat --raw-output leaves lines as they are",
    "num_thread threads num_gpu device cache_type": "it is an option of kv chat, see kv chat --help",
    "think nothink": "the model's own template decides that",
}


def of_command(name: str, known: Iterable[str], settings: Iterable[str]) -> str:
    """For a command that there is not, such as /load. `known`: those that there are, each with its slash."""
    word = name.removeprefix("/").lower().replace("-", "_")
    if text := _look_up(_COMMANDS, word):
        return text
    if setting := near(word, settings, alike=0.8):
        return f"/set {setting[0]} shows it, /set {setting[0]} VALUE changes it"
    return meant(near(name, known)) or f"/help lists the commands; {TO_SEND}"


def to_type(text: str) -> str:
    """What the runtime says of its options, in backticks, with what can be typed in a chat in their place.

    >>> to_type("`ctx=8192` has room, or begin with a smaller `page_size`")
    '/ctx 8192 has room, or begin with a smaller kv chat --page-size'
    """
    return re.sub("`[^`]*`", lambda found: _typed(found[0]), text)


def _typed(field: str) -> str:
    name, _, value = field.strip("`").partition("=")
    if name in ("ctx", "evict"):
        return f"/{name} {value}".strip()
    flag = as_flags(field)
    return f"kv chat {flag}" if name in _BEGINS else flag


def of_setting(word: str, known: Iterable[str]) -> str:
    """For a setting that there is not; "" = nothing is like it."""
    return _look_up(_SETTINGS, word) or meant(near(word, known))


def _look_up(table: dict[str, str], word: str) -> str:
    return next((text for words, text in table.items() if word in words.split()), "")
