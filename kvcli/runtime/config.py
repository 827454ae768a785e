"""`ModelConfig`: every size, layer kind and RoPE parameter of a model, from whichever container it was read.

Pure data: no torch, no paths, no user options. `from_gguf` has one reader an architecture; each obeys the keys that
change what is computed, and those it does not read are refused (`ggufkeys.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.formats.ggufkeys import Keys

FULL, SLIDING, LATENT, RECURRENT = "full", "sliding", "latent", "recurrent"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer (arXiv 2104.09864), applied to dims [0, dim) in half-split order.

    Positions are divided by `factor`. `scaling` is "none", "linear" (that alone) or "llama3" (each frequency is also
    divided by the file's own, its `rope_freqs` tensor).
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


# Values of general.type of files that are no models.
_OTHER_FILES = {
    "adapter": "a LoRA adapter", "mmproj": "a projector of images or sound", "imatrix": "an importance matrix",
}  # fmt: skip


def check_is_model(metadata: Mapping[str, Any]) -> str:
    """The architecture of a GGUF file. Raises ModelError for a file that is no model, or does not name it."""
    arch, kind = metadata.get("general.architecture"), metadata.get("general.type")
    if kind in _OTHER_FILES:
        belongs = f" for {arch} models" if isinstance(arch, str) and kind == "adapter" else ""
        raise ModelError(f"the file holds {_OTHER_FILES[kind]}{belongs}, not a model", "kv runs whole models only")
    if not isinstance(arch, str):
        raise ModelError("the GGUF file lacks the key general.architecture", "the file is incomplete; convert it again")
    return arch


def from_gguf(metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Build the config of a GGUF file.

    `tensor_shapes` maps names to shapes in row-major order (rows, columns), as numpy would give them.
    Raises ModelError naming the missing key, or the architecture if `kv` does not know it.
    """
    arch = check_is_model(metadata)
    reader = _READERS.get(arch)
    if reader is None:
        raise ModelError(f"kv does not run the architecture '{arch}'", f"it runs {' and '.join(RUNNABLE)}")
    keys = Keys(metadata, arch)
    config = reader(keys, tensor_shapes)
    keys.expect_only_known()
    return config


def _common(keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    n_heads = keys.integer("attention.head_count", limit=4096)
    d_model = keys.integer("embedding_length", limit=1 << 20)
    embedding = shapes.get("token_embd.weight")
    rows = embedding[0] if embedding else keys.integer("vocab_size")
    return {
        "arch": keys.arch,
        "name": str(keys.metadata.get("general.name") or keys.arch),
        "vocab_size": tokens_with_rows(keys.metadata, rows),
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


def _rows(keys: Keys, common: dict[str, Any]) -> LayerConfig:
    """A layer that sees everything, without RoPE; all layers agree but for windows and RoPE."""
    kv_heads = keys.integer("attention.head_count_kv", common["n_heads"], limit=4096)
    default = common["d_model"] // common["n_heads"]
    dim_k = keys.integer("attention.key_length", default, limit=4096)
    dim_v = keys.integer("attention.value_length", default, limit=4096)
    keys.expect("attention.key_length_swa", dim_k)
    keys.expect("attention.value_length_swa", dim_v)
    if common["n_heads"] % kv_heads:
        raise ModelError(f"{common['n_heads']} query heads are not a multiple of {kv_heads} KV heads")
    return LayerConfig(FULL, kv_heads, dim_k, dim_v)


def _rope(keys: Keys, shapes: Mapping[str, tuple[int, ...]], dim: int) -> RopeConfig:
    rope_dim = keys.integer("rope.dimension_count", dim, limit=4096)
    if rope_dim > dim or rope_dim % 2:
        raise ModelError(f"the GGUF key {keys.arch}.rope.dimension_count is {rope_dim}, head dim is {dim}")
    keys.expect("rope.dimension_count_swa", rope_dim)
    factor = _linear_factor(keys)
    scaling = "llama3" if "rope_freqs.weight" in shapes else "none" if factor == 1 else "linear"
    return RopeConfig(float(keys.number("rope.freq_base", 10000.0)), rope_dim, scaling, factor)


def _linear_factor(keys: Keys) -> float:
    """What positions are divided by; older files name it rope.scale_linear. Without a type the scaling is linear."""
    old = float(keys.number("rope.scale_linear", 1.0, zero=True)) or 1.0
    factor = float(keys.number("rope.scaling.factor", old, zero=True)) or 1.0
    if factor != old != 1:
        raise ModelError(
            f"{keys.arch}.rope.scale_linear is {old:g}, and {keys.arch}.rope.scaling.factor is {factor:g}",
            "they mean the same and cannot both hold",
        )
    kind = keys.get("rope.scaling.type", "linear")
    if kind == "none":
        return 1.0
    if factor != 1:
        keys.expect("rope.scaling.type", "linear")
    return factor


def _slides(keys: Keys, n_layers: int, every: int) -> list[bool]:
    """Which layers have a sliding window: those that the file names, else all but one in `every` (0 = all)."""
    pattern = keys.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        if len(pattern) != n_layers:
            raise ModelError(
                f"{keys.arch}.attention.sliding_window_pattern must name {n_layers} layers, not {len(pattern)}"
            )
        return [bool(x) for x in pattern]
    every = keys.integer("attention.sliding_window_pattern", every, limit=4096, zero=True)
    return [every == 0 or (i + 1) % every != 0 for i in range(n_layers)]


def _llama(keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    common = _common(keys, shapes)
    full, n_layers = _rows(keys, common), keys.integer("block_count", limit=4096)
    rope = _rope(keys, shapes, full.dim_k)
    local_rope = replace(rope, base=float(keys.number("rope.freq_base_swa", rope.base)))
    window = keys.integer("attention.sliding_window", 0, zero=True)
    local = [slides and window > 0 for slides in _slides(keys, n_layers, every=0)]
    full = replace(full, rope=rope)
    sliding = replace(full, kind=SLIDING, window=window, rope=local_rope)
    return ModelConfig(
        **common,
        layers=tuple(sliding if is_local else full for is_local in local),
        attn_scale=float(keys.number("attention.scale", 0.0, zero=True)) or full.dim_k**-0.5,
        embed_scale=float(keys.number("embedding_scale", 0.0, zero=True)) or 1.0,
        attn_softcap=float(keys.number("attn_logit_softcapping", 0.0, zero=True)),
    )


def _gemma3(keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    common = _common(keys, shapes)
    full, n_layers = _rows(keys, common), keys.integer("block_count", limit=4096)
    rope = _rope(keys, shapes, full.dim_k)
    # Files may lack both keys: the published models use five local layers to one global, and base 10,000 locally.
    local_rope = RopeConfig(float(keys.number("rope.freq_base_swa", 10000.0)), rope.dim)
    local = _slides(keys, n_layers, every=6)
    full = replace(full, rope=rope)
    sliding = replace(full, kind=SLIDING, window=keys.integer("attention.sliding_window"), rope=local_rope)
    # The 27B model scales queries by d_model / n_heads instead of the head dim.
    scale_dim = common["d_model"] // common["n_heads"] if n_layers == 62 else full.dim_k
    return ModelConfig(
        **common,
        layers=tuple(sliding if is_local else full for is_local in local),
        attn_scale=float(keys.number("attention.scale", 0.0, zero=True)) or scale_dim**-0.5,
        embed_scale=common["d_model"] ** 0.5,
        attn_softcap=float(keys.number("attn_logit_softcapping", 0.0, zero=True)),
    )


_READERS = {"llama": _llama, "gemma3": _gemma3}
RUNNABLE = tuple(sorted(_READERS))  # the architectures that kv runs
