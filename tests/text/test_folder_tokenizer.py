"""The tokenizer of a folder: tokenizer.json or tokenizer.model, and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tinyvocab
from adversarial import adversarial
from tokenizers import AddedToken, Regex, models, normalizers, processors, trainers
from tokenizers import Tokenizer as Oracle
from tokenizers import pre_tokenizers as cuts

from kvcli.errors import ModelError
from kvcli.runtime.text.foldertokenizer import folder_metadata
from kvcli.runtime.text.pretokenizers import PRETOKENIZERS
from kvcli.runtime.text.template import ChatTemplate
from kvcli.runtime.text.tokenizer import Tokenizer

SPELLED = cuts.ByteLevel(add_prefix_space=False, use_regex=False)


def trained(pre: str) -> Oracle:
    """A tokenizer as published ones are: by an expression, with tokens that were added and a BOS in front."""
    oracle = Oracle(models.BPE())
    oracle.pre_tokenizer = cuts.Sequence([cuts.Split(Regex(PRETOKENIZERS[pre].steps[0]), "isolated"), SPELLED])
    alphabet = cuts.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<bos>"], initial_alphabet=alphabet, show_progress=False
    )
    oracle.train_from_iterator([tinyvocab.TEXT], trainer)
    oracle.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    oracle.add_tokens([AddedToken("<ud>", normalized=False)])
    oracle.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return oracle


def write(folder: Path, oracle: Oracle | None = None, **files: Any) -> dict[str, Any]:
    """Put these files, by the names of `FILES` with _ for what is no letter, into a folder, and read it."""
    folder.mkdir(exist_ok=True)
    if oracle is not None:
        oracle.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder_metadata(folder)


def test_byte_level_tokenizers_equal_the_library_normalizer_and_all(tmp_path):
    oracle = trained("qwen2")
    oracle.normalizer = normalizers.NFC()
    metadata = write(tmp_path, oracle, tokenizer_config={"bos_token": "<bos>", "eos_token": {"content": "<|end|>"}})
    tokenizer = Tokenizer.from_gguf(metadata)
    end = oracle.token_to_id("<|end|>")
    assert metadata["tokenizer.ggml.pre"] == "qwen2"
    assert tokenizer.add_bos and tokenizer.bos_id == 0 and tokenizer.eos_id == end
    oracle.encode_special_tokens = True
    for text in adversarial(300, extra=("<ud>",)):
        assert tokenizer.encode(text, add_bos=False) == oracle.encode(text, add_special_tokens=False).ids, text
    parts = [tokenizer.encode(text, add_bos=False) for text in "ab"]
    assert tokenizer.encode("a<|end|> \nb", parse_special=True) == [0, *parts[0], end, *parts[1]]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "gpt-4o", "tekken", "qwen35"])
def test_the_name_of_a_rule_is_found_by_what_it_does(tmp_path, pre):
    oracle = trained(pre)
    oracle.model.ignore_merges = PRETOKENIZERS[pre].ignore_merges
    found = write(tmp_path, oracle)["tokenizer.ggml.pre"]
    assert PRETOKENIZERS[found].steps == PRETOKENIZERS[pre].steps


def test_a_rule_without_a_name_is_followed_all_the_same(tmp_path):
    oracle = Oracle(trained("gpt-2").model)
    oracle.pre_tokenizer = cuts.Sequence([cuts.Split(Regex("[aeiou]"), "isolated"), SPELLED])
    metadata = write(tmp_path, oracle)
    assert "tokenizer.ggml.pre" not in metadata
    text = "the pages of a pool"
    assert Tokenizer.from_gguf(metadata).encode(text) == oracle.encode(text).ids


def test_a_damaged_rule_is_a_model_error():
    for split in (
        "{",
        "{}",
        '{"normalizer": null, "pre_tokenizer": {"type": "Newest"}, "ignore_merges": false}',
        "[1]",
    ):
        with pytest.raises(ModelError, match="cuts words in a way that kv cannot follow"):
            Tokenizer.from_gguf(tinyvocab.byte_level()[0] | {"tokenizer.kv.split": split})


def test_merges_over_text(tmp_path):
    special, bytes_ = ["<pad>", "<eos>", "<unk>"], [f"<0x{byte:02X}>" for byte in range(256)]
    oracle = Oracle(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    oracle.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*special, *bytes_], show_progress=False)
    oracle.train_from_iterator([tinyvocab.TEXT], trainer)
    metadata = write(tmp_path, oracle)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert metadata["tokenizer.ggml.model"] == "gemma4" and tokenizer.add_space_prefix and not tokenizer.add_bos
    assert tokenizer.vocabulary.unk_id == 2
    for text in ("the pages", " two  spaces", "漢字\n"):
        assert tokenizer.encode(text) == oracle.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_unigram_model(tmp_path):
    oracle = Oracle(
        models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("pages", -3.0)], 2)
    )
    oracle.pre_tokenizer = cuts.Sequence([cuts.WhitespaceSplit(), cuts.Metaspace()])
    oracle.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer = Tokenizer.from_gguf(write(tmp_path, oracle, tokenizer_config={"eos_token": "</s>"}))
    for text in ("the pages", "  the   the ", "pages漢字the"):
        assert tokenizer.encode(text) == oracle.encode(text).ids


def test_tokenizer_model_with_tokens_that_were_added(tmp_path):
    metadata = tinyvocab.sentencepiece(user_defined=("▁▁",)) | {
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
    }
    (tmp_path / "tokenizer.model").write_bytes(tinyvocab.sentencepiece_file(metadata))
    count = len(metadata["tokenizer.ggml.tokens"])
    added = {str(count + 2): {"content": "<|im_end|>", "special": True}, "1": {"content": "<s>", "special": True}}
    config = {"added_tokens_decoder": added, "eos_token": "</s>", "bos_token": "<s>"}
    found = write(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [2, count + 2]})
    tokenizer = Tokenizer.from_gguf(found)
    assert tokenizer.vocab_size == count + 3 and tokenizer.eog_ids == {2, count + 2} and tokenizer.add_bos
    before = Tokenizer.from_gguf(metadata)
    for text in ("the pages", "a  b", "a▁▁b", "漢"):
        assert tokenizer.encode(text) == before.encode(text)
    assert tokenizer.encode("<|im_end|>", parse_special=True)[-1] == count + 2
    assert tokenizer.vocabulary.tokens[count] == f"[PAD{count}]" and tokenizer.vocabulary.kinds[count] == 5


def test_templates_of_a_folder(tmp_path):
    oracle = trained("gpt-2")
    several = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    found = write(tmp_path, oracle, tokenizer_config={"chat_template": several})
    assert (found["tokenizer.chat_template"], found["tokenizer.chat_template.tool_use"]) == ("one", "two")
    (tmp_path / "chat_template.jinja").write_text("three")
    template = ChatTemplate.from_gguf(folder_metadata(tmp_path), "", "")
    assert template is not None and template.source == "three"


@pytest.mark.parametrize(
    "written, what",
    [
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "'WordPiece' of tokenizer.json is not supported"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "has no vocabulary"),
        ({"model": {"type": "BPE", "vocab": {"a": 9_999_999}, "merges": []}}, "numbers its tokens"),
        ({"model": ["BPE"]}, "cannot be read"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": "x"}]}, "cannot be read"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [3]}}, "cannot be read"),
        ({"model": {"type": "Unigram", "vocab": ["a"], "unk_id": 0}}, "cannot be read"),
        (None, "has no tokenizer that kv reads"),
    ],
)
def test_what_cannot_be_read_is_a_model_error(tmp_path, written, what):
    if written is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ModelError) as caught:
        folder_metadata(tmp_path)
    assert what in caught.value.message


def test_a_damaged_tokenizer_model_is_a_model_error(tmp_path):
    raw = tinyvocab.sentencepiece_file(
        tinyvocab.sentencepiece() | {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 0}
    )
    for damaged in (raw[:-7], b"\x0a\xff", b"", b"nonsense", raw[:1000] + b"\xff" * 40):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(ModelError):
            folder_metadata(tmp_path)
