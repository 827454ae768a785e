"""SentencePiece's BPE: against the `tokenizers` library, ties, unused pieces, bytes."""

from __future__ import annotations

from typing import Any

import tinyvocab
from hypothesis import given
from hypothesis import strategies as st
from tinyvocab import tiny_sp
from tokenizers import Tokenizer as Oracle
from tokenizers import models

from kvcli.runtime.text.tokenizer import Tokenizer

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def oracle_of(metadata: dict[str, Any]) -> Oracle:
    """The library's BPE over merges derived from the scores."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, i in ids.items():
        for at in range(1, len(token)):
            left, right = ids.get(token[:at], 0), ids.get(token[at:], 0)
            if kinds[i] == kinds[left] == kinds[right] == 1:
                found.append((-scores[i], token[:at], token[at:]))
    merges = [(left, right) for _, left, right in sorted(found)]
    return Oracle(models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))


ORACLE = oracle_of(tinyvocab.sentencepiece())


@given(text=st.text(st.sampled_from("thepags aab  é漢</_\n"), max_size=40) | any_text)
def test_sentencepiece_ids_equal_the_librarys_with_derived_merges(text):
    expected = ORACLE.encode(text.replace(" ", "▁"), add_special_tokens=False).ids
    assert tiny_sp().encode(text, add_bos=False) == expected


@given(text=st.text(st.sampled_from("thepags aab  é漢</_\n"), max_size=60))
def test_cutting_into_words_changes_nothing(text):
    """The merge loop over the whole text at once gives the same ids."""
    tokenizer = tiny_sp()
    whole = tokenizer._model._encode_word(text.replace(" ", "▁")) if text else []
    assert tokenizer.encode(text, add_bos=False) == whole


def test_equal_scores_merge_from_the_left():
    metadata = tinyvocab.sentencepiece()
    metadata["tokenizer.ggml.scores"] = [0.0] * len(metadata["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.piece(i) for i in tokenizer.encode("abab", add_bos=False)] == ["ab", "ab"]
    assert [tokenizer.piece(i) for i in tokenizer.encode("bab", add_bos=False)] == ["ba", "b"]


def test_pieces_with_an_inner_space_are_still_found():
    metadata = tinyvocab.sentencepiece()
    for key, value in (("tokens", "s▁t"), ("scores", 1.0), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], value]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert "s t" in [tokenizer.piece(i) for i in tokenizer.encode("pages the", add_bos=False)]


def test_an_unused_piece_falls_apart_again():
    metadata = tinyvocab.sentencepiece()
    kinds = list(metadata["tokenizer.ggml.token_type"])
    kinds[metadata["tokenizer.ggml.tokens"].index("▁pag")] = 5
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": kinds})
    assert [tokenizer.piece(i) for i in tokenizer.encode(" pag", add_bos=False)] == [" p", "ag"]
    assert [tokenizer.piece(i) for i in tokenizer.encode(" pages", add_bos=False)] == [" pages"]


def test_pieces_that_add_up_to_a_control_token_stay_apart():
    tokenizer = tiny_sp()
    assert [tokenizer.piece(i) for i in tokenizer.encode("</s>", add_bos=False)] == ["</", "s>"]
    assert tokenizer.encode("</s>", add_bos=False, parse_special=True) == [tokenizer.eos_id]


def test_bytes_for_characters_without_a_piece():
    tokenizer = tiny_sp()
    ids = tokenizer.encode("漢a", add_bos=False)
    assert [tokenizer.piece(i) for i in ids] == ["<0xE6>", "<0xBC>", "<0xA2>", "a"]
    assert tokenizer.decode(ids) == "漢a"
    assert tokenizer.decode(tokenizer.encode("<0x41>", add_bos=False)) == "<0x41>"  # typed, not a byte
