"""Small tokenizers as GGUF metadata, trained here, with the `tokenizers` objects they were made of."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer as Oracle
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvcli.runtime.text.tokenizer import Tokenizer

TEXT = (
    "The key-value cache of a transformer stores what it has read. It's 2024, isn't it? "
    "Pages are taken from a pool and given back; 1234 tokens or 99, naïve or not.\n\n"
    "def page(n):\n    return n // 64  # rows\n"
) * 3
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@functools.cache
def _trained(digits: bool) -> Oracle:
    tokenizer = Oracle(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def byte_level(pre: str | None = "gpt-2") -> tuple[dict[str, Any], Oracle]:
    """Metadata of a byte-level BPE with three control tokens, and its oracle ("smollm" splits digits)."""
    oracle = _trained(pre == "smollm")
    metadata: dict[str, Any] = {
        **of_library(oracle, "gpt2", dict.fromkeys(CONTROL, 3)),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    return metadata | ({"tokenizer.ggml.pre": pre} if pre is not None else {}), oracle


def of_library(oracle: Oracle, kind: str, kinds: dict[str, int]) -> dict[str, Any]:
    """The vocabulary and the merges of a BPE of the library; `kinds` of tokens that are not normal ones."""
    model = json.loads(oracle.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }


def sentencepiece_file(metadata: dict[str, Any]) -> bytes:
    """A tokenizer.model with the vocabulary of a file: BPE, text as it is, no space in front."""

    def number(value: int) -> bytes:
        return bytes([value & 0x7F | 0x80]) + number(value >> 7) if value > 0x7F else bytes([value])

    def field(which: int, value: int | bytes) -> bytes:
        if isinstance(value, int):
            return number(which << 3) + number(value)
        return number(which << 3 | 2) + number(len(value)) + value

    keys = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    pieces = (
        field(1, text.replace(" ", "▁").encode()) + b"\x15" + struct.pack("<f", score) + field(3, int(kind))
        for text, score, kind in zip(*keys, strict=True)
    )
    ids = zip((40, 41, 42, 43), ("unknown", "bos", "eos", "padding"), strict=True)
    special = b"".join(field(which, metadata[f"tokenizer.ggml.{name}_token_id"]) for which, name in ids)
    trainer, normalizer = field(3, 2) + field(35, 1) + special, field(1, b"identity") + field(3, 0) + field(4, 0)
    return b"".join(field(1, piece) for piece in pieces) + field(2, trainer) + field(3, normalizer)


def sentencepiece(space_prefix: bool = False, user_defined: tuple[str, ...] = ()) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: <unk> <s> </s>, the bytes, characters, and pieces by rank."""
    words = [
        "▁t",
        "he",
        "▁the",
        "in",
        "▁p",
        "ag",
        "▁pag",
        "es",
        "▁pages",
        "aa",
        "aaa",
        "▁a",
        "ab",
        "ba",
        "▁▁",
    ]
    words += ["</", "s>", "</s>_", "<s"]  # neighbours that would add up to a control token
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz<>/_é"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *user_defined]
    kinds = [2, 3, 3] + [6] * 256 + [4] * len(user_defined)
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(words))] + [-1000.0] * len(letters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *words, *letters],
        "tokenizer.ggml.token_type": kinds + [1] * (len(words) + len(letters)),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file with this metadata and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in metadata.items():
        adders[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tiny(pre: str = "gpt-2", **changes: Any) -> Tokenizer:
    """The byte-level tokenizer, with changed tokenizer.ggml keys."""
    metadata = byte_level(pre)[0]
    return Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


def tiny_sp(space_prefix: bool = False, user_defined: tuple[str, ...] = (), **changes: Any) -> Tokenizer:
    """The SentencePiece tokenizer, with changed tokenizer.ggml keys."""
    metadata = sentencepiece(space_prefix, user_defined)
    return Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})
