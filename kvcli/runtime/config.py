"""`ModelConfig`: every size, layer kind and RoPE parameter of a model, from whichever container it was read.

Pure data: no torch, no paths, no user options. `from_gguf` is the only reader so far; the field names of GGUF
metadata are those of the `gguf` package's constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.errors import ModelError

FULL, SLIDING, LATENT, RECURRENT = "full", "sliding", "latent", "recurrent"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer (arXiv 2104.09864), applied to dims [0, dim) in half-split order.

    `scaling` is "none", "linear" (positions divided by `factor`) or "llama3" (per-frequency factors, given by the
    file's `rope_freqs` tensor).
    """

    base: float
    dim: int
    scaling: str = "none"
    factor: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """What one layer keeps in the cache and how it looks at it.

    `dim_k`/`dim_v` are per KV head. A latent (MLA) layer has kv_heads 1, dim_k = lora rank + rope dims, dim_v 0.
    `window` counts the tokens a sliding layer sees, the query included; 0 = all. A recurrent layer keeps
    `state_bytes` per sequence and no rows. `shares_kv_with` names the layer whose rows this one reads.
    """

    kind: str
    kv_heads: int
    dim_k: int
    dim_v: int
    window: int = 0
    rope: RopeConfig | None = None
    state_bytes: int = 0
    shares_kv_with: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only transformer. All dims in elements.

    `vocab_size` counts tokens; an embedding may have more rows, which pad it and belong to no token.
    """

    arch: str
    name: str
    vocab_size: int
    d_model: int
    d_ff: int
    n_heads: int
    context_length: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    attn_scale: float  # multiplies q.k
    embed_scale: float = 1.0
    attn_softcap: float = 0.0
    n_experts: int = 0
    n_experts_used: int = 0

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_kind(self) -> str:
        """MHA, GQA, MQA or MLA, judged by the first layer that keeps rows."""
        for layer in self.layers:
            if layer.kind == LATENT:
                return "MLA"
            if layer.kind != RECURRENT:
                if layer.kv_heads == self.n_heads:
                    return "MHA"
                return "MQA" if layer.kv_heads == 1 else "GQA"
        return "none"


class _Keys:
    """Typed access to GGUF metadata under one architecture prefix; a missing or odd value names its key."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata, self.arch = metadata, arch

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.arch}.{key}", default)

    def number(self, key: str, default: float | None = None, positive: bool = True) -> float:
        value = self.get(key, default)
        full = f"{self.arch}.{key}"
        if value is None:
            raise ModelError(f"the GGUF file lacks the key {full}", "the file is incomplete; convert it again")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (positive and not value > 0):
            raise ModelError(f"the GGUF key {full} has the value {value!r}, a positive number is needed")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = 1 << 31) -> int:
        value = self.number(key, default)
        if value != int(value) or value > limit:
            raise ModelError(f"the GGUF key {self.arch}.{key} has the value {value!r}, out of range")
        return int(value)


def from_gguf(metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Build the config of a GGUF file.

    `tensor_shapes` maps names to shapes in row-major order (rows, columns), as numpy would give them.
    Raises ModelError naming the missing key, or the architecture if `kv` does not know it.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(
            "the GGUF file lacks the key general.architecture", "it may be an adapter or a vocabulary file"
        )
    reader = _READERS.get(arch)
    if reader is None:
        known = ", ".join(sorted(_READERS))
        raise ModelError(f"unknown architecture '{arch}'", f"kv runs: {known}")
    return reader(metadata, tensor_shapes)


def _common(keys: _Keys, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    n_heads = keys.integer("attention.head_count", limit=4096)
    d_model = keys.integer("embedding_length", limit=1 << 20)
    embedding = shapes.get("token_embd.weight")
    rows = embedding[0] if embedding else keys.integer("vocab_size")
    return {
        "arch": keys.arch,
        "name": str(metadata.get("general.name") or keys.arch),
        "vocab_size": tokens_with_rows(metadata, rows),
        "d_model": d_model,
        "d_ff": keys.integer("feed_forward_length", limit=1 << 22),
        "n_heads": n_heads,
        "context_length": keys.integer("context_length"),
        "norm_eps": float(keys.number("attention.layer_norm_rms_epsilon")),
    }


def tokens_with_rows(metadata: Mapping[str, Any], rows: int) -> int:
    """How many of an embedding's rows belong to a token of the file's vocabulary; all where it has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return min(rows, len(tokens)) if isinstance(tokens, Sequence) and len(tokens) else rows


def _heads(keys: _Keys, common: dict[str, Any]) -> tuple[int, int, int]:
    """(kv heads, dim_k, dim_v) where all layers agree."""
    kv_heads = keys.integer("attention.head_count_kv", common["n_heads"], limit=4096)
    default = common["d_model"] // common["n_heads"]
    dim_k = keys.integer("attention.key_length", default, limit=4096)
    dim_v = keys.integer("attention.value_length", default, limit=4096)
    if common["n_heads"] % kv_heads:
        raise ModelError(f"{common['n_heads']} query heads are not a multiple of {kv_heads} KV heads")
    return kv_heads, dim_k, dim_v


def _rope(keys: _Keys, shapes: Mapping[str, tuple[int, ...]], dim: int) -> RopeConfig:
    scaling = str(keys.get("rope.scaling.type", "none") or "none")
    factor = float(keys.number("rope.scaling.factor", 1.0))
    if "rope_freqs.weight" in shapes:
        scaling = "llama3"
    if scaling not in ("none", "linear", "llama3"):
        raise ModelError(f"RoPE scaling '{scaling}' is not supported", "supported: none, linear, llama3 factors")
    rope_dim = keys.integer("rope.dimension_count", dim, limit=4096)
    if rope_dim > dim or rope_dim % 2:
        raise ModelError(f"the GGUF key {keys.arch}.rope.dimension_count is {rope_dim}, head dim is {dim}")
    return RopeConfig(float(keys.number("rope.freq_base", 10000.0)), rope_dim, scaling, factor)


def _n_layers(keys: _Keys) -> int:
    return keys.integer("block_count", limit=4096)


def _llama(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    keys = _Keys(metadata, "llama")
    common = _common(keys, metadata, shapes)
    if keys.get("expert_count"):
        raise ModelError("mixture-of-experts llama files are not supported yet")
    kv_heads, dim_k, dim_v = _heads(keys, common)
    rope = _rope(keys, shapes, dim_k)
    layer = LayerConfig(FULL, kv_heads, dim_k, dim_v, 0, rope)
    return ModelConfig(**common, layers=(layer,) * _n_layers(keys), attn_scale=dim_k**-0.5)


def _gemma3(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    keys = _Keys(metadata, "gemma3")
    common = _common(keys, metadata, shapes)
    kv_heads, dim_k, dim_v = _heads(keys, common)
    window = keys.integer("attention.sliding_window")
    rope = _rope(keys, shapes, dim_k)
    # Files may lack both keys: the published models use five local layers to one global, and base 10,000 locally.
    local_rope = RopeConfig(float(keys.number("rope.freq_base_swa", 10000.0)), rope.dim)
    pattern = keys.get("attention.sliding_window_pattern")
    n_layers = _n_layers(keys)
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        local = [bool(x) for x in pattern]
        if len(local) != n_layers:
            raise ModelError(f"gemma3.attention.sliding_window_pattern names {len(local)} layers of {n_layers}")
    else:
        every = keys.integer("attention.sliding_window_pattern", 6, limit=4096)
        local = [(i + 1) % every != 0 for i in range(n_layers)]
    full = LayerConfig(FULL, kv_heads, dim_k, dim_v, 0, rope)
    sliding = LayerConfig(SLIDING, kv_heads, dim_k, dim_v, window, local_rope)
    # The 27B model scales queries by d_model / n_heads instead of the head dim.
    scale_dim = common["d_model"] // common["n_heads"] if n_layers == 62 else dim_k
    return ModelConfig(
        **common,
        layers=tuple(sliding if is_local else full for is_local in local),
        attn_scale=scale_dim**-0.5,
        embed_scale=common["d_model"] ** 0.5,
    )


_READERS = {"llama": _llama, "gemma3": _gemma3}
