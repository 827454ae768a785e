"""What prompt caches need to know of an engine."""

from __future__ import annotations

from typing import Protocol

from kvcli import kernels
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.formats.adapter import Adapter
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.host.device import Device
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.plan.plan import Plan
from kvcli.runtime.promptcache import fingerprint
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.keeper import EngineView
from kvcli.runtime.promptcache.rowconversion import convert, larger, source_layout
from kvcli.runtime.text.tokenizer import Tokenizer


class Loaded(Protocol):
    """What is asked of a model."""

    adapters: tuple[Adapter, ...]
    config: ModelConfig
    decoder: Decoder
    device: Device
    exact: bool
    file: ModelFile
    threads: int
    title: str
    tokenizer: Tokenizer


class Opened(Protocol):
    """What is asked of an engine."""

    @property
    def loaded(self) -> Loaded: ...

    layout: KVLayout
    plan: Plan
    pool: PagePool


def view(engine: Opened) -> EngineView:
    """Everything that stays the same while the engine is open."""
    loaded = engine.loaded
    return EngineView(
        pool=engine.pool,
        pool_bytes=engine.plan.kv_bytes,
        identity=lambda: fingerprint.identity(loaded.file, loaded.adapters, loaded.config, engine.layout),
        computed_on=computed_on(loaded),
        model=loaded.title,
        text_of=loaded.tokenizer.decode,
        sums=sums(loaded, engine.layout),
        identity_of=lambda layout: fingerprint.identity(loaded.file, loaded.adapters, loaded.config, layout),
        source_of=lambda file: source_layout(loaded.config, engine.layout, file),
        larger=lambda: larger(loaded.config, engine.layout),
        convert=lambda found, tokens, source: _convert(loaded, engine.layout, found, tokens, source),
        card=loaded.device.name if loaded.device.kind == CUDA else "",
    )


def computed_on(loaded: Loaded) -> str:
    """What decides the last bits of a row: the kernels, and how exact they are asked to be."""
    return f"{loaded.decoder.ops.arithmetic}{' exact' if loaded.exact else ''}"


def sums(loaded: Loaded, layout: KVLayout) -> str:
    """What decides the last bits of a row besides: where kernels add up page by page, how the cache is cut into pages,
    and on a GPU what the policy keeps, too, as its lists are others then. "" where neither decides anything, or
    the bits follow from what no two runs need have in common: then rows are of use to all."""
    ops, kept = loaded.decoder.ops, layout.retention
    if not ops.sums_by_page:
        return ""
    evicting = [f"evicting {kept.identity}"] if kept and ops.device.type != "cpu" else []
    return ", ".join([f"pages of {layout.page_size}", *evicting])


def _convert(loaded: Loaded, layout: KVLayout, found: Found, tokens: list[int], source: KVLayout) -> Sequence:
    """See `convert`; on the host, whatever computes."""
    layers, ropes = loaded.config.layers, loaded.decoder.ropes
    ops = kernels.on_host(loaded.decoder.ops, loaded.threads)
    return convert(found, tokens, source, loaded.config, layout, lambda i: ropes.table(layers[i].rope), ops)
