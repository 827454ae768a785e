"""`ModelConfig`: every size, layer kind and RoPE parameter of a model, from whichever container it was read.

Pure data: no torch, no paths, no user options. The architectures' descriptions read it from files (`model/archs`).
"""

from __future__ import annotations

from dataclasses import dataclass

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
class Block:
    """How the layers of an architecture are put together, beyond their sizes.

    Each is attention and then a gated feed-forward part, with an RMS norm before either. `activation` of the gates is
    "silu" or "gelu" (tanh form). `qkv_bias`: vectors are added to q, k and v. `qk_norm`: an RMS norm over each head of
    q and k. `post_norms`: an RMS norm over what either part adds to the residual stream. `rope_pairs`: in files the
    rows of q and k that RoPE turns together are neighbours; else they are half a head apart, as everywhere in kv.
    `rope_factors`: a file may have factors that divide the frequencies of RoPE.
    """

    activation: str = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    rope_pairs: bool = False
    rope_factors: bool = False


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
    block: Block = Block()

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
