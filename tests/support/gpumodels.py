"""Tiny models whose tokens are computed by the kernels of a graph, or in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import tiny
import torch
from gpucases import DEVICE, OPS

from kvcli.kernels import Backend
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.options import LoraOption
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.engine.graph.tokengraph import TokenGraph
from kvcli.runtime.formats.adapter import open_all
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights

VOCAB, PAGE, CONTEXT = 64, 16, 96
# Nats. A number between two codes may become either, and where two scales are as good, rounding decides: with int4 that
# can be much for the attention of "llama", less so for "gemma3", whose keys are normed.
LIMITS = {"f16": 2e-5, "int8": 1e-3, "int4": 1e-3}


class Model:
    """A tiny model, its graph and a sequence; or, as `reference`, in plain torch on the CPU."""

    def __init__(
        self,
        arch: str,
        types: str,
        quantized: bool = False,
        reference: bool = False,
        retention: Retention | None = None,
        tokens: int = VOCAB,
        keys: Mapping[str, object] | None = None,
        lora: tuple[LoraOption, ...] = (),
    ) -> None:
        file = GGUFFile.open(tiny.make_even(arch, quantized, tokens))
        weights = Weights(file, open_all(lora, file))
        file.metadata.update(keys or {})
        config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
        assert config.vocab_size == tokens
        self.layout = KVLayout.build(config, types, types, PAGE).by_layer(not reference).evicting(retention)
        ops: Backend = OPS if reference else GpuBackend(torch.device(DEVICE))
        self.decoder: Decoder = load(config, weights, ops)
        self.prompts = self.decoder if DEVICE == "cuda" else load(config, weights, OPS)
        self.pool = PagePool(self.layout, device=ops.device)
        self.seq = Sequence(self.pool)
        self.graph = None if reference else TokenGraph(self.decoder, self.layout, CONTEXT)

    def feed(self, ids: list[int], decoder: Decoder | None = None) -> torch.Tensor:
        """Logits [vocab] after rows that come as one step."""
        decoder, part = decoder or self.prompts, self.seq.reserve(ids)
        hidden = decoder.hidden(Step((part,)))
        self.seq.commit(ids)
        if self.graph:
            self.graph.unbind()
        return decoder.logits(hidden[-1:])[0].cpu()

    def token(self, token: int) -> torch.Tensor:
        """Logits after one row more."""
        if self.graph is None:
            return self.feed([token])
        return self.graph.run(self.seq, token).cpu().clone()

    def again(self) -> None:
        """A new sequence, on pages that others have used."""
        self.seq.close()
        self.seq = Sequence(self.pool)


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.manual_seed(seed)).tolist()


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """KL divergence of next-token probabilities, in nats; NaN where a logit is not finite."""
    p, q = (x.double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum())


def alike(ours: Model, theirs: Model, text: Iterator[int], prompts: Iterable[tuple[int, int]], limit: float) -> None:
    """Prompts of so many tokens, each with so many tokens behind it, one by one: the logits of both differ little."""
    for prompt, count in prompts:
        chunk = [next(text) for _ in range(prompt)]
        assert divergence(theirs.feed(chunk), ours.feed(chunk)) < limit
        for _ in range(count):
            token = next(text)
            found = ours.token(token)
            assert divergence(theirs.token(token), found) < limit, ours.seq.length
