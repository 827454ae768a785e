"""Which layers of a config.json keep what: a letter for each, from the many ways in which makers say it. No torch.

F sees everything, S has a sliding window, C sees its own chunk, R has a recurrent state, K that of a short convolution,
and - keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.headers.hfconfig import HFConfig

_LETTER_OF = {
    **dict.fromkeys(("full_attention", "attention", "indexed_attention"), "F"),
    **dict.fromkeys(("sliding_attention", "local_attention"), "S"),
    "chunked_attention": "C",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "kda"), "R"),
    **dict.fromkeys(("conv", "short_conv"), "K"),
    **dict.fromkeys(("mlp", "moe", "ffn"), "-"),
}
_HYBRID_SIGNS = {"M": "R", "*": "F", "-": "-", "E": "-"}  # nemotron_h
# Keys that say of which kind layers are; where one does, the others repeat it.
SAYING = (
    "layer_types", "hybrid_override_pattern", "block_types", "attn_layer_indices",
    "full_attn_idxs", "attn_type_list", "full_attention_interval", "attn_layer_period", "attn_layer_offset",
    "layer_group_size", "use_sliding_window", "max_window_layers", "sliding_window", "sliding_window_pattern",
    "no_rope_layers", "no_rope_layer_interval", "attention_chunk_size", "conv_L_cache",
)  # fmt: skip
STATE_ONLY = ("mamba", "mamba2", "falcon_mamba")


def window_of(config: HFConfig) -> int:
    """The window of layers that slide, the query included, or the size of chunks; 0 = there is none."""
    if config.get("use_sliding_window") is False:
        return 0
    if config.has("sliding_window_size"):
        return config.count("sliding_window_size") + (config.model_type == "mimo_v2_flash")  # there without the query
    window = config.count("sliding_window", default=0)
    return window or config.count("attention_chunk_size", default=0)


def kinds_of(config: HFConfig) -> str:
    """A letter for each layer. Raises ModelError for a kind that kv cannot plan for."""
    window = window_of(config)
    config.seen(*SAYING)
    if config.has("layer_types"):
        config.seen("prefix_dense_sliding_window_pattern")
    if config.model_type in STATE_ONLY:
        config.seen("num_attention_heads", "head_dim")
        return "R" * config.n_layers
    if has_both(config):
        return "F" * config.n_layers
    kinds = _named(config) or _listed(config) or _by_period(config) or _by_window(config, window)
    if len(kinds) != config.n_layers:
        raise ModelError(f"layer_types in config.json must name {config.n_layers} layers, not {len(kinds)}")
    if not window and not set(kinds).isdisjoint("SC"):
        raise ModelError("config.json has sliding layers but lacks the key sliding_window", "--swa-window supplies it")
    return kinds


def _named(config: HFConfig) -> str:
    """Each layer by name."""
    if (named := config.values("layer_types")) is not None:
        return "".join(_letter(each, "layer_types", _LETTER_OF) for each in named)
    if config.has("hybrid_override_pattern"):
        signs = str(config.get("hybrid_override_pattern"))
        return "".join(_letter(each, "hybrid_override_pattern", _HYBRID_SIGNS) for each in signs)
    if (named := config.values("block_types")) is not None:  # over and over; attention of these models slides
        kinds = "".join(_letter(each, "block_types", {**_LETTER_OF, "attention": "S"}) for each in named)
        return (kinds * config.n_layers)[: config.n_layers]
    return ""


def _letter(name: Any, key: str, letters: dict[str, str]) -> str:
    if not isinstance(name, str) or name not in letters:
        raise ModelError(f"{key} in config.json names a layer {str(name)[:40]!r}, which kv cannot plan for")
    return letters[name]


def _listed(config: HFConfig) -> str:
    """The layers of one kind by number."""
    n, other = config.n_layers, "K" if config.has("conv_L_cache") else "R"
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if config.has(key):
            return _chosen(n, config.values(key) or (), "F", other)
    if config.has("linear_attn_config"):
        layers = config.table("linear_attn_config").get("full_attn_layers")
        if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
            raise ModelError("linear_attn_config in config.json lacks the list full_attn_layers")
        return _chosen(n, [layer - 1 for layer in layers], "F", other)
    for key, ones, zeros in (("attn_type_list", "F", "R"), ("hybrid_layer_pattern", "S", "F")):
        if (flags := config.values(key)) is not None:
            return "".join(ones if each else zeros for each in flags)
    # Where a search left attention out, or made it linear.
    return "".join("-" if without(each.get("attention")) else "F" for each in config.tables("block_configs"))


def has_both(config: HFConfig) -> bool:
    """Whether each layer has attention and a recurrent state."""
    return config.model_type == "falcon_h1"


def _chosen(n_layers: int, chosen: Sequence[Any], kind: str, other: str) -> str:
    return "".join(kind if i in chosen else other for i in range(n_layers))


def without(part: Any) -> bool:
    """Whether a layer of nemotron-nas lacks this part of its own, or has a mere matrix there."""
    return not isinstance(part, Mapping) or bool(part.get("no_op") or part.get("replace_with_linear"))


def _by_period(config: HFConfig) -> str:
    """One attention layer in so many, the others with a state."""
    for key in ("full_attention_interval", "attn_layer_period", "layer_group_size"):
        every = config.count(key, default=0)
        if every:
            offset = config.count("attn_layer_offset", default=every - 1) % every
            return "".join("F" if i % every == offset else "R" for i in range(config.n_layers))
    return ""


def _by_window(config: HFConfig, window: int) -> str:
    n = config.n_layers
    if config.model_type == "llama4_text":  # layers without RoPE see everything
        rotated = no_rope_layers(config)
        return "".join("C" if each and window else "F" for each in rotated)
    if config.kinds and not set(config.kinds) <= set("FS|"):
        return config.spread_kinds()
    if not config.kinds and config.get("mamba_d_state") and not has_both(config):
        raise ModelError("config.json does not say which layers are recurrent", "the shape can be given by flags")
    if not window:
        return "F" * n
    if config.get("use_sliding_window") is not None or config.has("max_window_layers"):
        if config.model_type == "smollm3":
            return "".join("F" if each else "S" for each in no_rope_layers(config))
        first = config.count("max_window_layers", default=n if config.kinds else 0)
        return "F" * min(first, n) + "S" * (n - first)
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):  # "LLLG"
        return "".join("F" if each == "G" else "S" for each in (pattern * n)[:n])
    if pattern is not None or not config.kinds:
        every = config.count("sliding_window_pattern", default=0)
        return "".join("S" if every == 0 or (i + 1) % every else "F" for i in range(n))
    return config.spread_kinds()


def no_rope_layers(config: HFConfig) -> list[int]:
    """1 for each layer that has RoPE, 0 for one without. (The key says the opposite of what it means.)"""
    if config.get("no_rope_layers"):
        return config.each("no_rope_layers", limit=1)
    every = config.count("no_rope_layer_interval", default=0)
    return [int(every == 0 or (i + 1) % every != 0) for i in range(config.n_layers)]


def recurrent_layers(kinds: str) -> dict[str, Any]:
    """Which layers keep a state: all but one in so many, or by name."""
    every = kinds.find("F") + 1
    if every and all((kind == "F") == ((i + 1) % every == 0) for i, kind in enumerate(kinds)):
        return {"full_attention_interval": every}
    return {"attention.recurrent_layers": [kind == "R" for kind in kinds]}


def says_otherwise(keys: Mapping[str, Any]) -> bool:
    """Whether files of this family tell layers with a state by another key than that they have no heads of keys."""
    return not keys.keys().isdisjoint(("full_attention_interval", "attention.recurrent_layers"))


def adjusted(config: HFConfig, width: int) -> int:
    """The width of a feed-forward part of LFM2, of which config.json may have one to be made less."""
    if config.get("block_auto_adjust_ff_dim", True) is False:
        return width
    factor, step = config.number("block_ffn_dim_multiplier", 1.0), config.count("block_multiple_of", default=256)
    width = int((factor or 1.0) * int(2 * width / 3))
    return -(-width // max(1, step)) * step
