"""Engines with a draft model, whose guesses are always made."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import tiny
from batches import Watched, alone
from kernelcases import need_native

from kvcli.options import CacheOptions, EvictOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.spec.draftmodel import DraftModel
from kvcli.runtime.engine.spec.pace import Drafted

OFF = {"spec": "off"}

WORTH = Drafted.worth

SINK, WINDOW = EvictOptions("sink", window=48, keep=5), EvictOptions("window", window=48)


def always_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made whether they are worth it or not."""
    monkeypatch.setattr(Drafted, "worth", lambda self, most: max(0, min(most, 4)))


@functools.cache
def engine_of(
    variant: str, draft: str, codec: str = "f16", evict: EvictOptions = EvictOptions(), **more: int
) -> Engine:
    need_native()
    options = CacheOptions(more.pop("ctx", 160), codec, codec, page_size=16, ubatch=24, evict=evict, **more)
    return Engine.open(tiny.make(variant).path, LoadOptions(variant, 2, "native"), options, tiny.make(draft).path)


def drafts(engine: Engine) -> Engine:
    assert engine.draft is not None
    return engine.draft


def kept(engine: Engine) -> DraftModel:
    assert isinstance(engine.session.drafts, DraftModel)
    return engine.session.drafts


def check(engine: Engine) -> None:
    """Nothing is held but rows for later prompts."""
    engine.pool.check([])
    drafts(engine).pool.check(kept(engine).tree.holds())


def both(engine: Engine, prompt: list[int], options: SampleOptions) -> tuple[Watched, Watched]:
    """The answer without guesses and with them."""
    return alone(engine, prompt, replace(options, **OFF)), alone(engine, prompt, options)
