"""`python tests/support/hfdefaults.py` writes the table of what transformers' classes assume of a config.json.

A line for each `model_type` of a decoder: the defaults of the keys that kv reads, and in "kinds" which layers are of
which kind where the file does not say.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kvcli.runtime.headers import hfconfig

PATH = Path(hfconfig.__file__).with_name("hfdefaults.json")
KIND_LETTERS = {
    "full_attention": "F", "sliding_attention": "S", "chunked_attention": "C", "linear_attention": "R", "conv": "K",
}  # fmt: skip

# What a class of transformers assumes where the file says nothing, as far as shape and arithmetic go.
WITH_DEFAULTS = {
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "attention_chunk_size", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
    *("qk_nope_head_dim", "index_head_dim", "num_kv_shared_layers", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"),
    *("mamba_d_state", "mamba_d_conv", "mamba_n_groups", "mamba_expand", "mamba_num_heads", "mamba_head_dim"),
    *("mamba_n_heads", "mamba_d_ssm", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "conv_L_cache"),
    *("attn_layer_period", "attn_layer_offset", "multi_query", "new_decoder_architecture", "attention_k_eq_v"),
    *("rms_norm_eps", "layer_norm_eps", "hidden_act", "rope_theta", "attn_logit_softcapping"),
    *("final_logit_softcapping", "query_pre_attn_scalar", "embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "logits_scaling", "logit_scale", "no_rope_layer_interval", "lru_width", "conv1d_width"),
    *("norm_topk_prob", "routed_scaling_factor", "tie_word_embeddings", "use_qk_norm", "n_group", "topk_group"),
    *("interleave_moe_layer_step", "decoder_sparse_step", "hidden_size_per_layer_input", "laurel_rank"),
    *("original_max_position_embeddings", "altup_num_inputs", "altup_active_idx", "intermediate_size_mlp"),
}  # fmt: skip

# Families whose shape kv does not read: layers that are run several times, or that keep something else.
NOT_PLANNED = (
    *(
        "blt",
        "cpmant",
        "deepseek_v4",
        "doge",
        "dory",
        "dots3_note_text",
        "gpt_neo",
        "hrm_text",
        "hy_v4",
        "inkling2_loop_text",
    ),
    *("inkling2_text", "inkling_text", "jetmoe", "longcat_flash", "minimax_m3_vl_text", "modernbert-decoder"),
    *("olmo_hybrid", "qwen4_exp_text", "rwkv", "xlm", "xlnet", "xlstm", "zamba", "zamba2", "zaya"),
)


def classes() -> Iterator[Any]:
    """The classes of configs of language models that are decoders alone."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = set()
    for name in [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *hfconfig.NESTED_TYPES]:
        cls = _text_class(CONFIG_MAPPING[name])
        if cls is None or cls in found:
            continue
        names = {each.name for each in fields(cls)}
        if not names & {"is_decoder", "add_cross_attention"} and "is_encoder_decoder" not in cls.__dict__:
            found.add(cls)
            yield cls


def _text_class(cls: Any) -> Any:
    try:
        return type(cls().get_text_config(decoder=True))
    except Exception:
        return None


def kinds_of(cls: Any, n_layers: int) -> str | None:
    """The kinds of the layers where only their number is said, as letters; None where the class does not know them."""
    config = cls(num_hidden_layers=n_layers)
    named = getattr(config, "layer_types", None)
    if named is None and hasattr(cls, "layers_block_type"):
        named = config.layers_block_type
    if not isinstance(named, list) or len(named) != n_layers or not set(named) <= KIND_LETTERS.keys():
        return None
    return "".join(KIND_LETTERS[each] for each in named)


def pattern_of(cls: Any) -> str | None:
    """The kinds as `first|repeated|last`."""
    try:
        long, other = kinds_of(cls, 61), kinds_of(cls, 48)
    except Exception:
        return None
    if long is None or other is None:
        return None
    for period in range(1, 13):
        for first in range(4):
            for last in range(2):
                pattern = "|".join((long[:first], long[first : first + period], long[len(long) - last :]))
                if [hfconfig.spread(pattern, n) for n in (61, 48)] == [long, other]:
                    return pattern
    return None


def defaults_of(cls: Any) -> dict[str, Any]:
    """What the class assumes for keys that are missing."""
    ours = {theirs: name for name, theirs in cls.attribute_map.items()}
    found = {}
    for each in fields(cls):
        name = each.name if each.name in WITH_DEFAULTS else hfconfig.name_of(ours.get(each.name, each.name))
        if name in WITH_DEFAULTS and each.default not in (MISSING, None):
            found[name] = each.default
    if kv_heads := getattr(getattr(cls(), "attn_config", None), "kv_n_heads", None):
        found["num_key_value_heads"] = kv_heads
    if pattern := pattern_of(cls):
        found["kinds"] = pattern
    return found


def text() -> str:
    """The whole file."""
    from transformers import __version__

    rows = {cls.model_type: defaults_of(cls) for cls in classes() if cls.model_type not in NOT_PLANNED}
    rows |= dict.fromkeys(NOT_PLANNED)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows))
    return f'{{"transformers": {json.dumps(__version__)}, "types": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
