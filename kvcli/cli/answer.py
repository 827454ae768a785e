"""One prompt through an open engine: its events go to a sink, what it took comes back as a `Result`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvcli.cli.interrupt import FINISH, Interrupts
from kvcli.cli.outcome import CacheFacts, MemoryFacts, Result
from kvcli.cli.overflow import Cut
from kvcli.cli.report import logprobs_object
from kvcli.cli.sinks import Sink
from kvcli.cli.toolcalls import ToolCalls
from kvcli.cli.verification import verify
from kvcli.errors import KVError, OutputError
from kvcli.options import SampleOptions
from kvcli.runtime.engine import samplesettings
from kvcli.runtime.engine.events import End, Prefill, Token

if TYPE_CHECKING:
    from kvcli.runtime.cache.sequence import Sequence as Rows
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.loaded import LoadedModel
    from kvcli.runtime.promptcache.caches import Caches
    from kvcli.runtime.promptcache.marks import Mark
    from kvcli.runtime.text.reasoning import Thinking
    from kvcli.runtime.text.tools.use import ToolUse


@dataclass(frozen=True)
class Job:
    """How an answer is made, and who is told. `model` is the name that the user gave."""

    model: str
    sampling: SampleOptions  # settled
    sink: Sink
    interrupts: Interrupts
    caches: Caches
    verify: bool = False  # compare the memory plan with what the process took
    history: bool = False  # the prompt is a whole conversation, see Engine.generate
    cut: Cut | None = None  # what is missing of the prompt
    thinking: Thinking | None = None  # how the answer is told apart from it
    marks: Sequence[Mark] = ()  # places of the prompt that later ones may start from
    told: list[str] = field(default_factory=list)  # what the user heard, or would have at a terminal
    tools: ToolUse | None = None  # which the answer may call


def settle(loaded: LoadedModel, options: SampleOptions) -> SampleOptions:
    """The options with the model's defaults and a seed filled in: what is reported is what was used.

    Raises UsageError, and ModelError for a default of the model that makes no sense.
    """
    return samplesettings.settled(options, loaded.sampling_defaults, loaded.config.vocab_size)


def answer(engine: Engine, sequence: Rows, ids: list[int], job: Job) -> Result:
    """Generate after `ids`, the whole context. ContextOverflow comes before anything is changed.

    From the first token on an interrupt ends the answer instead of the process.
    """
    job.sink.start(job.model, job.sampling)
    parts: list[Token] = []
    asked = job.sampling, job.interrupts.cancelled, job.history, job.caches, job.thinking, job.marks, job.tools
    try:
        for event in engine.generate(sequence, ids, *asked):
            if isinstance(event, Prefill):
                job.sink.prefill(event)
            elif isinstance(event, Token):
                job.interrupts.stage = FINISH
                parts.append(event)
                job.sink.token(event)
            else:
                end = event
    except KVError as error:
        if not isinstance(error, OutputError):
            job.sink.broken()
        raise
    tokens = max(1, sequence.length)
    memory = MemoryFacts(engine.predict(tokens).total, engine.plan.total)
    result = result_of(engine, sequence, job, parts, end, memory)
    if job.verify:
        result = replace(result, verification=verify(engine, tokens))
    job.sink.end(result)
    return result


def result_of(engine: Engine, sequence: Rows, job: Job, parts: list[Token], end: End, memory: MemoryFacts) -> Result:
    """The answer whose text came in `parts`, and its cache as it is now."""
    text = "".join(part.text for part in parts) + end.text
    reasoning = "".join(part.reasoning for part in parts) + end.reasoning
    told = [logprobs_object(part.logprobs) for part in parts if part.logprobs is not None]
    logprobs = None if job.sampling.logprobs is None else told
    facts = cache_facts(engine, sequence), job.sampling, list(job.told), job.model, memory
    told_of_calls = [*(each for part in parts for each in part.calls), *end.calls]
    calls = None if job.tools is None else ToolCalls.of(told_of_calls)
    return Result(text, end, *facts, cut=job.cut, reasoning=reasoning, logprobs=logprobs, calls=calls)


def cache_facts(engine: Engine, sequence: Rows) -> CacheFacts:
    """What the sequence holds now."""
    layout = engine.layout
    pages = [sequence.pages(arena) for arena in range(len(layout.arenas))]  # sealed or only ones, and open ones
    nbytes = sum(count * arena.page_bytes for count, arena in zip(pages, layout.arenas, strict=True))
    type_k, type_v = engine.loaded.cache_types
    counts = layout.page_size, sum(pages), nbytes, sequence.kept, engine.ctx_size
    options, whole = engine.terms.options, layout.contiguous_bytes(engine.ctx_size)
    pinned = options.tail, options.sinks, options.evict
    forgotten = sequence.evicted, engine.retention
    return CacheFacts(type_k, type_v, *counts, *pinned, *forgotten, sequence.page_utilization, whole, options.attend)
