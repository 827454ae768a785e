"""Text <-> token ids for the tokenizers of models, and streaming UTF-8 decoding. No torch.

Special tokens: control tokens (<|im_end|>, BOS...; see vocabulary.py) are recognized in trusted text only, so that
nothing a user types becomes one; user-defined tokens (Gemma's runs of newlines, HTML tags) are ordinary text with an id
of their own and are recognized everywhere, before all else, as llama.cpp and SentencePiece do. Where several
could start, the leftmost wins, then the longest. `add_eos_token` is not obeyed: after a prompt with EOS
nothing would follow.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from kvcli.errors import InputBytesError, ModelError
from kvcli.runtime.text.vocabulary import USER_DEFINED, Vocabulary, flag, numbers

# What Unicode calls white space; Python's own notion has four control characters more.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


# Kinds of tokenizers that no model has that kv runs.
_REFUSED = {"bert": " (WordPiece, of encoders)", "rwkv": " (a trie, of RWKV)", "plamo2": " (of PLaMo 2)"}


def import_library(metadata: Mapping[str, Any]) -> None:
    """Import the library that this model's tokenizer takes, if it takes one."""
    if metadata.get("tokenizer.ggml.model") in ("gpt2", "t5"):
        import tokenizers  # noqa: F401


class _Model(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """One model's tokenizer. Ids outside 0..vocab_size-1 raise ValueError."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: _Model,
        piece_bytes: Callable[[str], bytes],
        add_bos: bool,
        add_space_prefix: bool,
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        self.vocabulary, self._model, self._piece_bytes = vocabulary, model, piece_bytes
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.eog_ids, self.vocab_size = vocabulary.eog_ids, len(vocabulary.tokens)
        self.add_bos = add_bos  # the model wants a BOS before its text
        self.add_space_prefix = add_space_prefix  # a space before text at the start or after a control token
        self._normalize = normalize  # of text between control tokens
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], force: bool = False) -> Tokenizer:
        """From the metadata of a GGUF file (tensors are not needed).

        Raises ModelError for a missing, malformed or unsupported tokenizer, and for a `tokenizer.ggml.pre`
        that is missing or unknown; with `force` GPT-2's rule is used then.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind in ("gpt2", "gemma4"):
            return cls._merging(metadata, force)
        if kind in ("llama", "t5"):
            return cls._sentencepiece(metadata)
        if kind in (None, "none", "no_vocab"):
            raise ModelError("the file has no tokenizer (tokenizer.ggml.model is missing)")
        what = f"the tokenizer type {str(kind)[:60]!r}{_REFUSED.get(str(kind), '')} is not supported"
        hint = (
            "kv reads 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE), 't5' (SentencePiece unigram) and 'gemma4'"
        )
        raise ModelError(what, hint)

    @classmethod
    def _merging(cls, metadata: Mapping[str, Any], force: bool) -> Tokenizer:
        """BPE with a list of merges."""
        from kvcli.runtime.text import sentencepiece
        from kvcli.runtime.text.pretokenizers import find_pretokenizer

        name, split = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.kv.split", "")
        kind = metadata["tokenizer.ggml.model"]
        rule = find_pretokenizer(kind if kind == "gemma4" else name, force or bool(split))
        vocabulary = Vocabulary.from_gguf(metadata)
        merges = metadata.get("tokenizer.ggml.merges")
        if merges is None:
            raise ModelError("the tokenizer has no merges (tokenizer.ggml.merges is missing)")
        add_bos = _has_bos(flag(metadata, "add_bos_token", rule.add_bos), vocabulary)
        if not rule.spelled:
            space = flag(metadata, "add_space_prefix", False)
            model: _Model = sentencepiece.MergedBPE(vocabulary, merges)
            return cls(vocabulary, model, sentencepiece.piece_bytes, add_bos, space)
        from kvcli.runtime.text import bytebpe  # imports `tokenizers` (0.05 s), which the others do without

        model = bytebpe.ByteLevelBPE(vocabulary, merges, rule, split)
        return cls(vocabulary, model, bytebpe.piece_bytes, add_bos, False)

    @classmethod
    def _sentencepiece(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Pieces with scores."""
        from kvcli.runtime.text import sentencepiece
        from kvcli.runtime.text.normalizing import normalizer_of

        vocabulary = Vocabulary.from_gguf(metadata)
        scores = numbers(metadata, "tokenizer.ggml.scores", len(vocabulary.tokens), np.float32)
        if scores is None:
            raise ModelError("the tokenizer has no scores (tokenizer.ggml.scores is missing)")
        if metadata["tokenizer.ggml.model"] == "t5":
            from kvcli.runtime.text.unigram import Unigram

            model: _Model = Unigram(vocabulary, scores)
        else:
            model = sentencepiece.SentencePieceBPE(vocabulary, scores)
        add_bos = _has_bos(flag(metadata, "add_bos_token", metadata["tokenizer.ggml.model"] == "llama"), vocabulary)
        space = flag(metadata, "add_space_prefix", True)
        return cls(vocabulary, model, sentencepiece.piece_bytes, add_bos, space, normalizer_of(metadata))

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`, after one BOS if `add_bos`, the model wants one and the text does not begin with it.

        With `parse_special` the texts of control tokens become those tokens; without, none can appear.
        Raises InputBytesError for a lone surrogate, which is not text.
        """
        return self.encode_segments([(text, parse_special)], add_bos)

    def encode_segments(self, segments: Iterable[tuple[str, bool]], add_bos: bool = True) -> list[int]:
        """Ids of the concatenated (text, trusted) segments; only trusted ones have control tokens.

        Everything between two control tokens is tokenized as one text, whatever segments it came from, so the
        ids equal those of the whole text wherever no untrusted text spells a control token.
        """
        runs: list[int | list[str]] = []
        for text, trusted in segments:
            for part in self._control.split(text) if trusted else [text] if text else []:
                if isinstance(part, int):
                    runs.append(part)
                elif runs and isinstance(runs[-1], list):
                    runs[-1].append(part)
                else:
                    runs.append([part])
        ids: list[int] = []
        for run in runs:
            if isinstance(run, int):
                ids.append(run)
                continue
            text = "".join(run)
            if ids and ids[-1] in self.vocabulary.swallowing:
                text = text.lstrip(_WHITE_SPACE)
            if text:
                self._encode_run(text, ids)
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _encode_run(self, text: str, ids: list[int]) -> None:
        """Append the ids of text that starts at a control token or at the beginning."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"U+{ord(text[error.start]):04X} at character {error.start} is half a character"
            raise InputBytesError(f"the text is not valid Unicode: {what}", "convert it to UTF-8") from None
        if self._normalize and not (text := self._normalize(text)):
            return
        for part in self._user_defined.split(" " + text if self.add_space_prefix else text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._model.encode(part)

    @cached_property
    def longest(self) -> int:
        """No token stands for more characters than this; 0 = it may, since texts are normalized."""
        return 0 if self._normalize else max(map(len, self.vocabulary.tokens))

    def controls(self, text: str) -> list[tuple[int, str]]:
        """Where control tokens stand in `text`, were it trusted: (offset, token) in order."""
        found, at = [], 0
        for part in self._control.split(text):
            part = self.vocabulary.tokens[part] if (is_token := isinstance(part, int)) else part
            if is_token:
                found.append((at, part))
            at += len(part)
        return found

    @cached_property
    def _control(self) -> _Finder:
        tokens = self.vocabulary.tokens
        return _Finder({tokens[i]: i for i in sorted(self.vocabulary.control, reverse=True)})

    @cached_property
    def _user_defined(self) -> _Finder:
        tokens = self.vocabulary.tokens
        return _Finder({tokens[i]: i for i in reversed(self.vocabulary.user_defined)})

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: UTF-8, perhaps part of a character; nothing for a control token."""
        known = self._bytes.get(token_id)
        if known is None:
            self._check(token_id)
            text = self.vocabulary.tokens[token_id]
            if token_id in self.vocabulary.control:
                known = b""
            elif self.vocabulary.kinds[token_id] == USER_DEFINED:
                known = text.encode()
            else:
                known = self._piece_bytes(text)
            self._bytes[token_id] = known
        return known

    def decode_bytes(self, ids: Iterable[int], continues: bool = False) -> bytes:
        """The bytes of `ids`, control tokens left out.

        Where the tokenizer puts a space before a text, it is taken off again, unless the ids continue a text.
        """
        parts = [part for part in map(self.token_bytes, ids) if part]
        if parts and self.add_space_prefix and not continues:
            parts[0] = parts[0].removeprefix(b" ")
        return b"".join(parts)

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, continues).decode("utf-8", "replace")

    def piece(self, token_id: int) -> str:
        """A token for display: its text, <0xNN> for each byte where these are no whole characters; a control token's
        name."""
        self._check(token_id)
        if token_id in self.vocabulary.control:
            return self.vocabulary.tokens[token_id]
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary (0..{self.vocab_size - 1})")


class StreamDecoder:
    """Text of tokens as they come. All `push` results and `flush` joined equal `Tokenizer.decode` of all ids.

    The bytes of a character that is not complete yet are held back; bytes that cannot be UTF-8 come out as
    U+FFFD at once. `continues`: the ids go on from a text, so a leading space is theirs. `marks`: control tokens that
    have a text here, their name.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False, marks: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self._marks = tokenizer, marks
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.add_space_prefix and not continues

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps ''."""
        if token_id in self._marks:
            return self.flush() + self._tokenizer.piece(token_id)
        data = self._tokenizer.token_bytes(token_id)
        if data and self._strip_space:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is still held: U+FFFD for an incomplete character, or ''."""
        return self._utf8.decode(b"", True)


class _Finder:
    """Cuts text at a set of token texts: the leftmost first, the longest where several start at one place."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        heads: dict[str, set[int]] = {}  # the first one or two characters -> lengths of texts that start so
        for text in self._ids:
            heads.setdefault(text[:2], set()).add(len(text))
        for head, lengths in heads.items():  # a one-character text may start where a longer one was hoped for
            lengths |= heads.get(head[0], set())
        self._lengths = {head: sorted(lengths, reverse=True) for head, lengths in heads.items()}
        ordered = sorted(self._lengths, key=len, reverse=True)
        self._head = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def split(self, text: str) -> Sequence[str | int]:
        """The text in order, token texts replaced by their ids; no empty strings."""
        if self._head is None:
            return [text] if text else []
        parts: list[str | int] = []
        start = at = 0
        while found := self._head.search(text, at):
            at = found.start()
            for length in self._lengths[found[0]]:
                token_id = self._ids.get(text[at : at + length])
                if token_id is not None:
                    if start < at:
                        parts.append(text[start:at])
                    parts.append(token_id)
                    start = at = at + length
                    break
            else:
                at += 1
        if start < len(text):
            parts.append(text[start:])
        return parts


def _has_bos(add_bos: bool, vocabulary: Vocabulary) -> bool:
    if add_bos and vocabulary.bos_id is None:
        hint = "the file is damaged"
        raise ModelError("the tokenizer wants a BOS token, but tokenizer.ggml.bos_token_id is missing", hint)
    return add_bos
