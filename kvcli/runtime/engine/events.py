"""What `Engine.generate` yields, in order: Prefill..., Token..., End. No torch: commands read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcli.runtime.promptcache.lookuprecord import Choice
from kvcli.runtime.promptcache.marks import Breakpoint, MovedChunk
from kvcli.runtime.text.tools.parts import CallPart


@dataclass(frozen=True)
class Prefill:
    """Progress of a prompt: `done` of `total` tokens to be run in this call, those of its repetition included; `reused`
    were in the cache."""

    done: int
    total: int
    reused: int = 0


@dataclass(frozen=True)
class Logprob:
    """How likely the model took a token for, as a natural logarithm. `token`: its text."""

    id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class Logprobs:
    """Of the token that was chosen, and of those that were the likeliest, likeliest first."""

    chosen: Logprob
    top: tuple[Logprob, ...]

    @classmethod
    def of(cls, values: Sequence[tuple[int, float]], piece: Callable[[int], str]) -> Logprobs:
        """Of ids with their values, the chosen one first; `piece` has the text of an id."""
        chosen, *top = (Logprob(i, piece(i), value) for i, value in values)
        return cls(chosen, tuple(top))


@dataclass(frozen=True)
class Token:
    """One generated token. `text` may be shown now; '' while UTF-8 or a possible stop string is held back. `reasoning`:
    text that is thinking, and not of the answer. `id` None: the text was given, and no token generated.
    `logprobs`: where they are asked for; `calls`: what came of calls of tools."""

    id: int | None
    text: str
    reasoning: str = ""
    logprobs: Logprobs | None = None
    calls: tuple[CallPart, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Counts of tokens. `cache_read_tokens` of the prompt's tokens were not prefilled again, `disk_tokens` of these
    came from disk; `cache_write_tokens` are written there. `cache_miss`: why no more was reused, "" = no more is there.
    """

    prompt_tokens: int
    cache_read_tokens: int
    completion_tokens: int
    disk_tokens: int = 0
    cache_write_tokens: int = 0
    cache_miss: str = ""
    reasoning_tokens: int = 0  # of the generated ones
    choice: Choice | None = None  # what reading stored rows and computing them was predicted to take
    cache_how: str = ""  # what was done to rows that were stored otherwise; "" = nothing
    breakpoints: tuple[Breakpoint, ...] = ()  # the marks of the prompt
    chunks: tuple[MovedChunk, ...] = ()  # its documents, where their rows are moved
    drafted_tokens: int = 0  # guessed, and computed before they were known
    accepted_tokens: int = 0  # of those the ones that were right
    decode_steps: int = 0  # that computed the tokens behind the first

    @property
    def tokens_per_step(self) -> float:
        """Tokens behind the first that a step gave, on average; 0 without any."""
        return (self.decode_steps + self.accepted_tokens) / self.decode_steps if self.decode_steps else 0.0


@dataclass(frozen=True)
class Timings:
    """Seconds: `ttft_s` from the call to the first token, `decode_s` from the first token to the last."""

    load_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    prefill_tokens: int
    decode_tokens: int  # tokens that took decode_s: one fewer than generated

    @property
    def prompt_tps(self) -> float:
        """Prefilled tokens per second; 0 when nothing was timed."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Decoded tokens per second; 0 when nothing was timed."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class Loop:
    """The last `tokens` of a text are its last `period` ones again and again."""

    tokens: int
    period: int

    @property
    def times(self) -> int:
        return self.tokens // self.period


@dataclass(frozen=True)
class End:
    """The last event. `text` was held back and may be shown; `ids` are all tokens generated in this call.

    `finish_reason` is "stop" (end token or stop string), "length", "context" (cache full), "repetition" (`loop` says
    which) or "interrupted".
    `prompt_evicted`: tokens of the prompt that the answer's first token did not see. `losses`: why the cache is not
    what 16 bits and all tokens would give, as `Sequence.losses` has it; () = it is. `unwritten`: the
    files that its rows should be in, and why they are not there.
    """

    finish_reason: str
    text: str
    ids: list[int]
    stop: str | None
    usage: Usage
    timings: Timings
    prompt_evicted: int = 0
    losses: tuple[str, ...] = ()
    loop: Loop | None = None
    unwritten: tuple[str, ...] = ()
    reasoning: str = ""  # like `text`
    raw: str = ""  # the answer with its thinking and the marks of it; "" = nothing was told apart
    calls: tuple[CallPart, ...] = ()  # like `text`
    called: int = 0  # calls of tools that have come to their ends


Event = Prefill | Token | End
