"""`ModelText`: how one model writes text: its tokenizer and its chat template. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvcli.errors import ModelError
from kvcli.options import MODELS_OWN, ChatOptions
from kvcli.runtime.text.template import ChatTemplate, TemplateError, template_note
from kvcli.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelText:
    """`template`: None for a base model; `note`: what is to be said of a file that has none ("" = nothing);
    `has_spare`: whether there is one of the architecture that could be taken instead."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    note: str
    has_spare: bool

    @classmethod
    def of(
        cls,
        metadata: Mapping[str, Any],
        file_name: str,
        force: bool = False,
        chat_anyway: bool = False,
        chat: ChatOptions = MODELS_OWN,
        tell: Callable[[str], None] = lambda text: None,
        tokenizer: Tokenizer | None = None,
    ) -> ModelText:
        """`force`: even with a pre-tokenizer that is not known; `chat_anyway`: with the architecture's template where
        the file has none; `chat`: how the template is used, or another one. `tell` is called for what is noticed while
        a template is used. `tokenizer`: that of these metadata, where it is there already. Raises ModelError."""
        tokenizer = tokenizer or Tokenizer.from_gguf(metadata, force)
        bos, eos = ("" if i is None else tokenizer.piece(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
        given = None if chat.template is None else ChatTemplate(chat.template, bos, eos, "given")
        template = given or ChatTemplate.from_gguf(metadata, bos, eos, file_name)
        spare = ChatTemplate.built_in(metadata, bos, eos)
        if chat_anyway and template is None and spare is None:
            raise ModelError(
                f"the file has no chat template, and kv has none for {metadata.get('general.architecture', '?')}",
                "text can be continued without a template (`raw`)",
            )
        template = template or (spare if chat_anyway else None)
        if template:
            template.options, template.special = chat, _special(metadata, tokenizer)
            lost = "the chat template writes {} in a way that kv cannot follow: the model reads it as plain text"
            template.watch(tokenizer.controls, lambda token: tell(lost.format(token)))
        note = "" if given else template_note(metadata, file_name)
        return cls(tokenizer, template, note, spare is not None)

    def prepare(self) -> None:
        """Make now what else the first text makes, for processes that will be forked."""
        self.tokenizer.encode("a", parse_special=True)
        assert self.tokenizer.longest >= 0
        if self.template:
            with suppress(TemplateError):  # whoever uses it is told
                segments = self.template.render_segments([{"role": "user", "content": "a"}])
                self.template.thinking(segments, self.tokenizer)


def _special(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Tokens beside BOS and EOS that a template may name, as transformers gives them to it."""
    ids = {"unk_token": tokenizer.vocabulary.unk_id, "pad_token": metadata.get("tokenizer.ggml.padding_token_id")}
    known = ((name, i) for name, i in ids.items() if type(i) is int and 0 <= i < tokenizer.vocab_size)
    return {name: tokenizer.vocabulary.tokens[i] for name, i in known}
