"""Llama and everything built like it (arXiv 2302.13971): pre-norm, rotary attention, SwiGLU."""

from __future__ import annotations

from kvcli.kernels import Backend
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.decoder import AttentionWeights, Block, Decoder, DecoderWeights
from kvcli.runtime.model.rope import RopeTables
from kvcli.runtime.model.weights import Weights, half_split_rows

NAMES = ("llama",)
TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def build(config: ModelConfig, weights: Weights, ops: Backend) -> Decoder:
    """See `archs.build`."""
    blocks = tuple(_block(weights, config, i) for i in range(config.n_layers))
    rope_dim = config.layers[0].rope.dim if config.layers[0].rope else 0
    factors = weights.vector("rope_freqs.weight", rope_dim // 2) if "rope_freqs.weight" in weights else None
    norm = weights.vector("output_norm.weight", config.d_model)
    parts = DecoderWeights((weights.embedding(config),), blocks, norm, (weights.head(config),), "silu")
    return Decoder(config, parts, ops, RopeTables(config, factors))


def _block(w: Weights, config: ModelConfig, i: int) -> Block:
    d, shape, p = config.d_model, config.layers[i], f"blk.{i}."
    n_q, n_k = config.n_heads * shape.dim_k, shape.kv_heads * shape.dim_k
    rope_dim = shape.rope.dim if shape.rope else 0
    q = half_split_rows(w.matrix(p + "attn_q.weight", n_q, d), config.n_heads, rope_dim)
    k = half_split_rows(w.matrix(p + "attn_k.weight", n_k, d), shape.kv_heads, rope_dim)
    v = w.matrix(p + "attn_v.weight", shape.kv_heads * shape.dim_v, d)
    out = w.matrix(p + "attn_output.weight", d, config.n_heads * shape.dim_v)
    return Block(
        attn_norm=w.vector(p + "attn_norm.weight", d),
        attn=AttentionWeights((q, k, v), (out,)),
        ffn_norm=w.vector(p + "ffn_norm.weight", d),
        gate_up=(w.matrix(p + "ffn_gate.weight", config.d_ff, d), w.matrix(p + "ffn_up.weight", config.d_ff, d)),
        down=(w.matrix(p + "ffn_down.weight", d, config.d_ff),),
    )
