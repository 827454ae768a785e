"""A tiny model that can chat: random weights, and a template that puts a line around each message."""

from __future__ import annotations

import functools
from pathlib import Path

import tiny
import tinyvocab

TEMPLATE = (
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt else '' }}"
)


@functools.cache
def make_speaking() -> Path:
    """Its file, written once."""
    plain = tiny.make("llama")
    path = plain.path.with_name("speaking.gguf")
    tokenizer, _ = tinyvocab.byte_level()
    tiny.write(path, tiny.VARIANTS["llama"], plain.reference, tokenizer | {"tokenizer.chat_template": TEMPLATE})
    return path
