"""Chat templates of many families render as `transformers` renders them, over generated conversations."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tinyvocab
from chattemplates import TEMPLATES
from tinyvocab import tiny
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvcli.options import ChatOptions
from kvcli.runtime.text.modeltext import ModelText
from kvcli.runtime.text.template import ChatTemplate, TemplateError

CITY = {"type": "string", "description": 'The city, e.g. "Zürich" & <b>others</b>'}
FIELDS = {
    **{"city": CITY, "unit": {"type": "string", "enum": ["c", "f"]}, "days": {"type": "integer", "default": 1}},
    "tags": {"type": "array", "items": {"type": "string"}},
}
PARAMETERS = {"type": "object", "properties": FIELDS, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "What's it like?", "parameters": PARAMETERS}
NOW = {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
DOCUMENTS = [{"title": "One", "text": "The first."}, {"title": "Two", "content": "The second."}]
WORDS = (
    *("Hi", "What's 2+2?", "  spaced  ", "<think>x</think>y", "</think>", "<|im_end|>", "漢字", "a\nb\n", "{{ x }}"),
    *("", "\"q\" & 'r'", "<tool_call>", "\\n", "<|end|>", "ǅ ß İ", "%s {}"),
)


def conversation(draw: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """Messages, variables, and whether an answer is to come."""

    def words() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 3)))

    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": words()})
        if draw.random() < 0.2:
            arguments = draw.choice([{"city": "Bern", "days": 2}, {"city": "Genève"}])
            call = {"type": "function", "id": "abcdef123", "function": {"name": "get_weather", "arguments": arguments}}
            messages.append({"role": "assistant", "content": draw.choice(["", words()]), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": '{"t": 3}'})
        answer = {"role": "assistant", "content": draw.choice(["", "<think>\nhm\n</think>\n\n"]) + words()}
        for key in ("reasoning_content", "thinking"):
            if draw.random() < 0.3:
                answer[key] = words()
        messages.append(answer)
    if draw.random() < 0.7:
        messages.pop()
    chances: dict[str, tuple[float, Any]] = {
        "tools": (0.3, TOOLS),
        "documents": (0.2, DOCUMENTS),
        "enable_thinking": (0.4, draw.random() < 0.5),
        "thinking": (0.3, draw.random() < 0.5),
        "reasoning_effort": (0.2, draw.choice(["low", "high"])),
        "date_string": (0.2, "1 June"),
    }
    variables = {name: value for name, (chance, value) in chances.items() if draw.random() < chance}
    return messages, variables, draw.random() < 0.8


@pytest.mark.parametrize("name", TEMPLATES)
def test_renderings_are_those_of_transformers(name):
    source, draw, same = TEMPLATES[name], random.Random(name), 0
    theirs, ours = _compile_jinja_template(source), ChatTemplate(source, "<bos>", "<eos>")
    for _ in range(50):
        messages, variables, prompts = conversation(draw)
        given = {"tools": None, "documents": None, "bos_token": "<bos>", "eos_token": "<eos>"} | variables
        try:
            expected = theirs.render(messages=messages, add_generation_prompt=prompts, **given)
        except Exception:
            with pytest.raises(TemplateError):
                ours.render(messages, prompts, **variables)
            continue
        assert ours.render(messages, prompts, **variables) == expected
        options = ChatOptions(variables=variables)
        assert ours.with_options(options).render(messages, prompts) == expected
        same += 1
    assert same >= 10


# --- thinking


def segments_of(name: str, options: ChatOptions, text: str = "Hi") -> tuple[ChatTemplate, list[tuple[str, bool]]]:
    template = ChatTemplate(TEMPLATES[name], "<bos>", "<eos>").with_options(options)
    return template, template.render_segments([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    "name, asked, tail, budget",
    [
        ("qwen3", "auto", "<|im_start|>assistant\n", -1),
        ("qwen3", "on", "<|im_start|>assistant\n", -1),
        ("qwen3", "off", "<think>\n\n</think>\n\n", -1),
        ("granite", "on", 'assistant{"thinking": true}<|end_of_role|>', -1),
        ("granite", "off", "assistant<|end_of_role|>", -1),
        ("r1", "auto", "<think>\n", -1),
        ("r1", "off", "<think>\n", 0),  # no switch: thinking is ended as it begins
        ("harmony", "off", "<|start|>assistant", 0),
    ],
)
def test_thinking_is_turned_on_and_off_as_the_template_knows_it(name, asked, tail, budget):
    template, segments = segments_of(name, ChatOptions(reasoning=asked))
    assert "".join(text for text, _ in segments).endswith(tail)
    assert template.budget == budget
    assert template.with_options(ChatOptions(reasoning=asked, budget=7)).budget == 7


def test_a_variable_stands_above_the_switch():
    asked = ChatOptions(variables={"enable_thinking": True}, reasoning="off")
    assert segments_of("qwen3", asked)[1][-1][0].endswith("assistant\n")


@pytest.mark.parametrize("text, inside", [("Hi", True), ("<think>", True), ("</think>", True), ("", True)])
def test_a_template_may_begin_the_thinking_and_a_user_may_not_end_it(text, inside):
    template, segments = segments_of("r1", ChatOptions(), text)
    thinking = template.thinking(segments, tiny())
    assert (thinking.splitter().style is not None) == inside
    template, segments = segments_of("qwen3", ChatOptions(), text)
    assert template.thinking(segments, tiny()).splitter().style is None


def test_a_model_that_marks_no_thinking_has_none_told_apart():
    template, segments = segments_of("gemma", ChatOptions())
    assert template.thinking(segments, tiny()) is None
    assert template.thinking(segments, tiny(), "<think>").splitter().push("<think>a</think>b") == ("b", "a")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("qwen3", {"content": "b", "reasoning_content": "a", "reasoning": "a", "thinking": "a"}),
        ("harmony", {"content": "b", "reasoning_content": "a", "reasoning": "a", "thinking": "a"}),
        ("r1", {"content": "<think>a</think>b"}),  # it cuts thinking off by itself
        ("gemma", {"content": "<think>a</think>b"}),  # and this one keeps it
    ],
)
def test_answers_go_back_as_the_template_takes_them(name, expected):
    template = ChatTemplate(TEMPLATES[name])
    if "reasoning" not in expected:  # marks that are control tokens cannot stand in a content
        speaking = ChatTemplate(TEMPLATES[name])
        speaking.watch(lambda text: [(0, "<think>")] if "<think>" in text else [], lambda token: None)
        assert speaking.answered("b", "a", "<think>a</think>b") == {"role": "assistant", "content": "b"}
    assert template.answered("b", "a", "<think>a</think>b") == {"role": "assistant", **expected}
    assert template.answered("b", "", "b") == {"role": "assistant", "content": "b"}


def test_a_template_for_tools_is_used_where_there_are_tools():
    metadata = {
        "tokenizer.chat_template": "plain {{ greeting }}",
        "tokenizer.chat_template.tool_use": "{{ tools|length }} tools {{ greeting }}",
    }
    template = ChatTemplate.from_gguf(metadata, "", "")
    assert template.render([]) == "plain " and template.render([], tools=[]) == "plain "
    assert template.render([], tools=[1, 2]) == "2 tools "
    asked = template.with_options(ChatOptions(variables={"tools": [1], "greeting": "hi"}))
    assert asked.render([]) == "1 tools hi" and template.render([], tools=[1]) == "1 tools "


def test_templates_know_the_special_tokens():
    source = "{{ bos_token ~ eos_token ~ pad_token ~ (unk_token or '') }}"
    metadata = tinyvocab.byte_level()[0] | {"tokenizer.chat_template": source, "tokenizer.ggml.padding_token_id": 1}
    template = ModelText.of(metadata, "a.gguf").template
    assert template is not None
    assert template.render_segments([]) == [("<|endoftext|><|im_end|><|im_start|>", True)]
    assert template.with_options(ChatOptions(reasoning="on")).render([]) == "<|endoftext|><|im_end|><|im_start|>"
