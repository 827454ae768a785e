"""What an engine on a GPU computes as graphs, and which kernels are compiled for it before they are needed."""

from __future__ import annotations

import itertools
from contextlib import closing
from functools import partial
from typing import NamedTuple, Protocol

import torch

from kvcli.kernels.gpu import compiled
from kvcli.kernels.gpu.sample import DeviceSampler
from kvcli.options import SampleOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.graph import rowgraph, tokengraph
from kvcli.runtime.engine.graph.batching import Batches
from kvcli.runtime.engine.graph.compiling import Kernels
from kvcli.runtime.engine.graph.nexttoken import NextToken
from kvcli.runtime.engine.graph.stepgraph import StepGraph
from kvcli.runtime.engine.loaded import LoadedModel
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.engine.steplist import StepList


class Runs(Protocol):
    """What runs prompts whose kernels are compiled: an engine."""

    steps: StepGraph | StepList | None

    def new_sequence(self) -> Sequence: ...

    def forward(self, seq: Sequence, ids: list[int]) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Graphs(NamedTuple):
    """Those of single `tokens`, of short `steps` of prompts, and of tokens of several sequences (`batches`).
    `slow_path`: why single tokens have not the fastest ones; "" = they have."""

    tokens: NextToken
    steps: StepGraph
    batches: Batches
    kernels: Kernels
    slow_path: str


def open_graphs(
    engine: Runs, loaded: LoadedModel, layout: KVLayout, ctx_size: int, facts: tuple[object, ...]
) -> Graphs:
    """The graphs of an engine over a model, none of them captured yet. `facts`: all that kernels depend on."""
    model = loaded.decoder
    sizes, reason = (model, layout, ctx_size), tokengraph.unsupported(model)
    tokens = rowgraph.RowGraph(*sizes) if reason else tokengraph.TokenGraph(*sizes)
    steps = StepGraph(*sizes)
    first = tokens.dry_run, partial(steps.dry_run, shortest=True), partial(_sample, loaded, model.ops.device)
    others = partial(_prompts, engine, layout, ctx_size), steps.dry_run
    kernels = Kernels(compiled.mark_of(model.ops.device, *facts), first, others)
    slow_path = f"slower path (tokens by the kernels of prompts): {reason}" if reason else ""
    return Graphs(tokens, steps, Batches(*sizes), kernels, slow_path)


def _prompts(engine: Runs, layout: KVLayout, ctx_size: int) -> None:
    """Prompts that need every kernel that prompts need: long ones, and short ones, whose keys have no mean yet."""
    room = max(1, ctx_size - 1)
    pages = 1 + max(1, *(group.sinks for group in layout.groups))  # of which one is sealed
    graphs, engine.steps = engine.steps, None
    try:
        for steps in ((pages * layout.page_size + 1, 1), (2, 1)):
            with closing(engine.new_sequence()) as seq:
                for rows in steps:
                    engine.logits(engine.forward(seq, [0] * min(rows, room - seq.length or 1))[-1:])
    finally:
        engine.steps = graphs


def _sample(loaded: LoadedModel, device: torch.device) -> None:
    """What chooses tokens on the device."""
    vocab = loaded.config.vocab_size
    logits = torch.zeros(vocab, device=device)
    for temperature, penalty in itertools.product((None, 0.0), (1.0, 1.1)):
        options = SampleOptions(temperature=temperature, repeat_penalty=penalty)
        effective = Sampler(options, loaded.sampling_defaults, vocab).effective
        if not DeviceSampler.supports(effective):
            chooser = DeviceSampler([effective], vocab, device)
            chooser.launch(logits, torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device))
