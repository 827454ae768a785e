"""`load`: a decoder from the tensors of a GGUF file, in the order of sublayers that the model's `Block` describes.

This is the one place that says what a layer is made of; the decoder and a GPU's token graph run what it made.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvcli.errors import ModelError
from kvcli.kernels import AttentionLayer, Backend, QuantTensor
from kvcli.runtime.config import ModelConfig, RopeConfig
from kvcli.runtime.model.decoder import Attention, Decoder, DecoderWeights, FeedForward, Sublayer
from kvcli.runtime.model.rope import RopeTables
from kvcli.runtime.model.sealing import seal_step
from kvcli.runtime.model.weights import Weights, half_split, half_split_rows


def load(config: ModelConfig, weights: Weights, ops: Backend) -> Decoder:
    """The model of `config` over mapped weights.

    Raises ModelError for missing or misshapen tensors, and for tensors (biases, say) that it would leave out: without
    them it would be another model.
    """
    weights.used.clear()  # what others looked at before does not count
    ropes = RopeTables(config, _rope_factors(config, weights))
    loader = _Loader(config, weights, ops, ropes)
    sublayers = tuple(each for i in range(config.n_layers) for each in loader.layer(i))
    embedding = ops.place((weights.embedding(config),))
    head = ops.place((weights.head(config),)) if weights.has_head else embedding
    norm = loader.vector("output_norm.weight", config.d_model)
    left = sorted(set(weights.file.tensors) - weights.used)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ModelError(
            f"the file has tensors that kv's {config.arch} does not use: {left[0]}{more}",
            "kv would compute another model than this one",
        )
    return Decoder(config, DecoderWeights(embedding, sublayers, norm, head), ops, ropes)


def _rope_factors(config: ModelConfig, weights: Weights) -> torch.Tensor | None:
    """What the frequencies of RoPE are divided by, where the file says so."""
    rope, name = config.layers[0].rope, "rope_freqs.weight"
    return weights.vector(name, rope.dim // 2) if rope and config.block.rope_factors and name in weights else None


class _Loader:
    """The tensors of one layer after the other, taken to where the backend computes."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Backend, ropes: RopeTables) -> None:
        self.config, self.weights, self.ops, self.ropes = config, weights, ops, ropes

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.weights.vector(name, size).to(self.ops.device)

    def layer(self, i: int) -> Iterator[Sublayer]:
        """The sublayers of model layer `i`, in their order."""
        c, w, name = self.config, self.weights, f"blk.{i}.{{}}.weight".format
        d, block, place = c.d_model, c.block, self.ops.place
        out = w.matrix(name("attn_output"), d, c.n_heads * c.layers[i].dim_v)
        post = self.vector(name("post_attention_norm"), d) if block.post_norms else None
        yield Sublayer(self.vector(name("attn_norm"), d), self._attention(i), place((out,)), post)
        gate_up = w.matrix(name("ffn_gate"), c.d_ff, d), w.matrix(name("ffn_up"), c.d_ff, d)
        down = w.matrix(name("ffn_down"), d, c.d_ff)
        post = self.vector(name("post_ffw_norm"), d) if block.post_norms else None
        feed_forward = FeedForward(place(gate_up, paired=True))
        yield Sublayer(self.vector(name("ffn_norm"), d), feed_forward, place((down,)), post)

    def _attention(self, i: int) -> Attention:
        c, shape, name = self.config, self.config.layers[i], f"blk.{i}.attn_{{}}".format
        rope = self.ropes.table(shape.rope)
        qkv = ("q", c.n_heads, shape.dim_k), ("k", shape.kv_heads, shape.dim_k), ("v", shape.kv_heads, shape.dim_v)
        matrices = tuple(self._matrix(name(part), heads, dim, shape.rope) for part, heads, dim in qkv)
        bias = q_norm = k_norm = None
        if c.block.qkv_bias:
            bias = torch.cat([self._bias(name(part), heads, dim, shape.rope) for part, heads, dim in qkv])
        if c.block.qk_norm:
            q_norm, k_norm = (self.vector(name(f"{part}_norm.weight"), shape.dim_k) for part in "qk")
        how = AttentionLayer(
            c.n_heads, c.attn_scale, rope, shape.window, c.attn_softcap, bias, q_norm, k_norm, c.norm_eps,
            partial(seal_step, self.ops, rope),
        )  # fmt: skip
        return Attention(i, self.ops.place(matrices), how)

    def _matrix(self, name: str, heads: int, dim: int, rope: RopeConfig | None) -> QuantTensor:
        """One of q, k and v, with what RoPE turns together half a head apart."""
        matrix = self.weights.matrix(f"{name}.weight", heads * dim, self.config.d_model)
        return half_split_rows(matrix, heads, rope.dim) if rope and self._in_pairs(name) else matrix

    def _bias(self, name: str, heads: int, dim: int, rope: RopeConfig | None) -> torch.Tensor:
        bias = self.vector(f"{name}.bias", heads * dim)
        return half_split(bias, heads, rope.dim) if rope and self._in_pairs(name) else bias

    def _in_pairs(self, name: str) -> bool:
        return self.config.block.rope_pairs and not name.endswith("_v")
