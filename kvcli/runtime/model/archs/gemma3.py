"""Gemma 3 text models (arXiv 2503.19786): norms before and after each block, norms over q and k heads, GeGLU, scaled
embeddings, five sliding-window layers to one full layer with their own RoPE base. Norm weights in the file already hold
1 + w."""

from __future__ import annotations

from kvcli.kernels import Backend
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.decoder import AttentionWeights, Block, Decoder, DecoderWeights
from kvcli.runtime.model.rope import RopeTables
from kvcli.runtime.model.weights import Weights

NAMES = ("gemma3",)
TINY = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def build(config: ModelConfig, weights: Weights, ops: Backend) -> Decoder:
    """See `archs.build`."""
    blocks = tuple(_block(weights, config, i) for i in range(config.n_layers))
    norm = weights.vector("output_norm.weight", config.d_model)
    parts = DecoderWeights((weights.embedding(config),), blocks, norm, (weights.head(config),), "gelu")
    return Decoder(config, parts, ops, RopeTables(config))


def _block(w: Weights, config: ModelConfig, i: int) -> Block:
    d, shape, p = config.d_model, config.layers[i], f"blk.{i}."
    n_q, n_k, n_v = config.n_heads * shape.dim_k, shape.kv_heads * shape.dim_k, shape.kv_heads * shape.dim_v
    qkv = (
        w.matrix(p + "attn_q.weight", n_q, d),
        w.matrix(p + "attn_k.weight", n_k, d),
        w.matrix(p + "attn_v.weight", n_v, d),
    )
    return Block(
        attn_norm=w.vector(p + "attn_norm.weight", d),
        attn=AttentionWeights(
            qkv,
            (w.matrix(p + "attn_output.weight", d, config.n_heads * shape.dim_v),),
            w.vector(p + "attn_q_norm.weight", shape.dim_k),
            w.vector(p + "attn_k_norm.weight", shape.dim_k),
        ),
        post_attn_norm=w.vector(p + "post_attention_norm.weight", d),
        ffn_norm=w.vector(p + "ffn_norm.weight", d),
        gate_up=(w.matrix(p + "ffn_gate.weight", config.d_ff, d), w.matrix(p + "ffn_up.weight", config.d_ff, d)),
        down=(w.matrix(p + "ffn_down.weight", d, config.d_ff),),
        post_ffn_norm=w.vector(p + "post_ffw_norm.weight", d),
    )
