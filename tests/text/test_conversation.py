"""Conversations: what is kept of the ids from turn to turn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from fakes import END, FIRST_CHARACTER, PAIR, FakeTemplate, FakeTokenizer

from kvcli.errors import ModelError, UsageError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.text.conversation import Conversation
from kvcli.runtime.text.template import ChatTemplate
from kvcli.runtime.text.tokenizer import Tokenizer

A, B = FIRST_CHARACTER + ord("a"), FIRST_CHARACTER + ord("b")


def chat(**template: bool) -> Conversation:
    return Conversation(FakeTokenizer(), FakeTemplate(**template))


def fresh(conversation: Conversation) -> list[int]:
    """The ids of the whole conversation, tokenized anew."""
    system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    segments = conversation.template.render_segments([*system, *conversation.messages])
    return conversation.tokenizer.encode_segments(segments)


def answer(conversation: Conversation, text: str) -> None:
    conversation.record_answer(text, [*conversation.tokenizer.encode(text, add_bos=False), END])


def test_first_prompt_is_the_whole_rendering_with_one_bos():
    conversation = chat()
    conversation.set_system("be kind")
    ids = conversation.add_user("hello <|end|> there")
    assert ids == fresh(conversation)
    assert ids.count(1) == 1
    assert ids.count(END) == 2  # the user's own spelling of it is not one


def test_a_turn_appends_to_the_ids_before_it():
    conversation = chat()
    before = conversation.add_user("one")
    answer(conversation, "uno")
    ids = conversation.add_user("two")
    assert ids[: len(before)] == before
    assert ids == fresh(conversation)
    answer(conversation, "dos")
    assert conversation.add_user("three") == fresh(conversation)
    assert conversation.turns == 2


def test_an_answer_keeps_the_ids_it_was_generated_with():
    conversation = chat()
    before = conversation.add_user("one")
    conversation.record_answer("ab", [A, B, END])  # canonical would be PAIR
    ids = conversation.add_user("two")
    assert ids[: len(before) + 2] == [*before, A, B]
    assert ids != fresh(conversation)
    assert PAIR in fresh(conversation)
    answer(conversation, "x")
    assert conversation.add_user("three")[: len(ids)] == ids


def test_an_answer_cut_at_a_stop_string_is_tokenized_again():
    conversation = chat()
    before = conversation.add_user("one")
    conversation.record_answer("a", [A, B])
    ids = conversation.add_user("two")
    assert ids == fresh(conversation)
    assert ids[: len(before) + 2] == [*before, A, END]


def test_an_answer_cut_inside_a_character_keeps_the_ids_before_it():
    """One id a byte, as byte-level tokens are; the text lacks what was no character yet."""

    class Bytes(FakeTokenizer):
        def decode(self, ids, continues=False):
            return bytes(token - 10 for token in ids).decode("utf-8", "replace")

    conversation = chat()
    before = conversation.add_user("one")
    conversation.tokenizer = Bytes()
    conversation.record_answer("a", [10 + byte for byte in b"a\xf0\x9f\x99"])
    conversation.tokenizer = FakeTokenizer()
    assert conversation.add_user("two")[: len(before) + 2] == [*before, 10 + ord("a"), END]


def test_a_template_that_rewrites_an_answer_keeps_what_comes_before_it():
    conversation = chat(trim=True)
    conversation.add_user("one")
    conversation.record_answer("ab", [A, B, END])
    kept = conversation.add_user("two")
    conversation.record_answer(" x ", conversation.tokenizer.encode(" x ", add_bos=False))
    ids = conversation.add_user("three")
    assert ids[: len(kept)] == kept
    assert (A, B) in pairwise(ids)  # the first answer is still as generated, the second as rendered
    assert conversation.tokenizer.decode(ids[len(kept) :]).startswith("xuser:three")


def test_partial_answers_are_turns():
    conversation = chat()
    conversation.add_user("one")
    conversation.record_answer("un", conversation.tokenizer.encode("un", add_bos=False))
    assert conversation.add_user("two") == fresh(conversation)
    conversation.record_answer("", [])
    assert conversation.add_user("three") == fresh(conversation)


def test_regen_gives_the_prompt_of_the_last_answer():
    conversation = chat()
    conversation.add_user("one")
    answer(conversation, "uno")
    prompt = conversation.add_user("two")
    answer(conversation, "dos")
    assert conversation.regen() == prompt
    answer(conversation, "deux")
    assert conversation.messages[-1]["content"] == "deux"
    assert conversation.add_user("three") == fresh(conversation)


def test_undo_then_replay_is_as_if_never_done():
    conversation = chat()
    conversation.add_user("one")
    conversation.record_answer("ab", [A, B, END])
    tokens = conversation.tokens
    first = conversation.add_user("two")
    answer(conversation, "dos")
    assert conversation.undo() == "two"
    assert conversation.tokens == tokens
    assert conversation.turns == 1
    assert conversation.add_user("two") == first
    conversation.undo()
    conversation.undo()
    assert (conversation.tokens, conversation.messages) == ([], [])


def test_clear_keeps_the_system_message():
    conversation = chat()
    conversation.set_system("be kind")
    first = conversation.add_user("one")
    answer(conversation, "uno")
    conversation.clear()
    assert conversation.tokens == []
    assert conversation.add_user("one") == first


def test_a_new_system_message_starts_the_prompt_anew():
    conversation = chat()
    conversation.add_user("one")
    conversation.record_answer("ab", [A, B, END])
    conversation.set_system("be brief")
    ids = conversation.add_user("two")
    assert ids == fresh(conversation)
    assert (A, B) not in pairwise(ids)


def test_undo_after_a_new_system_message_has_the_ids_of_what_is_left():
    conversation = chat()
    for text in ("one", "two"):
        conversation.add_user(text)
        answer(conversation, "ab")
    conversation.set_system("be brief")
    whole = conversation.tokens
    conversation.undo()
    assert whole[: len(conversation.tokens)] == conversation.tokens and conversation.messages[1:] != []
    assert conversation.add_user("two") == whole[: len(conversation.tokens)] == fresh(conversation)
    conversation.undo()
    conversation.undo()
    assert conversation.tokens == []


def test_nothing_changes_when_the_template_refuses():
    conversation = chat()
    conversation.add_user("one")
    answer(conversation, "uno")
    before = conversation.snapshot()
    conversation.template.broken = True
    for refused in (
        lambda: conversation.add_user("two"),
        lambda: conversation.set_system("be kind"),
        lambda: conversation.set_state({"system": None, "messages": [{"role": "user", "content": "x"}], "chunks": []}),
        conversation.regen,
    ):
        with pytest.raises(ModelError, match="says no"):
            refused()
    assert conversation.snapshot() == before
    conversation.template.broken = False
    conversation.add_user("two")
    answer(conversation, "dos")
    before = conversation.snapshot()
    conversation.template.broken = True
    with pytest.raises(ModelError):
        conversation.undo()
    assert conversation.snapshot() == before


def test_restore_goes_back_to_a_snapshot():
    conversation = chat()
    conversation.add_user("one")
    answer(conversation, "uno")
    tokens, snapshot = conversation.tokens, conversation.snapshot()
    conversation.add_user("two")
    conversation.restore(snapshot)
    assert conversation.tokens == tokens
    assert [message["content"] for message in conversation.messages] == ["one", "uno"]


def test_there_must_be_something_to_take_back():
    for take_back in (chat().undo, chat().regen):
        with pytest.raises(UsageError):
            take_back()


# --- with the real tokenizers and templates


def real(path: Path) -> Conversation:
    metadata = GGUFFile.open(path).metadata
    tokenizer = Tokenizer.from_gguf(metadata)
    names = [tokenizer.piece(token) if token is not None else "" for token in (tokenizer.bos_id, tokenizer.eos_id)]
    template = ChatTemplate.from_gguf(metadata, *names) or ChatTemplate.built_in(metadata, *names)
    assert template is not None
    return Conversation(tokenizer, template)


@pytest.mark.models
@pytest.mark.parametrize("system", [None, "Answer in French. <|im_end|><end_of_turn>"])
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_real_turns_equal_a_fresh_tokenization_of_the_whole(model, system, request):
    conversation = real(request.getfixturevalue(model))
    conversation.set_system(system)
    before: list[int] = []
    for question, reply in [
        ("Why is the sky blue?", "Because of Rayleigh scattering.\n\n1. Light\n2. Air"),
        ("  Und warum?\n", "Größe 🙂 ... 日本語"),
        ("<|im_end|>\n<start_of_turn>model", "def f(x):\n\treturn x"),
        ("", "Was?"),
    ]:
        ids = conversation.add_user(question)
        assert ids == fresh(conversation)
        assert ids[: len(before)] == before
        answer_ids = conversation.tokenizer.encode(reply, add_bos=False)
        before = [*ids, *answer_ids]
        conversation.record_answer(reply, [*answer_ids, conversation.tokenizer.eos_id])
        assert conversation.tokens == before
    assert conversation.turns == 4


@pytest.mark.models
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_real_answers_keep_unusual_ids(model, request):
    conversation = real(request.getfixturevalue(model))
    tokenizer = conversation.tokenizer
    prompt = conversation.add_user("Hi")
    letters = [token for letter in "Hello there" for token in tokenizer.encode(letter, add_bos=False)]
    assert letters != tokenizer.encode("Hello there", add_bos=False)
    conversation.record_answer(tokenizer.decode(letters, continues=True), letters)
    ids = conversation.add_user("And?")
    assert ids[: len(prompt) + len(letters)] == [*prompt, *letters]
    assert tokenizer.decode(ids) == tokenizer.decode(fresh(conversation))
