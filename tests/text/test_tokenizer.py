"""Tokenizers: ids of the real models, control tokens, BOS, spaces, streaming, refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tinyvocab
from hypothesis import given
from hypothesis import strategies as st
from tinyvocab import tiny, tiny_sp

from kvcli.errors import InputBytesError, ModelError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.architecture import tokens_with_rows
from kvcli.runtime.text.tokenizer import StreamDecoder, Tokenizer
from kvcli.runtime.text.vocabulary import END_TEXTS, NORMAL, UNUSED, USER_DEFINED

DATA = Path(__file__).parents[1] / "data"
GOLDENS = {name: json.loads((DATA / f"goldens_{name}.json").read_text()) for name in ("smollm2", "gemma3")}

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def streamed(tokenizer: Tokenizer, ids: list[int], continues: bool = False) -> str:
    decoder = StreamDecoder(tokenizer, continues)
    return "".join([*map(decoder.push, ids), decoder.flush()])


# --- the real models


@pytest.fixture(scope="module")
def real() -> dict[str, Tokenizer]:
    """Opened once for the module, by `load`."""
    return {}


def load(name: str, request: pytest.FixtureRequest, real: dict[str, Tokenizer]) -> Tokenizer:
    if name not in real:
        path = request.getfixturevalue(f"{name}_path")
        with GGUFFile.open(path) as file:
            real[name] = Tokenizer.from_gguf(file.metadata)
    return real[name]


@pytest.mark.models
@pytest.mark.parametrize("model, text", [(model, text) for model, texts in GOLDENS.items() for text in texts])
def test_ids_of_the_golden_texts(model, text, request, real):
    tokenizer = load(model, request, real)
    golden = GOLDENS[model][text]
    assert tokenizer.encode(golden["text"], parse_special=text == "chatml") == golden["ids"]


def representable(tokenizer: Tokenizer, character: str) -> bool:
    return tokenizer.decode(tokenizer.encode(character, add_bos=False)) == character


@pytest.mark.models
@pytest.mark.parametrize("model", GOLDENS)
def test_a_thousand_random_strings_come_back(model, request, real):
    """Over all assigned code points that the vocabulary can represent; SmolLM2 lacks the bytes of a few."""
    tokenizer = load(model, request, real)
    rng = random.Random(7)
    ranges = [range(1, 0x3000), range(0x4E00, 0x9FA6), range(0xAC00, 0xD7A4), range(0x1F300, 0x1FB00)]
    pool = [c for span in ranges for c in map(chr, rng.sample(span, 400)) if representable(tokenizer, c)]
    pool += list(" \n\t'\"<>|") * 40
    assert len(pool) > 1_700
    for _ in range(1_000):
        text = "".join(rng.choices(pool, k=rng.randrange(1, 60)))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert streamed(tokenizer, ids) == text


@pytest.mark.models
@pytest.mark.parametrize("model", GOLDENS)
def test_the_ids_that_end_an_answer(model, request, real):
    tokenizer = load(model, request, real)
    names = {tokenizer.piece(token) for token in tokenizer.eog_ids}
    assert names == {"smollm2": {"<|im_end|>", "<|endoftext|>"}, "gemma3": {"<eos>", "<end_of_turn>"}}[model]


@pytest.mark.models
@pytest.mark.parametrize("model", GOLDENS)
def test_every_control_token_typed_by_a_user_stays_text(model, request, real):
    tokenizer = load(model, request, real)
    vocabulary = tokenizer.vocabulary
    for token in vocabulary.control:
        text = vocabulary.tokens[token]
        ids = tokenizer.encode(text, add_bos=False)
        assert vocabulary.control.isdisjoint(ids) and tokenizer.decode(ids) == text
        assert tokenizer.encode(text, add_bos=False, parse_special=True) == [token]


@pytest.mark.models
@pytest.mark.parametrize("text", ["🙂👩‍👩‍👧‍👦🏳️‍🌈", "日本語の文章、漢字かな交じり", "naïve ñandú — Ж"])
def test_characters_split_across_tokens_are_held_back(text, request, real):
    for model in GOLDENS:
        tokenizer = load(model, request, real)
        ids = tokenizer.encode(text, add_bos=False)
        decoder = StreamDecoder(tokenizer)
        shown = ""
        for token in ids:
            shown += decoder.push(token)
            assert text.startswith(shown)
        assert shown == text and decoder.flush() == ""
        partial = ["<0x" in tokenizer.piece(token) for token in ids]
        assert any(partial) or model == "gemma3"  # SmolLM2 has characters of each text in parts


# --- special tokens, BOS, spaces


def test_user_defined_tokens_are_found_in_any_text_the_longest_first():
    tokenizer = tiny_sp(user_defined=("\n", "\n\n", "  ", "<b>"))
    for special in (False, True):
        ids = tokenizer.encode("a\n\n\n<b>a   b", add_bos=False, parse_special=special)
        assert [tokenizer.piece(i) for i in ids] == ["a", "\n\n", "\n", "<b>", "a", "  ", " ", "b"]
        assert tokenizer.decode(ids) == "a\n\n\n<b>a   b"


@given(text=any_text | st.text(st.sampled_from("ab\n <>|im_endstart/"), max_size=40))
def test_no_text_becomes_a_control_token(text):
    for tokenizer in (tiny("smollm"), tiny("llama-bpe"), tiny_sp(True, ("\n", "<s")), tiny_sp()):
        for hostile in (text, f"<|im_end|>{text}<|im_start|>", f"</s>{text}<s><unk>"):
            ids = tokenizer.encode(hostile, add_bos=False)
            assert tokenizer.vocabulary.control.isdisjoint(ids)
            assert "▁" in hostile or tokenizer.decode(ids) == hostile == streamed(tokenizer, ids)


def test_exactly_one_bos():
    tokenizer = tiny_sp()
    a = tokenizer.encode("a", add_bos=False)
    assert tokenizer.add_bos and tokenizer.encode("a") == [1, *a]
    assert tokenizer.encode("<s>a", parse_special=True) == [1, *a]
    assert tokenizer.encode("") == [1] and tokenizer.encode("", add_bos=False) == []
    assert tokenizer.encode_segments([("<s>", False), ("a", True)])[:2] != [1, 1]
    typed = tokenizer.encode("<s>a")
    assert typed[0] == 1 and 1 not in typed[1:]
    assert tiny_sp(add_bos_token=False).encode("a") == a
    assert tiny().encode("a", parse_special=True) == tiny(add_bos_token=True).encode("a")[1:]


def test_segments_are_one_text_but_for_control_tokens():
    tokenizer = tiny("smollm")
    text = "<|im_start|>user\n\n It's 12 <|im_end|>\n"
    whole = tokenizer.encode(text, parse_special=True)
    segments = [("<|im_start|>user\n", True), ("\n It", False), ("'s 1", False), ("2 ", False)]
    assert tokenizer.encode_segments([*segments, ("<|im_end|>\n", True)]) == whole
    halves = tokenizer.encode_segments([("<|im_", True), ("end|>", False), ("<|im_", False), ("end|>", True)])
    assert tokenizer.vocabulary.control.isdisjoint(halves)


def test_a_space_before_text_goes_and_comes():
    tokenizer = tiny_sp(space_prefix=True)
    ids = tokenizer.encode("the pages")
    assert [tokenizer.piece(i) for i in ids] == ["<s>", " the", " pages"]
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == "the pages"
    assert tokenizer.decode(ids, continues=True) == streamed(tokenizer, ids, continues=True) == " the pages"
    assert tokenizer.encode("", add_bos=False) == []
    after = tokenizer.encode("a</s>the", parse_special=True)
    assert [tokenizer.piece(i) for i in after] == ["<s>", " a", "</s>", " the"]
    between = tiny_sp(True, ("\n",)).encode("a\nthe", add_bos=False)
    assert tiny_sp(True, ("\n",)).decode(between) == "a\nthe"


def test_ends_of_generation():
    assert tiny().eog_ids == {0, 2}  # <|endoftext|> by its text, <|im_end|> by its id
    metadata = tinyvocab.byte_level()[0]
    named = metadata | {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 11}
    assert Tokenizer.from_gguf(named).eog_ids == {0, 2, 9, 11}


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, UNUSED])
@pytest.mark.parametrize(
    "text", ["<|im_end|>", "<end_of_turn>", "</s>", "<|fim_prefix|>", "<|im_start|>", "<｜User｜>"]
)
def test_a_token_with_the_text_of_a_control_token_is_one_whatever_its_type(kind, text):
    """As the end of a turn it ends the answer; it is not shown, and no user's text becomes it."""
    metadata = tinyvocab.byte_level()[0]
    tokens, kinds = [*metadata["tokenizer.ggml.tokens"], "<|end|>"], [*metadata["tokenizer.ggml.token_type"], 3]
    token = tokens.index(text) if text in tokens else len(tokens) - 2
    tokens[token], kinds[token] = text, kind
    changed = {"tokens": tokens, "token_type": kinds, "eos_token_id": len(tokens) - 1}
    tokenizer = Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in changed.items()})
    assert (token in tokenizer.eog_ids) == (text in END_TEXTS)
    assert tokenizer.encode(f"a{text}b", parse_special=True).count(token) == 1
    assert token not in tokenizer.encode(f"a{text}b") and tokenizer.decode(tokenizer.encode(f"a{text}b")) == f"a{text}b"
    assert tokenizer.token_bytes(token) == b"" and tokenizer.piece(token) == text


def test_a_tag_of_html_is_a_word_in_a_vocabulary_that_has_its_like():
    """Gemma's </s>, which strikes text out; in others it ends the text."""
    words = tinyvocab.sentencepiece(user_defined=("<u>", "</u>", "</s>"))
    words["tokenizer.ggml.tokens"][2], words["tokenizer.ggml.eos_token_id"] = "<eos>", 2
    tokenizer = Tokenizer.from_gguf(words)
    struck = tokenizer.vocabulary.tokens.index("</s>")
    assert tokenizer.eog_ids == {2} and tokenizer.encode("a</s>", add_bos=False)[-1] == struck
    assert tokenizer.decode([struck]) == "</s>"


@pytest.mark.parametrize("where", [{"general.architecture": "phi3"}, {"general.name": "Phi 3 Mini"}])
def test_control_tokens_of_phi3_take_white_space_away(where):
    metadata = tinyvocab.sentencepiece(user_defined=("<|user|>", "<|end|>", "<|assistant|>"))
    metadata["tokenizer.ggml.token_type"][259:262] = [3, 3, 3]
    plain, phi3 = Tokenizer.from_gguf(metadata), Tokenizer.from_gguf(metadata | where)
    text = "<s> a<|user|>\n\t a b\u3000\x1f<|end|>\n<|assistant|>\n"
    shown = [phi3.piece(i) for i in phi3.encode(text, add_bos=False, parse_special=True)]
    assert shown[:3] == ["<s>", " a", "<|user|>"] and shown[-2:] == ["<|end|>", "<|assistant|>"]
    body = phi3.encode("a b\u3000\x1f", add_bos=False)
    assert phi3.encode(text, add_bos=False, parse_special=True)[3:-2] == body
    assert len(plain.encode(text, parse_special=True)) > len(phi3.encode(text, parse_special=True)) + 3
    ids = phi3.encode_segments([("<|user|>", True), ("\n x", False), ("<|end|>\n", True)], add_bos=False)
    assert [phi3.piece(i) for i in ids] == ["<|user|>", "x", "<|end|>"]


# --- decoding


@given(ids=st.lists(st.integers(0, 258), max_size=30), continues=st.booleans())
def test_streaming_equals_decoding_for_any_bytes(ids, continues):
    """Byte tokens in any order: mostly not UTF-8."""
    for tokenizer in (tiny_sp(True), tiny_sp(False), tiny()):
        decoder = StreamDecoder(tokenizer, continues)
        pieces = [decoder.push(token) for token in ids]
        assert "".join([*pieces, decoder.flush()]) == tokenizer.decode(ids, continues)
        whole = tokenizer.decode_bytes(ids, continues)
        assert whole.decode("utf-8", "replace") == tokenizer.decode(ids, continues)


def test_invalid_bytes_do_not_stall_the_stream():
    tokenizer = tiny_sp()
    byte = {value: tokenizer.vocabulary.tokens.index(f"<0x{value:02X}>") for value in range(256)}
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(byte[0xFF]) == "\ufffd"
    assert [decoder.push(byte[value]) for value in (0xF0, 0x9F, 0x99, 0x82)] == ["", "", "", "🙂"]
    assert decoder.push(byte[0xE6]) == ""
    assert decoder.push(byte[ord("a")]) == "\ufffda"
    assert decoder.push(byte[0xE6]) == "" and decoder.flush() == "\ufffd"


# --- refusals


@pytest.mark.parametrize("token", [-1, 10**6])
def test_ids_outside_the_vocabulary(token):
    tokenizer = tiny()
    for use in (tokenizer.token_bytes, tokenizer.piece, StreamDecoder(tokenizer).push):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            use(token)


def test_a_lone_surrogate_is_not_text():
    for tokenizer in (tiny(), tiny_sp()):
        with pytest.raises(InputBytesError, match="U\\+D83D at character 1"):
            tokenizer.encode("a\ud83d")


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "bert"}, "'bert' (WordPiece, of encoders) is not supported"),
        ({"model": "rwkv"}, "'rwkv' (a trie, of RWKV) is not supported"),
        ({"model": "plamo2"}, "'plamo2' (of PLaMo 2) is not supported"),
        ({"model": "newest"}, "'newest' is not supported"),
        ({"model": "gemma4", "merges": ["ab"]}, "holds what is not two tokens"),
        ({"model": "t5", "scores": [0.0], "tokens": ["a"], "eos_token_id": None}, "no unknown token"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "not an array of strings"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "holds 'ab'"),
        ({"token_type": [1]}, "token_type has 1 values"),
        ({"token_type": ["x"] * 400}, "not an array of numbers"),
        ({"eos_token_id": 400}, "eos_token_id is 400"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_malformed_metadata_is_a_model_error(changes, what):
    metadata = tinyvocab.byte_level()[0] | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})
    assert what in caught.value.message


def test_a_vocabulary_only_file(tmp_path):
    path = tinyvocab.write_vocabulary(tmp_path / "v.gguf", tinyvocab.byte_level("smollm")[0])
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        assert not file.tensors
    assert tokenizer.encode("It's 12") == tiny("smollm").encode("It's 12")


def test_placeholders_of_rows_without_a_token_are_none():
    """Converters call them [PAD400] and so on; a token of that form that stands elsewhere is one."""
    plain = tinyvocab.byte_level()[0]["tokenizer.ggml.tokens"]
    count = len(plain)
    tokens = [*plain, f"[PAD{count}]", "real", f"[PAD{count + 2}]", f"[PAD{count + 3}]"]
    tokenizer = tiny(tokens=tokens, token_type=[1] * len(tokens))
    assert tokenizer.vocab_size == count + 2 and tokenizer.piece(count) == f"[PAD{count}]"
    metadata = {"tokenizer.ggml.tokens": tokens}
    assert tokens_with_rows(metadata, len(tokens)) == tokens_with_rows(metadata, len(tokens) + 60) == count + 2
    assert tokens_with_rows(metadata, 5) == 5
