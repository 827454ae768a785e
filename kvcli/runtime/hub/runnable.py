"""Whether kv can run a GGUF model, judged by its header alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvcli.blockformats import WEIGHT_FORMATS
from kvcli.errors import ModelError
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.architecture import check_is_model
from kvcli.runtime.model.archs import from_gguf


class Tensor(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> str: ...


def judge(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[ModelConfig | None, str]:
    """(config, "") of a model that runs; else why it does not, with the config where that is not the reason."""
    try:
        check_is_model(metadata)
        if not tensors:
            return None, "the file holds a vocabulary and no weights"
        config = from_gguf(metadata, {name: tensor.shape for name, tensor in tensors.items()})
    except ModelError as error:
        return None, error.message
    for name, tensor in tensors.items():
        if tensor.type not in WEIGHT_FORMATS:
            return config, f"tensor {name} is stored as {tensor.type}, which kv cannot compute with"
    return config, ""
