"""Everything that is drawn: results go to stdout, all else to stderr. Rich is imported only where it draws.

Whether a stream is a terminal is decided here by `isatty`, never by Rich, which FORCE_COLOR can persuade to
write cursor movements into files.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TextIO

from kvcli.cli import jsonobjects
from kvcli.cli.invocation import Bars, Invocation, When
from kvcli.cli.streams import is_terminal, marked, wrapped, write_err
from kvcli.cli.wording import as_flags
from kvcli.cli.wrapping import cells, columns
from kvcli.notices import Tell
from kvcli.words import human_bytes

DIM, RESET = "\x1b[2m", "\x1b[0m"
_RED, _YELLOW, _BOLD = "\x1b[1;31m", "\x1b[33m", "\x1b[1m"
SPARED_FOR = 24  # columns of a terminal that the last column of a table should have
_PLAIN_PERIOD_S = 5.0  # with --progress on and no terminal: one line that often


def use_color(stream: TextIO, when: When) -> bool:
    """Whether color codes may be written to this stream; stdout and stderr are judged apart."""
    if when is not When.auto:
        return when is When.always
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def one_line(text: str) -> str:
    """The text on one line with control characters made visible, for messages that name user input."""
    joined = " ".join(text.split())
    return "".join(c if unicodedata.category(c) not in ("Cc", "Cf", "Cs") else ascii(c)[1:-1] for c in joined)


def fitting(line: str) -> str:
    """A line for stdout: cut to the width of a terminal, whole for a pipe or a file."""
    if not is_terminal(sys.stdout):
        return line
    from rich.cells import set_cell_size

    width = columns(sys.stdout)
    return line if cells(line) <= width else set_cell_size(line, width - 1) + "…"


def write_out(text: str) -> None:
    """Write text to stdout as UTF-8, whatever the locale; the caller ends lines."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def print_json(kind: str, value: Mapping[str, Any]) -> None:
    """One JSON object on stdout; `kind`: see `jsonobjects.finished`."""
    write_out(jsonobjects.line(kind, value))


def print_path(kind: str, value: Mapping[str, Any], json: bool) -> None:
    """An object that is all about a `path`: as JSON, or the path alone."""
    if json:
        print_json(kind, value)
    else:
        write_out(f"{value['path']}\n")


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    invocation: Invocation,
    right: Collection[int] = (),
    spare: Sequence[int] = (),
) -> None:
    """An aligned table on stdout, without frames, so that it can be grepped and cut.

    `right` holds the indexes of the columns that are aligned to the right. On a terminal lines are cut at its end;
    where the last column would have less than SPARED_FOR columns, those of `spare` are left out, one after the other.
    """
    grid = [list(headers), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(cells(row[i]) for row in grid) for i in range(len(headers))]
    shown = list(range(len(headers)))
    for column in spare if is_terminal(sys.stdout) else ():
        if sum(widths[i] + 2 for i in shown[:-1]) + SPARED_FOR > columns(sys.stdout):
            shown.remove(column)
    lines = []
    for row in grid:
        padded = [
            " " * (widths[i] - cells(row[i])) + row[i] if i in right else row[i] + " " * (widths[i] - cells(row[i]))
            for i in shown
        ]
        line = "  ".join(padded).rstrip()
        lines.append(fitting(line) if spare else line)
    if use_color(sys.stdout, invocation.color):
        lines[0] = f"{_BOLD}{lines[0]}{RESET}"
    write_out("\n".join(lines) + "\n")


def print_error(message: str, hint: str, when: When = When.auto) -> None:
    """`kv: error: message`, and the hint on a second line."""
    line = _labelled("error:", _RED, as_flags(message), when)
    write_err(line + (wrapped(f"  {one_line(as_flags(hint))}\n", "  ") if hint else ""))


def _labelled(label: str, style: str, message: str, when: When) -> str:
    line = marked(f"{label} {one_line(message)}") + "\n"
    return line.replace(label, f"{style}{label}{RESET}", 1) if use_color(sys.stderr, when) else line


def warn(message: str, invocation: Invocation) -> None:
    """Something was lost or is not as asked: always said, even with -q."""
    message = as_flags(message)
    invocation.told.append(message)
    write_err(_labelled("warning:", _YELLOW, message, invocation.color))


def announce(message: str, invocation: Invocation) -> None:
    """Something that takes long or costs space and was not asked for by name: said unless -q."""
    message = as_flags(message)
    invocation.told.append(message)
    if not invocation.quiet:
        write_err(marked(one_line(message)) + "\n")


def notice(message: str, invocation: Invocation) -> None:
    """Good to know: said on a terminal or with -v."""
    message = as_flags(message)
    invocation.told.append(message)
    step(message, invocation)


def step(message: str, invocation: Invocation) -> None:
    """What is being done now: said as a notice is, and not kept."""
    if not invocation.quiet and (invocation.verbose or is_terminal(sys.stderr)):
        aside(one_line(message), invocation)


def aside(message: str, invocation: Invocation) -> None:
    """What need not be looked at, dimmed: said always, not kept."""
    line = marked(message)
    write_err(f"{DIM}{line}{RESET}\n" if use_color(sys.stderr, invocation.color) else f"{line}\n")


def telling(invocation: Invocation) -> Tell:
    """The three ways above, for what knows nothing of this call."""
    return Tell(*(partial(tell, invocation=invocation) for tell in (warn, announce, notice)))


class Progress:
    """Progress bars on stderr, one for each stage, gone when the context is left.

    Called as `progress(stage, done, total)` from any thread; `total` 0 = unknown. `unit` is "bytes" or
    "tokens". On a terminal the bars are drawn at most ten times a second; with --progress on and no terminal
    a plain line is written every five seconds; otherwise nothing.
    """

    def __init__(self, invocation: Invocation, unit: str = "bytes") -> None:
        wanted = invocation.progress is not Bars.off and not invocation.quiet
        terminal = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._draws = wanted and terminal
        self._writes = wanted and not terminal and invocation.progress is Bars.on
        self._color = self._draws and use_color(sys.stderr, invocation.color)
        self._unit = unit
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._last_line = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars; the next call draws them anew."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._draws:
            if self._bars is None:
                self._bars = self._make_bars()
                self._bars.start()
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total or None)
            self._bars.update(self._tasks[stage], completed=done, total=total or None)
        elif self._writes and time.monotonic() - self._last_line >= _PLAIN_PERIOD_S:
            self._last_line = time.monotonic()
            amount = human_bytes if self._unit == "bytes" else str
            write_err(f"kv: {stage}: {amount(done)}" + (f" of {amount(total)}\n" if total else "\n"))

    def _make_bars(self) -> Any:
        from rich import progress
        from rich.console import Console

        console = Console(file=sys.stderr, force_terminal=True, no_color=not self._color, highlight=False)
        text = progress.TextColumn("{task.description}", markup=False)
        if self._unit == "bytes":
            amounts: list[Any] = [progress.DownloadColumn(binary_units=True), _speed_column()]
        else:
            amounts = [progress.MofNCompleteColumn()]
        columns = [text, progress.BarColumn(), *amounts, progress.TimeRemainingColumn()]
        return progress.Progress(*columns, console=console, transient=True, refresh_per_second=10)


def _speed_column() -> Any:
    """Rich's column of bytes a second is in powers of 1000, all other sizes here are in powers of 1024."""
    from rich import progress
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{human_bytes(speed)}/s" if speed else "")

    return Speed()
