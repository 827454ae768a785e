"""RoPE of a GGUF file: its keys, and which of its tensors divide frequencies. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from kvcli.errors import ModelError
from kvcli.runtime.config import RopeConfig
from kvcli.runtime.formats.ggufkeys import Keys

# The tensor of factors that divide frequencies, by `RopeConfig.scaling`.
FACTORS: Mapping[str, str] = {
    "llama3": "rope_freqs.weight", "long": "rope_factors_long.weight", "short": "rope_factors_short.weight",
}  # fmt: skip

_KINDS = "none", "linear", "yarn", "longrope", "dynamic"


def read_rope(
    keys: Keys, tensors: Mapping[str, object], head_dim: int, whole_ramp: bool = True, latents: bool = False
) -> RopeConfig:
    """The RoPE of a model's layers, in its training context. `whole_ramp`, `latents`: see `_yarn`. ModelError."""
    dim = keys.integer("rope.dimension_count", head_dim, limit=4096)
    if dim > head_dim or dim % 2:
        raise ModelError(f"the GGUF key {keys.arch}.rope.dimension_count is {dim}, head dim is {head_dim}")
    plain = RopeConfig(float(keys.number("rope.freq_base", 10000.0)), dim)
    context = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", context, zero=True) or context
    amplitude = float(keys.number("rope.scaling.attn_factor", 1.0, zero=True)) or 1.0
    keys.expect("rope.scaling.type", *_KINDS)
    kind, factor = keys.get("rope.scaling.type", "linear"), _factor(keys)
    if FACTORS["long"] in tensors or kind == "longrope":
        keys.expect("rope.scaling.type", "longrope")
        missing = [name for name in (FACTORS["long"], FACTORS["short"]) if name not in tensors]
        if missing:
            raise ModelError(f"the file has no tensor {missing[0]}", f"longrope of {keys.arch} needs it")
        rope = replace(plain, scaling="long", original=original)
    elif kind == "yarn" and factor != 1:
        rope = _yarn(keys, plain, factor, original, whole_ramp, latents)
    elif kind == "dynamic" and factor != 1:
        rope = replace(plain, scaling="dynamic", factor=factor, original=original)
    else:
        factor = 1.0 if kind == "none" else factor
        scaling = "llama3" if FACTORS["llama3"] in tensors else "none" if factor == 1 else "linear"
        rope = replace(plain, scaling=scaling, factor=factor)
    return replace(rope, amplitude=rope.amplitude * amplitude).at(context)


def _factor(keys: Keys) -> float:
    """By what scaling stretches positions; older files name it rope.scale_linear."""
    old = float(keys.number("rope.scale_linear", 1.0, zero=True)) or 1.0
    factor = float(keys.number("rope.scaling.factor", old, zero=True)) or 1.0
    if factor != old != 1:
        raise ModelError(
            f"{keys.arch}.rope.scale_linear is {old:g}, and {keys.arch}.rope.scaling.factor is {factor:g}",
            "they mean the same and cannot both hold",
        )
    return factor


def _yarn(keys: Keys, plain: RopeConfig, factor: float, original: int, whole: bool, latents: bool) -> RopeConfig:
    """YaRN (arXiv 2309.00071). `whole`: its ramp begins and ends at whole dims. `latents`: what there is of a log
    multiplier is of whole scores (see `score_factor`), and angles are as they are."""
    keys.expect("rope.scaling.yarn_ext_factor", -1, 1)
    fast = float(keys.number("rope.scaling.yarn_beta_fast", 32.0))
    slow = float(keys.number("rope.scaling.yarn_beta_slow", 1.0))

    def dim_of(turns: float) -> float:
        """The dim that turns so many times within the original context."""
        return plain.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(plain.base))

    first, last = dim_of(fast), dim_of(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, plain.dim - 1)
    log = float(keys.number("rope.scaling.yarn_log_multiplier", 0.0, zero=True))
    amplitude = _stretch(factor, 1.0) / (_stretch(factor, log) if log else 1.0)
    if latents and log:
        amplitude = 1.0
    amplitude = float(keys.number("rope.scaling.yarn_attn_factor", amplitude))
    ramp = float(first), float(last if last != first else first + 0.001)
    return replace(plain, scaling="yarn", factor=factor, original=original, ramp=ramp, amplitude=amplitude)


def _stretch(factor: float, multiplier: float) -> float:
    """What YaRN multiplies cosines and sines by for a context longer by `factor`."""
    return 1.0 + 0.1 * multiplier * math.log(factor) if factor > 1 else 1.0
