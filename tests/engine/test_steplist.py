"""Tokens by lists of kernel calls: to the bit what the decoder computes, and only where they may be."""

from __future__ import annotations

import pytest
import torch
from engines import PROMPT, open_tiny
from kernelcases import need_native

from kvcli.options import CacheOptions, EvictOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine import steplist
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.steplist import StepList

# With and without experts, post-norms, biases, softcaps, sinks, several RoPEs, states; torch computes in the last four.
FAMILIES = ("llama", "qwen2", "gemma2", "gemma3", "granitehybrid-dense", "gpt-oss", "llama4", "gemma3n", "deepseek2")
TOKENS = 40  # over two edges of pages


def engine_of(variant: str, codec: str = "f16", tail: int = 1, evict: EvictOptions = EvictOptions()) -> Engine:
    need_native()
    return open_tiny(
        variant, "native", CacheOptions(160, codec, codec, page_size=16, ubatch=24, tail=tail, evict=evict)
    )


def lists_of(engine: Engine) -> StepList:
    assert isinstance(engine.steps, StepList)
    return engine.steps


def tokens(engine: Engine, seq: Sequence, first: int = 20, n: int = TOKENS) -> torch.Tensor:
    return torch.cat([engine.forward(seq, PROMPT[first + i : first + i + 1]) for i in range(n)])


def several(engine: Engine, seq: Sequence, n: int = 8) -> torch.Tensor:
    """Steps of three rows, of which one stays."""
    found = []
    for i in range(n):
        if seq.states is not None:
            assert seq.states.can_guess()
            seq.certain = seq.length
        found.append(engine.forward(seq, PROMPT[i : i + 3]))
        seq.rewind(seq.length - 2)
        seq.certain = None
    return torch.cat(found)


def both(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states behind a prompt without lists and with them."""
    lists, found = lists_of(engine), []
    for each in (None, lists):
        engine.steps, seq = each, engine.new_sequence()
        engine.forward(seq, PROMPT[:20])
        found.append(torch.cat([tokens(engine, seq), tokens(engine, seq, 8, 6), several(engine, seq)]))
        seq.close()
    return found[0], found[1]


@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family_gives_the_same_bits(variant: str) -> None:
    engine = engine_of(variant)
    assert torch.equal(*both(engine))
    lists = lists_of(engine)
    assert set(lists.computed) == {False, True}
    if variant in FAMILIES[:5]:
        assert not any(lists.computed.values())
        assert {rows for (_, rows), noted in lists._lists.items() if noted.calls} == {1, 3}


@pytest.mark.parametrize("tail", (0, 1))
@pytest.mark.parametrize("codec", ("fp8", "int8", "int4"))
def test_sealed_caches(codec: str, tail: int) -> None:
    engine = engine_of("llama", codec, tail)
    assert torch.equal(*both(engine))


@pytest.mark.parametrize("policy", (EvictOptions("sink", window=48, keep=5), EvictOptions("window", window=48)))
def test_evicting_caches(policy: EvictOptions) -> None:
    engine = engine_of("llama", "int8", evict=policy)
    lists, found = lists_of(engine), []
    for each in (None, lists):
        engine.steps, seq = each, engine.new_sequence()
        engine.forward(seq, PROMPT[:20])
        found.append(torch.cat([engine.forward(seq, [PROMPT[i % 60]]) for i in range(90)]))
        seq.close()
    assert torch.equal(*found)


def test_sequences_in_turn_forks_and_rows_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are lists."""
    monkeypatch.setattr(steplist, "KEPT", 2)
    engine = engine_of("llama")
    lists, found = lists_of(engine), []
    for each in (None, lists):
        engine.steps = each
        seqs = [engine.new_sequence() for _ in range(3)]
        for i, seq in enumerate(seqs):
            engine.forward(seq, PROMPT[i : i + 20])
        out = [engine.forward(seq, [PROMPT[30 + i]]) for i in range(8) for seq in seqs]
        seqs.append(seqs[0].fork())
        out += [engine.forward(seq, [PROMPT[50 + i]]) for i in range(8) for seq in seqs]
        seqs[1].rewind(22)
        out.append(tokens(engine, seqs[1]))
        found.append(torch.cat(out))
        for seq in seqs:
            seq.close()
    assert torch.equal(*found)


def test_a_token_that_is_none_is_refused() -> None:
    engine = engine_of("llama")
    seq = engine.new_sequence()
    engine.forward(seq, PROMPT[:20])
    tokens(engine, seq, n=5)
    for token in (-1, engine.config.vocab_size + 64):
        with pytest.raises(IndexError):
            engine.forward(seq, [token])
