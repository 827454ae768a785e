"""`HeldModel`: a model whose weights another process has on a GPU, as a process finds it that takes them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import NotTaken
from kvcli.runtime.engine.opened import Opened
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.host.cudadriver import Driver, Failed
from kvcli.runtime.host.device import parse_device
from kvcli.runtime.host.memory import CUDA, Memory
from kvcli.runtime.text.modeltext import ModelText

if TYPE_CHECKING:
    from kvcli.kernels import Backend
    from kvcli.runtime.config import ModelConfig
    from kvcli.runtime.model.decoder import Decoder
    from kvcli.runtime.model.weights import Weights


@dataclass(frozen=True)
class HeldModel:
    """Opened files, and what the process `holder` says of the weights: the `device` that they are on, as `Device` is
    written, how to have them (`handover.describe`), and their bytes."""

    opened: Opened
    holder: int
    device: str
    described: bytes
    weight_bytes: int

    @property
    def file(self) -> ModelFile:
        return self.opened.file

    @property
    def path(self) -> Path:
        return self.opened.path

    @property
    def text(self) -> ModelText:
        return self.opened.text

    def beside(self, cards: Sequence[Memory]) -> list[Memory]:
        """The memory of GPUs for a plan that counts these weights: as if they were not there yet."""
        kind, index = parse_device(self.device)
        more = {index: self.weight_bytes} if kind == CUDA else {}
        return [replace(each, free=each.free + more.get(i, 0)) for i, each in enumerate(cards)]

    def decoder(self, config: ModelConfig, weights: Weights, ops: Backend) -> Decoder:
        """That of the weights where they are; `config`: at the context of this process. Raises NotTaken."""
        from kvcli.runtime.model.handover import take
        from kvcli.runtime.model.loading import rope_factors
        from kvcli.runtime.model.rope import RopeTables

        kind, index = parse_device(self.device)
        try:
            driver = Driver() if kind == CUDA else None
            if driver:
                driver.open(index)
            return take(self.described, config, ops, RopeTables(config, rope_factors(config, weights)), driver)
        except Failed as error:
            raise NotTaken(f"the weights that another process has on {self.device} cannot be opened: {error}") from None
