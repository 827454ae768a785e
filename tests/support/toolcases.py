"""Calls of tools in every form that kv knows, and a tokenizer that has the marks of all of them as control tokens."""

from __future__ import annotations

import functools
import re
from typing import Any

import tinyvocab

from kvcli.runtime.text.tokenizer import Tokenizer
from kvcli.runtime.text.tools.forms import FORMS, Form
from kvcli.runtime.text.tools.use import Tool, ToolChoice, ToolUse, _rules

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
        "wind": {"type": "boolean"},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "names": {"type": "array", "items": {"type": "string"}}},
            "required": ["lat"],
            "additionalProperties": False,
        },
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("get_weather", "What it is like", WEATHER), Tool("now", "The time", NOW))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
BY_NAME = {form.name: form for form in FORMS}

# Two calls, get_weather(city="Zürich & <b>", days=2, where={"lat": 1.5}) and now(), or the first alone where there is
# one at most, as models of the family write them.
_CITY = "Zürich & <b>"
_JSON = '{"city": "Zürich & <b>", "days": 2, "where": {"lat": 1.5}}'
_HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {_JSON}}}\n</tool_call>'
_LIST = f'[{{"name": "get_weather", "arguments": {_JSON}}}, {{"name": "now", "arguments": {{}}}}]'
_PYTHON = "[get_weather(city='Zürich & <b>', days=2, where={\"lat\": 1.5}), now()]"
_BARE = "city:{0}Zürich & <b>{0},days:2,where:{{lat:1.5}}"
_CODER = (
    "<function=get_weather>\n<parameter=city>\nZürich & <b>\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    '<parameter=where>\n{"lat": 1.5}\n</parameter>\n</function>\n'
)
_DSML = (
    '<｜DSML｜parameter name="city" string="true">Zürich & <b></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="where" string="false">{"lat": 1.5}</｜DSML｜parameter>\n'
)
TRANSCRIPTS = {
    "qwen3-coder": f"<tool_call>\n{_CODER}</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed-oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich & <b></parameter>\n"
        '<parameter=days>2</parameter>\n<parameter=where>{"lat": 1.5}</parameter>\n</function>\n</seed:tool_call>\n'
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
    ),
    "glm": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich & <b></arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        '<arg_key>where</arg_key>\n<arg_value>{"lat": 1.5}</arg_value>\n</tool_call>\n'
        "<tool_call>now\n</tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich & <b></parameter>\n'
        '<parameter name="days">2</parameter>\n<parameter name="where">{"lat": 1.5}</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "deepseek-dsml": (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{_DSML}</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{_JSON}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek-bare": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "gemma4": (
        "<|tool_call>call:get_weather{" + _BARE.format('<|"|>') + "}<tool_call|><|tool_call>call:now{}<tool_call|>"
    ),
    "gemma": (
        "<start_function_call>call:get_weather{" + _BARE.format("<escape>") + "}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>"
    ),
    "mistral-ids": (
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{_JSON}[TOOL_CALLS]now[CALL_ID]abcdefgh2[ARGS]{{}}"
    ),
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{_JSON}[TOOL_CALLS]now[ARGS]{{}}",
    "mistral-list": (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_JSON}, "id": "abcdefgh1"}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefgh2"}]'
    ),
    "list": f"<|tool_call|>{_LIST}",
    "command": (
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>'
    ),
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_JSON}",
    "hermes": f'{_HERMES}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
    "pythonic": _PYTHON,
    "llama3": f'{{"name": "get_weather", "parameters": {_JSON}}}',
}
ARGUMENTS = {"city": _CITY, "days": 2, "where": {"lat": 1.5}}


def expected(form: Form) -> list[tuple[str, Any]]:
    return [("get_weather", ARGUMENTS), *([] if form.single else [("now", {})])]


@functools.cache
def tokenizer() -> Tokenizer:
    """Of bytes and a few words, with the marks of all forms as control tokens but for Hermes' and the coder's."""
    metadata, _ = tinyvocab.byte_level()
    texts = "".join(form.opens + form.call + form.closes for form in FORMS) + '<|"|><escape>'
    marks = set(re.findall(r"<\|?[^<>\s«»=/]*\|>|<\|[^<>\s«»=/]*>|<｜tool▁[^<>]*｜>|<escape>|\[[A-Z_]+\]", texts))
    tokens, kinds = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    new = sorted(marks - set(tokens))
    metadata |= {"tokenizer.ggml.tokens": tokens + new, "tokenizer.ggml.token_type": kinds + [3] * len(new)}
    return Tokenizer.from_gguf(metadata)


def use(form: Form, tools: tuple[Tool, ...] = TOOLS, choice: ToolChoice = ToolChoice(True)) -> ToolUse:
    """What `ToolUse.of` makes for a template of this family."""
    rules = _rules(form, tools, choice.several and not form.single, tokenizer())
    return ToolUse(form, tools, tools, not choice.must, rules, frozenset(tokenizer().vocabulary.control))
