"""Templates that look like those of models, and a tokenizer with their markers."""

from __future__ import annotations

from typing import Any

import tinyvocab

from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.text.template import ChatTemplate
from kvcli.runtime.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Templates that do to contents, roles and their own markers what templates out there do.
STYLES = {
    "plain": CHATML,
    "trim": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}",
    "tilde": "{% for m in messages %}{{ '<|im_' ~ 'start|>' ~ m.content ~ '<|im_end|>' }}{% endfor %}",
    "thinking": """\
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}""",
    "macro": """\
{%- macro turn(role, text) -%}{{ '<|im_start|>' }}{{ role }}{{ '\n' ~ text }}<|im_end|>{%- endmacro -%}
{%- for m in messages -%}{{ turn(m.role, m.content) | trim }}{%- endfor -%}""",
    "collected": """\
{%- set ns = namespace(text='') -%}
{%- for m in messages -%}
    {%- set ns.text = ns.text + '<|im_start|>' + m['content'][:40] + '<|im_end|>' -%}
{%- endfor -%}
{{ ns.text }}""",
    "list": "{% for m in messages %}{{ ['<|im_start|>', m.content, '<|im_end|>'] | join }}{% endfor %}",
    "joined": "{{ messages | map(attribute='content') | join('<|im_end|>') }}<|im_end|>",
    "replaced": "{% for m in messages %}{{ 'X<|im_end|>' | replace('X', m.content) }}{% endfor %}",
    "block": "{% set all %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% endset %}{{ all }}",
    "role": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}",
    "generation": """\
{%- for m in messages -%}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{%- endfor -%}""",
}


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(tinyvocab.byte_level("smollm")[0])


_OPENED: dict[Any, tuple[Tokenizer, ChatTemplate]] = {}


def opened(path: Any) -> tuple[Tokenizer, ChatTemplate]:
    if path not in _OPENED:
        with GGUFFile.open(path) as file:
            used = Tokenizer.from_gguf(file.metadata)
            assert used.bos_id is not None and used.eos_id is not None
            names = used.piece(used.bos_id), used.piece(used.eos_id)
            template = ChatTemplate.from_gguf(file.metadata, *names) or ChatTemplate.built_in(file.metadata, *names)
        assert template is not None
        _OPENED[path] = used, template
    return _OPENED[path]
