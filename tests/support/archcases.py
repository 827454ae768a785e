"""Models of any family as they compute: one sequence on a pool of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from kernelcases import backend

from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.headers.openmodel import open_model
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights

LENGTH = 90  # pages of 16, several windows of 20
IDS = torch.randint(3, 370, (LENGTH,), generator=torch.manual_seed(3)).tolist()


class Loaded:
    """A model on the backend of that name, with keys changed, in a context of `ctx` tokens (0 = as trained)."""

    def __init__(
        self,
        source: Path | ModelFile,
        name: str,
        changed: dict[str, object] | None = None,
        types: str = "f32",
        retention: Retention | None = None,
        ctx: int = 0,
    ) -> None:
        file = open_model(source) if isinstance(source, Path) else source
        file.metadata.update(changed or {})
        config = from_gguf(file.metadata, {n: t.shape for n, t in file.tensors.items()})
        self.config = config.at(ctx) if ctx else config
        self.model = load(self.config, Weights(file), backend(name))
        self.pool = PagePool(KVLayout.build(self.config, types, types, 16).evicting(retention))

    @torch.inference_mode()
    def run(self, seq: Sequence, ids: list[int]) -> torch.Tensor:
        """Logits of the next rows, [n, vocab]."""
        hidden = self.model.hidden(Step((seq.reserve(ids),)))
        seq.commit(ids)
        return self.model.logits(hidden)
