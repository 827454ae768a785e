"""What an engine on a GPU computes as graphs, and which kernels are compiled for it before they are needed."""

from __future__ import annotations

import itertools
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvcli.kernels.gpu import compiled
from kvcli.kernels.gpu.sample import DeviceSampler
from kvcli.options import SampleOptions
from kvcli.runtime.engine.graph import rowgraph, tokengraph
from kvcli.runtime.engine.graph.batching import Batches
from kvcli.runtime.engine.graph.compiling import Kernels
from kvcli.runtime.engine.graph.nexttoken import NextToken
from kvcli.runtime.engine.graph.stepgraph import StepGraph
from kvcli.runtime.engine.sampler import Sampler

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine


class Graphs(NamedTuple):
    """Those of single `tokens`, of short `steps` of prompts, and of tokens of several sequences (`batches`).
    `slow_path`: why single tokens have not the fastest ones; "" = they have."""

    tokens: NextToken
    steps: StepGraph
    batches: Batches
    kernels: Kernels
    slow_path: str


def open_graphs(engine: Engine) -> Graphs:
    """The graphs of an engine, none of them captured yet."""
    sizes, reason = (engine.model, engine.layout, engine.ctx_size), tokengraph.unsupported(engine.model)
    tokens = rowgraph.RowGraph(*sizes) if reason else tokengraph.TokenGraph(*sizes)
    steps = StepGraph(*sizes)
    facts = engine.config, engine.terms.options, engine.ctx_size, engine.ubatch, engine.loaded.facts
    first = tokens.dry_run, partial(steps.dry_run, shortest=True), partial(_sample, engine)
    others = partial(_prompts, engine), steps.dry_run
    kernels = Kernels(compiled.mark_of(engine.model.ops.device, *facts), first, others)
    slow_path = f"slower path (tokens by the kernels of prompts): {reason}" if reason else ""
    return Graphs(tokens, steps, Batches(*sizes), kernels, slow_path)


def _prompts(engine: Engine) -> None:
    """Prompts that need every kernel that prompts need: long ones, and short ones, whose keys have no mean yet."""
    room = max(1, engine.ctx_size - 1)
    pages = 1 + max(1, *(group.sinks for group in engine.layout.groups))  # of which one is sealed
    graphs, engine.steps = engine.steps, None
    try:
        for steps in ((pages * engine.layout.page_size + 1, 1), (2, 1)):
            with closing(engine.new_sequence()) as seq:
                for rows in steps:
                    engine.logits(engine.forward(seq, [0] * min(rows, room - seq.length or 1))[-1:])
    finally:
        engine.steps = graphs


def _sample(engine: Engine) -> None:
    """What chooses tokens on the device."""
    device, vocab = engine.pool.device, engine.config.vocab_size
    logits = torch.zeros(vocab, device=device)
    for temperature, penalty in itertools.product((None, 0.0), (1.0, 1.1)):
        options = SampleOptions(temperature=temperature, repeat_penalty=penalty)
        effective = Sampler(options, engine.loaded.sampling_defaults, vocab).effective
        if not DeviceSampler.supports(effective):
            chooser = DeviceSampler([effective], vocab, device)
            chooser.launch(logits, torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device))
