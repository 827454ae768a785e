"""`Architecture`: a family of models as data, and how their GGUF files are read. No torch.

A key that changes what is computed is obeyed, and one that is not read is refused (see `formats/ggufkeys.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.config import (
    CHUNKED,
    FULL,
    LATENT,
    LAYER,
    RECURRENT,
    SLIDING,
    AltUp,
    Block,
    LayerConfig,
    Mixer,
    ModelConfig,
    RopeConfig,
    Temperature,
)
from kvcli.runtime.formats.ggufkeys import OTHER_MODEL, Keys
from kvcli.runtime.model.expertkeys import Mixture, read_experts
from kvcli.runtime.model.latentkeys import read_latents, score_factor
from kvcli.runtime.model.mixerkeys import MixerReader
from kvcli.runtime.model.ropekeys import read_rope
from kvcli.runtime.text.placeholders import count_tokens

_WIDEST = 1 << 20  # d_model
_STEP = 8  # dims: kernels read rows in such steps, and a dim more that does not turn is no other score
Shapes = Mapping[str, tuple[int, ...]]  # of tensors by name, in row-major order (rows, columns) as numpy has them


@dataclass(frozen=True)
class Windows:
    """Sliding windows as far as files do not name them.

    `every`: one layer in so many sees everything, which makes a window necessary unless it is `optional`; 0 = no layer
    does if there is a window. `size`: of the window, 0 = only the file knows. `rope_base`: of the layers that slide,
    None = as in the others. `scaled`: their RoPE is scaled as in the others. `full_rope`: beside them those that see
    everything have RoPE. `chunked`: instead of windows there are chunks (see `LayerConfig`).
    """

    every: int = 0
    size: int = 0
    optional: bool = False
    rope_base: float | None = None
    scaled: bool = True
    full_rope: bool = True
    chunked: bool = False


@dataclass(frozen=True)
class Architecture:
    """All that kv knows of one family of decoder-only transformers.

    `gguf`: values of `general.architecture`; `hf`: values of `model_type` in config.json. `embed_scale`: what token
    embeddings are multiplied by, of d_model; None = what the file says. `query_dim`: scores are divided by its square
    root where the file has no scale; None = the head dim. `logit_scale`: what logits are multiplied by, of the key of
    that name; None = files have none. `no_rope_every`: one layer in so many has no RoPE. `rope_switch`: a key that says
    whether there is RoPE at all, and `rope_usual` where files do not say. `tempered`: queries may have a temperature
    that grows with their position; `temperature`: those of layers without RoPE have, this one where files do not say.
    `whole_ramp`: see `read_rope`. `tokens_each`: see `ModelConfig.d_token`. `altup`: see `AltUp`; in such models gates
    of some layers are cut off. `qk_norm_optional`: files may lack the norms of q and k. `qk_norm_but`: models with so
    many experts have none. `latents`: attention is over latents. `experts`: files may have them. `mixers`: reads which
    layers keep a state, and what they have in the place of attention, or `beside` it. `turned`: RoPE turns such a share
    of a head where values are keys (see `LayerConfig.turned`). `of_images`: keys that say nothing of text.
    """

    gguf: tuple[str, ...]
    hf: tuple[str, ...] = ()
    block: Block = field(default_factory=Block)
    windows: Windows = Windows()
    embed_scale: Callable[[int], float] | None = None
    query_dim: Callable[[ModelConfig], int] | None = None
    logit_scale: Callable[[float], float] | None = None
    no_rope_every: int = 0
    rope_switch: str = ""
    rope_usual: bool = True
    tempered: bool = False
    temperature: Temperature | None = None
    whole_ramp: bool = True
    tokens_each: bool = False
    altup: bool = False
    latents: bool = False
    qk_norm_optional: bool = False
    qk_norm_but: int = 0
    experts: Mixture | None = None
    mixers: MixerReader | None = None
    beside: bool = False
    turned: float = 0.0
    of_images: tuple[str, ...] = ()

    def read(self, metadata: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
        """The config of a GGUF file. Raises ModelError naming a key that is missing, odd or cannot be obeyed."""
        keys = Keys(metadata, metadata["general.architecture"])
        config = self._config(keys, shapes)
        for key in self.of_images:
            keys.get(key)
        keys.expect_only_known()
        return config

    def _config(self, keys: Keys, shapes: Shapes) -> ModelConfig:
        n_heads = keys.integer("attention.head_count", limit=4096)
        d_model = keys.integer("embedding_length", limit=_WIDEST)
        embedding = shapes.get("token_embd.weight")
        layers, n_run = self._layers(keys, shapes, n_heads, d_model), _run(keys)
        norm = "layer_norm" if self.block.norm == LAYER else "layer_norm_rms"
        config = ModelConfig(
            arch=keys.arch,
            name=str(keys.metadata.get("general.name") or keys.arch),
            vocab_size=tokens_with_rows(keys.metadata, embedding[0] if embedding else keys.integer("vocab_size")),
            d_model=d_model,
            d_ff=max(self._widths(keys, keys.integer("block_count", limit=4096))),
            n_heads=n_heads,
            context_length=keys.integer("context_length"),
            norm_eps=float(keys.number(f"attention.{norm}_epsilon")),
            layers=layers[:n_run],
            attn_scale=0.0,
            attn_softcap=float(keys.number("attn_logit_softcapping", 0.0, zero=True)),
            residual_scale=float(keys.number("residual_scale", 1.0, zero=True)) or 1.0,
            logit_softcap=float(keys.number("final_logit_softcapping", 0.0, zero=True)),
            d_token=keys.integer("embedding_length_per_layer_input", 0, limit=_WIDEST, zero=True)
            if self.tokens_each
            else 0,
            ahead=layers[n_run:],
            altup=_altup(keys) if self.altup else None,
            latents=read_latents(keys)[0] if self.latents else None,
            block=self._block(shapes),
        )
        if self.embed_scale:
            scale = self.embed_scale(d_model)
        else:
            scale = float(keys.number("embedding_scale", 0.0, zero=True)) or 1.0
        if self.experts:
            config = replace(config, experts=read_experts(keys, shapes, self.experts, config))
        if config.experts and config.experts.routing.experts == self.qk_norm_but:
            config = replace(config, block=replace(config.block, qk_norm=""))
        query_dim = self.query_dim(config) if self.query_dim else _head_dim(config)
        if config.latents:
            query_dim += config.latents.plain
        attn_scale = float(keys.number("attention.scale", 0.0, zero=True)) or query_dim**-0.5
        if config.latents:
            attn_scale *= score_factor(keys)
        logit_scale = self.logit_scale(float(keys.number("logit_scale"))) if self.logit_scale else 1.0
        return replace(config, embed_scale=scale, attn_scale=attn_scale, logit_scale=logit_scale)

    def _block(self, shapes: Shapes) -> Block:
        without = self.qk_norm_optional and "blk.0.attn_q_norm.weight" not in shapes
        return replace(self.block, qk_norm="") if without else self.block

    def _layers(self, keys: Keys, shapes: Shapes, n_heads: int, d_model: int) -> tuple[LayerConfig, ...]:
        """Of all layers of the file, which agree but for windows and RoPE, and what files list by layer."""
        n = keys.integer("block_count", limit=4096)
        if self.latents:
            return self._latent_layers(keys, shapes, n)
        wide, narrow = _dims(keys, d_model // n_heads)
        rope, local_rope = self._ropes(keys, shapes, wide[0], narrow[0])
        swa, needed = self.windows, self.windows.every and not self.windows.optional
        window = keys.integer("attention.sliding_window", swa.size or (None if needed else 0), zero=not needed)
        full = LayerConfig(FULL, 0, *wide, rope=rope if swa.full_rope or not window else None)
        local = LayerConfig(CHUNKED if swa.chunked else SLIDING, 0, *narrow, window=window, rope=local_rope)
        kinds = [local if slides and window else full for slides in _slides(keys, n, swa.every)]
        heads = _kv_heads(keys, n, n_heads, none=self.mixers is not None)
        widths = self._widths(keys, n)
        widths, bare = widths if len(set(widths)) > 1 else [0] * n, self.no_rope_every
        ropes = [None if bare and not (i + 1) % bare else kind.rope for i, kind in enumerate(kinds)]
        layers = [
            replace(
                kinds[i], kv_heads=heads[i], d_ff=widths[i], rope=rope, temperature=self._temperature(keys, rope)
            )
            for i, rope in enumerate(ropes)
        ]  # fmt: skip
        if self.mixers:
            states = zip(layers, self.mixers(keys, n), strict=True)
            layers = [self._stateful(x, mixer, d_model) for x, mixer in states]
        if self.altup:
            layers = [replace(x, cutoff=y) for x, y in zip(layers, _cutoffs(keys, n), strict=True)]
        if self.turned:
            both = bool(keys.get("attention.keys_as_values", False))
            layers = [self._with_turned(x, f"blk.{i}.attn_", shapes, both) for i, x in enumerate(layers)]
        first = n - keys.integer("attention.shared_kv_layers", 0, limit=n - 1, zero=True)
        return tuple(share_last(layers, first))

    def _widths(self, keys: Keys, n: int) -> list[int]:
        """Of feed-forward parts, by layer; 0 = it has none."""
        return keys.each("feed_forward_length", n, limit=4 * _WIDEST, zero=self.block.alone)

    def _stateful(self, layer: LayerConfig, mixer: Mixer | None, d_model: int) -> LayerConfig:
        """The layer with what keeps a state, instead of rows or beside them; without both, it feeds forward alone."""
        state_bytes = 0 if mixer is None else mixer.state_bytes(d_model)
        if self.beside or (mixer is None and layer.kv_heads):
            return replace(layer, state_bytes=state_bytes, mixer=mixer)
        return LayerConfig(RECURRENT, 0, 0, 0, d_ff=layer.d_ff, state_bytes=state_bytes, mixer=mixer)

    def _with_turned(self, layer: LayerConfig, prefix: str, shapes: Shapes, named: bool) -> LayerConfig:
        """A layer that sees everything with what RoPE turns of its keys, where these are its values, too: where there
        is no matrix of values, or, without tensors, where the file says so (`named`)."""
        there = f"{prefix}k.weight" in shapes
        if layer.kind != FULL or not (named or there) or f"{prefix}v.weight" in shapes or layer.dim_k != layer.dim_v:
            return layer
        pairs = int(self.turned * layer.dim_k / 2)
        return replace(layer, turned=min(layer.dim_k, -(-2 * pairs // _STEP) * _STEP))

    def _latent_layers(self, keys: Keys, shapes: Shapes, n: int) -> tuple[LayerConfig, ...]:
        _, rank, rotary = read_latents(keys)
        rope = read_rope(keys, shapes, rotary, self.whole_ramp, latents=True)
        layer = LayerConfig(LATENT, 1, rotary, rank, rope=rope, temperature=self._temperature(keys, rope))
        return (layer,) * n

    def _ropes(self, keys: Keys, shapes: Shapes, wide: int, narrow: int) -> tuple[RopeConfig | None, RopeConfig | None]:
        """Of the layers that see everything, and of those that slide; head dims `wide` and `narrow`."""
        rope, swa = read_rope(keys, shapes, wide, self.whole_ramp), self.windows
        base = float(keys.number("rope.freq_base_swa", swa.rope_base or rope.base))
        dim = keys.integer("rope.dimension_count_swa", min(rope.dim, narrow), limit=narrow)
        local = replace(rope, base=base, dim=dim) if swa.scaled else RopeConfig(base, dim)
        if rope.scaling not in ("none", "linear") and (base, dim) != (rope.base, rope.dim) and swa.scaled:
            raise ModelError(f"kv's {keys.arch} cannot scale two kinds of RoPE by {rope.scaling}", OTHER_MODEL)
        if self.rope_switch and not keys.get(self.rope_switch, self.rope_usual):
            return None, None
        return rope, local

    def _temperature(self, keys: Keys, rope: RopeConfig | None) -> Temperature | None:
        """Of a layer with that RoPE."""
        if (usual := self.temperature) is not None:
            scale = float(keys.number("attention.temperature_scale", usual.scale, zero=True))
            length = keys.integer("attention.temperature_length", usual.length)
            return Temperature(scale, length, usual.offset) if scale and rope is None else None
        scale = float(keys.number("attention.temperature_scale", 0.0, zero=True)) if self.tempered else 0.0
        length = keys.integer("rope.scaling.original_context_length", 0, zero=True)
        if self.tempered:
            length = keys.integer("attention.temperature_length", length, zero=True) or length
        if scale and not length:
            raise ModelError(
                f"the GGUF file lacks the key {keys.arch}.rope.scaling.original_context_length",
                "its attention temperature needs it; convert it again",
            )
        return Temperature(scale, length) if scale else None


# Values of general.type of files that are no models.
_OTHER_FILES = {
    "adapter": "a LoRA adapter", "mmproj": "a projector of images or sound", "imatrix": "an importance matrix",
}  # fmt: skip


def check_is_model(metadata: Mapping[str, Any]) -> str:
    """The architecture of a GGUF file. Raises ModelError for a file that is no model, or does not name it."""
    arch, kind = metadata.get("general.architecture"), metadata.get("general.type")
    if kind in _OTHER_FILES:
        belongs = f" for {arch} models" if isinstance(arch, str) and kind == "adapter" else ""
        hint = "give it as `lora`, beside its model" if kind == "adapter" else "kv runs whole models only"
        raise ModelError(f"the file holds {_OTHER_FILES[kind]}{belongs}, not a model", hint)
    if not isinstance(arch, str):
        raise ModelError("the GGUF file lacks the key general.architecture", "the file is incomplete; convert it again")
    return arch


def tokens_with_rows(metadata: Mapping[str, Any], rows: int) -> int:
    """How many of an embedding's rows belong to a token of the file's vocabulary; all where it has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return min(rows, count_tokens(tokens)) if isinstance(tokens, Sequence) and len(tokens) else rows


def _run(keys: Keys) -> int:
    """How many of the file's layers, the first ones, give the next token; the others predict those behind it."""
    ahead, n = keys.integer("nextn_predict_layers", 0, zero=True), keys.integer("block_count", limit=4096)
    if ahead >= n:
        raise ModelError(f"the GGUF key {keys.arch}.nextn_predict_layers is {ahead}, as many as there are layers")
    return n - ahead


def _altup(keys: Keys) -> AltUp:
    streams = keys.integer("altup.num_inputs", limit=64)
    return AltUp(streams, keys.integer("altup.active_idx", limit=streams - 1, zero=True))


def _cutoffs(keys: Keys, n_layers: int) -> list[float | None]:
    """Of each layer's gates; -inf in files = they are not cut off."""
    values = keys.get("activation_sparsity_scale")
    if not isinstance(values, Sequence) or len(values) != n_layers or not all(isinstance(x, float) for x in values):
        raise ModelError(f"the GGUF key {keys.arch}.activation_sparsity_scale must have {n_layers} numbers")
    if any(x != x or x == float("inf") for x in values):
        raise ModelError(f"the GGUF key {keys.arch}.activation_sparsity_scale closes all gates of a layer")
    return [None if x == float("-inf") else float(x) for x in values]


def _dims(keys: Keys, head_dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """dim_k and dim_v of layers that see everything, and of those that slide."""
    wide = [keys.integer(f"attention.{x}_length", head_dim, limit=4096) for x in ("key", "value")]
    narrow = [
        keys.integer(f"attention.{x}_length_swa", dim, limit=4096)
        for x, dim in zip(("key", "value"), wide, strict=True)
    ]
    return (wide[0], wide[1]), (narrow[0], narrow[1])


def _head_dim(config: ModelConfig) -> int:
    """Elements of a query of the first layer with attention."""
    found = next((layer.dim_k for layer in config.layers if layer.kind != RECURRENT), 0)
    if not found:
        raise ModelError(f"no layer of this {config.arch} has attention", "kv runs models in which some have")
    return found


def _kv_heads(keys: Keys, n_layers: int, n_heads: int, none: bool) -> list[int]:
    """`none`: layers may have none."""
    found = keys.each("attention.head_count_kv", n_layers, n_heads, limit=4096, zero=none)
    for kv_heads in filter(None, found):
        if n_heads % kv_heads:
            raise ModelError(f"{n_heads} query heads are not a multiple of {kv_heads} KV heads")
    return found


def share_last(layers: Sequence[LayerConfig], first: int) -> list[LayerConfig]:
    """Layers from `first` on share with the last layer of the same kind before `first`. Raises ModelError."""
    result = list(layers)
    for i in range(first, len(layers)):
        owners = [j for j in range(first) if layers[j].kind == layers[i].kind]
        if not owners:
            raise ModelError(f"layer {i} shares the cache of an earlier {layers[i].kind} layer, and there is none")
        result[i] = replace(layers[i], shares_kv_with=owners[-1], turned=layers[owners[-1]].turned)
    return result


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
