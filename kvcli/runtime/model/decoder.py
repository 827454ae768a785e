"""The parts that decoder architectures are put together from, written over the kernels' facade."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvcli.kernels import Backend, PagedKV
from kvcli.runtime.cache.sequence import Part, Step
from kvcli.runtime.config import LayerConfig, ModelConfig
from kvcli.runtime.model.rope import RopeTable, RopeTables
from kvcli.runtime.model.sealing import seal_step

if TYPE_CHECKING:
    from kvcli.kernels.gpu.backend import GpuBackend

Matrices = tuple[Any, ...]  # QuantTensor as in the file, or what the backend's `place` made of them


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one layer; the norms over each head of q and k exist where the architecture has them."""

    qkv: Matrices
    out: Matrices
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


def attention(
    ops: Backend,
    x: torch.Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    step: Step,
    layer: int,
    ropes: RopeTables,
) -> torch.Tensor:
    """x [T, d_model] (normed) -> heads' outputs [T, heads * dim_v]; stores the step's rows of this layer.

    The projections are of all rows at once; each part then looks at its own pages.
    """
    qkv = ops.matmul(x, weights.qkv)
    found = [_attend(ops, qkv[rows], weights, config, part, layer, ropes) for rows, part in step.rows]
    return found[0] if len(found) == 1 else torch.cat(found)


def _attend(
    ops: Backend,
    qkv: torch.Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    part: Part,
    layer: int,
    ropes: RopeTables,
) -> torch.Tensor:
    """The projections of one part, q, k and v side by side [T, ...] -> its heads' outputs [T, heads * dim_v]."""
    if ops.name == "cuda":
        return _attend_on_gpu(ops, qkv, weights, config, part, layer, ropes)
    shape: LayerConfig = config.layers[layer]
    kv, t = part.kv(layer), qkv.shape[0]
    n_q, n_k = config.n_heads * shape.dim_k, shape.kv_heads * shape.dim_k
    q = qkv[:, :n_q].view(t, config.n_heads, shape.dim_k)  # [T, heads, dim_k], rows of a wider matrix
    k = qkv[:, n_q : n_q + n_k].view(t, shape.kv_heads, shape.dim_k)
    v = qkv[:, n_q + n_k :].view(t, shape.kv_heads, shape.dim_v)
    if weights.q_norm is not None:
        q = ops.rms_norm(q, weights.q_norm, config.norm_eps)
    if weights.k_norm is not None:
        k = ops.rms_norm(k, weights.k_norm, config.norm_eps)
    rope = ropes.table(shape.rope)
    sink_q = _sink_queries(ops, q, kv, part.start, rope)
    if rope is not None:
        cos, sin = rope.at(part.start, t)
        ops.rope_(q, cos, sin)
        ops.rope_(k, cos, sin)
    rotated_k, rotated_v = kv.rotated
    if rotated_k:
        ops.rotate_(k)
        ops.rotate_(q)
        if sink_q is not None:
            ops.rotate_(sink_q)
    if rotated_v:
        ops.rotate_(v)
    ops.store(k, v, kv, part.start)
    centres = seal_step(ops, kv, part.start, part.end, rope)
    out = ops.attention(q, kv, part.start, shape.window, config.attn_scale, config.attn_softcap, centres, sink_q)
    if rotated_v:
        ops.rotate_(out.view(t, config.n_heads, shape.dim_v))
    return out


def _sink_queries(
    ops: Backend, q: torch.Tensor, kv: PagedKV, start: int, rope: RopeTable | None
) -> torch.Tensor | None:
    """Queries for the rows that are kept before evicted ones: q [T, heads, dim_k], not turned yet, turned to where it
    stands inside the cache (StreamingLLM, arXiv 2309.17453). None where `q` will do."""
    if rope is None or kv.keep == 0:
        return None
    gaps = kv.gaps(start, q.shape[0])
    if not gaps.any():
        return None
    sink_q = q.clone(memory_format=torch.contiguous_format)
    ops.rope_(sink_q, *rope.inside(start, gaps))
    return sink_q


def _attend_on_gpu(
    ops: GpuBackend,
    qkv: torch.Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    part: Part,
    layer: int,
    ropes: RopeTables,
) -> torch.Tensor:
    """The same from the projections on, by kernels that do several of its steps at once."""
    shape, kv, start = config.layers[layer], part.kv(layer), part.start
    rope = ropes.table(shape.rope)
    frequencies = None if rope is None else rope.frequencies_on(ops.device)
    known = kv.basis.known
    while True:
        queries = ops.prepare(
            qkv, config.n_heads, kv, start, frequencies, weights.q_norm, weights.k_norm, config.norm_eps,
            config.attn_scale,
        )  # fmt: skip
        centres = seal_step(ops, kv, start, part.end, rope)
        if kv.basis.known == known:
            return ops.attention(queries, kv, start, shape.window, config.attn_softcap, centres)
        known = True  # the mean of keys is now known, and queries carry its share of the scores: once more


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

    def hidden(self, step: Step) -> torch.Tensor:
        """Run the step's rows and store them in the cache -> float32 [T, d_model], after the last norm."""
        ops, eps, w = self.ops, self.config.norm_eps, self.weights
        x = ops.rows(w.embedding[0], step.ids, self.config.embed_scale)  # [T, d_model], the residual stream
        for i, block in enumerate(w.blocks):
            h = attention(ops, ops.rms_norm(x, block.attn_norm, eps), block.attn, self.config, step, i, self.ropes)
            self._add(x, h, block.attn.out, block.post_attn_norm)
            h = ops.glu(ops.matmul(ops.rms_norm(x, block.ffn_norm, eps), block.gate_up), w.activation)
            self._add(x, h, block.down, block.post_ffn_norm)
        return ops.rms_norm(x, w.norm, eps)

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
