"""Calls of tools: read from texts of every family, whole and in pieces, and written under a grammar."""

from __future__ import annotations

import json
import random
import sys

import jsonschema
import pytest
import toolcases
from hypothesis import given, settings
from hypothesis import strategies as st
from toolcases import BY_NAME, SCHEMAS, TRANSCRIPTS, expected, tokenizer

from kvcli.cli.toolcalls import ToolCalls
from kvcli.errors import UsageError
from kvcli.runtime.text.grammar import Constraint
from kvcli.runtime.text.tokenizer import StreamDecoder
from kvcli.runtime.text.tools.forms import FORMS, Form
from kvcli.runtime.text.tools.parts import joined
from kvcli.runtime.text.tools.reader import CallReader
from kvcli.runtime.text.tools.use import Tool, ToolChoice, tools_of

Call = tuple[str, str]


def read(form: Form, pieces: list[str]) -> tuple[str, list[Call], int]:
    """The text, the calls with their arguments as they were told, and how many are whole."""
    reader, text, calls = CallReader(form, SCHEMAS), "", list[Call]()
    for found in [*map(reader.push, pieces), reader.flush()]:
        text += found[0]
        for part in found[1]:
            if part.number == len(calls):
                calls.append((part.name, ""))
            calls[part.number] = (calls[part.number][0], calls[part.number][1] + part.arguments)
    return text, calls, reader.whole


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_calls_of_every_family_are_read(form: Form) -> None:
    for lead, behind in (("", ""), ("" if form.first else "I'll see.\n\n", "\n")):
        text, calls, whole = read(form, [lead + TRANSCRIPTS[form.name] + behind])
        assert [(name, json.loads(arguments)) for name, arguments in calls] == expected(form)
        assert whole == len(calls) and text.strip() == lead.strip()


HOSTILE = [
    "<tool_call>", "<tool_call>\n{", "</tool_call>", '{"name": "get_weather"', "get_weather", "}}", "[",
    '"arguments": {', '{"name": "nobody", "arguments": {}}', "\\", '"', "'", "<", "[TOOL_CALLS]", "\n", " ", "now()",
    "]", "<|", "<|tool_call>call:now{", '<|"|>', "<function=now>", "</function>", "<｜tool▁calls▁begin｜>", "text",
    "[ARGS]", ",", "é",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_pieces_are_read_as_the_whole(data: st.DataObject) -> None:
    """Whatever the text, and wherever it is cut, what is told is the same."""
    form = data.draw(st.sampled_from(FORMS))
    transcript = TRANSCRIPTS[form.name]
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(transcript))] * 2)))
    junk = data.draw(st.lists(st.sampled_from(HOSTILE), max_size=6))
    at = data.draw(st.integers(0, len(junk)))
    text = "".join([*junk[:at], transcript[begin:end], *junk[at:]])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == read(form, [text]) == read(form, list(text))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_call_that_is_cut_is_no_whole_call(form: Form) -> None:
    first = TRANSCRIPTS[form.name]
    for end in range(len(first)):
        text, calls, whole = read(form, [first[:end]])
        for name, arguments in calls[:whole]:
            assert json.loads(arguments) == dict(expected(form))[name]
        assert whole <= len(calls) <= whole + 1
        assert calls or text == first[:end]  # nothing is lost


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3-coder", "llama3", "gemma4", "lfm2"])
def test_what_is_no_call_is_text(name: str) -> None:
    form = BY_NAME[name]
    for text in (
        TRANSCRIPTS[name].replace("get_weather", "nobody").replace("now", "none"),
        f"{form.marks(['now'])[0]}!\nand more\n",
        "  plain text, with < and [ and { in it\n\n",
    ):
        assert read(form, [text]) == (text, [], 0)


# --- grammars


CLOSERS = (
    *(
        "\n</parameter>\n",
        "</parameter>\n",
        "</arg_value>\n",
        "</｜DSML｜parameter>\n",
        "</function>\n</tool_call>",
        '"',
    ),
    *(
        "</function>\n</seed:tool_call>",
        "</tool_call>",
        "</invoke>\n",
        "}",
        "]",
        ")",
        '<|"|>',
        "<escape>",
        "<tool_call|>",
    ),
)


def wander(form: Form, seed: int) -> str:
    """A text of the form's grammar, at random."""
    draw, words = random.Random(seed), tokenizer()
    constraint = Constraint(toolcases.use(form).followed("")[0], words, words.vocab_size)
    closers = [words.encode_segments([(text, True)], add_bos=False) for text in CLOSERS]
    ids: list[int] = []
    while not constraint.stopped and len(ids) < 1500:
        allowed = [int(i) for i in constraint.allowed().nonzero()[0]]
        closing = [each for each in closers if constraint._matcher.validate_tokens(each) == len(each)]
        new = draw.choice(closing) if closing and draw.random() < 0.3 else [draw.choice(allowed)]
        if (any(i in words.eog_ids for i in allowed) and draw.random() < 0.7) or new[0] in words.eog_ids:
            break
        for token in new:
            constraint.accept(token)
        ids += new
    assert len(ids) < 1500
    decoder = StreamDecoder(words, True, frozenset(words.vocabulary.control))
    return "".join(map(decoder.push, ids)) + decoder.flush()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_a_grammar_allows_is_a_call_that_its_schema_allows(form: Form) -> None:
    for seed in range(6):
        text = wander(form, seed)
        left, calls, whole = read(form, [text])
        assert left.strip() == "" and whole == len(calls) >= 1, text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_grammar_allows_what_models_write(form: Form) -> None:
    words = tokenizer()
    ids = words.encode_segments([(TRANSCRIPTS[form.name].replace("'", '"'), True)], add_bos=False)
    for several in (True, False):
        source, lazy = toolcases.use(form, choice=ToolChoice(True, (), several)).followed("")
        assert not lazy
        constraint = Constraint(source, words, words.vocab_size)
        count = constraint._matcher.try_consume_tokens(ids)
        assert (count == len(ids)) == (several or form.single)
        if several:
            assert constraint.stopped or constraint._matcher.is_accepting()


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([5], r"`tools\[0\]` must be a function"),
        ([{"type": "web_search"}], r"`tools\[0\]` must be a function"),
        ([{"type": "function", "function": {}}], r"`tools\[0\].function.name` is missing"),
        ([{"name": "a b"}], "no name of a tool"),
        ([{"name": "a"}, {"name": "a"}], "two tools have the name 'a'"),
        *(
            ([{"name": "a", "parameters": bad}], r"`tools\[0\].parameters` must be the schema of an object")
            for bad in ({"type": "string"}, [], False, 0, "")
        ),
        ([{"function": {"name": "a", "strict": "no"}}], r"`tools\[0\].function.strict` must be true or false"),
        ([{"name": "a", "description": ["x"]}], r"`tools\[0\].description` must be a text"),
        ("x", "must be a list"),
    ],
)
def test_tools_that_are_none(tools: object, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        tools_of(tools)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "lfm2", "gemma4"])
def test_a_schema_that_cannot_be_followed_is_refused_with_its_path(name: str) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "strin"}}}}
    with pytest.raises(UsageError, match=r"items: Invalid type: strin"):
        toolcases.use(BY_NAME[name], (Tool("f", parameters=bad, called="`tools[0].parameters`"),))
    odd = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
    toolcases.use(BY_NAME[name], (Tool("f", parameters=odd),))
    if name != "gemma4":
        with pytest.raises(UsageError, match="uniqueItems"):
            toolcases.use(BY_NAME[name], (Tool("f", parameters=odd, strict=True),))


def doubled(levels: int) -> dict[str, object]:
    """A schema whose references lead to 2**levels others."""
    defs: dict[str, object] = {"d0": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    for level in range(levels):
        defs[f"d{level + 1}"] = {"anyOf": [{"$ref": f"#/$defs/d{level}"}] * 2}
    return {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{levels}"}}, "$defs": defs}


LOOPED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/a"}},
    "$defs": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}},
}
TREE = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/node"}},
    "$defs": {
        "node": {
            "type": "object",
            "properties": {name: {"$ref": "#/$defs/node"} for name in "bcd"},
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}


ITSELF = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}
ENDLESS = [
    {**ITSELF, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {**ITSELF, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
    {**ITSELF, "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}}},
    {**ITSELF, "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}},
]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "lfm2", "gemma4"])
@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_that_never_ends_is_refused_at_once(name: str, schema: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"cannot be followed at \$\.\$defs\.a: it never ends"):
        toolcases.use(BY_NAME[name], (Tool("f", parameters=schema),))


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "lfm2"])
@pytest.mark.parametrize("inner", [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#/properties/b"}}])
def test_references_to_the_whole_lead_there_from_a_part(name: str, inner: dict[str, object]) -> None:
    schema = {"type": "object", "properties": {"a": inner, "b": {"type": "integer"}}}
    words = tokenizer()
    source, _ = toolcases.use(BY_NAME[name], (Tool("f", parameters=schema),), ToolChoice(True)).followed("")
    value = '{"b": 1}' if "$ref" in inner else "[1, 2]"
    begins = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": ', "lfm2": "<|tool_call_start|>[f(a=",
        "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=a>\n",
    }  # fmt: skip
    for text, follows in ((value, True), ('{"b": "x"', False), ("[[", False)):
        ids = words.encode_segments([(begins[name] + text, True)], add_bos=False)
        matcher = Constraint(source, words, words.vocab_size)._matcher
        assert (matcher.try_consume_tokens(ids) == len(ids)) == follows, text


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "lfm2", "gemma4"])
def test_references_are_followed_once(name: str) -> None:
    for schema in (doubled(40), LOOPED, TREE):
        use = toolcases.use(BY_NAME[name], (Tool("f", parameters=schema),))
        assert len(use.followed("")[0]) < 50_000


def test_a_schema_of_itself_is_followed_to_any_depth() -> None:
    tools = (Tool("f", parameters=TREE),)
    words = tokenizer()
    source, _ = toolcases.use(BY_NAME["gemma4"], tools, ToolChoice(True)).followed("")
    for key, follows in (("b", True), ("x", False)):
        arguments = "a:{" + "b:{c:{d:{" * 5 + f"{key}:{{}}" + "}}}" * 5 + "}"
        text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
        ids = words.encode_segments([(text, True)], add_bos=False)
        matcher = Constraint(source, words, words.vocab_size)._matcher
        assert (matcher.try_consume_tokens(ids) == len(ids)) == follows


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "lfm2", "gemma4"])
def test_a_grammar_that_grows_too_large_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.runtime.text.tools.rules._MOST", 40)
    monkeypatch.setattr("kvcli.runtime.text.tools.rules._MOST_BYTES", 2000)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer", "title": "x" * 99} for i in range(40)}}
    with pytest.raises(UsageError, match="its grammar is too large"):
        toolcases.use(BY_NAME[name], (Tool("f", parameters=wide),))


def test_a_call_that_broke_off_is_not_a_whole_one() -> None:
    text = '[f(x=1, y=}, g()]</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"} oh\n'
    reader = CallReader(BY_NAME["hermes"], SCHEMAS)
    parts = [part for found in (reader.push(broken), reader.push(text), reader.flush()) for part in found[1]]
    first, second = joined(parts)
    assert (first.name, first.whole, second.name, second.whole) == ("get_weather", False, "now", True)
    assert ToolCalls.of(parts) == ToolCalls([{"name": "now", "arguments": {}}], "get_weather")


def test_a_call_that_follows_no_grammar_is_waited_for_again() -> None:
    words, reader = tokenizer(), CallReader(BY_NAME["hermes"], SCHEMAS)
    constraint = Constraint(toolcases.use(BY_NAME["hermes"]).followed("")[0], words, words.vocab_size, waits=True)
    reader.push('<tool_call>\n{"nome')
    assert not constraint.begin('<tool_call>\n{"nome') and constraint.waits and reader.begun == ""
    reader.push("and then <tool_call>")
    assert reader.begun == "<tool_call>" and constraint.begin(reader.begun) and not constraint.waits


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1e999</arg_value>\n</tool_call>"),
        ("lfm2", "<|tool_call_start|>[f(x=1e999)]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:f{x:1e999}<tool_call|>"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1e999}}\n</tool_call>'),
    ],
)
def test_numbers_that_no_float_can_have_are_the_largest(name: str, text: str) -> None:
    reader = CallReader(BY_NAME[name], {"f": {"properties": {"x": {"type": "number"}}}})
    parts = [*reader.push(text)[1], *reader.flush()[1]]
    assert "Inf" not in joined(parts)[0].arguments
    assert ToolCalls.of(parts).whole == [{"name": "f", "arguments": {"x": sys.float_info.max}}]


@pytest.mark.parametrize("empty", ["\n</parameter>", "\n\n</parameter>", "</parameter>"])
def test_an_empty_value_swallows_nothing(empty: str) -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    form, words = BY_NAME["qwen3-coder"], tokenizer()
    text = f"<tool_call>\n<function=f>\n<parameter=a>{empty}\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        reader = CallReader(form, {"f": schema})
        parts = [part for piece in pieces for part in reader.push(piece)[1]]
        assert json.loads(joined(parts)[0].arguments) == {"a": "", "b": "x"} and reader.whole == 1
    if empty != "</parameter>":  # which no template writes
        source, _ = toolcases.use(form, (Tool("f", parameters=schema),)).followed("")
        ids = words.encode_segments([(text, True)], add_bos=False)
        matcher = Constraint(source, words, words.vocab_size)._matcher
        assert matcher.try_consume_tokens(ids) == len(ids) and (matcher.is_stopped() or matcher.is_accepting())
