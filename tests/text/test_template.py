"""Chat templates: which one a file has, what it renders, and what its sandbox refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tinyvocab
from templatecases import STYLES, chat, opened

from kvcli.errors import ModelError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.hub.recipes import find_recipe
from kvcli.runtime.text.modeltext import ModelText
from kvcli.runtime.text.template import DEFAULT_TEMPLATES, ChatTemplate, TemplateError, template_note


@pytest.mark.models
def test_smollm2_renders_as_it_was_trained(smollm2_path):
    used, template = opened(smollm2_path)
    assert template.origin == "file"
    text = template.render([{"role": "user", "content": "Why is the sky blue?"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    )
    segments = template.render_segments([{"role": "user", "content": "Why is the sky blue?"}])
    assert used.encode_segments(segments) == used.encode(text, parse_special=True)


@pytest.mark.models
def test_gemma3_is_a_base_model_whose_architecture_has_a_template_with_one_bos(gemma3_path):
    assert ChatTemplate.from_gguf(GGUFFile.open(gemma3_path).metadata, "", "", gemma3_path.name) is None
    assert find_recipe("gemma-3-270m").kind == "base"
    used, template = opened(gemma3_path)
    assert template.origin == "built-in"
    messages = [{"role": "system", "content": "Be brief."}, *chat(" Hi ", "Ho", "Bye")]
    segments = template.render_segments(messages)
    assert "".join(text for text, _ in segments) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    assert used.encode_segments(segments).count(used.bos_id) == 1


def test_the_built_in_gemma_template_wants_turns():
    template = ChatTemplate(DEFAULT_TEMPLATES["gemma3"], "<bos>", "<eos>")
    user, model = chat("a", "b")
    for messages in ([model], [user, user], [user, model, model]):
        with pytest.raises(TemplateError) as caught:
            template.render(messages)
        assert "take turns" in caught.value.reason
    assert template.render([], add_generation_prompt=False) == "<bos>"


@pytest.mark.parametrize(
    "metadata, file_name, origin, note",
    [
        ({"tokenizer.chat_template": "x", "general.architecture": "gemma3"}, "", "file", ""),
        ({"general.architecture": "gemma3"}, "gemma-3-270m-q4_k_m.gguf", None, "base model: "),
        ({"general.architecture": "gemma3", "general.name": "Gemma 3 4b It"}, "", "built-in", "kv's own for gemma3"),
        ({"general.architecture": "gemma3", "general.finetune": "it"}, "", "built-in", "kv's own for gemma3"),
        ({"general.architecture": "gemma3"}, "gemma-3-1b-it-Q4_K_M.gguf", "built-in", "kv's own for gemma3"),
        ({"general.architecture": "gemma3", "general.name": "Italian edition"}, "italo.gguf", None, "base model: "),
        ({"general.architecture": "llama"}, "llama-2-7b.Q4_K_M.gguf", None, "base model: "),
        ({"general.architecture": "llama"}, "llama-2-7b-chat.Q4_K_M.gguf", None, "kv has none for llama"),
        ({}, "", None, "base model: "),
    ],
)
def test_which_template_a_file_gets(metadata, file_name, origin, note):
    template = ChatTemplate.from_gguf(metadata, "", "", file_name)
    assert (template and template.origin) == origin
    said = template_note(metadata, file_name)
    assert (said == "") is (note == "") and note in said
    spare = ChatTemplate.built_in(metadata, "", "")
    assert (spare is not None) is (metadata.get("general.architecture") == "gemma3")


def test_a_template_that_is_no_text():
    with pytest.raises(ModelError):
        ChatTemplate.from_gguf({"tokenizer.chat_template": 3}, "", "")


# --- transformers' conventions


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),  # trim_blocks
        ("a\n   {% if true %}b{% endif %}", "a\nb"),  # lstrip_blocks
        ("{{ bos_token }}-{{ eos_token }}", "<s>-</s>"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'a': '<é>&', 'b': [1, none]} | tojson }}", '{"a": "<é>&", "b": [1, null]}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "TrueTrueFalse"),
        ("{{ extra }}{{ add_generation_prompt }}", "givenTrue"),
        ("{{ messages[0].content is string }}{{ 'x' in messages[0]['content'] }}", "TrueFalse"),
        ("{{ 'a' ~ 1 ~ none }}{{ 2 + 3 }}{{ 'ab' * 2 }}{{ 'abc'[1] }}{{ 'abc'[::-1] }}", "a1None5ababbcba"),
        ("{{ {'a': 1}['a'] }}{{ 'b,c'.split(',') | join('+') }}{{ [1, 2] | join }}", "1b+c12"),
        ("{{ 'x' if messages | length == 1 else 'y' }}{{ 'a' == 'a' }}{{ 'A' | lower }}", "xTruea"),
    ],
)
def test_conventions(source, expected):
    template = ChatTemplate(source, "<s>", "</s>")
    assert template.render(chat("hello"), extra="given") == expected


@pytest.mark.parametrize("style", [*STYLES, "gemma3"])
def test_the_text_is_what_transformers_renders(style):
    from transformers import PreTrainedTokenizerFast

    source = DEFAULT_TEMPLATES[style] if style in DEFAULT_TEMPLATES else STYLES[style]
    oracle = PreTrainedTokenizerFast(tokenizer_object=tinyvocab.byte_level()[1], bos_token="<|endoftext|>")
    messages = chat(" Hi \n", "<think>\nhm</think>\n\nHo <b>", "{{ 7 * 7 }} é漢😀 & 'x'\n\n")
    for prompt in (True, False):
        expected = oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        assert ChatTemplate(source, "<|endoftext|>").render(messages, prompt) == expected


def test_the_date():
    from datetime import datetime

    before = datetime.now().strftime("%Y")
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(chat("")) in (before, str(int(before) + 1))


def test_templates_refusals_reach_the_user():
    template = ChatTemplate("a\n{{ raise_exception('Only ' ~ messages | length ~ ' allowed') }}")
    with pytest.raises(TemplateError) as caught:
        template.render(chat("x"))
    assert caught.value.reason == "Only 1 allowed" and "Only 1 allowed" in caught.value.message
    assert isinstance(caught.value, ModelError) and caught.value.exit_code == 3


@pytest.mark.parametrize(
    "source, what",
    [
        ("a\nb {% if %}", "line 2"),
        ("{{ 'a' | nosuchfilter }}", "line 1"),
        ("a\n\n{{ nothing.at.all }}", "failed in line 3: UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% include 'x' %}", "failed in line 1"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
    ],
)
def test_broken_templates_say_where(source, what):
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(chat("x"))
    assert what in caught.value.message and "\n" not in caught.value.message
    assert "`raw`" in caught.value.hint


# --- the sandbox


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ range(1000000000) | length }}",
        "{% import 'os' as os %}",
        "{{ (''|attr('_parts')).x }}",
        "{{ ''._parts.x }}",
    ],
)
def test_the_sandbox_refuses(attempt):
    messages = chat("x")
    with pytest.raises(TemplateError):
        ChatTemplate(attempt).render(messages)
    assert messages == chat("x")


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ messages.__class__ }}",
        "{{ ''._parts }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('{0.__class__}' ~ '').format(messages) }}",
        "{{ messages[0].content.format_map({'x': messages}) }}",
    ],
)
def test_the_sandbox_shows_nothing(attempt):
    assert ChatTemplate(attempt).render(chat("{x.__class__}")) == ""


def test_importing_the_module_does_not_import_jinja():
    code = "import sys, kvcli.runtime.text.template as _; assert not {'jinja2', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_empty_template_is_named_as_such():
    for source in ("", " \n"):
        with pytest.raises(TemplateError, match="the chat template of the file is empty") as error:
            ChatTemplate(source).render([{"role": "user", "content": "hi"}])
        assert "`raw`" in error.value.hint


def test_models_with_the_same_template_compile_it_once():
    first, second = (ChatTemplate("{{ messages[0].content }}!", "", "", "given") for _ in range(2))
    first.compile()
    assert first._compiled is second._compiled
    for template, text in ((first, "a"), (second, "b")):
        assert template.render([{"role": "user", "content": text}]) == f"{text}!"
    with pytest.raises(TemplateError, match="broken in line 1"):
        ChatTemplate("{% if %}", "", "", "given").compile()


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{% if %}"])
def test_what_a_text_needs_is_made_ahead(source: str):
    """A template that is broken is none of this: whoever wants it is told."""
    metadata = tinyvocab.byte_level()[0] | {"tokenizer.chat_template": source}
    text = ModelText.of(metadata, "model.gguf")
    text.prepare()
    assert {"longest", "_control"} <= set(vars(text.tokenizer))
    assert text.template is not None and ("_compiled" in vars(text.template)) == ("if" not in source)
