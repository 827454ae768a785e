"""Which sampling values are in force: the user's, else the model's, else the built-in ones. No torch."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvcli.errors import ModelError, UsageError
from kvcli.options import SampleOptions
from kvcli.runtime.engine.spec import METHODS, OFF


class _Rule(NamedTuple):
    text: str
    holds: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_RULES = {
    "temperature": _Rule("0 or more", lambda v: _is_real(v) and v >= 0),
    "top_k": _Rule("a whole number, 0 (off) or more", lambda v: _is_int(v) and v >= 0),
    "top_p": _Rule("in (0, 1]", lambda v: _is_real(v) and 0 < v <= 1),
    "min_p": _Rule("in [0, 1]", lambda v: _is_real(v) and 0 <= v <= 1),
    "repeat_penalty": _Rule("more than 0", lambda v: _is_real(v) and v > 0),
    "repeat_last_n": _Rule("-1 (all), 0 (off) or more", lambda v: _is_int(v) and v >= -1),
    "presence_penalty": _Rule("a number", _is_real),
    "frequency_penalty": _Rule("a number", _is_real),
    "dry_multiplier": _Rule("0 (off) or more", lambda v: _is_real(v) and v >= 0),
    "dry_base": _Rule("1 or more", lambda v: _is_real(v) and v >= 1),
    "dry_allowed_length": _Rule("1 or more", lambda v: _is_int(v) and v >= 1),
    "dry_penalty_last_n": _Rule("-1 (all), 0 (off) or more", lambda v: _is_int(v) and v >= -1),
    "logprobs": _Rule("a whole number from 0 to 100", lambda v: _is_int(v) and 0 <= v <= 100),
    "max_tokens": _Rule("-1 (no limit), 0 or more", lambda v: _is_int(v) and v >= -1),
    "seed": _Rule("-1 (random) or in [0, 2^64)", lambda v: _is_int(v) and -1 <= v < 1 << 64),
}
_BUILT_IN = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0, "repeat_last_n": 64
}  # fmt: skip
# What models call their own ones, after general.sampling.
_MODEL_KEYS = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repeat_penalty": "penalty_repeat",
    "repeat_last_n": "penalty_last_n",
}  # fmt: skip
_NOT_HAD = ("xtc_probability", "mirostat")  # 0 = off


def check(options: SampleOptions) -> None:
    """Raises UsageError naming the field of a value that makes no sense; None is what the model says."""
    for name, rule in _RULES.items():
        value = getattr(options, name)
        if value is not None and not rule.holds(value):
            raise UsageError(f"`{name}` must be {rule.text}, not {value}")
    if options.spec is not None and options.spec not in METHODS:
        raise UsageError(f"`spec` must be {', '.join(METHODS[:-1])} or {METHODS[-1]}, not {options.spec}")
    for token, bias in options.logit_bias.items():
        if not _is_int(token):
            raise UsageError(f"`logit_bias` is by token ids, not {token!r}")
        if not isinstance(bias, (int, float)) or math.isnan(bias) or bias == math.inf:
            raise UsageError(f"`logit_bias` of token {token} must be a number or -inf, not {bias}")


def settled(options: SampleOptions, defaults: Mapping[str, Any], vocab_size: int) -> SampleOptions:
    """The options with nothing left open: the model's `defaults` (by the keys of its file) and a seed filled in.

    Raises UsageError naming a field, ModelError naming the key of a default that makes no sense.
    """
    check(options)
    for token in options.logit_bias:
        if not 0 <= token < vocab_size:
            raise UsageError(f"`logit_bias` names token {token}, the vocabulary is 0 to {vocab_size - 1}")
    found: dict[str, Any] = {name: _default(name, defaults) for name in _BUILT_IN if getattr(options, name) is None}
    if options.spec is None:
        found["spec"] = defaults.get("spec", OFF)
    if options.loop_stop is None:
        found["loop_stop"] = not options.ignore_eos
    if options.seed == -1:
        found["seed"] = secrets.randbits(32)
    return replace(options, **found)


def model_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's file says of sampling, by its own keys."""
    prefix = "general.sampling."
    return {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix) and isinstance(v, (int, float))}


def not_obeyed(defaults: Mapping[str, Any]) -> str:
    """What a model would have of us that we cannot do; "" = nothing."""
    asked = [f"general.sampling.{key}" for key in _NOT_HAD if defaults.get(key)]
    return f"the model asks for sampling that kv does not have: {', '.join(asked)}" if asked else ""


def _default(name: str, defaults: Mapping[str, Any]) -> Any:
    rule, value = _RULES[name], defaults.get(_MODEL_KEYS[name], _BUILT_IN[name])
    if not rule.holds(value):
        key = f"general.sampling.{_MODEL_KEYS[name]}"
        raise ModelError(f"the model's {key} is {value!r}; it must be {rule.text}", f"give `{name}`")
    return value
