"""`estimate`: what a model would need, before anything is loaded. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcli.api import checks, kinds, planning
from kvcli.api.checks import Adapters
from kvcli.api.planning import Outcome, Query
from kvcli.codecs import canonical
from kvcli.errors import UsageError
from kvcli.options import CacheOptions
from kvcli.runtime.headers.plannedmodel import planned_model
from kvcli.runtime.headers.shapes import Given
from kvcli.runtime.host.cores import usable_cpus


@dataclass(frozen=True)
class Choice:
    """One cache type at the context that was asked for. Sizes are in bytes.

    `total_bytes`: weights, cache, workspace and libraries, those of a draft model, too; `max_ctx`: the longest context
    that fits, within training; `decode_tps`: what memory bandwidth allows at most, None = not known.
    """

    cache_type: str
    ctx: int
    total_bytes: int
    cache_bytes: int
    token_bytes: int
    fits: bool
    max_ctx: int
    decode_tps: float | None


@dataclass(frozen=True)
class Estimate:
    """What a model would need on one device. `best`: the most precise type that holds the context, or as much of it as
    fits; None = nothing fits."""

    model: str
    device: str
    free_bytes: int
    weight_bytes: int
    trained_ctx: int
    choices: tuple[Choice, ...]
    best: Choice | None
    notices: tuple[str, ...] = ()


def estimate(
    model: str,
    *,
    ctx: int = 0,
    cache_type: str | Sequence[str] | None = None,
    device: str | None = None,
    gpu: str | None = None,
    memory: str | None = None,
    bandwidth: float | None = None,
    cache: CacheOptions = CacheOptions(),
    sequences: int = 1,
    lora: Adapters = (),
    quantize: str | None = None,
    draft: str | None = None,
    mtp: bool = False,
    offline: bool = False,
) -> Estimate:
    """What a model would need; only headers are read.

    model: a name, a .gguf file, a folder of safetensors, or a repository of the hub.
    ctx: tokens of the context; 0 = as trained.
    cache_type: one type, or several to compare; None = the usual ones.
    device: a device of this machine; None = the first GPU, else the CPU.
    gpu: a card by its name, which need not be here: "rtx4090".
    memory: assume that much to be free: "11G".
    bandwidth: of memory, in GB/s, from which the limit of tokens a second is computed.
    cache: page size, 16-bit pages, rows of a prefill step, and eviction.
    sequences: contexts at a time.
    lora: LoRA adapters of a GGUF file, as `load` takes them.
    quantize: what the weights of a folder are to be packed as, as `load` takes it.
    draft, mtp: what guesses tokens, as `load` takes it; its memory is part of every total.
    offline: read nothing from the network.

    Raises UsageError, ModelError, DeviceError and DownloadError.

    >>> import kvcli
    >>> found = kvcli.estimate("llama-3.1-8b", gpu="rtx3060-12g", ctx=65536)
    >>> found.best.cache_type, found.best.total_bytes >> 20, found.best.max_ctx
    ('int8', 11307, 86592)
    >>> [choice.cache_type for choice in found.choices if not choice.fits]
    ['f32', 'f16']
    """
    for name, given in (("model", model), ("device", device or ""), ("gpu", gpu or ""), ("memory", memory or "")):
        kinds.text(given, name)
    if not isinstance(sequences, int) or sequences < 1:
        raise UsageError(f"`sequences` must be 1 or more, not {sequences!r}")
    if bandwidth is not None and not (isinstance(bandwidth, (int, float)) and 0 < bandwidth < math.inf):
        raise UsageError(f"`bandwidth` must be GB/s, more than 0, not {bandwidth!r}")
    asked = [cache_type] if isinstance(cache_type, str) else kinds.several(cache_type or (), "cache_type")
    named = [checks.type_pair(name) for name in asked]
    pairs = tuple(dict.fromkeys((canonical(k), canonical(v)) for k, v in named)) or planning.USUAL_PAIRS
    for type_k, type_v in pairs:
        checks.check_cache(CacheOptions(ctx, type_k, type_v, cache.page_size, cache.ubatch, cache.tail, cache.sinks))
    target, warnings = planning.find_target(gpu, memory, device, None, bandwidth)
    planned = planned_model(
        model, Given(), target.memory.kind, offline, checks.adapters(lora), checks.block_format(quantize)
    )
    if mtp and draft:
        raise UsageError("`mtp` and `draft` cannot be used together", "leave one of them out")
    beside = planning.planned_draft(planned, draft, target.memory.kind, offline, cache) if draft else None
    beside = planning.planned_next(planned, target.memory.kind, cache) if mtp else beside
    context = ctx or planned.config.context_length
    if not context:
        raise UsageError(f"the context that {planned.name} was trained with is not known", "give `ctx`")
    query = Query(
        (context,), planning.kept_apart(planned, pairs), cache.page_size, cache.ubatch, sequences,
        threads=len(usable_cpus()), tail=cache.tail, sinks=cache.sinks, evict=cache.evict,
        attend=cache.attend, draft=beside,
    )  # fmt: skip
    [outcomes] = planning.compare(planned, target, query)
    best = planning.recommend(outcomes, bool(named), planned.config.context_length)
    return Estimate(
        planned.name,
        target.memory.name,
        target.memory.free,
        planned.weights.packed if planned.weights else 0,
        planned.config.context_length,
        tuple(map(_choice, outcomes)),
        None if best is None else _choice(best.outcome),
        (*planned.notices, *(f"draft: {text}" for text in (beside.notices if beside else ())), *warnings),
    )


def _choice(outcome: Outcome) -> Choice:
    plan = outcome.plan
    return Choice(
        outcome.label, plan.tokens, plan.total, plan.kv_bytes, outcome.layout.token_bytes(), outcome.fits,
        outcome.max_context, outcome.tokens_per_s,
    )  # fmt: skip
