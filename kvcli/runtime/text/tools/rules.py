"""Grammars of calls, for llguidance. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from kvcli.errors import UsageError
from kvcli.runtime.text import grammar
from kvcli.runtime.text.tokenizer import Tokenizer
from kvcli.runtime.text.tools import schemas
from kvcli.runtime.text.tools.schemas import Schema, dumped

_TEXT_KEYS = "pattern", "minLength", "maxLength", "format"
_MOST, _MOST_BYTES = 10_000, 32 << 20  # rules of a grammar, and of the schemas that they name


def _escaped(text: str) -> str:
    """As regular expressions of a grammar have it, on one line."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")


class Rules:
    """Rules of a grammar in Lark's notation, and the JSON schemas that they name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: dict[str, str] = {}
        self._parts: list[dict[str, Any]] = []
        self._bytes = 0  # of their schemas
        self._kinds: dict[str, frozenset[str]] = {}
        self.called, self.strict = "", False
        """Of the tool that rules are made for: the key with its schema, and whether all of it has to be followed."""

    def begin(self, called: str, strict: bool) -> None:
        """Rules of another tool follow, with a schema of its own."""
        self.called, self.strict = called, strict
        self._kinds.clear()

    def source(self, shape: str = "") -> str:
        """As `SampleOptions.grammar` has it, of the rule `start`; or of what another one says, `shape`."""
        rules, parts = dict(self._rules), list(self._parts)
        if shape:
            rules["calls"] = rules.pop("start")
            rules["start"] = "calls | @shape"
            first, *others = json.loads(shape)["grammars"]
            parts += [{**first, "name": "shape"}, *others]
        lark = "\n".join(f"{name}: {body}" for name, body in rules.items())
        return json.dumps({"grammars": [{"lark_grammar": lark}, *parts]})

    def add(self, body: str) -> str:
        """The name of a new rule."""
        return self.named(f"r{len(self._rules)}", body)

    def named(self, name: str, body: str) -> str:
        """Raises UsageError for one too many."""
        if len(self._rules) >= _MOST:
            raise UsageError(f"{self.called} cannot be followed: its grammar is too large", "a simpler one can be")
        self._rules[name] = body
        return name

    def text(self, text: str) -> str:
        """Exactly this, in which control tokens are tokens."""
        return " ".join(dumped(part) if isinstance(part, str) else f"<[{part}]>" for part in self._split(text)) or '""'

    def free(self, ends: str, begins: str = "") -> str:
        """`begins`, any text up to `ends`, and that. Where `ends` begins like that, it may come alone."""
        first, *rest = self._split(ends)
        behind = " ".join(dumped(part) if isinstance(part, str) else f"<[{part}]>" for part in rest)
        if not isinstance(first, str):  # which no text holds
            return f"{self.text(begins)} /(?s:.*)/ <[{first}]> {behind}"
        name, alone = f"text{len(self._rules)}", begins and first.startswith(begins) and first != begins
        self.named(f"{name}[suffix={dumped(first)}]", f"/({_escaped(begins)}(?s:.*))?/" if alone else "/(?s:.*)/")
        return f"{'' if alone else self.text(begins)} {name} {behind}"

    def _split(self, text: str) -> list[str | int]:
        """Texts, and the ids of control tokens, in order."""
        ids, parts, at = {}, list[str | int](), 0
        for start, token in self._tokenizer.controls(text):
            ids[token] = self._tokenizer.encode_segments([(token, True)], add_bos=False)[-1]
            parts += [*filter(None, [text[at:start]]), ids[token]]
            at = start + len(token)
        return [*parts, *filter(None, [text[at:]])]

    def sequence(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """The items in order, of which those may be missing that are not needed, with `between` between them."""
        comma = self.text(between)
        behind = alone = self.add('""')  # the rest of them where one stands before, and where none does
        for item, needed in reversed(items):
            without = ("", "") if needed else (f" | {alone}", f" | {behind}")
            alone = self.add(f"{item} {behind}{without[0]}")
            behind = self.add(f"{comma} {item} {behind}{without[1]}")
        return alone

    def json(self, schema: Any, root: Schema) -> str:
        """JSON of a schema that is a part of `root`. Raises UsageError for one that is none."""
        whole = schemas.alone(schema, root)
        self._bytes += len(dumped(whole))
        if self._bytes > _MOST_BYTES:
            raise UsageError(f"{self.called} cannot be followed: its grammar is too large", "a simpler one can be")
        inner = json.loads(grammar.json_schema(whole, self.called, lenient=not self.strict))["grammars"][0]
        name = f"s{len(self._parts)}"
        self._parts.append({**inner, "name": name})
        return f"@{name}"

    def kinds(self, schema: Schema, root: Schema) -> frozenset[str]:
        """As `schemas.kinds` has them, which is asked once for each reference."""
        if not (name := schemas.reference(schema)):
            return schemas.kinds(schema, root)
        if name not in self._kinds:
            self._kinds[name] = schemas.kinds(schema, root)
        return self._kinds[name]

    def loosely(self, schema: Schema, allowed: frozenset[str]) -> None:
        """What a schema says of a text is not followed here. Raises UsageError where it has to be."""
        unmet = [key for key in _TEXT_KEYS if key in schema] or ([] if allowed == {"string"} else ["types"])
        if self.strict and unmet:
            raise UsageError(
                f"{self.called} has {unmet[0]} of a text, which cannot be followed in the form that this model has",
                "leave `strict` out",
            )
