"""`Architecture`: a family of models as data, and how their GGUF files are read. No torch.

A key that changes what is computed is obeyed, and one that is not read is refused (see `formats/ggufkeys.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.config import FULL, SLIDING, Block, LayerConfig, ModelConfig, RopeConfig
from kvcli.runtime.formats.ggufkeys import Keys

_WIDEST = 1 << 20  # d_model
Shapes = Mapping[str, tuple[int, ...]]  # of tensors by name, in row-major order (rows, columns) as numpy has them


@dataclass(frozen=True)
class Windows:
    """Sliding windows as far as files do not name them.

    `every`: one layer in so many sees everything, which makes a window necessary; 0 = no layer does if there is a
    window. `size`: of the window, 0 = only the file knows. `rope_base`: of the layers that slide, whose RoPE is not
    scaled then; None = as in the others.
    """

    every: int = 0
    size: int = 0
    rope_base: float | None = None


@dataclass(frozen=True)
class Architecture:
    """All that kv knows of one family of decoder-only transformers.

    `gguf`: values of `general.architecture`; `hf`: values of `model_type` in config.json. `embed_scale`: what token
    embeddings are multiplied by, of d_model; None = what the file says. `query_dim`: scores are divided by its square
    root where the file has no scale; None = the head dim.
    """

    gguf: tuple[str, ...]
    hf: tuple[str, ...] = ()
    block: Block = field(default_factory=Block)
    windows: Windows = Windows()
    embed_scale: Callable[[int], float] | None = None
    query_dim: Callable[[ModelConfig], int] | None = None

    def read(self, metadata: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
        """The config of a GGUF file. Raises ModelError naming a key that is missing, odd or cannot be obeyed."""
        keys = Keys(metadata, metadata["general.architecture"])
        config = self._config(keys, shapes)
        keys.expect_only_known()
        return config

    def _config(self, keys: Keys, shapes: Shapes) -> ModelConfig:
        n_heads = keys.integer("attention.head_count", limit=4096)
        d_model = keys.integer("embedding_length", limit=_WIDEST)
        embedding = shapes.get("token_embd.weight")
        config = ModelConfig(
            arch=keys.arch,
            name=str(keys.metadata.get("general.name") or keys.arch),
            vocab_size=tokens_with_rows(keys.metadata, embedding[0] if embedding else keys.integer("vocab_size")),
            d_model=d_model,
            d_ff=keys.integer("feed_forward_length", limit=4 * _WIDEST),
            n_heads=n_heads,
            context_length=keys.integer("context_length"),
            norm_eps=float(keys.number("attention.layer_norm_rms_epsilon")),
            layers=self._layers(keys, shapes, n_heads, d_model),
            attn_scale=0.0,
            attn_softcap=float(keys.number("attn_logit_softcapping", 0.0, zero=True)),
            block=self.block,
        )
        if self.embed_scale:
            scale = self.embed_scale(d_model)
        else:
            scale = float(keys.number("embedding_scale", 0.0, zero=True)) or 1.0
        query_dim = self.query_dim(config) if self.query_dim else config.layers[0].dim_k
        attn_scale = float(keys.number("attention.scale", 0.0, zero=True)) or query_dim**-0.5
        return replace(config, embed_scale=scale, attn_scale=attn_scale)

    def _layers(self, keys: Keys, shapes: Shapes, n_heads: int, d_model: int) -> tuple[LayerConfig, ...]:
        """All agree but for windows and RoPE."""
        full = _rows(keys, n_heads, d_model // n_heads)
        rope, swa = _rope(keys, shapes, full.dim_k), self.windows
        if swa.rope_base is None:
            local_rope = replace(rope, base=float(keys.number("rope.freq_base_swa", rope.base)))
        else:
            local_rope = RopeConfig(float(keys.number("rope.freq_base_swa", swa.rope_base)), rope.dim)
        window = keys.integer("attention.sliding_window", swa.size or (None if swa.every else 0), zero=not swa.every)
        full, local = replace(full, rope=rope), replace(full, kind=SLIDING, window=window, rope=local_rope)
        slides = _slides(keys, keys.integer("block_count", limit=4096), swa.every)
        return tuple(local if each and window else full for each in slides)


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


def tokens_with_rows(metadata: Mapping[str, Any], rows: int) -> int:
    """How many of an embedding's rows belong to a token of the file's vocabulary; all where it has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return min(rows, len(tokens)) if isinstance(tokens, Sequence) and len(tokens) else rows


def _rows(keys: Keys, n_heads: int, head_dim: int) -> LayerConfig:
    """A layer that sees everything, without RoPE."""
    kv_heads = keys.integer("attention.head_count_kv", n_heads, limit=4096)
    dim_k = keys.integer("attention.key_length", head_dim, limit=4096)
    dim_v = keys.integer("attention.value_length", head_dim, limit=4096)
    keys.expect("attention.key_length_swa", dim_k)
    keys.expect("attention.value_length_swa", dim_v)
    if n_heads % kv_heads:
        raise ModelError(f"{n_heads} query heads are not a multiple of {kv_heads} KV heads")
    return LayerConfig(FULL, kv_heads, dim_k, dim_v)


def _rope(keys: Keys, shapes: Shapes, dim: int) -> RopeConfig:
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
