"""Answers that follow a grammar: whatever a model would like to write, what comes out is of the form."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from typing import Any
from weakref import ref

import jsonschema
import pytest
from engines import open_tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from kvcli.errors import UsageError
from kvcli.options import CacheOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.text import grammar
from kvcli.runtime.text.reasoning import STYLES, Thinking
from kvcli.runtime.text.tools.schemas import kinds, meant


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield open_tiny("llama", "native", CacheOptions(ctx_size=1024))


def answer(engine: Engine, source: str, thinking: Thinking | None = None, **options: Any) -> tuple[str, End]:
    wanted = SampleOptions(**{"temperature": 1.0, "seed": 5, "max_tokens": 300, "grammar": source, **options})
    seq, parts = engine.new_sequence(), []
    ids = engine.tokenizer.encode("Answer:")
    for event in engine.generate(seq, ids, wanted, thinking=thinking):
        parts.append(getattr(event, "text", ""))
    seq.close()
    assert isinstance(event, End)
    return "".join(parts), event


PLAIN = st.sampled_from(
    [
        {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": -5, "maximum": 300},
        {"enum": ["red", 7, None]}, {"const": {"a": [1]}}, {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "number", "minimum": 0, "maximum": 1},
    ]
)  # fmt: skip
NAMES = st.text('abé"\\ {', min_size=1, max_size=4)


def _object(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    return fields.map(
        lambda found: {
            "type": "object",
            "properties": found,
            "required": list(found)[:2],
            "additionalProperties": False,
        }
    )


SCHEMAS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        _object(inner),
        inner.map(lambda each: {"type": "array", "items": each, "minItems": 1, "maxItems": 3}),
        st.tuples(inner, inner).map(lambda two: {"anyOf": list(two)}),
    ),
    max_leaves=5,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_every_whole_answer_is_of_the_schema(engine: Engine, schema: Any, seed: int) -> None:
    text, end = answer(engine, grammar.json_schema(schema), seed=seed)
    if end.finish_reason == "stop":
        jsonschema.validate(json.loads(text), schema)
    else:
        assert end.finish_reason == "length"


@pytest.mark.parametrize(
    ("schema", "none", "some"),
    [
        ({"properties": {"a": {"type": "null"}}, "required": ["a"]}, "1", '{"a": null}'),
        ({"required": ["a"]}, '"a"', '{"a": 1}'),
        ({"items": {"additionalProperties": {"type": "null"}}, "type": "array"}, "[1]", '[{"a": null}]'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {}}}}, "1", "{}"),
        ({"anyOf": [{"type": "null"}, {"properties": {"a": {}}}]}, "1", "null"),
        ({"type": "object", "properties": {"properties": {"required": ["a"]}}}, '{"properties": 1}', "{}"),
        ({"type": "object", "properties": {"required": {"type": "null"}}}, "1", '{"required": null}'),
        ({"enum": [{"properties": 1}, 5]}, "1", "5"),
        ({"type": ["null", "object"], "properties": {}}, "1", "null"),
    ],
)
def test_a_schema_with_properties_and_no_type_is_one_of_objects(schema: Any, none: str, some: str) -> None:
    def takes(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), grammar.json_schema(schema))
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()

    assert takes(some) and not takes(none)
    assert schema == meant(schema) or kinds(meant(schema), meant(schema)) == kinds(schema, schema)


def test_a_regular_expression_and_a_grammar(engine: Engine) -> None:
    for temperature in (0.0, 2.0):
        text, end = answer(engine, grammar.lark("start: /(yes|no), [0-9]{4}/"), temperature=temperature)
        assert re.fullmatch("(yes|no), [0-9]{4}", text) and end.finish_reason == "stop"
        text, end = answer(engine, grammar.lark('start: "a" (" " WORD)*\nWORD: /[xyz]+/'), temperature=temperature)
        assert re.fullmatch("a( [xyz]+)*", text)


def test_a_tokenizer_is_let_go_of_with_its_model() -> None:
    engine = open_tiny("llama", "native", CacheOptions(ctx_size=64))
    found = answer(engine, grammar.lark("start: /a+b/"), max_tokens=4)
    assert found[0].startswith("a")
    known = ref(engine.tokenizer)
    del engine
    gc.collect()
    assert known() is None


def test_two_of_one_seed_are_alike_and_others_are_free(engine: Engine) -> None:
    source = grammar.lark("start: /[a-z]{8}/")
    assert answer(engine, source)[0] == answer(engine, source)[0] != answer(engine, source, seed=6)[0]
    free = SampleOptions(temperature=1.0, seed=5, max_tokens=20)
    before = list(engine.generate(engine.new_sequence(), [5, 6, 7], free))[-1]
    answer(engine, source)
    assert list(engine.generate(engine.new_sequence(), [5, 6, 7], free))[-1].ids == before.ids  # type: ignore[union-attr]


def test_thinking_is_free_and_what_follows_is_not(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    thinking = Thinking(
        STYLES[:1], "<think>", "", frozenset(), lambda text: tokenizer.encode(text, add_bos=False), budget=9
    )
    for seed in range(5):  # with some of them the model would end while it thinks
        text, end = answer(engine, grammar.lark("start: /[0-9]{3}/"), thinking, seed=seed)
        assert re.fullmatch(r"\s*[0-9]{3}", text) and end.usage.reasoning_tokens >= 9
        assert not re.fullmatch(r"\s*[0-9]*", end.raw.split("</think>")[0].removeprefix("<think>"))


@pytest.mark.parametrize(
    ("make", "given", "told"),
    [
        (grammar.json_schema, "{", "is not JSON"),
        (grammar.json_schema, "[]", "must be an object"),
        (grammar.json_schema, {"type": "odd"}, r"at \$: "),
        (
            grammar.json_schema,
            {"properties": {"a": {"items": {"pattern": "("}}}},
            r"at \$\.properties\.a\.items: .*regex",
        ),
        (grammar.json_schema, {"anyOf": [{}, {"$ref": "#/$defs/no"}]}, r"at \$\.anyOf\[1\]: "),
        (grammar.json_schema, {"const": "\ud800"}, "cannot be followed"),
        (grammar.json_schema, {"type": "integer", "minimum": 10**40}, "cannot be followed"),
        (grammar.lark, "start: /(/", "cannot be followed"),
        (grammar.lark, "start: \ud800", "cannot be followed"),
        (grammar.lark, "start: missing", "missing"),
        (grammar.lark, "", "cannot be followed"),
        (grammar.lark, 'start: missing "::="', "missing"),
        (grammar.lark, "# numbers\nroot ::= [0-9]+", "is in GBNF, llama.cpp's notation: kv takes Lark's"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(make: Any, given: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told) as raised:
        make(given)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_a_grammar_that_allows_nothing_more_ends_the_answer(engine: Engine) -> None:
    text, end = answer(engine, grammar.json_schema({"const": 12}), ignore_eos=True)
    assert (text, end.finish_reason) == ("12", "stop")
