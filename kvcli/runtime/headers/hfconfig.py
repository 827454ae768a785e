"""`config_from_hf`: the shape of a model from its config.json, for planning. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.config import FULL, LATENT, RECURRENT, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.headers import families
from kvcli.runtime.headers.anygguf import share_last
from kvcli.runtime.headers.shapes import Given, flag_of, override, planning_config

_STATE_BYTES = 4
_SLIDING_KINDS = ("sliding_attention", "chunked_attention", "local_attention")
_RECURRENT_KINDS = ("linear_attention", "mamba", "conv", "recurrent")


def config_from_hf(data: Mapping[str, Any], given: Given | None = None) -> ModelConfig:
    """The config of a parsed config.json, `given` standing in for what is missing and over the rest.

    Raises ModelError that names the missing or odd key, UsageError for flags that contradict the model.
    """
    given = given or Given()
    inner = data.get("text_config")  # of a model that also sees or hears
    reader = _Reader(inner if isinstance(inner, Mapping) else data, given)
    return override(reader.config(), given)


class _Reader:
    def __init__(self, data: Mapping[str, Any], given: Given) -> None:
        self.data, self.given = data, given
        self.model_type = str(data.get("model_type", "unknown"))
        self.family = families.of_hf(self.model_type)
        self.n_layers = self.count("num_hidden_layers", "n_layer", "num_layers", flag="layers", limit=4096)
        self.heads = self.count("num_attention_heads", "n_head", flag="heads")
        self.hidden = self.count("hidden_size", "n_embd", "d_model", flag="hidden")

    def count(self, *keys: str, flag: str = "", default: int | None = None, limit: int = 1 << 31) -> int:
        """The first of `keys` that is there and not null, else what a flag says, else the default."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
                raise ModelError(f"{key} in config.json has the value {str(value)[:40]}, out of range")
            return value
        found = getattr(self.given, flag) if flag else None
        found = default if found is None else found
        if found is None:
            hint = f"{flag_of(flag)} supplies it" if flag else "the file is incomplete"
            raise ModelError(f"config.json lacks the key {keys[0]}", hint)
        return found

    def config(self) -> ModelConfig:
        layers = self._layers()
        experts = self.count("num_local_experts", "num_experts", "n_routed_experts", default=0)
        used = self.count("num_experts_per_tok", "experts_per_token", default=0)
        width = self.count("intermediate_size", "n_inner", "ffn_hidden_size", flag="ffn", default=4 * self.hidden)
        if experts:
            width = max(width, used * self.count("moe_intermediate_size", default=width))
        return planning_config(
            self.model_type,
            self.model_type,
            layers,
            self.family.block,
            vocab_size=self.count("vocab_size", flag="vocab"),
            d_model=self.hidden,
            d_ff=width,
            n_heads=self.heads,
            context_length=self.count("max_position_embeddings", "n_positions", "max_seq_len", default=0),
            n_experts=experts,
            n_experts_used=used,
        )

    def _layers(self) -> list[LayerConfig]:
        full = self._rows()
        window = self._window()
        kinds = self._kinds(window)
        layers = []
        for kind in kinds:
            if kind == RECURRENT:
                layers.append(LayerConfig(RECURRENT, 0, 0, 0, state_bytes=self._state_bytes()))
            elif kind == SLIDING and full.kind == FULL:
                layers.append(LayerConfig(SLIDING, full.kv_heads, full.dim_k, full.dim_v, window))
            else:
                layers.append(full)
        shared = self.count("num_kv_shared_layers", default=0)
        return share_last(layers, self.n_layers - shared) if 0 < shared < self.n_layers else layers

    def _rows(self) -> LayerConfig:
        rank = self.count("kv_lora_rank", default=0)
        if rank:
            return LayerConfig(LATENT, 1, rank + self.count("qk_rope_head_dim", flag="rope_dim"), 0)
        kv_heads = self._kv_heads()
        if not kv_heads or self.heads % kv_heads:
            raise ModelError(f"{self.heads} query heads are not a multiple of {kv_heads} KV heads")
        dim = self.count("head_dim", flag="dim_k", default=self.hidden // self.heads)
        return LayerConfig(FULL, kv_heads, dim, self.count("v_head_dim", default=dim))

    def _kv_heads(self) -> int:
        if self.model_type in ("falcon", "RefinedWebModel") and not self.data.get("new_decoder_architecture"):
            return 1 if self.data.get("multi_query", True) else self.heads
        if self.data.get("multi_query") is True and "num_key_value_heads" not in self.data:
            return self.count("num_kv_heads", default=1)
        return self.count("num_key_value_heads", "num_kv_heads", "n_head_kv", flag="kv_heads", default=self.heads)

    def _window(self) -> int:
        if self.data.get("use_sliding_window") is False:
            return 0
        return self.count("sliding_window", "attention_chunk_size", default=0)

    def _kinds(self, window: int) -> list[str]:
        """FULL, SLIDING or RECURRENT for each layer."""
        named = self.data.get("layer_types") or self.data.get("layers_block_type")
        if isinstance(named, list):
            if len(named) != self.n_layers:
                raise ModelError(f"layer_types in config.json must name {self.n_layers} layers, not {len(named)}")
            return [self._kind(name, window) for name in named]
        every = self.count("full_attention_interval", "attn_layer_period", default=0)
        if every:
            offset = self.count("attn_layer_offset", default=every - 1)
            return [FULL if i % every == offset % every else RECURRENT for i in range(self.n_layers)]
        if not window:
            return [FULL] * self.n_layers
        every = self.count(
            "sliding_window_pattern",
            "_sliding_window_pattern",
            default=self.family.windows.every,
        )
        # Qwen2 slides from this layer on only; its other layers see everything.
        first = self.count("max_window_layers", default=0) if self.data.get("use_sliding_window") else 0
        slides = [i >= first and (every == 0 or (i + 1) % every != 0) for i in range(self.n_layers)]
        return [SLIDING if each else FULL for each in slides]

    def _kind(self, name: Any, window: int) -> str:
        if name in _SLIDING_KINDS:
            if not window:
                raise ModelError(
                    "config.json has sliding layers but lacks the key sliding_window",
                    "--swa-window supplies it",
                )
            return SLIDING
        if name in _RECURRENT_KINDS:
            return RECURRENT
        if name in ("full_attention", "attention"):
            return FULL
        raise ModelError(f"layer_types in config.json names a layer {str(name)[:40]!r}, which kv cannot plan for")

    def _state_bytes(self) -> int:
        """Bytes of one recurrent layer per sequence, in float32."""
        if "linear_num_value_heads" in self.data:
            keys = self.count("linear_num_key_heads") * self.count("linear_key_head_dim")
            values = self.count("linear_num_value_heads") * self.count("linear_value_head_dim")
            mixed = (self.count("linear_conv_kernel_dim") - 1) * (2 * keys + values)
            return _STATE_BYTES * (mixed + values * self.count("linear_key_head_dim"))
        if "mamba_d_state" in self.data or "state_size" in self.data:
            state = self.count("mamba_d_state", "state_size")
            inner = self.count("mamba_expand", "expand", default=2) * self.hidden
            mixed = inner + 2 * self.count("mamba_n_groups", "n_groups", default=0) * state
            return _STATE_BYTES * ((self.count("mamba_d_conv", "conv_kernel") - 1) * mixed + inner * state)
        if "conv_L_cache" in self.data:
            return _STATE_BYTES * (self.count("conv_L_cache") - 1) * self.hidden
        raise ModelError("config.json has recurrent layers whose constant state kv cannot work out")
