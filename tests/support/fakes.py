"""A tokenizer, a template and an engine without weights, for tests of commands and conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from kvcli.errors import ContextOverflow, ModelError
from kvcli.options import MODELS_OWN, CacheOptions, ChatOptions, EvictOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.engine.events import End, Loop, Prefill, Timings, Token, Usage
from kvcli.runtime.engine.repeats import LoopDetector
from kvcli.runtime.plan.plan import Plan, Row
from kvcli.runtime.promptcache.prefixpages import common_length

BOS, START, END = 1, 2, 3
CONTROL = {"<s>": BOS, "<|start|>": START, "<|end|>": END}
PAIR = 5  # "ab", which canonical text always uses
FIRST_CHARACTER = 10


class FakeTokenizer:
    """One id a character, one for the pair "ab", three control tokens."""

    bos_id, eos_id, eog_ids, add_bos = BOS, END, frozenset({END}), True
    vocab_size, longest = FIRST_CHARACTER + 0x110000, 0

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        return self.encode_segments([(text, parse_special)], add_bos)

    def encode_segments(self, segments: list[tuple[str, bool]], add_bos: bool = True) -> list[int]:
        ids: list[int] = []
        for text, trusted in segments:
            while text:
                name = next((name for name in CONTROL if trusted and text.startswith(name)), None)
                if name is not None:
                    ids.append(CONTROL[name])
                    text = text[len(name) :]
                elif text.startswith("ab"):
                    ids.append(PAIR)
                    text = text[2:]
                else:
                    ids.append(FIRST_CHARACTER + ord(text[0]))
                    text = text[1:]
        if add_bos and ids[:1] != [BOS]:
            ids.insert(0, BOS)
        return ids

    def decode(self, ids: list[int], continues: bool = False) -> str:
        return "".join(self._text(token) for token in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._text(token_id).encode()

    def _text(self, token: int) -> str:
        if token == PAIR:
            return "ab"
        return chr(token - FIRST_CHARACTER) if token >= FIRST_CHARACTER else ""


@dataclass
class FakeTemplate:
    """<|start|>role:content<|end|> for each message. `trim` strips answers, roles must alternate."""

    trim: bool = False
    broken: bool = False
    options: ChatOptions = MODELS_OWN
    budget: int = -1
    switch: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def thinking(self, segments: object, tokenizer: object, lead: str = "") -> None:
        """Fakes do not think."""

    def render_segments(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> list[tuple[str, bool]]:
        if self.broken:
            raise ModelError("the template says no")
        roles = [message["role"] for message in messages if message["role"] != "system"]
        expected = ["user", "assistant"] * len(roles)
        if roles != expected[: len(roles)]:
            raise ModelError("roles must alternate")
        segments: list[tuple[str, bool]] = []
        for message in messages:
            content = message["content"]
            if self.trim and message["role"] == "assistant":
                content = content.strip()
            segments += [(f"<|start|>{message['role']}:", True), (content, False), ("<|end|>", True)]
        return [*segments, ("<|start|>assistant:", True)] if add_generation_prompt else segments


@dataclass
class FakeSequence:
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def kept(self) -> int:
        return self.length

    @property
    def evicted(self) -> int:
        return 0

    @property
    def page_utilization(self) -> float | None:
        return self.length / (64 * self.pages(0)) if self.length else None

    def pages(self, arena: int) -> int:
        return -(-self.length // 64)

    def rewindable(self, length: int) -> int:
        return min(length, self.length)

    def rewind(self, length: int) -> None:
        del self.tokens[length:]

    def rewind_to(self, length: int) -> int:
        self.rewind(length)
        return self.length

    def close(self) -> None:
        self.tokens.clear()


class FakeEngine:
    """Answers with `answers` in turn, about a token a character; keeps what a real engine would keep.

    `calls` holds (prompt ids, options) of every generation. `before_token(n)` runs before token n.
    """

    def __init__(self, answers: list[str], ctx_size: int = 4096) -> None:
        self.answers = list(answers)
        self.ctx_size, self.title = ctx_size, "Fake 1K"
        self.template: FakeTemplate | None = FakeTemplate()
        self.spare_template: FakeTemplate | None = None  # which may be taken where there is no template
        self.tokenizer = FakeTokenizer()
        self.config = SimpleNamespace(
            name="Fake 1K", arch="fake", vocab_size=FakeTokenizer.vocab_size, context_length=4096
        )
        self.sampling_defaults: dict[str, float] = {}
        self.cache_types = ("f32", "f32")
        self.notices: list[str] = []
        self.doubts: list[str] = []
        self.load_s, self.backend = 0.25, "reference"
        self.lora_names: list[str] = []
        self.retention: eviction.Retention | None = None
        group = SimpleNamespace(page_bytes=1 << 20)
        self.layout = SimpleNamespace(
            page_size=64,
            groups=[group],
            arenas=[group],
            contiguous_bytes=lambda tokens: tokens << 14,
            selection=None,
        )
        self.memory_tokens = 1 << 20  # the longest context that fits
        self.options = CacheOptions()
        self.changes: list[EvictOptions] = []
        self.stored: list[int] = []
        self.calls: list[tuple[list[int], SampleOptions]] = []
        self.before_token: Callable[[int], None] = lambda number: None
        self.before_prefill: Callable[[], None] = lambda: None

    @property
    def terms(self) -> SimpleNamespace:
        options = self.options
        keeps, layout = (
            options.evict.keep == eviction.WHOLE_PROMPT,
            SimpleNamespace(retention=self.retention, selection=None),
        )
        return SimpleNamespace(
            options=options, could_hold=lambda tokens: tokens <= self.memory_tokens, keeps_prompt=keeps, notices=(),
            layout=layout, ctx_size=self.ctx_size, check_prompt=self._check_prompt,
            check_text=lambda chars, most: None,
        )  # fmt: skip

    def _check_prompt(self, ids: list[int], answer: int = -1) -> None:
        if len(ids) > self.ctx_size:
            raise ContextOverflow(f"the prompt has {len(ids)} tokens, the context {self.ctx_size}")

    @property
    def loaded(self) -> FakeEngine:
        return self

    @property
    def text(self) -> SimpleNamespace:
        note = "" if self.template else "base model: no template"
        has_spare = self.spare_template is not None
        return SimpleNamespace(tokenizer=self.tokenizer, template=self.template, note=note, has_spare=has_spare)

    @property
    def plan(self) -> Plan:
        return self.predict(self.ctx_size)

    def take_spare_template(self) -> None:
        """As a model does that is loaded with `chat_anyway`."""
        self.template = self.template or self.spare_template
        if self.template is None:
            raise ModelError("there is no template")

    def predict(self, tokens: int) -> Plan:
        return Plan((Row("KV pool", tokens << 14, "exact"),), tokens, tokens << 14, 0)

    def prompt_caches(self, options: PromptCacheOptions, tell: object, elsewhere: object = None) -> SimpleNamespace:
        """Caches that have nothing but the sequence and, in `stored`, rows of one prompt."""
        self.cache_options = options
        return SimpleNamespace(
            close=lambda: None,
            save=lambda sequence: None,
            find=self._find,
            keeps=lambda prompt_tokens: False,
            kept_otherwise=lambda tokens: "",
        )

    def _find(self, sequence: FakeSequence, tokens: list[int]) -> int:
        return max(common_length(held, tokens) for held in (sequence.tokens, self.stored))

    def reopened(self, ctx_size: int, evict: EvictOptions) -> FakeEngine:
        """The fake itself, changed."""
        self.ctx_size = ctx_size or self.ctx_size
        self.retention = eviction.retention(evict, self.ctx_size, self.layout.page_size)
        self.options, self.changes = CacheOptions(evict=evict), [*self.changes, evict]
        return self

    def carried(self, sequence: FakeSequence) -> FakeSequence:
        """Rows stay where they are the same under both policies, as far as a fake can tell."""
        sequence.rewind(self.retention.whole if self.retention else sequence.length)
        return sequence

    def tokenizer_hashes(self) -> dict[str, str]:
        return {"tokenizer": "fake"}

    def unguessed(self, asked: SampleOptions) -> str:
        return ""

    def sampled_on_host(self, settled: SampleOptions) -> str:
        return "because" if settled.dry_multiplier else ""

    def new_sequence(self) -> FakeSequence:
        return FakeSequence()

    def generate(
        self,
        sequence: FakeSequence,
        prompt_ids: list[int],
        options: SampleOptions,
        cancelled: Callable[[], bool] = lambda: False,
        history: bool = False,
        caches: object = None,
        thinking: object = None,
        marks: object = (),
        tools: object = None,
    ) -> Iterator[Prefill | Token | End]:
        if len(prompt_ids) > self.ctx_size:
            raise ContextOverflow(f"the prompt has {len(prompt_ids)} tokens, the context {self.ctx_size}")
        self.calls.append((list(prompt_ids), options))
        reused = 0
        for old, new in zip(sequence.tokens, prompt_ids[:-1], strict=False):
            if old != new:
                break
            reused += 1
        self.before_prefill()
        sequence.tokens = prompt_ids[: reused if cancelled() else len(prompt_ids)]
        ids: list[int] = []
        usage = Usage(len(prompt_ids), reused, 0)
        if cancelled():
            yield self._end("interrupted", ids, usage)
            return
        yield Prefill(len(prompt_ids) - reused, len(prompt_ids) - reused, reused)
        reason = yield from self._decode(sequence, ids, options, cancelled)
        yield self._end(reason, ids, Usage(len(prompt_ids), reused, len(ids)), self.loop)

    def _decode(
        self, sequence: FakeSequence, ids: list[int], options: SampleOptions, cancelled: Callable[[], bool]
    ) -> Iterator[Token]:
        answer = self.tokenizer.encode(self.answers.pop(0), add_bos=False)
        detector, self.loop = LoopDetector(), None
        for number, token in enumerate(answer):
            if cancelled():
                return "interrupted"
            if len(ids) == options.max_tokens:
                return "length"
            self.before_token(number)
            ids.append(token)
            yield Token(token, self.tokenizer.decode([token]))
            if options.loop_stop and (loop := detector.push(token)):
                self.loop = loop
                return "repetition"
            if sequence.length == self.ctx_size:
                return "context"
            if not cancelled():
                sequence.tokens.append(token)
        return "stop"

    def _end(self, reason: str, ids: list[int], usage: Usage, loop: Loop | None = None) -> End:
        prefilled = usage.prompt_tokens - usage.cache_read_tokens
        timings = Timings(self.load_s, 0.5, 0.6, 0.1, prefilled, max(0, len(ids) - 1))
        return End(reason, "", ids, None, usage, timings, loop=loop)
