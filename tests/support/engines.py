"""Engines on tiny models, and generations that are checked as they run."""

from __future__ import annotations

from typing import Any

import tiny
import torch
from kernelcases import need_native

from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.cache.sequence import Sequence, chunk_end
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End, Prefill, Token
from kvcli.runtime.text.tokenizer import StreamDecoder

GREEDY = SampleOptions(temperature=0.0, ignore_eos=True, max_tokens=8)
DRAWN = SampleOptions(4.0, 0, 1.0, 0.0, seed=8, ignore_eos=True, max_tokens=12)  # varied text, the same each time
PROMPT = torch.randint(3, 370, (140,), generator=torch.manual_seed(5)).tolist()


def open_tiny(variant: str, backend: str, cache: CacheOptions | None = None, memory_limit: str | None = None) -> Engine:
    if backend == "native":
        need_native()
    threads = 1 if backend == "reference" else 2  # torch's threads wait for each other far longer than they work
    return Engine.open(
        tiny.make(variant).path,
        LoadOptions(variant, threads, backend, memory_limit=memory_limit),
        cache or CacheOptions(),
    )


def states(engine: Engine, seq: Sequence, ids: list[int], ubatch: int = 512) -> torch.Tensor:
    """Hidden states [len(ids), d_model] of ids that are fed in steps."""
    parts, end = [], seq.length + len(ids)
    while seq.length < end:
        step = chunk_end(seq.length, end, ubatch, engine.layout.page_size) - seq.length
        parts.append(engine.forward(seq, ids[:step]))
        ids = ids[step:]
    return torch.cat(parts)


def last_logits(engine: Engine, seq: Sequence, ids: list[int], ubatch: int = 512) -> torch.Tensor:
    """Feed ids in steps; logits [1, vocab] after the last."""
    return engine.logits(states(engine, seq, ids, ubatch)[-1:])


def fresh(engine: Engine, ids: list[int], ubatch: int = 512) -> torch.Tensor:
    seq = engine.new_sequence()
    logits = last_logits(engine, seq, ids, ubatch)
    seq.close()
    return logits


def run(
    engine: Engine,
    seq: Sequence,
    prompt: list[int],
    options: SampleOptions = GREEDY,
    **more: Any,
) -> End:
    """The last event, after checks that hold for every generation."""
    events = list(engine.generate(seq, prompt, options, **more))
    end, tokens = events[-1], [e for e in events if isinstance(e, Token)]
    assert isinstance(end, End) and isinstance(events[0], Prefill)
    assert [type(e) for e in events] == sorted((type(e) for e in events), key=[Prefill, Token, End].index)
    assert [t.id for t in tokens] == end.ids
    shown = "".join(t.text for t in tokens) + end.text
    decoder = StreamDecoder(engine.tokenizer, continues=True)
    decoded = "".join(map(decoder.push, end.ids)) + (decoder.flush() if end.finish_reason == "stop" else "")
    assert shown == (decoded if end.stop is None else decoded[: decoded.index(end.stop)])
    whole = prompt + end.ids
    assert seq.tokens == whole[: seq.length]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(prompt), len(end.ids))
    assert end.timings.prefill_tokens == len(prompt) - end.usage.cache_read_tokens
    assert end.timings.decode_tokens == max(0, len(end.ids) - 1)
    if end.ids:
        assert end.timings.prefill_s > 0 and end.timings.prompt_tps > 0
        # The last token's row is computed with the next one.
        assert seq.length == len(whole) - 1 or end.finish_reason == "interrupted"
    return end
