"""Every kind of tokenizer against the `tokenizers` and `sentencepiece` packages, on strings on which they differ."""

from __future__ import annotations

import io
from typing import Any

import pytest
import tinyvocab
from adversarial import adversarial
from tokenizers import Regex, models, normalizers, trainers
from tokenizers import Tokenizer as Oracle
from tokenizers import pre_tokenizers as cuts

from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.text import sentencemodel
from kvcli.runtime.text.pretokenizers import PRETOKENIZERS
from kvcli.runtime.text.tokenizer import Tokenizer

COUNT = 300
SPELLED = cuts.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = cuts.ByteLevel(add_prefix_space=False)


def isolated(*steps: str) -> list[Any]:
    return [cuts.Split(Regex(step), "isolated") for step in steps]


# Rules whose tokenizer.json names other parts of the library than expressions, as these are published.
WRITTEN = {
    "gpt-2": [GPT2],
    "smollm": [cuts.Digits(individual_digits=True), GPT2],
    "command-r": [cuts.Digits(individual_digits=True), GPT2],
    "falcon": [
        cuts.Punctuation("contiguous"), GPT2, cuts.Digits(individual_digits=False), *isolated("[0-9][0-9][0-9]"),
    ],
    "deepseek-coder": [
        *isolated(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+"),
        *(cuts.Digits(individual_digits=True), SPELLED),
    ],
}  # fmt: skip


def byte_level_oracle(metadata: dict[str, Any], steps: list[Any]) -> Oracle:
    """The library's byte-level BPE over the vocabulary less its control tokens."""
    kinds = metadata["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"]) if kinds[i] == 1}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    oracle = Oracle(models.BPE(vocab=ids, merges=merges))
    oracle.pre_tokenizer = cuts.Sequence(steps)
    return oracle


def check(tokenizer: Tokenizer, expected: Any, strings: list[str]) -> None:
    wrong = [text for text in strings if tokenizer.encode(text, add_bos=False) != expected(text)]
    assert not wrong, f"{len(wrong)} of {len(strings)}: {wrong[:3]!a}"


@pytest.mark.parametrize("pre", WRITTEN)
def test_rules_cut_as_the_parts_of_a_published_tokenizer_json(pre):
    metadata = tinyvocab.byte_level(pre)[0]
    oracle = byte_level_oracle(metadata, WRITTEN[pre])
    check(tinyvocab.tiny(pre), lambda text: oracle.encode(text).ids, adversarial(COUNT))


@pytest.mark.parametrize("pre", [name for name, rule in PRETOKENIZERS.items() if rule.spelled])
def test_every_rule_equals_the_library_on_its_expressions(pre):
    rule = PRETOKENIZERS[pre]
    oracle = byte_level_oracle(tinyvocab.byte_level(pre)[0], [*isolated(*rule.steps), SPELLED])
    oracle.model.ignore_merges = rule.ignore_merges
    check(tinyvocab.tiny(pre), lambda text: oracle.encode(text).ids, adversarial(60))


@pytest.mark.parametrize("space", [False, True])
def test_merges_over_text_equal_the_librarys(space):
    """Gemma 4's kind."""
    unknown, bytes_ = ["<pad>", "<eos>", "<unk>"], [f"<0x{byte:02X}>" for byte in range(256)]
    oracle = Oracle(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if space else []
    oracle.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*unknown, *bytes_], show_progress=False)
    oracle.train_from_iterator([tinyvocab.TEXT], trainer)
    metadata = tinyvocab.of_library(oracle, "gemma4", {**dict.fromkeys(unknown, 3), **dict.fromkeys(bytes_, 6)})
    metadata |= {"tokenizer.ggml.add_space_prefix": space, "tokenizer.ggml.unknown_token_id": 2}
    oracle.encode_special_tokens = True
    expected = [text for text in adversarial(COUNT) if "<0x41>" not in text]  # there a token that is added
    check(Tokenizer.from_gguf(metadata), lambda text: oracle.encode(text).ids, expected)


TRAINED = {
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "unigram, NFKC": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "unigram without bytes": {"model_type": "unigram", "byte_fallback": False, "add_dummy_prefix": False},
    "BPE": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "BPE, NFKC": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
    "BPE with runs of spaces": {
        **{"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        **{"user_defined_symbols": ["<ud>", "\n\n", "▁▁", "▁▁▁"], "add_dummy_prefix": False},
    },
}


@pytest.mark.parametrize("name", TRAINED)
def test_sentencepiece_models_equal_the_package(name):
    spm = pytest.importorskip("sentencepiece")
    raw = io.BytesIO()
    given = {"byte_fallback": True, "vocab_size": 380, "hard_vocab_limit": False, "minloglevel": 3} | TRAINED[name]
    lines = iter(tinyvocab.TEXT.split("\n"))
    spm.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=raw, **given)
    oracle = spm.SentencePieceProcessor(model_proto=raw.getvalue())
    tokenizer = Tokenizer.from_gguf(sentencemodel.metadata_of(raw.getvalue(), "tokenizer.model"))
    check(tokenizer, oracle.encode, adversarial(COUNT, extra=("<ud>", "<unk>", "▁▁▁")))


@pytest.mark.models
@pytest.mark.slow
def test_smollm2_equals_the_library(smollm2_path):
    metadata = GGUFFile.open(smollm2_path).metadata
    oracle = byte_level_oracle(metadata, WRITTEN["smollm"])
    check(Tokenizer.from_gguf(metadata), lambda text: oracle.encode(text).ids, adversarial(2000))


@pytest.mark.models
@pytest.mark.slow
def test_gemma3_equals_sentencepiece(gemma3_path):
    spm = pytest.importorskip("sentencepiece")
    metadata = GGUFFile.open(gemma3_path).metadata
    oracle = spm.SentencePieceProcessor(model_proto=tinyvocab.sentencepiece_file(metadata))
    extra = ("   ", "\n\n\n", "▁▁▁▁", "<b>", "</s>", "<unused7>")
    check(Tokenizer.from_gguf(metadata), oracle.encode, adversarial(2000, extra=extra))
