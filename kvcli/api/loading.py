"""`load`: from a name to an open model. torch is imported when it is called, not before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from os import PathLike, fspath

from kvcli import environment
from kvcli.api import checks, kinds
from kvcli.api.checks import Adapters
from kvcli.api.finding import find_draft, find_runnable
from kvcli.api.model import Model
from kvcli.codecs import alias_note
from kvcli.errors import UsageError
from kvcli.notices import Tell
from kvcli.options import CacheOptions, EvictOptions, LoadOptions, PromptCacheOptions

LOG = logging.getLogger("kvcli")
IN_MEMORY = PromptCacheOptions(memory=True)
DEFAULTS = CacheOptions()


def load(
    model: str | PathLike[str],
    *,
    cache_type: str | None = None,
    ctx: int | None = None,
    evict: str | None = None,
    window: int | None = None,
    keep: int | None = None,
    budget: str | int | None = None,
    device: str = "auto",
    threads: int = 0,
    exact: bool = False,
    strict_repeat: bool = False,
    lora: Adapters = (),
    backend: str = "auto",
    memory_limit: str | None = None,
    quantize: str | None = None,
    draft: str | PathLike[str] | None = None,
    mtp: bool = False,
    offline: bool = False,
    force_pretokenizer: bool = False,
    cache: CacheOptions = DEFAULTS,
    prompts: PromptCacheOptions = IN_MEMORY,
    progress: Callable[[str, int, int], None] | None = None,
) -> Model:
    """Open a model, downloading it first where it is a known one that is missing.

    model: a name (`kv models ls`), a .gguf file, a folder of safetensors, or a repository of the hub
        (`org/repo:Q4_K_M`).
    cache_type: how keys and values are stored: "f16", "int8", "int4", ..., or "int8/int4" for each.
    ctx: most tokens in a sequence; 0 = as trained, or as many as fit.
    evict: what is forgotten where the context is full: "none", "shift", "sink" or "window"; or where the prompt is
        read, by score: "expected", "h2o", "keydiff", "kvzip", "random", "snapkv" or "tova".
    window, keep: how many of the recent and of the first tokens stay then.
    budget: how many rows stay that score highest: 1024, or "25%" of the tokens.
    device: "auto", "cpu", "cuda" or "cuda:N".
    threads: most threads of a CPU; 0 = one for each physical core.
    exact: activations of products are not rounded: on a GPU 16 bits throughout, on a CPU float32.
    strict_repeat: on a GPU prompts are computed in fixed blocks, so that greedy answers from cached rows are those
        without; slower. On a CPU they always are.
    lora: LoRA adapters, "FILE" or "FILE:SCALE", one or several, which are added to the weights.
    backend: the kernels of a CPU: "auto", "native" or "reference".
    memory_limit: most memory to use, "6G", or "0.9" of what there is.
    quantize: what the weights of a folder are packed as while they are read: "q8_0", "q4_k", ...
    draft: a smaller model of the same vocabulary, named like `model`, which guesses tokens: the answers stay the same;
        or the folder of a head of EAGLE-3.
    mtp: the layer of the model's file that predicts further tokens guesses them.
    offline: download nothing.
    force_pretokenizer: go on with a pre-tokenizer that is not known; tokens may be wrong.
    cache: all that can be said of the cache; `cache_type`, `ctx`, `evict`, `window`, `keep` and `budget` stand
        above it.
    prompts: where the rows of prompts are kept: by default in memory; with `store=FOLDER` on disk, too.
    progress: is called with (stage, bytes done, bytes in all) during a download.

    What is worth knowing goes to the logger "kvcli". Raises UsageError, ModelError, DeviceError, DownloadError and
    DoesNotFit, each before any weight is read. torch itself computes with one thread afterwards, for the engine has
    threads of its own; `torch.set_num_threads` changes that.
    """
    kinds.options(prompts, PromptCacheOptions, "prompts")
    cache = kinds.options(cache, CacheOptions, "cache")
    cache = replace(cache, evict=_evict(cache.evict, evict, window, keep, budget))
    if cache_type is not None:
        type_k, type_v = checks.type_pair(cache_type)
        cache = replace(cache, type_k=type_k, type_v=type_v)
    if ctx is not None:
        cache = replace(cache, ctx_size=ctx)
    options = LoadOptions(
        fspath(model),
        threads,
        backend,
        offline,
        force_pretokenizer,
        memory_limit,
        device,
        exact=exact,
        strict_repeat=strict_repeat,
        lora=checks.adapters(lora),
        quantize=checks.block_format(quantize),
        draft=fspath(draft or ""),
        mtp=mtp,
    )
    checks.check_load(options)
    checks.check_cache(cache)
    if cache.evict.keep == -1:
        raise UsageError("`keep=-1` means a whole prompt, and there is none yet", "give a number of tokens")
    for note in dict.fromkeys(map(alias_note, (cache.type_k, cache.type_v))):
        if note:
            LOG.info("%s", note)
    environment.prepare()
    path = find_runnable(options.model, offline, progress, LOG.info)
    from kvcli.runtime.engine.opened import Opened

    opened = Opened(path, options)  # before torch is imported, whose libraries are loaded meanwhile
    guesses = None
    if options.draft:
        guesses = Opened.draft(find_draft(options.draft, path, offline, progress, LOG.info), options)
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.loaded import LoadedModel

    engine = Engine(LoadedModel(opened, options, cache, LOG.warning, draft=guesses))
    for text in engine.notices:
        LOG.log(logging.WARNING if text in engine.doubts else logging.INFO, "%s", text)
    return Model(engine, prompts, Tell(LOG.warning, LOG.info, LOG.info))


def _evict(
    base: EvictOptions, policy: str | None, window: int | None, keep: int | None, budget: str | int | None
) -> EvictOptions:
    """The options with what was named beside them; another policy begins with its own defaults."""
    asked = base if policy is None else EvictOptions(policy)
    return EvictOptions(
        asked.policy,
        asked.window if window is None else window,
        asked.keep if keep is None else keep,
        asked.budget if budget is None else str(budget),
    )
