"""Model shapes from flags and from recipes, for planning: what the cache and the workspace depend on, no
more.

The configs made here have no RoPE and are not for running. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvcli.errors import UsageError
from kvcli.routing import Routing
from kvcli.runtime.config import (
    FULL,
    LATENT,
    RECURRENT,
    SLIDING,
    WINDOWED,
    Block,
    Experts,
    LayerConfig,
    Mamba,
    ModelConfig,
    ShortConv,
)
from kvcli.runtime.headers import families

_MAX_LAYERS = 4096
_LATENT_HEAD_DIM = 128  # of keys (without RoPE) and values in every published model with latent attention


@dataclass(frozen=True)
class Given:
    """Sizes given by flags; None = not given. A flag is the field's name with dashes."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    dim_k: int | None = None
    dim_v: int | None = None
    kv_lora_rank: int | None = None
    rope_dim: int | None = None
    swa_layers: int | None = None
    swa_window: int | None = None
    vocab: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    params: int | None = None
    bpw: float | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for a size that is not positive; 0 layers may slide."""
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in ("swa_layers", "dim_v") else 1
            if value is not None and not (least <= value < 1 << 45 and (value > 0 or least == 0)):
                raise UsageError(f"{flag_of(each.name)} must be a positive number, not {value}")

    @property
    def shapes(self) -> bool:
        """Whether a flag speaks of the model's shape, not only of its weights' number or size."""
        return any(getattr(self, f.name) is not None for f in fields(self) if f.name not in ("params", "bpw"))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def planning_config(arch: str, name: str, layers: Sequence[LayerConfig], block: Block, **sizes: Any) -> ModelConfig:
    """A config for planning. `sizes`: vocab_size, d_model, d_ff, n_heads, context_length, experts..."""
    dim = next((layer.dim_k for layer in layers if layer.dim_k), 1)
    return ModelConfig(
        arch=arch, name=name, norm_eps=1e-5, layers=tuple(layers), attn_scale=dim**-0.5, block=block, **sizes
    )


def config_by_hand(given: Given) -> ModelConfig:
    """A shape from flags alone; sizes that only the workspace needs are 0 if not given. Raises UsageError."""
    n_layers = _need(given, "layers")
    if given.kv_lora_rank is not None:
        layer, heads = _latent(given, given.rope_dim or 0), given.heads or 0
    else:
        kv_heads = given.kv_heads or given.heads
        if kv_heads is None:
            raise UsageError("a shape by hand needs --kv-heads", "also --layers and --head-dim; --heads for a plan")
        heads = given.heads or 0
        dim_k = given.dim_k or (given.hidden // heads if given.hidden and heads else None)
        if dim_k is None:
            raise UsageError("a shape by hand needs --head-dim", "or --dim-k and --dim-v where they differ")
        layer = LayerConfig(FULL, kv_heads, dim_k, dim_k if given.dim_v is None else given.dim_v)
    if heads and heads % layer.kv_heads:
        raise UsageError(f"{heads} query heads are not a multiple of {layer.kv_heads} KV heads")
    if n_layers > _MAX_LAYERS:
        raise UsageError(f"--layers must be at most {_MAX_LAYERS:,}, not {n_layers:,}")
    layers = _slide([layer] * n_layers, given)
    sizes = {"vocab_size": given.vocab or 0, "d_model": given.hidden or 0, "d_ff": given.ffn or 0}
    return planning_config("by hand", "by hand", layers, Block(), **sizes, n_heads=heads, context_length=0)


def override(config: ModelConfig, given: Given) -> ModelConfig:
    """The config with what the flags say instead of its own. Raises UsageError where that cannot be."""
    if not given.shapes:
        return config
    layers = list(config.layers)
    if given.layers is not None and given.layers > _MAX_LAYERS:
        raise UsageError(f"--layers must be at most {_MAX_LAYERS:,}, not {given.layers:,}")
    if given.layers is not None:
        layers = [layers[i % len(layers)] for i in range(given.layers)]
    layers = _slide([_overridden(layer, given) for layer in layers], given)
    heads = given.heads or config.n_heads
    if any(heads % layer.kv_heads for layer in layers if layer.kind != RECURRENT):
        raise UsageError(f"{heads} query heads are not a multiple of the KV heads")
    return replace(
        config,
        layers=tuple(layers),
        n_heads=heads,
        vocab_size=given.vocab or config.vocab_size,
        d_model=given.hidden or config.d_model,
        d_ff=given.ffn or config.d_ff,
    )


def _overridden(layer: LayerConfig, given: Given) -> LayerConfig:
    if layer.kind == RECURRENT:
        return layer
    if given.kv_lora_rank is not None or (layer.kind == LATENT and given.rope_dim is not None):
        if given.kv_lora_rank is None or given.rope_dim is None:
            raise UsageError("a latent cache needs both --kv-lora-rank and --rope-dim")
        return _latent(given, given.rope_dim)
    return replace(
        layer,
        kv_heads=given.kv_heads or layer.kv_heads,
        dim_k=given.dim_k or layer.dim_k,
        dim_v=layer.dim_v if given.dim_v is None else given.dim_v,
    )


def _latent(given: Given, rope_dim: int) -> LayerConfig:
    assert given.kv_lora_rank is not None
    return LayerConfig(LATENT, 1, rope_dim, given.kv_lora_rank)


def _slide(layers: list[LayerConfig], given: Given) -> list[LayerConfig]:
    """The layers with --swa-window and --swa-layers applied; which layers slide makes no difference."""
    if given.swa_layers is None and given.swa_window is None:
        return layers
    rows = [i for i, layer in enumerate(layers) if layer.kind in (FULL, *WINDOWED)]
    sliding = [i for i in rows if layers[i].kind in WINDOWED]
    if given.swa_layers is not None:
        if given.swa_layers > len(rows):
            raise UsageError(
                f"--swa-layers must be at most {len(rows)}, the layers of the model, not {given.swa_layers}"
            )
        chosen = rows[: given.swa_layers]
    else:
        chosen = sliding or rows
    window = given.swa_window or (layers[sliding[0]].window if sliding else 0)
    if chosen and not window:
        raise UsageError("--swa-layers needs --swa-window")
    result = list(layers)
    for i in rows:
        slides, kind = i in chosen, layers[i].kind if layers[i].kind in WINDOWED else SLIDING
        result[i] = replace(layers[i], kind=kind if slides else FULL, window=window if slides else 0)
    return result


def _need(given: Given, name: str) -> int:
    value = getattr(given, name)
    if value is None:
        raise UsageError(f"a shape by hand needs {flag_of(name)}", "or name a model: kv estimate MODEL")
    return value


def config_from_recipe(name: str, shape: Mapping[str, Any]) -> ModelConfig:
    """The config of a recipe's checked [shape] table."""
    layers = [layer for group in shape["groups"] for layer in [_of_group(shape, group)] * group["layers"]]
    moe = shape.get("moe", {})
    experts = _experts(shape, moe) if moe else None
    return planning_config(
        shape["arch"],
        name,
        layers,
        families.of_gguf(shape["arch"]).block,
        vocab_size=shape["vocab"],
        d_model=shape["hidden"],
        d_ff=shape["ffn"],
        n_heads=shape["heads"],
        context_length=shape["context"],
        experts=experts,
    )


def _of_group(shape: Mapping[str, Any], group: Mapping[str, Any]) -> LayerConfig:
    """A layer of a group."""
    kind, mixer = group["kind"], None
    if kind == "state" or group.get("state"):
        sizes = {key: value for key, value in shape["state"].items() if key != "kind"}
        mixer = (Mamba if shape["state"]["kind"] == "mamba" else ShortConv)(**sizes)
    state_bytes = 0 if mixer is None else mixer.state_bytes(shape["hidden"])
    if kind in ("state", "none"):
        return LayerConfig(RECURRENT, 0, 0, 0, state_bytes=state_bytes, mixer=mixer)
    dims = (group["rope_dim"], group["kv_lora_rank"]) if kind == LATENT else (group["dim_k"], group["dim_v"])
    window = group.get("window", 0)
    return LayerConfig(kind, group["kv_heads"], *dims, window, state_bytes=state_bytes, mixer=mixer)


def _experts(shape: Mapping[str, Any], moe: Mapping[str, Any]) -> Experts:
    dense = shape["layers"] - _sparse_layers(shape, moe, _expert_params(shape, moe))
    return Experts(Routing(moe["experts"], moe["experts_used"]), moe["expert_ffn"], moe["shared_ffn"], dense)


def recipe_params_read(shape: Mapping[str, Any]) -> int:
    """Parameters that one token reads: without the input embedding (unless tied) and the experts not used."""
    read = shape["params"]
    if not shape["tied_embeddings"]:
        read -= shape["vocab"] * shape["hidden"]
    moe = shape.get("moe")
    if moe:
        expert = _expert_params(shape, moe)
        read -= (moe["experts"] - moe["experts_used"]) * expert * _sparse_layers(shape, moe, expert)
    return read


def _expert_params(shape: Mapping[str, Any], moe: Mapping[str, Any]) -> int:
    matrices = 3 if families.of_gguf(shape["arch"]).block.gated else 2
    return matrices * int(shape["hidden"]) * int(moe["expert_ffn"])


def _sparse_layers(shape: Mapping[str, Any], moe: Mapping[str, Any], expert: int) -> int:
    """Layers with experts: those that are known, or as many as the parameters allow besides embeddings, attention and
    dense layers."""
    if "layers" in moe:
        return int(moe["layers"])
    hidden, heads = shape["hidden"], shape["heads"]
    rest = shape["params"] - shape["vocab"] * hidden * (1 if shape["tied_embeddings"] else 2)
    for group in shape["groups"]:
        if group["kind"] == LATENT:  # without the query's projections, whose rank is not listed
            weights = heads * _LATENT_HEAD_DIM * (hidden + 2 * group["kv_lora_rank"])
        else:
            weights = hidden * (2 * heads * group["dim_k"] + group["kv_heads"] * (group["dim_k"] + group["dim_v"]))
        rest -= group["layers"] * weights
    dense, sparse = 3 * hidden * shape["ffn"], moe["experts"] * expert + 3 * hidden * moe["shared_ffn"]
    return max(n for n in range(shape["layers"] + 1) if n == 0 or n * sparse + (shape["layers"] - n) * dense <= rest)
