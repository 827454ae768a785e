"""What is one message of a chat."""

from __future__ import annotations

import pytest

from kvcli.cli.commands.chat.messages import joined, unquote
from kvcli.errors import UsageError


def named(lines):
    return [(f"line {number}", line) for number, line in enumerate(lines, 1)]


def test_a_message_has_the_name_of_its_first_line():
    assert [name for name, _ in joined(named(["a", "b\\", "c", "d"]))] == ["line 1", "line 2", "line 4"]


def test_triple_quotes_come_off():
    assert unquote('"""\na\n"""') == "a"
    assert unquote('"""a') == '"""a'
    assert unquote('say """a"""') == 'say """a"""'


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["a", "b"], ["a", "b"]),
        (["", "a", ""], ["", "a", ""]),
        (["a\\", "b\\", "", "c"], ["a\nb\n", "c"]),
        (['"""a', "", "b\\", 'c"""', "d"], ["a\n\nb\\\nc", "d"]),
        (['"""', "a", '"""'], ["a"]),
        (['"""a"""', 'say """', "b"], ["a", 'say """', "b"]),
        (["a\\", '"""', "b"], ['a\n"""', "b"]),
        (["a", "C:\\"], ["a", "C:\\"]),
        ([], []),
    ],
    ids=repr,
)
def test_lines_of_a_script_are_put_together_as_they_are_at_a_terminal(lines, messages):
    assert [text for _, text in joined(named(lines))] == messages


def test_quotes_that_never_end_are_an_error():
    messages = joined(named(["a", '"""b', "c"]))
    assert next(messages) == ("line 1", "a")
    with pytest.raises(UsageError, match="the message of line 2 begins with"):
        next(messages)
