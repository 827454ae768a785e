"""Prompts and answers of several requests, computed one by one and together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from kernelcases import same_bits

from kvcli.options import SampleOptions
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End, Event, Prefill, Token
from kvcli.runtime.engine.request import Request


@dataclass
class Watched:
    """A request and all that came of it, with the logits of every token."""

    request: Request
    events: list[Event] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def end(self) -> End:
        end = self.events[-1]
        assert isinstance(end, End)
        return end

    def check(self) -> None:
        """What holds for the events of every request."""
        kinds = [Prefill, Token, End].index
        assert [type(e) for e in self.events] == sorted((type(e) for e in self.events), key=kinds)
        assert [e.id for e in self.events if isinstance(e, Token)] == self.end.ids == self.ids

    @property
    def ids(self) -> list[int]:
        return self.request.history[self.request.n_prompt :]


def watched(
    engine: Engine, prompt: list[int], options: SampleOptions, own: Retention | None = None, **more: Any
) -> Watched:
    """A request in a new sequence whose logits are kept. `own`: an eviction policy of its own."""
    found = Watched(engine.request(engine.new_sequence(own), prompt, options, **more))
    sampler = found.request.sampler
    choose = sampler.sample

    def sample(logits: torch.Tensor, history: list[int], position: int) -> int:
        found.logits.append(logits.clone())
        return choose(logits, history, position)

    sampler.sample = sample  # type: ignore[method-assign]
    return found


def alone(engine: Engine, prompt: list[int], options: SampleOptions, own: Retention | None = None) -> Watched:
    """The request by itself, from its first step to its last, its sequence closed."""
    one = watched(engine, prompt, options, own)
    while not one.request.finished:
        one.events += engine.step([one.request])[0]
    one.check()
    one.request.seq.close()
    return one


def same(a: Watched, b: Watched) -> bool:
    """Whether they have the same tokens, texts and, to the bit, logits."""
    return (
        a.ids == b.ids
        and (a.end.finish_reason, a.end.text) == (b.end.finish_reason, b.end.text)
        and len(a.logits) == len(b.logits)
        and all(map(same_bits, a.logits, b.logits))
    )
