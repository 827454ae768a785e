"""The parts that decoder architectures are put together from, written over the kernels' facade."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvcli.kernels import AttentionLayer, Backend
from kvcli.runtime.cache.sequence import Step
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.rope import RopeTables
from kvcli.runtime.model.sealing import seal_step

Matrices = tuple[Any, ...]  # QuantTensor as in the file, or what the backend's `place` made of them


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one layer; the norms over each head of q and k exist where the architecture has them."""

    qkv: Matrices
    out: Matrices
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class Block:
    """One layer: attention, then a gated feed-forward part. The norms after each exist where the architecture has
    them; gate and up are stacked."""

    attn_norm: torch.Tensor
    attn: AttentionWeights
    ffn_norm: torch.Tensor
    gate_up: Matrices
    down: Matrices
    post_attn_norm: torch.Tensor | None = None
    post_ffn_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder. `activation` of the feed-forward parts: "silu" or "gelu"."""

    embedding: Matrices
    blocks: tuple[Block, ...]
    norm: torch.Tensor
    head: Matrices
    activation: str


class Decoder:
    """A stack of blocks over the paged cache; what an architecture's file builds."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Backend, ropes: RopeTables) -> None:
        self.config, self.ops, self.ropes = config, ops, ropes
        self.weights = _placed(weights, ops)
        self.layers = tuple(self._layer(i) for i in range(config.n_layers))

    def _layer(self, layer: int) -> AttentionLayer:
        """What the backend is to know of one layer's attention."""
        c, shape, weights = self.config, self.config.layers[layer], self.weights.blocks[layer].attn
        rope = self.ropes.table(shape.rope)
        return AttentionLayer(
            c.n_heads, c.attn_scale, rope, shape.window, c.attn_softcap, weights.q_norm, weights.k_norm, c.norm_eps,
            partial(seal_step, self.ops, rope),
        )  # fmt: skip

    def hidden(self, step: Step) -> torch.Tensor:
        """Run the step's rows and store them in the cache -> float32 [T, d_model], after the last norm."""
        ops, eps, w = self.ops, self.config.norm_eps, self.weights
        x = ops.rows(w.embedding[0], step.ids, self.config.embed_scale)  # [T, d_model], the residual stream
        for i, block in enumerate(w.blocks):
            h = self._attention(ops.rms_norm(x, block.attn_norm, eps), block.attn, step, i)
            self._add(x, h, block.attn.out, block.post_attn_norm)
            h = ops.glu(ops.matmul(ops.rms_norm(x, block.ffn_norm, eps), block.gate_up), w.activation)
            self._add(x, h, block.down, block.post_ffn_norm)
        return ops.rms_norm(x, w.norm, eps)

    def _attention(self, x: torch.Tensor, weights: AttentionWeights, step: Step, layer: int) -> torch.Tensor:
        """x [T, d_model] (normed) -> heads' outputs [T, heads * dim_v]; stores the step's rows of this layer.

        The projections are of all rows at once; each part then looks at its own pages.
        """
        qkv, how = self.ops.matmul(x, weights.qkv), self.layers[layer]
        found = [self.ops.attend(qkv[rows], part.kv(layer), part.start, how) for rows, part in step.rows]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _add(self, x: torch.Tensor, h: torch.Tensor, weights: Matrices, post_norm: torch.Tensor | None) -> None:
        """x += W h, normed first where there is a norm."""
        if post_norm is None:
            self.ops.matmul(h, weights, add_to=x)
        else:
            x += self.ops.rms_norm(self.ops.matmul(h, weights), post_norm, self.config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, d_model] -> [n, vocab_size]."""
        return self.ops.matmul(hidden, self.weights.head)


def _placed(w: DecoderWeights, ops: Backend) -> DecoderWeights:
    """The same weights where the backend computes with them."""

    def vector(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(ops.device)

    blocks = []
    for b in w.blocks:
        a = b.attn
        attn = AttentionWeights(ops.place(a.qkv), ops.place(a.out), vector(a.q_norm), vector(a.k_norm))
        blocks.append(
            Block(
                b.attn_norm.to(ops.device), attn, b.ffn_norm.to(ops.device), ops.place(b.gate_up, paired=True),
                ops.place(b.down), vector(b.post_attn_norm), vector(b.post_ffn_norm),
            )
        )  # fmt: skip
    embedding, head = ops.place(w.embedding), ops.place(w.head)
    return replace(w, embedding=embedding, blocks=tuple(blocks), norm=w.norm.to(ops.device), head=head)
