"""Architectures, one a file. Each exports `NAMES` (values of `general.architecture`), `build` and `TINY` (sizes of a
two-layer test model); `build` here finds the file by the architecture's name."""

from __future__ import annotations

import importlib
import pkgutil

from kvcli.errors import ModelError
from kvcli.kernels import Backend
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.weights import Weights


def names() -> list[str]:
    """Module names of this folder."""
    return [m.name for m in pkgutil.iter_modules(__path__)]


def build(config: ModelConfig, weights: Weights, ops: Backend) -> Decoder:
    """The model of `config.arch` over mapped weights.

    Raises ModelError for missing or misshapen tensors, and for tensors (biases, say) that it would leave out: without
    them it would be another model.
    """
    for name in names():
        module = importlib.import_module(f"{__name__}.{name}")
        if config.arch in module.NAMES:
            weights.used.clear()  # what others looked at before does not count
            model = module.build(config, weights, ops)
            left = sorted(set(weights.file.tensors) - weights.used)
            if left:
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                raise ModelError(
                    f"the file has tensors that kv's {config.arch} does not use: {left[0]}{more}",
                    "kv would compute another model than this one",
                )
            return model
    raise ModelError(f"unknown architecture '{config.arch}'", f"kv runs: {', '.join(names())}")
