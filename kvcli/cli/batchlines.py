"""A line of `kv run --batch`: what it may say, and what it asks of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcli.api import kinds
from kvcli.errors import UsageError
from kvcli.options import ChatOptions, SampleOptions
from kvcli.runtime.engine import samplesettings
from kvcli.runtime.engine.prompt import Prompt
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.runtime.promptcache import marks
from kvcli.runtime.promptcache.marks import Mark
from kvcli.words import meant, near

if TYPE_CHECKING:
    from kvcli.runtime.text.modeltext import ModelText

ROLES = ("system", "user", "assistant")
SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "seed", "stop"),
    *("logit_bias", "ignore_eos", "loop_stop", "spec"),
)
THINKING = ("reasoning", "reasoning_budget")
SHAPE = 'each line is {"prompt": "..."} or {"messages": [...]}'
KEYS = ("prompt", "messages", "id", *THINKING, *SAMPLING)


@dataclass(frozen=True)
class Form:
    """What holds for lines that do not say otherwise. `system`: the message before theirs; `raw`: prompts go without a
    template, None = where the model has none; `special`: raw prompts may hold special tokens; `marks`: texts behind
    which other prompts may start."""

    system: str | None
    raw: bool | None
    special: bool
    sampling: SampleOptions
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise UsageError("`raw` has no system message", "put it into the prompts, or leave it out")
        if self.special and not self.raw:
            raise UsageError("--special needs --raw", "a chat template brings its own special tokens")


@dataclass(frozen=True)
class Line:
    """One line, checked but for what a model says of it: either `prompt` or `messages`. `thinking`: `reasoning` and
    `reasoning_budget` where the line has them."""

    id: str | int | None
    prompt: str | None
    messages: list[dict[str, str]]
    sampling: SampleOptions
    thinking: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: bytes, number: int, form: Form) -> Line:
        """Raises UsageError; its `id` is that of the line as far as that is known."""
        value = load_object(raw, f"line {number}", UsageError, SHAPE)
        value = {key: each for key, each in value.items() if each is not None}
        for key in value:
            if key not in KEYS:
                raise UsageError(f"unknown key '{key}'", meant(near(key, KEYS)) or f"keys: {', '.join(KEYS)}")
        if ("prompt" in value) == ("messages" in value):
            raise UsageError("a line has either `prompt` or `messages`")
        prompt = _text(value, "prompt") if "prompt" in value else None
        messages = _messages(value["messages"]) if "messages" in value else []
        thinking = {key: value[key] for key in THINKING if key in value}
        kinds.chat(thinking.get("reasoning", "auto"), thinking.get("reasoning_budget", -1), None)
        return cls(value_id(value), prompt, messages, _sampling(value, form.sampling), thinking)

    def asked(self, model: ModelText, form: Form) -> Prompt:
        """The whole prompt. Raises UsageError, and TemplateError."""
        raw = form.raw or model.template is None
        if raw and self.thinking:
            raise UsageError(f"`{next(iter(self.thinking))}` needs a chat template", "leave it out, or use one")
        if self.prompt is not None and raw:
            if form.system is not None:
                raise UsageError("a prompt without a chat template has no system message", "put it into the text")
            ids = model.tokenizer.encode(self.prompt, add_bos=True, parse_special=form.special)
            return Prompt(ids, None, self._marked(model, form, ids))
        if raw or model.template is None:
            raise UsageError("`messages` need a chat template", "give `prompt`, or --no-raw")
        messages = self.messages or [{"role": "user", "content": self.prompt or ""}]
        if form.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": form.system}, *messages]
        prompt = Prompt.of_chat(model.tokenizer, model.template, messages, self._chat(model.template.options))
        return replace(prompt, marks=[*self._marked(model, form, prompt.ids), *prompt.marks])

    def _marked(self, model: ModelText, form: Form, ids: list[int]) -> list[Mark]:
        """Behind the texts that are marked in every line that has them."""
        return [mark for text in form.marks for mark in marks.behind_text(model.tokenizer, ids, text)]

    def _chat(self, own: ChatOptions) -> ChatOptions | None:
        """How the template is used, where the line says something of thinking."""
        if not self.thinking:
            return None
        budget = self.thinking.get("reasoning_budget", own.budget)
        return replace(own, reasoning=self.thinking.get("reasoning", own.reasoning), budget=budget)


def value_id(value: dict[str, Any]) -> str | int | None:
    """The `id` of a line. Raises UsageError."""
    found = value.get("id")
    if found is not None and (isinstance(found, bool) or not isinstance(found, (str, int))):
        raise UsageError(f"`id` must be a text or a whole number, not {found!r}")
    return found


def _text(value: dict[str, Any], key: str) -> str:
    found = value[key]
    if not isinstance(found, str) or not found:
        raise UsageError(f"`{key}` must be a text, and not empty")
    return found


def _messages(value: Any) -> list[dict[str, str]]:
    form = 'each is {"role": "user", "content": "..."}'
    if not isinstance(value, list) or not value:
        raise UsageError("`messages` must be a list of messages", form)
    for each in value:
        if not isinstance(each, dict) or set(each) != {"role", "content"} or not isinstance(each["content"], str):
            raise UsageError("`messages` must have a role and a content each, and nothing else", form)
        if each["role"] not in ROLES:
            raise UsageError(f"the role of a message is one of {', '.join(ROLES)}, not {each['role']!r}")
    return value


def _sampling(value: dict[str, Any], default: SampleOptions) -> SampleOptions:
    """The options with what a line says of them. Raises UsageError."""
    said = {key: value[key] for key in SAMPLING if key in value}
    if "max_tokens" in said:
        said["unattended"] = False
    if "logit_bias" in said:
        said["logit_bias"] = _logit_bias(said["logit_bias"])
    options = kinds.sampling(default, said)
    samplesettings.check(options)
    return options


def _logit_bias(value: Any) -> dict[int, float]:
    wrong = UsageError("`logit_bias` must be an object of token ids with a number each", 'such as {"15043": -1.5}')
    if not isinstance(value, dict):
        raise wrong
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit()) or isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise wrong
    return {int(token): float(bias) for token, bias in value.items()}
