"""The prompt of `kv chat` on a terminal: several lines, history, completion. `prompt_toolkit` draws it.

Enter sends; Alt-Enter and Ctrl-J begin a new line, as does Enter after a backslash or in triple quotes. Text that is
pasted keeps its lines. Ctrl-X Ctrl-E opens $EDITOR, Ctrl-Z suspends.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app_or_none
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, DummyCompleter, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import shift_selection_mode
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys

from kvcli import paths
from kvcli.cli.commands.chat.messages import is_open, unquote

if TYPE_CHECKING:
    from prompt_toolkit.buffer import Buffer

MAX_ENTRIES = 10_000
ENDING = (signal.SIGTERM, signal.SIGHUP)


class LineEditor:
    """Reads one message after another from the terminal."""

    def __init__(
        self,
        history: History,
        completer: Completer | None = None,
        ended: Callable[[], int] = lambda: 0,
        early: str = "",
    ) -> None:
        """`ended`: the exit code of a signal that came before there was a prompt to end, 0 = none. `early`: keys that
        were pressed before."""
        self._ended = ended
        self._session: PromptSession[str] = PromptSession(
            history=history,
            multiline=True,
            key_bindings=_keys(),
            completer=completer or DummyCompleter(),
            complete_while_typing=False,
            enable_open_in_editor=True,
            enable_suspend=True,
            prompt_continuation=continuation,
        )
        keys: list[KeyPress] = []
        parser = Vt100Parser(keys.append)
        parser.feed_and_flush(early)
        store_typeahead(self._session.app.input, keys)

    def read(self, text: str = "") -> str:
        """The next message; `text` stands there already, selected: Enter sends it, what is typed or pasted replaces it,
        a key that moves the cursor leaves it to be changed. Raises EOFError (Ctrl-D), KeyboardInterrupt (Ctrl-C), and
        SystemExit for a signal that ends the process."""
        with _ended_by_signals(self._ended) as check:

            def begin() -> None:
                check()
                if text:
                    select_all(self._session.default_buffer)

            return unquote(self._session.prompt("> ", default=text, pre_run=begin))

    @property
    def interrupted_text(self) -> str:
        """What stood on the line when Ctrl-C was pressed."""
        return self._session.default_buffer.text


class CommandCompleter(Completer):
    """Completes commands, and what comes behind them: `values(command)` gives the words, None = names of files."""

    def __init__(self, commands: Iterable[str], values: Callable[[str], Iterable[str] | None]) -> None:
        self.commands, self.values = list(commands), values
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        command, space, begun = document.text_before_cursor.partition(" ")
        words = self.values(command) if space else self.commands
        if words is None:
            yield from self._files.get_completions(Document(begun), event)
            return
        begun = begun if space else command
        yield from (Completion(word, -len(begun)) for word in words if word.startswith(begun))


def continuation(width: int, line: int, wraps: int) -> str:
    """What stands before a line but the first: one that was begun has a dot, the rest of a long one has nothing."""
    return " " * width if wraps else ". ".rjust(width)


class _Ended(Exception):
    """A signal ends the prompt."""


@contextmanager
def _ended_by_signals(ended: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """Inside, SIGTERM and SIGHUP end the prompt as Ctrl-D does, and then the process: raised by a handler, SystemExit
    would be told by the event loop, on a terminal that may be gone. Yields what is to be called when the loop runs.
    `ended`: see `LineEditor`."""
    noted = 0

    def check() -> None:
        app = get_app_or_none()
        if noted and app is not None and app.future is not None and not app.future.done():
            app.exit(exception=_Ended())

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        noted = noted or number
        app = get_app_or_none()
        if app is not None and app.loop is not None:
            app.loop.call_soon_threadsafe(check)

    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    noted = noted or next((number for number in heeded if ended() == 128 + number), 0)
    try:
        yield check
    except BaseException:
        if not noted:  # else it may be anything: a terminal that is gone cannot be written to
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if noted:
        raise SystemExit(128 + noted)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        enter(event.current_buffer)

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.exit_selection()
        event.current_buffer.insert_text("\n")

    @keys.add("c-e", filter=shift_selection_mode)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.exit_selection()

    @keys.add("delete", filter=shift_selection_mode)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.cut_selection()

    @keys.add(Keys.BracketedPaste, filter=shift_selection_mode)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.cut_selection()
        event.current_buffer.insert_text(event.data.replace("\r\n", "\n").replace("\r", "\n"))

    return keys


def select_all(buffer: Buffer) -> None:
    """Select the text as Shift and arrow keys would, until the cursor moves."""
    buffer.cursor_position = 0
    buffer.start_selection()
    assert buffer.selection_state is not None
    buffer.selection_state.enter_shift_mode()
    buffer.cursor_position = len(buffer.text)

    def moved(_: Buffer) -> None:
        buffer.on_cursor_position_changed -= moved
        buffer.exit_selection()

    buffer.on_cursor_position_changed += moved


def enter(buffer: Buffer) -> None:
    """What the Enter key does with the text so far."""
    buffer.exit_selection()
    before = buffer.document.text_before_cursor
    if is_open(buffer.text):
        buffer.insert_text("\n")
    elif before.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


class FileHistory(History):
    """Messages in a file that only its owner can read, one JSON string a line; the last 10,000 are kept.

    A message that begins with a space is not written, nor kept in memory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        if not path.exists():
            path.touch(mode=0o600)
        path.chmod(0o600)

    def load_history_strings(self) -> Iterable[str]:
        """Newest first. A line that is not a JSON string is skipped: someone edited the file."""
        lines = self.path.read_text("utf-8", "replace").splitlines()
        if len(lines) > MAX_ENTRIES:
            lines = lines[-MAX_ENTRIES:]
            paths.replace_file(self.path, "".join(f"{line}\n" for line in lines).encode())
        for line in reversed(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, str):
                yield entry

    def append_string(self, string: str) -> None:
        if not string.startswith(" "):
            super().append_string(string)

    def store_string(self, string: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(string) + "\n")


def open_history(warn: Callable[[str], None], forbidden: bool = False) -> History:
    """The user's history file, or one in memory: where a file is `forbidden`, or cannot be written."""
    if forbidden:
        return InMemoryHistory()
    folder = paths.state_dir()
    if not paths.make_or_warn(folder, warn):
        return InMemoryHistory()
    try:
        return FileHistory(folder / "history")
    except OSError as error:
        warn(f"cannot use the history file: {error.strerror or error}; going on without it")
        return InMemoryHistory()
