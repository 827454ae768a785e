"""`Prompt`: what a model reads of a conversation, and what is to be known to answer it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcli.options import ChatOptions
from kvcli.runtime.promptcache import marks
from kvcli.runtime.promptcache.marks import Mark
from kvcli.runtime.text.tools.history import as_template_takes

if TYPE_CHECKING:
    from kvcli.runtime.text.reasoning import Thinking
    from kvcli.runtime.text.template import ChatTemplate
    from kvcli.runtime.text.tokenizer import Tokenizer
    from kvcli.runtime.text.tools.use import ToolUse


@dataclass(frozen=True)
class Prompt:
    """`ids`: all of it; `thinking`: how the answer is told apart from what the model thinks, None = it marks none;
    `marks`: places that later prompts may start from; `tools`: which the answer may call, None = it calls none."""

    ids: list[int]
    thinking: Thinking | None = None
    marks: list[Mark] = field(default_factory=list)
    tools: ToolUse | None = None

    @classmethod
    def of_chat(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions | None = None,
        assistant: str = "",
        tools: ToolUse | None = None,
    ) -> Prompt:
        """Of messages, each {"role": ..., "content": ...}. `options`: another use of the template than its own;
        `assistant`: what the answer begins with; `tools`: which it may call. Raises TemplateError where the template
        refuses them."""
        if options is not None:
            template = template.with_options(options)
        told: dict[str, Any] = {"tools": [tool.told for tool in tools.listed]} if tools else {}
        segments = template.render_segments(as_template_takes(messages, template), **told)
        thinking = template.thinking(segments, tokenizer, assistant)
        ids = tokenizer.encode_segments([*segments, *(thinking.given if thinking else [])], add_bos=True)
        system = bool(messages) and messages[0]["role"] == "system"
        return cls(ids, thinking, marks.of_segments(tokenizer, ids, segments, system), tools)
