"""Lines broken between words, for a text that comes in pieces."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from kvcli.cli import render, streams
from kvcli.cli.invocation import Invocation, When
from kvcli.cli.streams import TextOut
from kvcli.cli.wrapping import Wrapper, cells, fill


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four five", ["one two", "three four", "five"]),
        ("1234567890 12", ["1234567890", "12"]),  # as wide as the terminal
        ("a  \nb", ["a  ", "b"]),  # nothing is taken away but at a break
        ("a b\n\n\nc", ["a b", "", "", "c"]),
        ("see http://example.org/a-long-one now on it", ["see http://example.org/a-long-one now on", "it"]),
        ("- one two three\nfour five six", ["- one two", "  three", "four five", "six"]),
        ("  12. one two", ["  12. one", "      two"]),
        ("    - one two", ["    - one", "      two"]),
        ("    indented code stays", ["    indented code stays"]),
        ("\tindented code stays", ["\tindented code stays"]),
        ("| a table | stays |", ["| a table | stays |"]),
        ("```py\nx = 1 + 2 + 3\n```\nand so it goes", ["```py", "x = 1 + 2 + 3", "```", "and so it", "goes"]),
        ("~~~\n``` is no end of it\n~~~\nand so it goes", ["~~~", "``` is no end of it", "~~~", "and so it", "goes"]),
        ("a very né́é né́é", ["a very né́é", "né́é"]),  # marks take no column
        ("日本語の文章は、長い「です」。", ["日本語の文", "章は、長い", "「です」。"]),
        ("한국어 문장 하나", ["한국어", "문장 하나"]),
        ("hi 👩‍👩‍👧 and 🇩🇪", ["hi 👩‍👩‍👧 and", "🇩🇪"]),
        ("x a\u00a0bcdef\u00a0h jk", ["x", "a\u00a0bcdef\u00a0h", "jk"]),
    ],
)
def test_breaks_stand_between_words_however_the_text_is_cut(text: str, lines: list[str]) -> None:
    assert fill(text, 10).split("\n") == lines
    for seed in range(20):
        generator, wrapper, shown, rest = Random(seed), Wrapper(lambda: 10), "", text
        while rest:
            size = generator.randrange(1, 5)
            shown, rest = shown + wrapper.feed(rest[:size]), rest[size:]
        assert (shown + wrapper.release()).split("\n") == lines


def test_a_word_waits_until_it_has_ended() -> None:
    wrapper = Wrapper(lambda: 10)
    assert "".join(wrapper.feed(piece) for piece in ("The lit", "tle dra")) == "The little"
    assert wrapper.feed("gon ") == "\ndragon"
    assert wrapper.feed("x" * 11) == " " + "x" * 11  # no word of prose: it does not wait
    assert wrapper.feed("yz") == "yz"


def test_code_does_not_wait() -> None:
    wrapper = Wrapper(lambda: 10)
    assert wrapper.feed("```\nx = f") == "```\nx = f"


def test_the_width_is_asked_for_each_word() -> None:
    widths = [20]
    wrapper = Wrapper(lambda: widths[-1])
    assert wrapper.feed("one two three four ") == "one two three four"
    widths.append(9)
    assert wrapper.feed("five six seven ") == "\nfive six\nseven"


def test_cells_of_wide_characters() -> None:
    assert [cells(text) for text in ("abc", "日本", "é", "👍🏽", "a\tb")] == [3, 4, 1, 2, 2]


@contextmanager
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Inside, stdout and stderr are a terminal of 20 columns; yields what tells what was written to it."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(its, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)

        def written() -> str:
            text = b""
            os.write(its, b"\0")
            while not text.endswith(b"\0"):
                text += os.read(ours, 1 << 16)
            return text[:-1].decode().replace("\r\n", "\n")

        yield written
    os.close(ours)


def test_an_answer_on_a_terminal_and_what_is_held_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_terminal(monkeypatch) as terminal:
        for raw, shown in (
            (False, "The little dragon\nwent far abroad^[\n"),
            (True, "The little dragon went far abroad\x1b\n"),
        ):
            out = TextOut.stdout(raw)
            for letter in "The little dragon went far abroad\x1b":
                out.write(letter)
            out.end_line()
            assert terminal() == shown
        out.write("no new")
        out.flush()
        assert terminal() == "no new"


def test_messages_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_terminal(monkeypatch) as terminal:
        streams.say("the little dragon went")
        assert terminal() == "kv: the little\n    dragon went\n"
        invocation = Invocation(color=When.always)
        render.print_error("no such little dragon", "look for it abroad now", When.always)
        render.warn("the dragon is gone", invocation)
        render.aside("the dragon is gone", invocation)
        assert terminal() == (
            "kv: \x1b[1;31merror:\x1b[0m no such\n    little dragon\n  look for it abroad\n  now\n"
            "kv: \x1b[33mwarning:\x1b[0m the\n    dragon is gone\n"
            "\x1b[2mkv: the dragon is\n    gone\x1b[0m\n"
        )
