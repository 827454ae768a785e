"""`config_from_gguf_any`: the shape of a GGUF file of any architecture, from its keys alone, for planning.

An architecture that kv runs is read by `archs.from_gguf`, so that a plan is that of the engine. For all
others: per-layer head counts, separate K and V dims, sliding windows with their patterns, latent attention,
layers that share K and V, and recurrent layers with a constant state. A missing key is named together with
the flag that supplies it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcli.errors import ModelError
from kvcli.routing import Routing
from kvcli.runtime.config import CHUNKED, FULL, LATENT, RECURRENT, SLIDING, Experts, LayerConfig, ModelConfig
from kvcli.runtime.headers import families
from kvcli.runtime.headers.hfarithmetic import check_arithmetic
from kvcli.runtime.headers.hfkeys import config_of, metadata_of
from kvcli.runtime.headers.shapes import Given, flag_of, override, planning_config
from kvcli.runtime.model.architecture import check_is_model, share_last, tokens_with_rows
from kvcli.runtime.model.archs import from_gguf

_LIMITS = {"block_count": 4096}
_STATE_BYTES = 4  # recurrent states are kept in float32

_ATTENTION_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}  # one attention layer in so many
_BOTH = ("falcon-h1",)  # attention and a recurrent state in every layer


def config_from_gguf_any(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], given: Given | None = None
) -> ModelConfig:
    """The config of a GGUF file, `given` standing in for missing keys and over the others.

    Raises ModelError that names the missing or odd key, UsageError for flags that contradict the model.
    """
    given = given or Given()
    arch = check_is_model(metadata)
    try:
        config = from_gguf(metadata, shapes)
    except ModelError:  # not an architecture that kv runs, or not in this form: planning needs less
        config = _Reader(metadata, shapes, arch, given).config()
    return override(config, given)


class _Reader:
    """One file's keys under its architecture's prefix."""

    def __init__(
        self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], arch: str, given: Given
    ) -> None:
        self.metadata, self.shapes, self.arch, self.given = metadata, shapes, arch, given
        self.n_layers = self.count("block_count", "layers")
        self.heads = self.each("attention.head_count", "heads", None if self._has_rows() else 1)
        self.hidden = self.count("embedding_length", "hidden")

    def _has_rows(self) -> bool:
        """False for models that are recurrent throughout, which need no heads."""
        recurrent = self.has("ssm.state_size") or self.has("wkv.head_size")
        return self.has("attention.head_count") or not recurrent

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def value(self, key: str, flag: str = "", default: Any = None) -> Any:
        found = self.metadata.get(f"{self.arch}.{key}", default)
        if found is None and flag:
            found = getattr(self.given, flag)
        if found is None:
            hint = f"{flag_of(flag)} supplies it" if flag else "convert the file again"
            raise ModelError(f"the GGUF file lacks the key {self.arch}.{key}", hint)
        return found

    def count(self, key: str, flag: str = "", default: int | None = None) -> int:
        """A number that is the same for all layers; of a per-layer array the largest."""
        value = self.value(key, flag, default)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return max((self._checked(key, x) for x in value), default=0)
        return self._checked(key, value)

    def each(self, key: str, flag: str = "", default: int | None = None) -> list[int]:
        """One number per layer, whether the file has an array or a single number."""
        value = self.value(key, flag, default)
        if not isinstance(value, Sequence) or isinstance(value, str):
            return [self._checked(key, value)] * self.n_layers
        if len(value) < self.n_layers:
            raise ModelError(f"{self.arch}.{key} has {len(value)} values for {self.n_layers} layers")
        return [self._checked(key, x) for x in value[: self.n_layers]]

    def _checked(self, key: str, value: Any) -> int:
        whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
        if not whole or not 0 <= value <= _LIMITS.get(key, 1 << 31):
            raise ModelError(f"the GGUF key {self.arch}.{key} has the value {str(value)[:40]}, out of range")
        return int(value)

    def config(self) -> ModelConfig:
        layers = self._layers()
        width = self.count("feed_forward_length", "ffn", 0 if self._n_experts() or not self._has_rows() else None)
        experts = self._experts(width)
        embedding = self.shapes.get("token_embd.weight")
        name = self.metadata.get("general.name")
        return planning_config(
            self.arch,
            name if isinstance(name, str) else self.arch,
            layers,
            families.of_gguf(self.arch).block,
            vocab_size=tokens_with_rows(self.metadata, embedding[0]) if embedding else self._vocabulary(),
            d_model=self.hidden,
            d_ff=width,
            n_heads=max(self.heads) or 1,
            context_length=self.count("context_length", "", 0),
            experts=experts,
        )

    def _n_experts(self) -> int:
        return self.count("expert_count", "", 0)

    def _experts(self, width: int) -> Experts | None:
        """`width`: of dense layers."""
        if not self._n_experts():
            return None
        used = self.count("expert_used_count", "", 0)
        return Experts(
            Routing(self._n_experts(), used),
            self.count("expert_feed_forward_length", "", width),
            self.count("expert_shared_feed_forward_length", "", 0),
            self.count("leading_dense_block_count", "", 0),
        )

    def _vocabulary(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return self.count("vocab_size", "vocab", None if tokens is None else len(tokens))

    def _layers(self) -> list[LayerConfig]:
        kv_heads = self._kv_heads()
        recurrent = self._recurrent(kv_heads)
        state = self._state_bytes() if any(recurrent) or self.arch in _BOTH else 0
        sliding = self._sliding()
        latent = self._latent()
        layers: list[LayerConfig] = []
        for i in range(self.n_layers):
            if recurrent[i] or kv_heads[i] == 0:
                layers.append(LayerConfig(RECURRENT, 0, 0, 0, state_bytes=state if recurrent[i] else 0))
            elif latent:
                layers.append(latent)
            else:
                layers.append(self._rows(i, kv_heads[i], sliding[i]))
        if self.arch in _BOTH:
            layers = [replace(layer, state_bytes=state) for layer in layers]
        return self._shared(layers[: self.n_layers - self.count("nextn_predict_layers", "", 0)])

    def _kv_heads(self) -> list[int]:
        """KV heads of each layer, 0 where it keeps no rows; without the key as many as query heads."""
        if self.has("attention.head_count_kv"):
            return self.each("attention.head_count_kv")
        if not self._has_rows():
            return [0] * self.n_layers
        return [self.given.kv_heads] * self.n_layers if self.given.kv_heads else self.heads

    def _rows(self, layer: int, kv_heads: int, window: int) -> LayerConfig:
        heads = self.heads[layer]
        if heads % kv_heads:
            raise ModelError(f"layer {layer} has {heads} query heads, not a multiple of its {kv_heads} KV heads")
        default = self.hidden // heads
        dim_k = self.count("attention.key_length", "dim_k", default)
        dim_v = self.count("attention.value_length", "dim_v", default)
        if window:
            dim_k = self.count("attention.key_length_swa", "", dim_k)
            dim_v = self.count("attention.value_length_swa", "", dim_v)
        slides = CHUNKED if families.of_gguf(self.arch).windows.chunked else SLIDING
        return LayerConfig(slides if window else FULL, kv_heads, dim_k, dim_v, window)

    def _latent(self) -> LayerConfig | None:
        """The rows of latent attention (MLA): K and V compressed, and the key part that carries RoPE."""
        rank = self.count("attention.kv_lora_rank", "", 0)
        if not rank:
            return None
        index = self.count("attention.indexer.key_length", "", 0)  # a further key that chooses what is looked at
        return LayerConfig(LATENT, 1, self.count("rope.dimension_count", "rope_dim") + index, rank)

    def _sliding(self) -> list[int]:
        """The window of each layer, 0 = all tokens."""
        windows = families.of_gguf(self.arch).windows
        every, window = windows.every, windows.size
        if (every and not windows.optional) or self.has("attention.sliding_window"):
            window = self.count("attention.sliding_window", "swa_window", window or None)
        if not window:
            return [0] * self.n_layers
        pattern = self.value("attention.sliding_window_pattern", "", every)
        if isinstance(pattern, Sequence) and not isinstance(pattern, str):
            if len(pattern) < self.n_layers:
                raise ModelError(
                    f"{self.arch}.attention.sliding_window_pattern must name {self.n_layers} layers, not {len(pattern)}"
                )
            return [window if slides else 0 for slides in pattern[: self.n_layers]]
        every = self._checked("attention.sliding_window_pattern", pattern)
        return [window if every == 0 or (i + 1) % every else 0 for i in range(self.n_layers)]

    def _recurrent(self, kv_heads: list[int]) -> list[bool]:
        if not self._has_rows():
            return [True] * self.n_layers
        if self.has("full_attention_interval") or self.arch in _ATTENTION_INTERVALS:
            every = self.count("full_attention_interval", "", _ATTENTION_INTERVALS.get(self.arch))
            return [(i + 1) % max(1, every) != 0 for i in range(self.n_layers)]
        has_state = any(
            self.has(key) for key in ("ssm.state_size", "kda.head_dim", "shortconv.l_cache", "wkv.head_size")
        )
        widths = [0] * self.n_layers
        if self.arch.startswith("nemotron_h"):  # a layer is attention, or recurrent, or feed-forward
            widths = self.each("feed_forward_length")
        return [has_state and heads == 0 and width == 0 for heads, width in zip(kv_heads, widths, strict=True)]

    def _state_bytes(self) -> int:
        """Bytes of one recurrent layer per sequence: the last inputs of its convolution, and its state."""
        if self.has("kda.head_dim"):
            head, heads = self.count("kda.head_dim"), max(self.heads)
            values = 3 * (self.count("ssm.conv_kernel") - 1) * heads * head + heads * head * head
        elif self.has("ssm.state_size"):
            inner, state = self.count("ssm.inner_size"), self.count("ssm.state_size")
            mixed = inner + 2 * self.count("ssm.group_count", "", 0) * state
            values = (self.count("ssm.conv_kernel") - 1) * mixed + state * inner
        elif self.has("shortconv.l_cache"):
            values = (self.count("shortconv.l_cache") - 1) * self.hidden
        elif self.has("wkv.head_size"):
            values = self.hidden * (self.count("token_shift_count", "", 2) + self.count("wkv.head_size"))
        else:
            raise ModelError(
                f"the GGUF file has recurrent layers but lacks the key {self.arch}.ssm.state_size",
                "their constant state cannot be planned; convert the file again",
            )
        return values * _STATE_BYTES

    def _shared(self, layers: list[LayerConfig]) -> list[LayerConfig]:
        """The last `shared_kv_layers` read the rows of the last layer of their kind before them."""
        first = len(layers) - self.count("attention.shared_kv_layers", "", 0)
        if not 0 < first < len(layers):
            return layers
        return share_last(layers, first)


def config_problem(data: Mapping[str, Any]) -> str:
    """Why kv cannot run a model with that config.json, whatever its weights are like; "" = nothing in it says so."""
    try:
        from_gguf(metadata_of(data), {})
        check_arithmetic(config_of(data))
    except ModelError as error:
        return error.message
    return ""


def config_from_hf(data: Mapping[str, Any], given: Given | None = None) -> ModelConfig:
    """The config of a parsed config.json, `given` standing in for missing keys and over the others.

    Raises ModelError that names the key of it, UsageError for flags that contradict the model.
    """
    given = given or Given()
    return config_from_gguf_any(metadata_of(data, given), {}, given)
