"""SentencePiece's unigram model ("tokenizer.ggml.model" = "t5") as a `tokenizers` object: the likeliest pieces."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, models

from kvcli.errors import ModelError
from kvcli.runtime.text.vocabulary import BYTE_TEXTS, NORMAL, SPACE, Vocabulary


class Unigram:
    """Text -> ids, without special tokens.

    A literal U+2581 counts as a space; a run of characters without a piece becomes its UTF-8 bytes (<0x00>...), or one
    unknown token where the vocabulary lacks those.
    """

    def __init__(self, vocabulary: Vocabulary, scores: np.ndarray) -> None:
        """`scores`: [n] float32, logarithms of probabilities. Raises ModelError without an unknown token."""
        if vocabulary.unk_id is None:
            raise ModelError("the tokenizer has no unknown token (tokenizer.ggml.unknown_token_id is missing)")
        # Text becomes normal pieces only; user-defined ones were found before, unused ones are not for use. "" is what
        # no text has.
        normal = vocabulary.kinds == NORMAL
        normal[list(vocabulary.control)] = False
        texts = [text if use else "" for text, use in zip(vocabulary.tokens, normal.tolist(), strict=True)]
        pieces = list(zip(texts, np.where(normal, scores, 0.0).tolist(), strict=True))
        self._tokenizer = Tokenizer(models.Unigram(pieces, vocabulary.unk_id))
        self._unk_id = vocabulary.unk_id
        ids = vocabulary.ids_by_text()
        byte_ids = [ids[text] for text in BYTE_TEXTS if text in ids]
        self._byte_ids = byte_ids if len(byte_ids) == len(BYTE_TEXTS) else None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no space is put in front, no BOS."""
        text = text.replace(" ", SPACE)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        if self._byte_ids is None or self._unk_id not in found.ids:
            return found.ids
        ids: list[int] = []
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            ids += [self._byte_ids[b] for b in text[start:end].encode()] if token_id == self._unk_id else [token_id]
        return ids
