"""What tiny random models are told by: `Family`, `Variant`, and settings and keys that several kinds of them share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CONTEXT, WINDOW = 512, 20


@dataclass(frozen=True)
class Family:
    """What the tiny models of one architecture have in common.

    `kind`: in transformers, where its name is another. `settings` go to the transformers config. `halves`: transformers
    turns halves of heads where files have neighbours. `one_more`: norm weights are 1 less than in files.
    """

    kind: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    halves: bool = False
    one_more: bool = False


@dataclass(frozen=True)
class Variant:
    """`settings` go to the transformers config, `keys` into the file (after the architecture's name). The embedding has
    `padding` rows more than there are tokens. `kind`: as in Family, of this one. `apart`: each expert of the file is a
    tensor of its own."""

    arch: str
    settings: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    padding: int = 0
    kind: str = ""
    apart: bool = False


def slides(*layers: bool) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in layers]


def tied(tied: bool, **others: Any) -> dict[str, Any]:
    return {"tie_word_embeddings": tied} | others


EVEN = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}  # 6 heads of 8 are as wide as the model
SLIDING = {"sliding_window": WINDOW}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8) | {"num_experts_per_tok": 3}
EXPERT_KEYS = {"expert_count": 8, "expert_used_count": 3}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
MINISTRAL = {
    **YARN,
    "rope_theta": 1e4,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "llama_4_scaling_beta": 0.3,
    "original_max_position_embeddings": 16,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
}
GRANITE_KEYS = {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.3, "logit_scale": 2.0}
HYBRID = {"layer_types": slides(True, False, True), **SLIDING}
HYBRID_KEYS = {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False, True]}
