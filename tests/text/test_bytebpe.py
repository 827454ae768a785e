"""Byte-level BPE and its named pre-tokenizers."""

from __future__ import annotations

import pytest
import tinyvocab
from hypothesis import given
from hypothesis import strategies as st
from tinyvocab import tiny
from tokenizers import Tokenizer as Oracle

from kvcli.errors import ModelError
from kvcli.runtime.text.pretokenizers import PRETOKENIZERS
from kvcli.runtime.text.tokenizer import Tokenizer

spelled = st.text(st.sampled_from("the pages' 12\n\t<>|_éñ漢😀") | st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
@given(text=spelled)
def test_byte_level_ids_equal_the_librarys_own_pretokenizers(pre, text):
    oracle: Oracle = tinyvocab.byte_level(pre)[1]
    oracle.encode_special_tokens = True
    expected = oracle.encode(text, add_special_tokens=False).ids
    tokenizer = tiny(pre)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


WORDS = {
    "gpt-2": [
        "It",
        "'s",
        " 12345",
        " DON",
        "'",
        "T",
        " ",
        " x",
        "\n\n ",
        " y",
        "=",
        "foo",
        "();",
        " 日本",
        "\r\n",
    ],
    "smollm": [
        *["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'", "T", " ", " x", "\n\n "],
        *[" y", "=", "foo", "();", " 日本", "\r\n"],
    ],
    "llama-bpe": [
        *["It", "'s", " ", "123", "45", " DON", "'T", " ", " x", "\n\n", " ", " y", "=foo", "();"],
        *[" 日本", "\r\n"],
    ],
    "qwen2": [
        *["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'T", " ", " x", "\n\n", " ", " y"],
        *["=foo", "();", " 日本", "\r\n"],
    ],
    "gpt-4o": [
        "It's",
        " ",
        "123",
        "45",
        " DON'T",
        " ",
        " x",
        "\n\n",
        " ",
        " y",
        "=foo",
        "();",
        " 日本",
        "\r\n",
    ],
    "deepseek-v3": [
        *["It", "'s", " ", "123", "45", " DON", "'T", " ", " x", "\n\n", " ", " y", "=foo", "();"],
        *[" ", "日本", "\r\n"],
    ],
    "falcon": [
        *["It", "'", "s", " ", "123", "45", " DON", "'", "T", " ", " x", "\n\n ", " y", "=", "foo"],
        *["();", " 日本", "\r\n"],
    ],
}


def cut(pre: str, text: str) -> list[str]:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(step), "isolated") for step in PRETOKENIZERS[pre].steps]
    return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", WORDS)
def test_words_of_the_named_rules(pre):
    assert cut(pre, "It's 12345 DON'T  x\n\n  y=foo(); 日本\r\n") == WORDS[pre]


@pytest.mark.parametrize("pre", [name for name, rule in PRETOKENIZERS.items() if rule.spelled])
def test_every_rule_works_and_loses_nothing(pre):
    tokenizer = tiny(pre, add_bos_token=False)
    text = "Ünïcode_1234567890 'LL x'll\t\r\n\n  ()[]{}<=>|~`^$+ 日本語。한국어 ⅷ ² 👩‍👧 a\u0301 \u3000 end  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_equal_rules_differ_where_they_should():
    assert tiny("llama-bpe").add_bos is False  # the file says so
    metadata = tinyvocab.byte_level("llama-bpe")[0]
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(metadata).add_bos is True
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}).add_bos is False


def test_a_whole_word_beats_the_merges_only_where_the_rule_says_so():
    metadata = tinyvocab.byte_level("tekken")[0]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "qjzx"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert Tokenizer.from_gguf(metadata).encode("qjzx", add_bos=False) == [last]
    assert len(Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("qjzx")) == 4


@pytest.mark.parametrize("pre", [None, "", "default", "superfast-2099"])
def test_an_unknown_pretokenizer_is_refused_unless_forced(pre):
    metadata = tinyvocab.byte_level(pre)[0]
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_gguf(metadata)
    assert "tokenizer.ggml.pre" in caught.value.message and "`force_pretokenizer`" in caught.value.hint
    assert not pre or repr(pre) in caught.value.message
    assert Tokenizer.from_gguf(metadata, force=True).encode("It's 42") == tiny("gpt-2").encode("It's 42")


def test_merges_into_control_tokens_are_left_out():
    metadata = tinyvocab.byte_level()[0]
    merges = [*metadata["tokenizer.ggml.merges"], "< |", "<| im", "i m", "<|im_ end|>"]
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|", "im", "<|im_", "end|>"]
    kinds = [*metadata["tokenizer.ggml.token_type"], 1, 1, 1, 1]
    new = {"merges": [*merges, "<|im_ end|>"], "tokens": tokens, "token_type": kinds}
    tokenizer = tiny(**new)
    assert tokenizer.encode("<|")[0] == tokens.index("<|")
    assert tokenizer.vocabulary.control.isdisjoint(tokenizer.encode("<|im_end|>"))
