"""`ModelConfig`: every size, layer kind and RoPE parameter of a model, from whichever container it was read.

Pure data: no torch, no paths, no user options. The architectures' descriptions read it from files (`model/archs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from kvcli.routing import Routing

FULL, SLIDING, CHUNKED, LATENT, RECURRENT = "full", "sliding", "chunked", "latent", "recurrent"
MAX_CONV, MAX_HEAD = 8, 256  # rows that a convolution reads, elements of a head with a state: at most, as in cpu.c
WINDOWED = (SLIDING, CHUNKED)  # layers that see a part of the rows before a query


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer (arXiv 2104.09864), applied to dims [0, dim) in half-split order.

    Positions are divided by `factor`, and frequencies by factors of the file, as `scaling` says:

    | `scaling` | |
    |---|---|
    | none, linear | by `factor` alone |
    | llama3 | also by the file's own factors |
    | short, long | of longrope (arXiv 2402.13753): by its factors for contexts up to `original` and beyond it |
    | yarn | frequency i by `factor` as far as i stands in `ramp` = (i where that begins, i where it is whole) |
    | dynamic | by a larger base, for a context of `length` (more than `original`) tokens |

    `amplitude` multiplies cosines and sines, of queries and of keys.
    """

    base: float
    dim: int
    scaling: str = "none"
    factor: float = 1.0
    original: int = 0
    length: int = 0
    ramp: tuple[float, float] = (0.0, 0.0)
    amplitude: float = 1.0

    def at(self, ctx: int) -> RopeConfig:
        """The same in a context of `ctx` tokens. Where scaling depends on the length it is that of the whole context,
        while transformers changes it as a text grows, and leaves earlier keys as they are."""
        if self.scaling in ("short", "long"):
            return replace(self, scaling="long" if ctx > self.original else "short")
        return replace(self, length=max(ctx, self.original)) if self.scaling == "dynamic" else self


class Temperature(NamedTuple):
    """Queries at position p are multiplied by 1 + scale * ln(1 + floor((p + offset) / length)) (as in Llama 4)."""

    scale: float
    length: int
    offset: int = 0


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution over `kernel` rows, in the place of attention (LFM2, arXiv 2511.23404). Its state are
    the last kernel - 1 rows of what is convolved."""

    kernel: int

    def state_bytes(self, d_model: int) -> int:
        """Bytes of a sequence's state in one layer: float32."""
        return 4 * (self.kernel - 1) * d_model


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta network in the place of attention (arXiv 2412.06464), behind a convolution over `kernel` rows. Its
    state are the last kernel - 1 rows of queries, keys and values, and of each value head a matrix [dim_k, dim_v].
    `tiled`: value head h reads key head h mod `key_heads`, else neighbours share one."""

    key_heads: int
    value_heads: int
    dim_k: int
    dim_v: int
    kernel: int
    tiled: bool = True

    def state_bytes(self, d_model: int) -> int:
        """Bytes of a sequence's state in one layer: float32."""
        channels = 2 * self.key_heads * self.dim_k + self.value_heads * self.dim_v
        return 4 * ((self.kernel - 1) * channels + self.value_heads * self.dim_k * self.dim_v)


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 in the place of attention (arXiv 2405.21060), behind a convolution over `kernel` rows. Its state are the
    last kernel - 1 rows of what is convolved, and of each head a matrix [state, dim]. Neighbouring heads share the keys
    and queries of one of `groups`. `norm_optional`: files may lack the norm of what heads give."""

    heads: int
    dim: int
    groups: int
    state: int
    kernel: int
    norm_optional: bool = False

    @property
    def channels(self) -> int:
        """Elements of a row that is convolved."""
        return self.heads * self.dim + 2 * self.groups * self.state

    def state_bytes(self, d_model: int) -> int:
        """Bytes of a sequence's state in one layer: float32."""
        return 4 * ((self.kernel - 1) * self.channels + self.heads * self.dim * self.state)


Mixer = ShortConv | DeltaNet | Mamba


@dataclass(frozen=True)
class LayerConfig:
    """What one layer keeps in the cache and how it looks at it.

    `dim_k`/`dim_v` are per KV head. A latent (MLA) layer has kv_heads 1; dim_v is the rank of latents, which are
    values and parts of keys, and dim_k counts what keys have besides, the dims that RoPE turns.
    `window` counts the tokens a sliding layer sees, the query included; 0 = all. In a chunked layer a query sees those
    of its own chunk, of `window` tokens; the first one begins at position 0. `turned` is not 0 where a value is its key
    before norm and RoPE: RoPE turns so many dims of the key at most, and all others are those of the value, times a
    weight each, so that they need not be stored twice (`KVLayout.build`). `rope` None: positions are not seen
    but by the order of rows. A recurrent layer keeps `state_bytes` per sequence and no rows; `mixer` is what it has in
    the place of attention, None where kv only plans for it, and where there is a feed-forward part alone. In a layer of
    another kind `mixer` stands beside attention. `shares_kv_with` names the layer whose rows this one reads;
    it has none of its own. `d_ff` is the width of its feed-forward part, 0 = that of the model. `cutoff`: of its gates
    only those are open that stand more than so many standard deviations above their mean (statistical top-k, arXiv
    2506.06644); None = all are.
    """

    kind: str
    kv_heads: int
    dim_k: int
    dim_v: int
    window: int = 0
    rope: RopeConfig | None = None
    temperature: Temperature | None = None
    state_bytes: int = 0
    shares_kv_with: int | None = None
    d_ff: int = 0
    cutoff: float | None = None
    mixer: Mixer | None = None
    turned: int = 0


RMS, LAYER = "rms", "layer"  # norms: arXiv 1910.07467 and 1607.06450
HEAD, ALL, PLAIN = "head", "all", "plain"


@dataclass(frozen=True)
class Block:
    """How the layers of an architecture are put together, beyond their sizes.

    Each is attention and then a feed-forward part, which both add to the residual stream; what keeps a state stands in
    the place of attention, or beside it, with the same normed input. Biases are not listed: those
    that a file has are added.

    | field | |
    |---|---|
    | `activation` | "silu", "gelu" (tanh form) or "relu2" (square of the positive part) |
    | `gated` | the activation is of gates, by which other products are multiplied; else of one product alone |
    | `norm` | RMS or LAYER (mean and variance), of all norms but those of heads |
    | `pre_norms`, `post_norms` | a norm before either part; one over what either part adds |
    | `parallel` | the feed-forward part has the normed input of attention, and no norm of its own |
    | `alone` | a layer is one part alone: attention, what keeps a state, or a feed-forward part |
    | `qk_norm` | an RMS norm of q and k: HEAD = over each head, ALL = over all heads together, PLAIN = over each head |
    | | without weights, in layers with RoPE; "" = none |
    | `qk_norm_last` | that norm comes after RoPE |
    | `rope_pairs` | RoPE turns neighbouring rows of q and k in files; else, and in kv, rows half a head apart |
    | `output_gate` | what a head gives is multiplied by the sigmoid of gates, in files behind its query |
    | `sinks` | a logit of each head takes part in the softmax of attention, and has no value |
    | `v_norm` | an RMS norm without weights over each head of v |
    | `keys_as_values` | layers without values of their own take their keys, before norm and RoPE |
    | `layer_scale` | the residual stream behind a layer is multiplied by a number of the layer, where a file has it |
    | `ffn_norm`, `last_norm` | names in files of the norm before the feed-forward part, and of that behind all layers |
    """

    activation: str = "silu"
    gated: bool = True
    norm: str = RMS
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    alone: bool = False
    qk_norm: str = ""
    qk_norm_last: bool = False
    rope_pairs: bool = False
    output_gate: bool = False
    sinks: bool = False
    v_norm: bool = False
    keys_as_values: bool = False
    layer_scale: bool = False
    ffn_norm: str = "ffn_norm"
    last_norm: str = "output_norm"


@dataclass(frozen=True)
class Experts:
    """Layers whose feed-forward part is a mixture of experts, all but the first `dense` ones.

    `d_ff` is the width of an expert, `shared_ff` that of what every token has besides, 0 = nothing. `every`: of the
    others one layer in so many, the last one of them, has experts. `beside`: these layers have the dense part of the
    model, too, each part with norms of its own, and the router one more (as in Gemma 4). `weighs_input`: see
    `ExpertLayer`.
    """

    routing: Routing
    d_ff: int
    shared_ff: int = 0
    dense: int = 0
    every: int = 1
    beside: bool = False
    weighs_input: bool = False

    def has(self, layer: int) -> bool:
        """Whether that layer has experts."""
        return layer >= self.dense and (layer + 1) % self.every == 0

    @property
    def has_dense(self) -> bool:
        """Whether the model has dense feed-forward parts as well."""
        return self.beside or self.dense > 0 or self.every > 1


class Latents(NamedTuple):
    """Heads of latent attention (arXiv 2405.04434) before they are compressed: `plain` dims of keys without RoPE, and
    `dim_v` of values. `q_rank`: queries are compressed to so many elements; 0 = they are not."""

    plain: int
    dim_v: int
    q_rank: int = 0


class AltUp(NamedTuple):
    """Several residual streams, of which layers see the `active` one (arXiv 2301.13310)."""

    streams: int
    active: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only transformer. All dims in elements.

    `vocab_size` counts tokens; an embedding may have more rows, which pad it and belong to no token. `residual_scale`
    multiplies what attention and feed-forward parts add; `logit_scale` the logits, before `logit_softcap` c > 0 makes
    c * tanh(x / c) of each x. `d_token`: each layer has an embedding of tokens of its own, of so many elements (as in
    Gemma 3n); 0 = none. `d_ff`: of the widest layer without experts. `ahead`: more layers of the file, which predict
    tokens beyond the next one, and are no part of what gives that.
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
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    d_token: int = 0
    experts: Experts | None = None
    ahead: tuple[LayerConfig, ...] = ()
    altup: AltUp | None = None
    latents: Latents | None = None
    block: Block = Block()

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of that layer is a mixture of experts."""
        return self.experts is not None and self.experts.has(layer) and self.feeds_forward(layer)

    def feeds_forward(self, layer: int) -> bool:
        """Whether that layer has a feed-forward part."""
        shape = self.layers[layer]
        return not self.block.alone or (shape.kind == RECURRENT and shape.mixer is None)

    def at(self, ctx: int) -> ModelConfig:
        """The model in a context of `ctx` tokens; see `RopeConfig.at`."""
        if all(x.rope is None or x.rope.at(ctx) is x.rope for x in (*self.layers, *self.ahead)):
            return self
        layers, ahead = (
            tuple(replace(x, rope=x.rope.at(ctx)) if x.rope else x for x in some) for some in (self.layers, self.ahead)
        )
        return replace(self, layers=layers, ahead=ahead)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def predictor(self) -> ModelConfig:
        """The first of the layers that predict tokens beyond the next one, as a model of one layer."""
        experts = None
        if self.experts is not None and self.experts.has(self.n_layers):
            experts = replace(self.experts, dense=0, every=1)
        return replace(self, layers=self.ahead[:1], ahead=(), experts=experts)

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
