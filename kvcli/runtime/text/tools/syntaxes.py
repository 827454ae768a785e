"""How arguments are written: as JSON, as tagged texts, as in Python, or as JSON with bare keys. Each syntax reads them,
and says as a grammar how they stand there. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvcli.runtime.text.tools import schemas
from kvcli.runtime.text.tools.schemas import ANY, Schema, dumped
from kvcli.runtime.text.tools.source import Mismatch, Reading, Source

if TYPE_CHECKING:
    from kvcli.runtime.text.tools.rules import Rules

Tell = Callable[[str], None]
_DEEP = 8  # lists and objects in each other that are followed where they are not JSON
_KEY = re.compile(r"[^<>\"'=:,(){}\[\]\n]+")
_KEY_RULE = r"/[^<>\"'=:,(){}\[\]\n]+/"


class Syntax(Protocol):
    def read(self, source: Source, schema: Schema, tell: Tell) -> Reading[None]:
        """Take the arguments, and what ends them; `tell` them as JSON, piece by piece. Raises Mismatch."""
        ...

    def rule(self, rules: Rules, schema: Schema) -> str:
        """What arguments of this schema follow, in Lark's notation."""
        ...


class _Json:
    """An object, told as it is written."""

    _piece = re.compile(r'[^{}\[\]"\\]+|\\.|[{}\[\]"]', re.S)

    def read(self, source: Source, schema: Schema, tell: Tell) -> Reading[None]:
        if not (yield from source.begins("{")):
            raise Mismatch
        depth, quoted = 0, False
        while True:
            at = 0
            for found in self._piece.finditer(source.held):
                piece, at = found[0], found.end()
                if piece == '"':
                    quoted = not quoted
                elif not quoted and piece in "{[]}":
                    depth += 1 if piece in "{[" else -1
                    if depth == 0:
                        break
            tell(source.take(at))
            if depth == 0 and at:
                return
            yield from source.more()

    def rule(self, rules: Rules, schema: Schema) -> str:
        return rules.json(schemas.closed(schema), schema)


JSON = _Json()


class _Object:
    """Tells an object, one property after the other."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._begun = tell, False

    def put(self, key: str, value: Any) -> None:
        self._tell(f"{', ' if self._begun else '{'}{dumped(key)}: {dumped(value)}")
        self._begun = True

    def end(self) -> None:
        self._tell("}" if self._begun else "{}")


@dataclass(frozen=True)
class Tagged:
    """Texts in tags: `entry` of each argument, with «key», «value» and perhaps «text», which says whether the value is
    a text; `ends`: what stands behind the last one. A value is JSON where its schema wants no text."""

    entry: str
    ends: str

    @property
    def _pieces(self) -> tuple[str, str, str]:
        """What stands before the key, between key and value, and behind the value."""
        before, rest = self.entry.split("«key»")
        between, behind = rest.split("«value»")
        return before, between, behind

    def read(self, source: Source, schema: Schema, tell: Tell) -> Reading[None]:
        before, between, _ = self._pieces
        said, found = schemas.properties(schema, schema) or {}, _Object(tell)
        while not (yield from source.begins(self.ends.split("\n")[0])):
            yield from source.literal(before)
            key = yield from source.word(_KEY)
            text_only = yield from self._between(source, between)
            value = yield from self._taken(source)
            allowed = schemas.kinds(said.get(key, ANY), schema) if text_only is None else _TOLD[text_only]
            found.put(key, schemas.value_of(value, allowed))
        yield from source.literal(self.ends)
        found.end()

    def _taken(self, source: Source) -> Reading[str]:
        """Take a value, and what stands behind it; of an empty one on a line of its own the tag may come at once."""
        _, between, behind = self._pieces
        if between.endswith("\n") and (yield from source.has("\n")):
            source.take(1)
        if behind.startswith("\n") and (yield from source.has(behind.strip())):
            source.take(len(behind.strip()))
            return ""
        return (yield from source.until([behind.rstrip()]))[0]

    def _between(self, source: Source, between: str) -> Reading[bool | None]:
        """Take what stands between key and value; whether that is a text, where it is told."""
        if "«text»" not in between:
            yield from source.literal(between)
            return None
        first, last = between.split("«text»")
        yield from source.literal(first)
        told = yield from source.word(_KEY)
        yield from source.literal(last)
        return told == "true"

    def rule(self, rules: Rules, schema: Schema) -> str:
        said, must = schemas.properties(schema, schema), schemas.required(schema, schema)
        if said is None:
            return f"({self._entry(rules, _KEY_RULE, schema, ANY)})* {rules.text(self.ends)}"
        entries = ((key, self._entry(rules, rules.text(key), schema, each)) for key, each in said.items())
        parts = [entry if key in must else f"({entry})?" for key, entry in entries]
        return " ".join([*parts, rules.text(self.ends)])

    def _entry(self, rules: Rules, key: str, root: Schema, schema: Schema) -> str:
        before, between, behind = self._pieces
        allowed, listed = rules.kinds(schema, root), schemas.choices(schemas.resolved(schema, root))
        line = "\n" if between.endswith("\n") else ""
        between = between.removesuffix(line)
        if "string" not in allowed:
            value, text = f"{rules.text(line)} {rules.json(schema, root)} {rules.text(behind)}", "false"
        else:
            value, text = rules.free(behind, line), "true"
            if listed and all(isinstance(each, str) for each in listed):
                value = f"{rules.text(line)} ({' | '.join(map(rules.text, listed))}) {rules.text(behind)}"
            else:
                rules.loosely(schemas.resolved(schema, root), allowed)
        return f"{rules.text(before)} {key} {rules.text(between.replace('«text»', text))} {value}"


_TOLD = {True: frozenset({"string"}), False: schemas.kinds(ANY, ANY) - {"string"}}


class _Python:
    """Arguments by name, up to a bracket: city="Bern", days=2)."""

    _piece = re.compile(r"""[^()\[\]{},'"\\]+|\\.|[()\[\]{},'"]""", re.S)

    def read(self, source: Source, schema: Schema, tell: Tell) -> Reading[None]:
        found, last = _Object(tell), ""
        if (yield from source.begins(")")):
            last = source.take(1)
        while last != ")":
            key = yield from source.word(_KEY)
            yield from source.literal("=")
            value, last = yield from self._value(source)
            found.put(key, _of_python(value))
        found.end()

    def _value(self, source: Source) -> Reading[tuple[str, str]]:
        """Take a value and the comma or bracket behind it."""
        text, depth, quote = "", 0, ""
        while True:
            at = 0
            for found in self._piece.finditer(source.held):
                piece, at = found[0], found.end()
                if quote or piece in "'\"":
                    quote = ("" if piece == quote else quote) if quote else piece
                elif depth == 0 and piece in ",)":
                    text += source.take(found.start())
                    return text, source.take(1)
                elif piece in "()[]{}":
                    depth += 1 if piece in "([{" else -1
            text += source.take(at)
            yield from source.more()

    def rule(self, rules: Rules, schema: Schema) -> str:
        said, must = schemas.properties(schema, schema), schemas.required(schema, schema)
        if said is None:
            one = f'{_KEY_RULE} "=" {rules.json(ANY, schema)}'
            return f'({one} (", " {one})*)? ")"'
        items = [
            (f"{rules.text(f'{key}=')} {self._rule_of(rules, each, schema)}", key in must) for key, each in said.items()
        ]
        return f'{rules.sequence(items, ", ")} ")"'

    def _rule_of(self, rules: Rules, schema: Schema, root: Schema) -> str:
        """JSON, but for the names that Python has for three values."""
        names = {"boolean": '"True" | "False"', "null": '"None"'}
        allowed = rules.kinds(schema, root)
        if allowed <= set(names) and schemas.choices(schemas.resolved(schema, root)) is None:
            return f"({' | '.join(names[kind] for kind in sorted(allowed))})"
        return rules.json(schema, root)


PYTHON = _Python()


def _of_python(text: str) -> Any:
    """The value of a literal of Python or JSON; what is none is a text."""
    try:
        return schemas.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text.strip())
        dumped(value)
        return value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


@dataclass(frozen=True)
class Bare:
    """JSON without quotes around keys, and with `quote` around texts, in which nothing is escaped."""

    quote: str

    def read(self, source: Source, schema: Schema, tell: Tell) -> Reading[None]:
        text, depth, quoted = "{", 1, False
        while depth:
            piece, mark = yield from source.until([self.quote] if quoted else [self.quote, "{", "}", "[", "]"])
            quoted ^= mark == self.quote
            depth += (mark in "{[") - (mark in "]}")
            text += (dumped(piece) if mark == self.quote and not quoted else _quoted_keys(piece)) + mark.replace(
                self.quote, ""
            )
        try:
            value = schemas.loads(text)
        except (ValueError, RecursionError):
            raise Mismatch from None
        tell(dumped(value))

    def rule(self, rules: Rules, schema: Schema) -> str:
        return _BareRules(rules, schema, self.quote).made()


class _BareRules:
    """What the arguments of one schema, `root`, follow as `Bare` reads them. A reference has one rule, which all
    that lead to it name: schemas may be of themselves."""

    def __init__(self, rules: Rules, root: Schema, quote: str) -> None:
        self._rules, self._root, self._quote = rules, root, quote
        self._names: dict[str, str] = {}  # of rules, by references
        self._waiting: list[tuple[str, Schema]] = []  # rules that are named, and not made yet

    def made(self) -> str:
        found = self._object(self._root, _DEEP)
        while self._waiting:
            name, schema = self._waiting.pop()
            self._rules.named(name, self._inline(schema, _DEEP))
        return found

    def _object(self, schema: Schema, depth: int) -> str:
        """What stands behind the bracket that opens it. `depth`: of further ones in it that are followed."""
        said, must = schemas.properties(schema, self._root), schemas.required(schema, self._root)
        if said is None:
            one = f'{_KEY_RULE} ":" {self._any()}'
            return f'({one} ("," {one})*)? "}}"'
        items = [
            (f"{self._rules.text(f'{key}:')} {self._value(said[key], depth)}", key in must)
            for key in sorted(said)  # as templates write them
        ]
        return f'{self._rules.sequence(items, ",")} "}}"'

    def _value(self, schema: Schema, depth: int) -> str:
        if not (name := schemas.reference(schema)):
            return self._inline(schema, depth)
        if name not in self._names:
            self._names[name] = self._rules.add('""')
            self._waiting.append((self._names[name], schemas.resolved(schema, self._root)))
        return self._names[name]

    def _inline(self, schema: Schema, depth: int) -> str:
        found, allowed = schemas.resolved(schema, self._root), self._rules.kinds(schema, self._root)
        quote, listed = self._rules.text(self._quote), schemas.choices(found)
        if listed and all(isinstance(each, str) for each in listed):
            return f"{quote} ({' | '.join(map(self._rules.text, listed))}) {quote}"
        if not allowed & {"string", "array", "object"}:
            return self._rules.json(schema, self._root)
        if allowed == {"object"} and depth:
            return self._rules.add(f'"{{" {self._object(found, depth - 1)}')
        if allowed == {"array"} and depth:
            one = self._rules.add(self._value(found.get("items", ANY), depth - 1))
            return f'"[" ({one} ("," {one})*)? "]"'
        self._rules.loosely(found, allowed)
        return f"{quote} {self._rules.free(self._quote)}" if allowed == {"string"} else self._any()

    def _any(self) -> str:
        quote, name = self._rules.text(self._quote), "any_value"
        plain = r'/-?[0-9]+(\.[0-9]+)?/ | "true" | "false" | "null"'
        nested = f'"[" ({name} ("," {name})*)? "]" | "{{" ({_KEY_RULE} ":" {name} ("," {_KEY_RULE} ":" {name})*)? "}}"'
        return self._rules.named(name, f"{quote} {self._rules.free(self._quote)} | {plain} | {nested}")


def _quoted_keys(text: str) -> str:
    return re.sub(r"([^,:\s]+)(\s*:)", lambda found: dumped(found[1]) + found[2], text)
