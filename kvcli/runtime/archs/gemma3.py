"""Gemma 3 text models (arXiv 2503.19786): norms before and after each block, norms over q and k heads, GeGLU, scaled
embeddings, five sliding-window layers to one full layer with their own RoPE base."""

from __future__ import annotations

import torch

from kvcli.kernels import Backend
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.layers import AttentionWeights, MLPWeights, attention
from kvcli.runtime.rope import RopeTables
from kvcli.runtime.sequence import Step
from kvcli.runtime.weights import Weights

NAMES = ("gemma3",)
TINY = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


class _Layer:
    def __init__(self, w: Weights, config: ModelConfig, i: int) -> None:
        d, shape, p = config.d_model, config.layers[i], f"blk.{i}."
        n_q, n_k, n_v = (
            n * x
            for n, x in ((config.n_heads, shape.dim_k), (shape.kv_heads, shape.dim_k), (shape.kv_heads, shape.dim_v))
        )
        self.attn_norm = w.vector(p + "attn_norm.weight", d)
        self.attn = AttentionWeights(
            (
                w.matrix(p + "attn_q.weight", n_q, d),
                w.matrix(p + "attn_k.weight", n_k, d),
                w.matrix(p + "attn_v.weight", n_v, d),
            ),
            (w.matrix(p + "attn_output.weight", d, config.n_heads * shape.dim_v),),
            w.vector(p + "attn_q_norm.weight", shape.dim_k),
            w.vector(p + "attn_k_norm.weight", shape.dim_k),
        )
        self.post_attn_norm = w.vector(p + "post_attention_norm.weight", d)
        self.ffn_norm = w.vector(p + "ffn_norm.weight", d)
        gate, up = (w.matrix(p + f"ffn_{x}.weight", config.d_ff, d) for x in ("gate", "up"))
        self.mlp = MLPWeights((gate, up), (w.matrix(p + "ffn_down.weight", d, config.d_ff),))
        self.post_ffn_norm = w.vector(p + "post_ffw_norm.weight", d)


class Model:
    """See `archs.Model`. Norm weights in the file already hold 1 + w."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Backend) -> None:
        self.config, self.ops = config, ops
        self.embedding = weights.matrix("token_embd.weight", config.vocab_size, config.d_model)
        self.layers = [_Layer(weights, config, i) for i in range(config.n_layers)]
        self.norm = weights.vector("output_norm.weight", config.d_model)
        self.head = self.embedding
        if "output.weight" in weights:
            self.head = weights.matrix("output.weight", config.vocab_size, config.d_model)
        self.ropes = RopeTables(config)

    def hidden(self, step: Step) -> torch.Tensor:
        ops, eps = self.ops, self.config.norm_eps
        x = ops.rows(self.embedding, step.ids, self.config.embed_scale)  # [T, d_model], the residual stream
        for i, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.attn_norm, eps)
            h = ops.matmul(attention(ops, h, layer.attn, self.config, step, i, self.ropes), layer.attn.out)
            x += ops.rms_norm(h, layer.post_attn_norm, eps)
            h = ops.glu(ops.matmul(ops.rms_norm(x, layer.ffn_norm, eps), layer.mlp.gate_up), "gelu")
            x += ops.rms_norm(ops.matmul(h, layer.mlp.down), layer.post_ffn_norm, eps)
        return ops.rms_norm(x, self.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.matmul(hidden, (self.head,))
