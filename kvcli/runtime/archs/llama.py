"""Llama and everything built like it (arXiv 2302.13971): pre-norm, rotary attention, SwiGLU."""

from __future__ import annotations

import torch

from kvcli.kernels import Backend
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.layers import AttentionWeights, MLPWeights, attention
from kvcli.runtime.rope import RopeTables
from kvcli.runtime.sequence import Step
from kvcli.runtime.weights import Weights, half_split_rows

NAMES = ("llama",)
TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


class _Layer:
    def __init__(self, w: Weights, config: ModelConfig, i: int) -> None:
        d, shape, p = config.d_model, config.layers[i], f"blk.{i}."
        n_q, n_k = config.n_heads * shape.dim_k, shape.kv_heads * shape.dim_k
        self.attn_norm = w.vector(p + "attn_norm.weight", d)
        rope_dim = shape.rope.dim if shape.rope else 0
        q = half_split_rows(w.matrix(p + "attn_q.weight", n_q, d), config.n_heads, rope_dim)
        k = half_split_rows(w.matrix(p + "attn_k.weight", n_k, d), shape.kv_heads, rope_dim)
        v = w.matrix(p + "attn_v.weight", shape.kv_heads * shape.dim_v, d)
        self.attn = AttentionWeights((q, k, v), (w.matrix(p + "attn_output.weight", d, config.n_heads * shape.dim_v),))
        self.ffn_norm = w.vector(p + "ffn_norm.weight", d)
        gate, up = (w.matrix(p + f"ffn_{x}.weight", config.d_ff, d) for x in ("gate", "up"))
        self.mlp = MLPWeights((gate, up), (w.matrix(p + "ffn_down.weight", d, config.d_ff),))


class Model:
    """See `archs.Model`."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Backend) -> None:
        self.config, self.ops = config, ops
        self.embedding = weights.matrix("token_embd.weight", config.vocab_size, config.d_model)
        self.layers = [_Layer(weights, config, i) for i in range(config.n_layers)]
        self.norm = weights.vector("output_norm.weight", config.d_model)
        self.head = self.embedding
        if "output.weight" in weights:
            self.head = weights.matrix("output.weight", config.vocab_size, config.d_model)
        rope_dim = config.layers[0].rope.dim if config.layers[0].rope else 0
        factors = weights.vector("rope_freqs.weight", rope_dim // 2) if "rope_freqs.weight" in weights else None
        self.ropes = RopeTables(config, factors)

    def hidden(self, step: Step) -> torch.Tensor:
        ops, eps = self.ops, self.config.norm_eps
        x = ops.rows(self.embedding, step.ids)  # [T, d_model], the residual stream
        for i, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.attn_norm, eps)
            h = attention(ops, h, layer.attn, self.config, step, i, self.ropes)
            ops.matmul(h, layer.attn.out, add_to=x)
            h = ops.glu(ops.matmul(ops.rms_norm(x, layer.ffn_norm, eps), layer.mlp.gate_up), "silu")
            ops.matmul(h, layer.mlp.down, add_to=x)
        return ops.rms_norm(x, self.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.matmul(hidden, (self.head,))
