"""Marked strings: str in everything, and a mark can be lost but not gained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcli.runtime.text.provenance import Marked, concat, from_parts, parts_of, trust

parts = st.lists(st.tuples(st.text("ab \n", max_size=4), st.booleans()), max_size=5)


def marks(text: str) -> str:
    return "".join(("t" if trusted else "u") * len(part) for part, trusted in parts_of(text))


@given(parts=parts, start=st.integers(-9, 9), stop=st.integers(-9, 9), sep=st.sampled_from(["a", "ab", " "]))
def test_marked_strings_are_strings_whose_marks_follow_their_letters(parts, start, stop, sep):
    marked = from_parts(parts)
    plain, letters = str.__str__("".join(text for text, _ in parts)), marks(marked)
    assert marked == plain and hash(marked) == hash(plain) and marks(str(marked)) == letters
    assert marked[start:stop] == plain[start:stop] and marks(marked[start:stop]) == letters[start:stop]
    for name, args in (
        ("strip", ()), ("lstrip", ()), ("rstrip", ("b",)), ("removeprefix", (sep,)), ("removesuffix", (sep,)),
        ("split", ()), ("split", (sep,)), ("split", (sep, 1)), ("rsplit", (sep, 1)), ("rsplit", (None, 1)),
        ("split", (None, 1)), ("splitlines", ()), ("splitlines", (True,)), ("partition", (sep,)),
        ("rpartition", (sep,)), ("replace", (sep, "x")), ("replace", (sep, "x", 1)), ("replace", ("", "-")),
        ("upper", ()), ("lower", ()), ("title", ()), ("capitalize", ()), ("swapcase", ()), ("casefold", ()),
        ("center", (9,)), ("center", (10, "-")), ("ljust", (7,)), ("rjust", (7, "*")), ("rjust", (0,)),
        ("__mul__", (3,)),
        ("__mul__", (-1,)), ("__mod__", ((),)), ("__getitem__", (slice(None, None, -1),)),
        ("__getitem__", (slice(4, 0, -2),)),
    ):  # fmt: skip
        assert getattr(marked, name)(*args) == getattr(plain, name)(*args), name


@given(parts=parts, sep=st.sampled_from(["a", "ab", None, " ", "\n"]))
def test_marks_survive_cutting_and_joining_again(parts, sep):
    marked = from_parts(parts)
    if sep is not None:
        pieces = marked.split(sep)
        again = concat(x for i, piece in enumerate(pieces) for x in ([] if i == 0 else [sep]) + [piece])
        kept = [mark for mark, letter in zip(marks(again), again, strict=True) if letter not in sep]
        assert kept == [m for m, letter in zip(marks(marked), marked, strict=True) if letter not in sep]
    else:
        squeezed = concat(marked.split())
        assert marks(squeezed) == "".join(
            mark for mark, letter in zip(marks(marked), marked, strict=True) if not letter.isspace()
        )


@given(parts=st.lists(st.tuples(st.text("aSßİΣ ", max_size=4), st.booleans()), max_size=5))
def test_changing_letters_moves_no_mark(parts):
    marked = from_parts(parts)
    plain = "".join(text for text, _ in parts)
    for name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold"):
        changed = getattr(marked, name)()
        assert changed == getattr(plain, name)()
        if len(changed) == len(plain):
            assert marks(changed) == marks(marked)
        elif not any(trusted for text, trusted in parts if text):
            assert "t" not in marks(changed)
    assert marks("".join(list(marked))) == "u" * len(plain) and marks(concat(list(marked))) == marks(marked)


@given(
    form=st.lists(
        st.sampled_from(["<|", "|>", "{}", "{:>5}", "{0}", "{:.2}", "{x}", "{!r}", "{{", "{:{}}"]), max_size=5
    ),
    values=st.lists(st.text("ab<|>", max_size=4), min_size=6, max_size=6),
    trusted=st.booleans(),
)
def test_formats_are_those_of_str_and_only_a_trusted_one_keeps_marks(form, values, trusted):
    text = "".join(form)
    form_marked = trust(text) if trusted else Marked(text)
    try:
        expected = text.format(*values, x="y")
    except (ValueError, IndexError) as error:
        with pytest.raises(type(error)):
            form_marked.format(*values, x="y")
        return
    result = form_marked.format(*map(Marked, values), x="y")
    assert result == expected == form_marked.format(*values, x="y")
    assert trusted or "t" not in marks(result)
    assert marks(Marked(text).format(*map(trust, values), x="y")) == "u" * len(expected)


def test_a_mark_is_never_gained():
    own, typed = trust("<|a|>"), "<|b|>"
    assert parts_of(own + typed) == (("<|a|>", True), ("<|b|>", False))
    assert parts_of(typed + own) == (("<|b|>", False), ("<|a|>", True))
    assert parts_of(own.replace("a", typed)) == (("<|", True), ("<|b|>", False), ("|>", True))
    assert parts_of(Marked(typed).replace("b", own)) == (("<|", False), ("<|a|>", True), ("|>", False))
    assert parts_of(own.join([typed, typed]))[1] == ("<|a|>", True)
    assert parts_of(trust("%s{}") % typed) == (("<|b|>", False), ("{}", True))
    assert parts_of(trust("[{:6}]").format(Marked(typed))) == (("[", True), ("<|b|>", False), (" ]", True))
    for lost in (typed.replace("b", own), f"{own}!", Marked("%s") % own, Marked("{}").format(own), own.expandtabs()):
        assert not any(trusted for _, trusted in parts_of(lost))
    assert parts_of(Marked(own)) == parts_of(own) and parts_of("") == ()
    with pytest.raises(TypeError):
        own + 1
    with pytest.raises(TypeError):
        own.join([1])
