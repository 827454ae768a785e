"""`tokenizer.model`: SentencePiece's own file, a protocol buffer, as the keys that a GGUF file has."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from kvcli.errors import ModelError

# Numbers of fields, as sentencepiece_model.proto has them.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _UNK, _BOS, _EOS, _PAD = 3, 24, 40, 41, 42, 43
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES = 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_NORMAL = 1


def metadata_of(raw: bytes, label: str) -> dict[str, Any]:
    """The keys `tokenizer.ggml.*`. `label` names the file in messages. Raises ModelError for what is no such file, and
    for one of words or characters."""
    try:
        fields = list(_fields(raw))
        pieces = [dict(_fields(value)) for number, value in fields if number == _PIECES]
        trainer, normalizer = (
            {k: v for n, value in fields if n == which for k, v in _fields(value)} for which in (2, 3)
        )
        tokens = [piece[_TEXT].decode() for piece in pieces]
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, struct.error):
        hint = "the file is damaged, or another program's; kv reads tokenizer.json, too"
        raise ModelError(f"{label} is not a SentencePiece model", hint) from None
    kinds = {_UNIGRAM: "t5", _BPE: "llama"}
    kind = kinds.get(trainer.get(_MODEL_TYPE, _UNIGRAM))
    if kind is None or not tokens or trainer.get(_SUFFIX, 0):
        raise ModelError(f"{label} is a SentencePiece model of a kind that kv does not read (BPE or unigram)")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [piece.get(_SCORE, 0.0) for piece in pieces],
        "tokenizer.ggml.token_type": [piece.get(_KIND, _NORMAL) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(_DUMMY_PREFIX, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normalizer.get(_EXTRA_SPACES, 1)),
    }
    if normalizer.get(_CHARSMAP):
        metadata["tokenizer.ggml.precompiled_charsmap"] = list(normalizer[_CHARSMAP])
    for name, number, default in (("unknown", _UNK, 0), ("bos", _BOS, 1), ("eos", _EOS, 2), ("padding", _PAD, -1)):
        token_id = trainer.get(number, default)
        token_id -= token_id >> 63 << 64  # negative numbers are written in 64 bits
        if 0 <= token_id < len(tokens):
            metadata[f"tokenizer.ggml.{name}_token_id"] = token_id
    return metadata


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: whole numbers, float32, or bytes. Raises ValueError, IndexError, struct.error."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, form = tag >> 3, tag & 7
        if form == 0:
            value, at = _varint(raw, at)
            yield number, value
        elif form == 2:
            length, at = _varint(raw, at)
            if at + length > len(raw):
                raise ValueError("cut off")
            yield number, raw[at : at + length]
            at += length
        elif form == 5:
            yield number, struct.unpack_from("<f", raw, at)[0]
            at += 4
        elif form == 1:
            at += 8
        else:
            raise ValueError("unknown form")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("too long a number")
