"""The architectures that kv runs, one a file, as data. Each file has an `ARCHITECTURE`; nothing else names them. No
torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.architecture import Architecture, Shapes, check_is_model
from kvcli.words import listed

ARCHITECTURES: tuple[Architecture, ...] = tuple(
    importlib.import_module(f"{__name__}.{module.name}").ARCHITECTURE for module in pkgutil.iter_modules(__path__)
)
_BY_NAME = {name: architecture for architecture in ARCHITECTURES for name in architecture.gguf}
RUNNABLE = tuple(sorted(_BY_NAME))  # values of general.architecture that kv runs


def from_gguf(metadata: Mapping[str, Any], tensor_shapes: Shapes) -> ModelConfig:
    """The config of a GGUF file.

    Raises ModelError naming the key that is missing, odd or cannot be obeyed, or the architecture if `kv` does not
    run it.
    """
    arch = check_is_model(metadata)
    if arch not in _BY_NAME:
        raise ModelError(f"kv does not run the architecture '{arch}'", f"it runs {listed(RUNNABLE)}")
    return _BY_NAME[arch].read(metadata, tensor_shapes)
