"""Launches on a GPU, captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.runtime.engine.graph.legs import GraphLegs
from kvcli.runtime.model.decoder import Decoder


def captured(launch: Callable[[], None], legs: GraphLegs | None, memory: Any) -> torch.cuda.CUDAGraph:
    """The graph of what `launch` launches; `memory`: the pool that graphs share.

    It is launched once before, which compiles what is new and changes nothing that a replay would not write again:
    states, which it would carry on, stay as they are.
    """
    with nullcontext() if legs is None else legs.idle():
        launch()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):  # other models may run meanwhile
        launch()
    return graph


def launched_ahead(model: Decoder) -> AbstractContextManager[None]:
    """Inside, the model's kernels are launched ahead of each other; see `GpuBackend.ahead`."""
    assert isinstance(model.ops, GpuBackend)
    return model.ops.ahead()
