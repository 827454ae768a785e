"""Stop strings in streamed text: never shown, not even in part, and nothing else is lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcli.runtime.text.stops import StopMatcher

WORDS = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=5), max_size=12), st.lists(WORDS, max_size=3))
@example(["a", "a", "b"], ["aab"])
@example(["aa", "ab"], ["aab", "ab"])
def test_stop_strings_never_leak(pieces: list[str], stops: list[str]):
    matcher, shown, fed = StopMatcher(stops), "", ""
    for piece in pieces:
        fed += piece
        shown += matcher.push(piece)
        assert not any(stop in shown for stop in stops)
        if matcher.stop is None:
            held = fed[len(shown) :]
            assert fed.startswith(shown) and (not held or any(stop.startswith(held) for stop in stops))
            assert held not in stops
    text = "".join(pieces)
    if matcher.stop is None:
        assert shown + matcher.flush() == text
        assert not any(stop in text for stop in stops)
    else:
        assert matcher.stop in stops and text.startswith(shown + matcher.stop)
        assert matcher.flush() == "" and matcher.push("a") == ""


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stop"),
    [
        (["hello ", "wor", "ld"], ["world"], ["hello ", "", ""], "world"),
        (["wor", "k"], ["world"], ["", "work"], None),
        (["abab", "c"], ["ababc", "b"], ["a", ""], "b"),  # what is complete first, stops
        (["xabc"], ["ab", "abc"], ["x"], "abc"),  # the longest of those that begin together
        (["xabcd"], ["cd", "bc"], ["xa"], "bc"),  # the leftmost
        (["text"], [], ["text"], None),
        (["text"], [""], ["text"], None),
        (["ö", "ä\n\n", "x"], ["\n\n"], ["ö", "ä", ""], "\n\n"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: list[str], stop: str | None):
    matcher = StopMatcher(stops)
    assert [matcher.push(piece) for piece in pieces] == shown
    assert matcher.stop == stop


def test_the_rest_is_given_back_once():
    matcher = StopMatcher(["<end>"])
    assert (matcher.push("a<en"), matcher.flush(), matcher.flush(), matcher.stop) == ("a", "<en", "", None)
