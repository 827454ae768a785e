"""Grammars that an answer has to follow: a JSON schema, or a grammar in Lark's notation.

llguidance compiles them and says after every token which ones may come next (Earley's parser over a lexer of
derivatives; about 50 us for a vocabulary of 128k). No torch.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from kvcli.errors import UsageError
from kvcli.runtime.text.tokenizer import Tokenizer
from kvcli.runtime.text.tools.schemas import endless, meant

ANY_JSON: dict[str, Any] = {"type": "object"}
# A step takes some 20 ms at most, an answer's automaton some 100 MB. Nothing is computed ahead: that can take hours.
_LIMITS = LLParserLimits(precompute_large_lexemes=False, max_lexer_states=50_000, verbose_errors=False)


def json_schema(schema: Mapping[str, Any] | str | bytes, called: str = "the JSON schema", lenient: bool = False) -> str:
    """What an answer follows that is JSON of this schema, as `SampleOptions.grammar` takes it. Raises UsageError, with
    the path of what is wrong, for a schema that is none or cannot be followed. `lenient`: what it says beside types and
    properties is left out where it cannot be followed. A schema with properties and no type is one of objects."""
    return COMPILER("json_schema", schema if isinstance(schema, Mapping) else _text(schema), called, lenient)


def _text(schema: str | bytes) -> str:
    return schema.decode("utf-8", "replace") if isinstance(schema, bytes) else schema


def compiled(kind: str, *given: Any) -> str:
    """What `json_schema` gives (`kind` "json_schema"), or a grammar as it is, which was tried out ("source"). Raises
    UsageError."""
    return _json_schema(*given) if kind == "json_schema" else _tried(*given)


COMPILER: Callable[..., str] = compiled
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
"""Does what `compiled` does; a server has one that ends what takes too long."""


def _tried(source: str) -> str:
    """The grammar, with which an answer over bytes was begun. Raises UsageError for one that is too large."""
    matcher = LLMatcher(LLTokenizer("byte"), _without_tokens(source), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise UsageError(f"the grammar cannot be followed: {_one_line(matcher.get_error())}")
    return source


def _without_tokens(source: str) -> str:
    """The grammar with texts in place of tokens by their ids, which bytes do not have."""
    found = json.loads(source)
    for part in found["grammars"]:
        if isinstance(lark := part.get("lark_grammar"), str):
            part["lark_grammar"] = re.sub(r"<\[(\d+)\]>", r'"\1"', lark)
    return json.dumps(found)


def _json_schema(schema: Mapping[str, Any] | str, called: str, lenient: bool) -> str:
    if not isinstance(schema, Mapping):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{called} is not JSON: {error}") from None
        if not isinstance(schema, Mapping):
            raise UsageError(f'{called} must be an object, such as {{"type": "object"}}')
    try:
        schema = dict(meant(schema))
    except RecursionError:
        raise UsageError(f"{called} cannot be followed: it is nested too deeply") from None
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    # White space is fixed: small models would go on with it for ever.
    spaced: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": lenient}

    def compiled(part: Mapping[str, Any]) -> str:
        return LLMatcher.grammar_from_json_schema({**shared, **part}, overrides=spaced)

    try:
        found = compiled(schema)
    except ValueError as error:  # numbers and characters that it cannot hold
        raise UsageError(f"{called} cannot be followed: {_one_line(str(error))}") from None
    if problem := _problem(found):
        path, problem = _place(schema, lambda part: _problem(compiled(part)), "$", problem)
        raise UsageError(f"{called} cannot be followed at {path}: {problem}")
    if name := endless(schema):
        raise UsageError(f"{called} cannot be followed at {name.replace('#', '$').replace('/', '.')}: it never ends")
    return found


def lark(text: str, called: str = "the grammar") -> str:
    """What an answer follows that is a `start` of a grammar in Lark's notation. Raises UsageError."""
    try:
        found = LLMatcher.grammar_from_lark(text)
        problem = _problem(found)
    except ValueError as error:  # characters that are none
        problem = _one_line(str(error))
    if problem and _GBNF.search(text):
        raise UsageError(
            f"{called} is in GBNF, llama.cpp's notation: kv takes Lark's",
            "`start: a` in place of `root ::= a`, each /regex/ between slashes: [a-z]+ becomes /[a-z]+/",
        )
    if problem:
        raise UsageError(f"{called} cannot be followed: {problem}")
    return found


def _problem(source: str) -> str:
    """What is wrong with a grammar; "" = nothing."""
    wrong, told = LLMatcher.validate_grammar_with_warnings(source)
    return _one_line(told[0]) if wrong else ""


def _place(part: Any, problem_of: Callable[[Any], str], path: str, problem: str) -> tuple[str, str]:
    """The smallest schema in `part`, which is at `path` and is wrong, that is wrong by itself: its path and why."""
    for key, value in part.items():
        inner: list[tuple[str, Any]] = [(key, value)]
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            inner = [(f"{key}.{name}", each) for name, each in value.items()] if isinstance(value, dict) else []
        elif isinstance(value, list):
            inner = [(f"{key}[{number}]", each) for number, each in enumerate(value)]
        for name, each in inner:
            is_schema = isinstance(each, dict) and key not in ("const", "enum", "default", "examples")
            if is_schema and (found := problem_of(each)):
                return _place(each, problem_of, f"{path}.{name}", found)
    return path, problem


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:400]


class Constraint:
    """Where one answer stands in its grammar. `waits`: the grammar is for what comes from some text on, which has not
    come; until then all is free."""

    def __init__(self, source: str, tokenizer: Tokenizer, vocab_size: int, waits: bool = False) -> None:
        """`vocab_size`: of the logits. Raises UsageError for a grammar that is too large."""
        self.waits, self._tokenizer = waits, tokenizer
        self._matcher = _matcher(source, tokenizer).deep_copy()
        self._check()
        words = -(-tokenizer.vocab_size // 32)
        self._bits, self._vocab_size = np.zeros(words, np.int32), vocab_size
        self._tokens = tokenizer.vocab_size
        self.unfinished = np.ones(vocab_size, bool)
        """Tokens that end no answer, bool [vocab_size]."""
        self.unfinished[sorted(tokenizer.eog_ids)] = False

    def begin(self, text: str) -> bool:
        """The text has come that it waits for, and this much more. False where that does not follow the grammar, which
        it goes on to wait for then."""
        ids = self._tokenizer.encode_segments([(text, True)], add_bos=False)
        if self._matcher.validate_tokens(ids) == len(ids):
            self._matcher.try_consume_tokens(ids)
            self.waits = False
        return not self.waits

    def copy(self, vocab_size: int) -> Constraint:
        """Another one at the same place, for logits of that size."""
        twin = copy(self)
        twin._matcher, twin._bits = self._matcher.deep_copy(), np.zeros_like(self._bits)
        twin._vocab_size, twin.unfinished = vocab_size, self.unfinished[:vocab_size]
        return twin

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool [vocab_size]. Raises UsageError where the grammar turns out too large."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        found = np.zeros(self._vocab_size, bool)
        known = min(self._tokens, self._vocab_size)  # the logits of a model that drafts may be fewer
        found[:known] = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:known]
        return found

    def accept(self, token: int) -> None:
        """This token comes. Raises UsageError like `allowed`."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def stopped(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(f"the grammar cannot be followed: {_one_line(self._matcher.get_error())}")


_KEPT = 8  # grammars of a tokenizer that stay compiled: calls of one conversation have the same
_MATCHERS: WeakKeyDictionary[Tokenizer, dict[str, LLMatcher]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def ready(source: str, tokenizer: Tokenizer) -> None:
    """Compile a grammar ahead, which takes up to seconds. Raises UsageError for one that is too large."""
    COMPILER("source", source)
    _matcher(source, tokenizer)


def _matcher(source: str, tokenizer: Tokenizer) -> LLMatcher:
    """At the beginning of an answer."""
    with _LOCK:
        kept = _MATCHERS.setdefault(tokenizer, {})
        if (found := kept.pop(source, None)) is None:
            found = LLMatcher(known(tokenizer), source, log_level=0, limits=_LIMITS)
        kept[source] = found
        while len(kept) > _KEPT:
            del kept[next(iter(kept))]
        return found


_TOKENIZERS: WeakKeyDictionary[Tokenizer, LLTokenizer] = WeakKeyDictionary()


def known(tokenizer: Tokenizer) -> LLTokenizer:
    """A tokenizer as llguidance takes it, made once for each, which takes up to seconds."""
    if (found := _TOKENIZERS.get(tokenizer)) is None:
        found = _TOKENIZERS[tokenizer] = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer)), eos_token=_ends(tokenizer))
    return found


def _ends(tokenizer: Tokenizer) -> list[int]:
    return sorted(tokenizer.eog_ids) or [0]


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        control = tokenizer.vocabulary.control
        self._tokenizer = ref(tokenizer)  # or what is known of it would keep it for ever
        self.eos_token_id, self.bos_token_id = _ends(tokenizer)[0], tokenizer.bos_id
        self.special_token_ids = sorted(control)
        self.tokens = [
            b"\xff" + tokenizer.vocabulary.tokens[i].encode() if i in control else tokenizer.token_bytes(i)
            for i in range(tokenizer.vocab_size)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # it is only asked for an answer's sake
        return tokenizer.encode(plain, add_bos=False)
