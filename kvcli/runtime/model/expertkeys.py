"""Which experts a model has, from the keys of its GGUF file. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcli.errors import ModelError
from kvcli.routing import CHOSEN, SIGMOID, SOFTMAX, Routing
from kvcli.runtime.config import Experts, ModelConfig
from kvcli.runtime.formats.ggufkeys import Keys

MOST_EXPERTS = 4096
_GATINGS = {1: SOFTMAX, 2: SIGMOID, 3: CHOSEN}  # values of expert_gating_func


@dataclass(frozen=True)
class Mixture:
    """How a family routes tokens to experts, where files do not say; see `Routing`. `beside`, `weighs_input`: see
    `Experts`. `step`: the key that says which layers have experts. `best`: of a group that is chosen by SOFTMAX, see
    `Routing`."""

    gating: str = SOFTMAX
    normed: bool = False
    beside: bool = False
    weighs_input: bool = False
    step: str = ""
    best: int = 2


def read_experts(
    keys: Keys, shapes: Mapping[str, tuple[int, ...]], mixture: Mixture, config: ModelConfig
) -> Experts | None:
    """The experts of a model, None if it has none. Widths that no key names are those of tensors.

    Raises ModelError naming a key that is missing, odd or contradicts another one.
    """
    count = keys.integer("expert_count", 0, limit=MOST_EXPERTS, zero=True)
    if not count:
        return None
    dense = keys.integer("leading_dense_block_count", 0, zero=True)
    every = keys.integer(mixture.step, 1, limit=config.n_layers) if mixture.step else 1
    first = -(-(dense + 1) // every) * every - 1  # with experts
    width, shared = (shapes.get(f"blk.{first}.ffn_down_{x}.weight", (0,))[-1] for x in ("exps", "shexp"))
    return Experts(
        _routing(keys, mixture, count, f"blk.{first}.exp_probs_b.bias" in shapes),
        keys.integer("expert_feed_forward_length", width or config.d_ff),
        _shared_width(keys, width, shared),
        min(dense, config.n_layers),
        every,
        mixture.beside,
        mixture.weighs_input,
    )


def _routing(keys: Keys, mixture: Mixture, count: int, biased: bool) -> Routing:
    """`biased`: the scores that experts are chosen by have a bias, as only those of SIGMOID have."""
    used = keys.integer("expert_used_count", limit=count)
    groups = keys.integer("expert_group_count", 1, limit=count, zero=True) or 1
    used_groups = keys.integer("expert_group_used_count", groups, limit=groups, zero=True) or groups
    if count % groups or used > used_groups * (count // groups):
        raise ModelError(
            f"{keys.arch}.expert_group_count is {groups}: {used} of {count} experts cannot be in {used_groups} groups",
            "the file is damaged; convert it again",
        )
    number = keys.integer("expert_gating_func", 0, zero=True)
    if number and number not in _GATINGS:
        keys.expect("expert_gating_func", *_GATINGS)
    normed = bool(keys.get("expert_weights_norm", mixture.normed))
    scale = float(keys.number("expert_weights_scale", 1.0, zero=True)) or 1.0
    gating = _GATINGS.get(number, SIGMOID if biased else mixture.gating)
    best = mixture.best if gating == SOFTMAX else 2
    return Routing(count, used, gating, normed, scale, groups, used_groups, best)


def _shared_width(keys: Keys, width: int, in_file: int) -> int:
    """Of what every token has besides."""
    count = keys.integer("expert_shared_count", 0, zero=True)
    named = keys.integer("expert_shared_feed_forward_length", 0, zero=True)
    return in_file or named or count * keys.integer("expert_feed_forward_length", width or 1)
