"""What prompt caches need to know of an engine."""

from __future__ import annotations

from typing import Protocol

import torch

from kvcli import kernels
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.host.cores import physical_cores
from kvcli.runtime.host.device import Device
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.plan.plan import Plan
from kvcli.runtime.promptcache import fingerprint
from kvcli.runtime.promptcache.convert import convert
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.keeper import Setting
from kvcli.runtime.text.tokenizer import Tokenizer


class Opened(Protocol):
    """What is asked of an engine."""

    config: ModelConfig
    device: Device
    exact: bool
    layout: KVLayout
    model: Decoder
    model_weights: Weights
    plan: Plan
    title: str
    pool: PagePool
    tokenizer: Tokenizer


def setting(engine: Opened) -> Setting:
    """Everything that stays the same while the engine is open."""
    return Setting(
        pool=engine.pool,
        pool_bytes=engine.plan.kv_bytes,
        identity=lambda: fingerprint.identity(engine.model_weights.file, engine.config, engine.layout),
        computed_on=computed_on(engine),
        model=engine.title,
        text_of=engine.tokenizer.decode,
        convert=lambda file, agrees: _convert(engine, file, agrees),
    )


def computed_on(engine: Opened) -> str:
    """What decides the last bits of a row: the kernels, and how exact they are asked to be."""
    if engine.device.kind == CUDA:
        return f"cuda {torch.cuda.get_device_name(engine.pool.device)}{' exact' if engine.exact else ''}"
    ops = engine.model.ops
    assert ops.name != "cuda"
    return f"cpu {ops.name} {ops.isa if ops.name == 'native' else ops.arithmetic}"


def _convert(engine: Opened, file: PromptCacheFile, agrees: int) -> Sequence:
    ops = engine.model.ops
    if ops.name == "cuda":  # rows are converted on the host
        ops, _ = kernels.backend("auto", physical_cores())
    assert ops.name != "cuda"
    layers, ropes = engine.config.layers, engine.model.ropes
    return convert(file, agrees, engine.config, engine.layout, lambda i: ropes.table(layers[i].rope), ops)
