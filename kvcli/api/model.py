"""`Model`: an open engine for Python programs, and `Sequence`: one context of it. torch comes in with the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.api import kinds
from kvcli.api.answers import Answer
from kvcli.errors import ModelError, UsageError
from kvcli.options import ChatOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.engine import samplesettings as settling
from kvcli.runtime.engine.prompt import Prompt

if TYPE_CHECKING:
    from kvcli.notices import Tell
    from kvcli.runtime.cache.sequence import Sequence as Rows
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.events import Event
    from kvcli.runtime.plan.plan import Plan

DEFAULTS = SampleOptions()


class Sequence:
    """One context: token ids whose keys and values are in the model's cache. `Model.new_sequence` makes one.

    Its pages are let go of by `close`, or at the end of a `with`.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @property
    def tokens(self) -> list[int]:
        """The ids, a copy."""
        return list(self.rows.tokens)

    def __len__(self) -> int:
        return self.rows.length

    def fork(self) -> Sequence:
        """Another sequence with the same rows, which share their pages: it costs no memory until the two differ."""
        return Sequence(self.rows.fork())

    def close(self) -> None:
        """Let go of all pages; the sequence is empty afterwards."""
        self.rows.close()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Model:
    """A model that is open. `kvcli.load` makes one; close it, or use it in a `with`.

    It writes one answer at a time and is not for use from several threads at once. Prompts without a `sequence` share
    the model's own one: of each, only what differs from the one before is prefilled.
    """

    def __init__(self, engine: Engine, prompts: PromptCacheOptions, tell: Tell) -> None:
        self.engine = engine
        self._caches = engine.prompt_caches(prompts, tell)
        self._own = Sequence(engine.new_sequence())
        self._running: Callable[[], Answer | None] = lambda: None
        self._closed = False

    # --- what it is

    def __repr__(self) -> str:
        if self._closed:
            return "<Model, closed>"
        return f"<Model {self.name!r}, ctx {self.ctx}, {'/'.join(dict.fromkeys(self.cache_type))}, {self.device}>"

    @property
    def name(self) -> str:
        """The model's name, as its makers write it."""
        return self._alive().loaded.title

    @property
    def ctx(self) -> int:
        """Most tokens in a sequence."""
        return self._alive().ctx_size

    @property
    def cache_type(self) -> tuple[str, str]:
        """The cache types of keys and values."""
        return self._alive().loaded.cache_types

    @property
    def device(self) -> str:
        """ "cpu", or "cuda:0" and so on."""
        return str(self._alive().device)

    @property
    def notices(self) -> list[str]:
        """What is not as it was asked for, or good to know."""
        return list(self._alive().notices)

    # --- text

    def tokenize(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """The ids of a text. `bos`: with the token that begins a text, where the model has one; `special`: control
        tokens that the text spells are taken for such."""
        return self._alive().tokenizer.encode(kinds.text(text, "text"), add_bos=bos, parse_special=special)

    def detokenize(self, ids: Many[int]) -> str:
        """The text of ids. Raises UsageError for ids that the model does not have."""
        try:
            return self._alive().tokenizer.decode(kinds.ids(ids, "ids"))
        except ValueError as error:
            raise UsageError(str(error)) from None

    def chat(
        self,
        messages: str | Many[Mapping[str, Any]],
        *,
        sequence: Sequence | None = None,
        reasoning: str = ChatOptions.reasoning,
        reasoning_budget: int = ChatOptions.budget,
        template_vars: Mapping[str, Any] | None = None,
        assistant: str = "",
        sampling: SampleOptions = DEFAULTS,
        **fields: Any,
    ) -> Answer:
        """Answer the last of these messages, each {"role": ..., "content": ...}; a text is one message of a user.

        What the model thinks before it answers is `Answer.reasoning`. `reasoning`: "on", "off", or "auto" = as the chat
        template has it; `reasoning_budget`: most tokens of it, -1 = no limit. `template_vars`: what the template gets
        beside the messages (`tools`, `documents`, variables of its own). `assistant`: what the answer begins with.
        `fields`: those of `SampleOptions`, by name (`temperature=0, max_tokens=100`); they stand above `sampling`.
        Raises ModelError where the model has no chat template or its template refuses the messages, ContextOverflow for
        a prompt longer than the context, UsageError for a value out of range.
        """
        text = self._open().loaded.text
        if text.template is None:
            raise ModelError("this model has no chat template", "Model.generate continues a text")
        options, begun = kinds.chat(reasoning, reasoning_budget, template_vars), kinds.text(assistant, "assistant")
        prompt = Prompt.of_chat(text.tokenizer, text.template, kinds.messages(messages), options, begun)
        return self._answer(prompt, sequence, kinds.sampling(sampling, fields))

    def generate(
        self,
        prompt: str | Many[int],
        *,
        special: bool = False,
        sequence: Sequence | None = None,
        sampling: SampleOptions = DEFAULTS,
        **fields: Any,
    ) -> Answer:
        """Continue a text, or token ids as they are, without a chat template. `special`: control tokens that the text
        spells are taken for such. For the rest see `chat`."""
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt, bos=True, special=special)
        return self._answer(Prompt(kinds.ids(prompt, "prompt")), sequence, kinds.sampling(sampling, fields))

    def _answer(self, prompt: Prompt, sequence: Sequence | None, options: SampleOptions) -> Answer:
        engine, rows, caches = self._open(), self._rows(sequence), self._caches
        settled = settling.settled(options, engine.loaded.sampling_defaults, engine.config.vocab_size)

        def start(cancelled: Callable[[], bool]) -> Iterator[Event]:
            how = prompt.thinking, prompt.marks
            return engine.generate(rows, prompt.ids, settled, cancelled, False, caches, *how)

        answer = Answer(len(prompt.ids), settled, start)
        self._running = weakref.ref(answer)  # an answer that nobody has any more is over
        return answer

    # --- sequences

    def new_sequence(self) -> Sequence:
        """An empty context."""
        return Sequence(self._open().new_sequence())

    def fork(self, sequence: Sequence | None = None) -> Sequence:
        """A sequence with the rows of `sequence`, or of what the model was asked last; both go on by themselves."""
        self._open()
        return Sequence(self._rows(sequence).fork())

    def save_cache(self, path: str | PathLike[str], sequence: Sequence | None = None) -> None:
        """Write the rows of `sequence`, or of what the model was asked last, to a file. Raises UsageError for a
        sequence of less than a page, which is not worth it, and OutputError."""
        from kvcli.runtime.promptcache import savedsequence

        engine, rows = self._open(), self._rows(sequence)
        if rows.length < engine.layout.page_size:
            raise UsageError(
                f"the sequence has {rows.length} tokens, less than a page of {engine.layout.page_size}",
                "save it after a prompt",
            )
        savedsequence.save(self._caches.engine, rows, Path(path))

    def load_cache(self, path: str | PathLike[str]) -> Sequence:
        """A sequence with the rows of a file that `save_cache` wrote, with the same model and cache options.

        Give it to `chat` or `generate` as `sequence`: what its tokens and the prompt have in common is not prefilled.
        Raises CacheFileError and DoesNotFit.
        """
        from kvcli.runtime.promptcache import savedsequence

        self._open()
        return Sequence(savedsequence.load(self._caches.engine, Path(path)))

    # --- memory

    def estimate(self, tokens: int | None = None) -> Plan:
        """The memory of a run of `tokens`, by default of the whole context, row by row; `Plan.total` is the sum."""
        engine = self._alive()
        if tokens is None:
            return engine.plan
        if not isinstance(tokens, int) or tokens < 1:
            raise UsageError(f"`tokens` must be 1 or more, not {tokens!r}")
        return engine.predict(tokens)

    # --- the end

    def close(self) -> None:
        """Wait until prompt caches are written, and let go of everything. The model cannot be used any more."""
        if self._closed:
            return
        answer = self._running()
        if answer is not None and not answer.done:
            answer.close()
        self._closed = True
        with closing(self._own), closing(self._caches):
            pass
        del self.engine, self._caches, self._own

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, sequence: Sequence | None) -> Rows:
        """Of a sequence, or of the model's own. Raises UsageError for one of another model."""
        if not isinstance(sequence, (Sequence, type(None))):
            raise UsageError(f"`sequence` must be one of Model.new_sequence, not {sequence!r}")
        rows = (self._own if sequence is None else sequence).rows
        if rows.pool is not self.engine.pool:
            raise UsageError("the sequence is of another model", "Model.new_sequence makes one")
        return rows

    def _open(self) -> Engine:
        """The engine. Raises UsageError where it is closed or busy."""
        engine = self._alive()
        answer = self._running()
        if answer is not None and not answer.done:
            raise UsageError("the model is writing another answer", "read that to its end, or close() it")
        return engine

    def _alive(self) -> Engine:
        """The engine, busy or not. Raises UsageError where it is closed."""
        if self._closed:
            raise UsageError("the model is closed", "kvcli.load opens it again")
        return self.engine
