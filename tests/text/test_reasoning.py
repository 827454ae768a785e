"""Thinking is told apart from the answer, by the marks of every family, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinyvocab import tiny

from kvcli.runtime.text.reasoning import STYLES, Splitter, Style, Thinking, styles_of
from kvcli.runtime.text.tokenizer import StreamDecoder

HARMONY = next(style for style in STYLES if style.channels)
OTHERS = [style for style in STYLES if not style.channels]
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


def split(text: str, tail: str = "", styles: list[Style] = OTHERS, step: int = 0) -> tuple[str, str]:
    """Answer and thinking of a text that comes in pieces of `step` letters; 0 = at once."""
    splitter = Thinking(tuple(styles), tail, "", frozenset(), lambda text: []).splitter()
    pieces = [text[i : i + step] for i in range(0, len(text), step)] if step else [text]
    found = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    assert splitter.raw.endswith(text)
    return "".join(answer for answer, _ in found), "".join(thinking for _, thinking in found)


@pytest.mark.parametrize("style", OTHERS, ids=lambda style: style.opens[0])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_every_family(style, step):
    opened, closed = style.opens[0], style.close
    assert split(f"{opened}\nhm, 1 < 2\n{closed}\n\nYes.\n", step=step) == ("Yes.\n", "hm, 1 < 2")
    assert split(f"hm\n{closed}\n\nYes.", tail=f"...{opened}\n", step=step) == ("Yes.", "hm")  # begun by the template
    assert split("Yes.", tail=f"{opened}\n\n{closed}\n\n", step=step) == ("Yes.", "")  # and ended by it
    assert split(f"{opened}for ever ", step=step) == ("", "for ever")
    closing = style.closing or style.close
    assert split(f"hm{closing}Yes.", tail=opened, step=step) == ("Yes.", "hm")


@pytest.mark.parametrize("step", [0, 1, 3])
def test_harmony(step):
    begun = "<|channel|>analysis<|message|>"
    assert split(f"{begun}hm{FINAL}Yes.", "<|start|>assistant", [HARMONY], step) == ("Yes.", "hm")
    assert split(f" hm {FINAL} Yes.", f"<|start|>assistant{begun}", [HARMONY], step) == (" Yes.", "hm")
    assert split("<|channel|>final<|message|>Yes.", "<|start|>assistant", [HARMONY], step) == ("Yes.", "")
    assert split("Yes.", "<|start|>assistant", [HARMONY], step) == ("Yes.", "")  # a model that has forgotten it
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    assert split(f"{begun}hm<|end|><|start|>assistant{call}", "<|start|>assistant", [HARMONY], step) == ("{}", "hm")


@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize(
    "text, expected",
    [
        ("Write <think> like this: <think>x</think>", None),  # only what an answer begins with is thinking
        (" \n Hello \n", None),
        ("<thinker> is a word", None),
        ("<thi", None),
        ("", None),
        ("<think></think>Hi", ("Hi", "")),
        ("\n<think>a</think>\n<response>\nb <b>\n</response>", ("b <b>\n", "a")),
        ("<think>a</think><answer>b</answer> c", ("bc", "a")),
        ("a <answer>b</answer>", None),
        (
            "Here are my reasoning steps:\na\n[BEGIN FINAL RESPONSE]\nb[END FINAL RESPONSE]\n<|end|>",
            ("b<|end|>", "a"),
        ),
        ("<|channel>thought\na<channel|>b <|channel>thought\nc<channel|> d", ("b d", "ac")),
        ("<|START_RESPONSE|>a<|END_RESPONSE|>", ("a", "")),
        ("<think>a</think>b <think>c</think>", ("b <think>c</think>", "a")),
    ],
)
def test_what_is_thinking_and_what_is_not(text, expected, step):
    assert split(text, step=step) == (expected or (text, ""))


PIECES = [*"ab <>/\n|", *STYLES[0].marks, "<|channel>thought\n", "<channel|>"]


def test_the_text_with_its_marks_begins_where_the_thinking_does():
    for tail, text in (
        ("user: <think></think>x assistant: <think>\n", "hm</think>Yes."),
        ("", "<think>\nhm</think>Yes."),
    ):
        splitter = Splitter(OTHERS, tail)
        splitter.push(text)
        assert splitter.raw == "<think>\nhm</think>Yes."


@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_how_a_text_is_cut_makes_no_difference(text):
    whole = split(text)
    assert split(text, step=1) == split(text, step=5) == whole


def test_styles_are_those_of_the_template_or_the_vocabulary():
    plain = tiny().vocabulary
    assert styles_of("{{ messages }}", plain) == ()
    assert styles_of("{{ '<think>' }}", plain) == (STYLES[0],)
    assert styles_of("", plain, begun=" [THINK]") == (next(style for style in STYLES if style.opens == ("[THINK]",)),)
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    spoken = with_tokens(*names).vocabulary
    assert styles_of("", spoken) == (HARMONY,)
    ends = {spoken.tokens[i] for i in spoken.eog_ids}
    assert {"<|return|>", "<|call|>"} <= ends and "<|end|>" not in ends  # a message is over, not the answer
    assert "<|end|>" in {with_tokens("<|end|>").vocabulary.tokens[i] for i in with_tokens("<|end|>").eog_ids}


def with_tokens(*names: str):
    metadata = tiny().vocabulary
    tokens, kinds = [*metadata.tokens, *names], [*metadata.kinds.tolist(), *[3] * len(names)]
    return tiny(tokens=tokens, token_type=kinds)


def test_control_tokens_that_mark_thinking_are_seen():
    tokenizer = with_tokens("[THINK]", "[/THINK]")
    thinking = Thinking.of("", tokenizer.vocabulary, lambda text: tokenizer.encode(text, False, True))
    assert [thinking.styles[0].opens, thinking.ids("[/THINK]")] == [("[THINK]",), [tokenizer.vocab_size - 1]]
    decoder, splitter = StreamDecoder(tokenizer, True, thinking.marks), thinking.splitter()
    ids = tokenizer.encode("[THINK]hm, é[/THINK]the page<|im_end|>", False, parse_special=True)
    found = [splitter.push(decoder.push(token)) for token in ids]
    assert ("".join(a for a, _ in found), "".join(t for _, t in found)) == ("the page", "hm, é")
    assert tokenizer.decode(ids) == "hm, éthe page"


def test_the_beginning_of_an_answer_has_its_marks_as_tokens():
    tokenizer = with_tokens("[THINK]", "[/THINK]")
    thinking = Thinking.of("", tokenizer.vocabulary, tokenizer.encode, "", "[THINK]a[/THINK]<|im_end|>")
    assert thinking.given == [("[THINK]", True), ("a", False), ("[/THINK]", True), ("<|im_end|>", False)]
    harmony = Thinking((HARMONY,), "<|start|>assistant", "Sure", frozenset(), tokenizer.encode)
    assert harmony.given == [("<|channel|>final<|message|>", True), ("Sure", False)]
    assert harmony.splitter().push("Sure, yes") == ("Sure, yes", "")
    assert isinstance(Thinking((), "", "Sure", frozenset(), tokenizer.encode).splitter(), Splitter)
