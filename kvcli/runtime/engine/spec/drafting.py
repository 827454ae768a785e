"""Whether one model can draft for another, and what is worth knowing of it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from kvcli.errors import ModelError, UsageError
from kvcli.options import CacheOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.engine.opened import Opened
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.plan import repacked
from kvcli.runtime.plan.footprint import WeightBytes
from kvcli.runtime.text.tokenizer import Tokenizer
from kvcli.runtime.text.vocabulary import UNUSED

_UNUSED_SHARE = 8  # of a vocabulary at most one in so many is unused
LEAVE = "leave `draft` out"
OTHERS = "choose one of the same family, or guess without a model (`spec=suffix`)"


def check(tokenizer: Tokenizer, draft: Opened, cache: CacheOptions, kind: str, in_blocks: bool) -> None:
    """Raises ModelError where `draft` cannot guess for a model of `tokenizer` on a device of `kind`, UsageError where
    nothing can be guessed with these options. `in_blocks`: rows are computed so, see `strict_repeat`."""
    check_layers(draft.config, kind)
    check_device(draft.config, repacked.matrix_types(draft.file.tensors), kind)
    check_options(cache, in_blocks)
    check_vocabulary(tokenizer, draft.text.tokenizer)


def unguessed(cache: CacheOptions, in_blocks: bool) -> str:
    """The one of these options with which nothing can be guessed; "" = there is none. `in_blocks`: see
    `strict_repeat`."""
    options = {
        f"`evict={cache.evict.policy}`": eviction.policy(cache.evict.policy).scorer is not None,
        f"`attend=pages:{cache.attend.pages}`": cache.attend.pages > 0,
        "`strict_repeat`": in_blocks,
    }
    return next((name for name, there in options.items() if there), "")


def check_options(cache: CacheOptions, in_blocks: bool, what: str = "draft") -> None:
    """Raises UsageError where nothing can be guessed with these options, so that `what` is of no use."""
    if name := unguessed(cache, in_blocks):
        raise UsageError(f"nothing can be guessed with {name}, so `{what}` is of no use there", "leave one of them out")


def check_layers(draft: ModelConfig, kind: str) -> None:
    """Raises ModelError where a draft model cannot take guesses back on a device of `kind`: graphs of single tokens
    change a state in place."""
    if kind != CPU and any(layer.state_bytes for layer in draft.layers):
        what = "the draft model has layers that keep a state, from which a GPU cannot take its guesses back"
        raise ModelError(what, OTHERS)


def check_device(draft: ModelConfig, types: Mapping[str, str], kind: str) -> None:
    """Raises ModelError where a draft model, or a head, cannot be computed on a device of `kind`. `types`: of its
    matrices, by tensor name."""
    if kind != CPU and (reason := repacked.unfit(draft, types)):
        raise ModelError(f"the draft model cannot be computed on a GPU: {reason}", f"use `device=cpu`, or {LEAVE}")


def check_next(config: ModelConfig, types: Mapping[str, str], kind: str) -> None:
    """Raises ModelError where no layer of the model's file guesses further tokens, or one that cannot be computed on a
    device of `kind`. `types`: of the file's matrices, by name."""
    if not config.ahead:
        raise ModelError(
            "the file has no layer that predicts further tokens (nextn_predict_layers), so `mtp` is of no use",
            "guess without a model (`spec=suffix`), or name one with `draft`",
        )
    behind = f"blk.{config.n_layers}."
    own = {f"blk.0.{n.removeprefix(behind)}": type_ for n, type_ in types.items() if n.startswith(behind)}
    if kind != CPU and (reason := repacked.unfit(config.predictor, own)):
        what = f"the layer that predicts further tokens cannot be computed on a GPU: {reason}"
        raise ModelError(what, "use `device=cpu`, or leave `mtp` out")


def check_head(config: ModelConfig, head: ModelConfig) -> None:
    """Raises ModelError where a head that reads what the model makes of tokens is not one of this model."""
    if config.altup:
        raise ModelError("the model has several residual streams, which no such head reads", LEAVE)
    if head.vocab_size < config.vocab_size:
        tokens = f"{head.vocab_size:,} tokens, and {config.vocab_size:,} in the model"
        raise ModelError(f"the draft model has another vocabulary: {tokens}", OTHERS)


def check_sizes(mine: int, theirs: int) -> None:
    """Raises ModelError where so many tokens cannot be the same ones: unused ones, which fill up a matrix, are few."""
    if mine and theirs and abs(mine - theirs) * _UNUSED_SHARE > max(mine, theirs):
        tokens = f"{theirs:,} tokens, and {mine:,} in the model"
        raise ModelError(f"the draft model has another vocabulary: {tokens}", OTHERS)


def check_vocabulary(mine: Tokenizer, theirs: Tokenizer) -> None:
    """Raises ModelError where ids of the draft model mean other tokens."""
    if difference := differing(mine, theirs):
        raise ModelError(f"the draft model has another vocabulary: {difference}", OTHERS)


def differing(mine: Tokenizer, theirs: Tokenizer) -> str:
    """The first thing in which two vocabularies differ; "" = ids mean the same. One may have unused tokens more."""
    ours, other = mine.vocabulary, theirs.vocabulary
    if ours.tokens != other.tokens:
        for i, (a, b) in enumerate(zip_longest(ours.tokens, other.tokens)):
            longer = ours if b is None else other
            if a != b and (None not in (a, b) or longer.kinds[i] != UNUSED):
                return f"token {i} is {_said(b)}, and {_said(a)} in the model"
    for name in ("bos_id", "eos_id"):
        a, b = getattr(ours, name), getattr(other, name)
        if a != b:
            return f"{name.removesuffix('_id').upper()} is token {b}, and {a} in the model"
    return ""


def _said(text: str | None) -> str:
    return "not there" if text is None else repr(text[:40])


def too_large(weights: WeightBytes, draft: WeightBytes) -> str:
    """What to say of a draft model that reads more than the model; "" = nothing."""
    if draft.read < weights.read:
        return ""
    sizes = f"{draft.read >> 20:,} MiB for each token, and {weights.read >> 20:,}"
    return f"the draft model is as large as the model, or larger ({sizes}): guesses take more time than they save"


def too_short(ctx_size: int, draft: ModelConfig) -> str:
    """What to say of a draft model for a context beyond its training; "" = nothing."""
    trained = draft.context_length
    if not 0 < trained < ctx_size:
        return ""
    return f"the draft model was trained on {trained:,} tokens: behind them fewer guesses are right"
