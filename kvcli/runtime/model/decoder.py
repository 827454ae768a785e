"""`Decoder`: a stack of sublayers over the paged cache, written over the kernels' facade."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from kvcli.kernels import AttentionLayer, Backend, ExpertLayer, HostBackend
from kvcli.kernels.reference.experts import sigmoid
from kvcli.kernels.reference.pointwise import cut_gates
from kvcli.runtime.cache.selector import LayerFacts
from kvcli.runtime.cache.sequence import Step
from kvcli.runtime.config import LAYER, ModelConfig
from kvcli.runtime.model.keysasvalues import JoinedRows
from kvcli.runtime.model.mixers import Mixing
from kvcli.runtime.model.rope import RopeTables

Matrices = tuple[Any, ...]  # stacked; what the backend's `place` made of QuantTensors
Operand = Any  # rows as the backend's `matmul` reads them


@dataclass(frozen=True)
class Attention:
    """Attention of model layer `layer`: the product that gives q, k and v side by side, and what `ops.attend` wants.
    `gate`: the product by whose sigmoid what heads give is multiplied, () = it is not. `joined`: where values are keys,
    what to do where they are stored once."""

    layer: int
    qkv: Matrices
    how: AttentionLayer
    gate: Matrices = ()
    joined: JoinedRows | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Attention of model layer `layer` over latents (arXiv 2405.04434), which every head has in common.

    `first` gives queries, or `q_rank` elements of which, with `q_norm`, `second` makes them; and behind those the part
    of the key that RoPE turns, and the latent. Of queries the parts that RoPE turns come first, of all heads, and then
    the others: these become queries of latents by the matrices of `keys`, and what heads find becomes values by those
    of `values`. So keys and values themselves are never computed.
    """

    layer: int
    first: Matrices
    q_norm: torch.Tensor | None
    second: Matrices
    keys: Any
    values: Any
    how: AttentionLayer


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward part up to its last product: gates and, behind them, what they gate, or one product alone.

    `bias` is added to the product. `cutoff`: see `LayerConfig`.
    """

    gate_up: Matrices
    bias: torch.Tensor | None = None
    cutoff: float | None = None


@dataclass(frozen=True)
class TokenGate:
    """What lets the layer's own embedding of tokens pass: the activated product is multiplied by it."""

    layer: int
    gate: Matrices


@dataclass(frozen=True)
class TokenEmbeddings:
    """Each layer's own embedding of tokens: rows of all layers side by side, and a projection of the token's embedding
    in the residual stream likewise, with a norm over each layer's part. Tokens from `count` on have the first row."""

    rows: Matrices
    projection: Matrices
    norm: torch.Tensor
    count: int


@dataclass(frozen=True)
class DenseAndExperts:
    """A feed-forward part and a mixture of experts over the same rows, which have no norm yet; what both give, normed,
    is added up. `norms`: before the dense part, behind it, before the experts, behind them."""

    dense: FeedForward
    down: Matrices
    experts: ExpertLayer
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


Inner = Attention | LatentAttention | Mixing | FeedForward | ExpertLayer | DenseAndExperts | TokenGate


@dataclass(frozen=True)
class Sublayer:
    """x += scale * post_norm(out . inner(norm(x)) + bias), without what is None or (); the scale is the model's.

    `norm` has weights and, for a layer norm that has one, a bias. `beside`: it takes the normed input of the sublayer
    before it, and has no norm. `leaves`: what the sum is multiplied by.
    """

    norm: torch.Tensor | None
    inner: Inner
    out: Matrices
    post_norm: torch.Tensor | None = None
    norm_bias: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    beside: bool = False
    leaves: float = 1.0


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder, where the backend computes. `sublayers` are in the order in which they are computed."""

    embedding: Matrices
    sublayers: tuple[Sublayer, ...]
    norm: torch.Tensor
    head: Matrices
    norm_bias: torch.Tensor | None = None
    tokens: TokenEmbeddings | None = None

    def with_next(self) -> Iterator[tuple[Sublayer, Sublayer | None]]:
        """Each sublayer, and the one behind it; None = the last norm is."""
        return zip(self.sublayers, (*self.sublayers[1:], None), strict=True)


class Decoder:
    """The model of `config`: hidden states of a step's rows, and logits of those."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Backend, ropes: RopeTables) -> None:
        self.config, self.weights, self.ops, self.ropes = config, weights, ops, ropes
        self.taps: tuple[int, ...] = ()  # layers before which the residual stream of each step is kept
        self.tapped: list[torch.Tensor] = []  # float32 [T, d_model] each, of the last step
        self._ones = torch.ones(0, 1)

    @cached_property
    def layer_facts(self) -> dict[int, LayerFacts]:
        """What those need to know who score rows, by layer that stores some."""
        found = {}
        for each in self.weights.sublayers:
            if isinstance(each.inner, Attention) and each.inner.how.stores:
                rope = self.ropes.table(self.config.layers[each.inner.layer].rope)
                found[each.inner.layer] = LayerFacts(each.inner.how.scale, rope.at_positions if rope else None)
        return found

    def hidden(self, step: Step) -> torch.Tensor:
        """Run the step's rows and store them in the cache -> float32 [T, d_model], after the last norm."""
        w = self.weights
        x = self.ops.rows(w.embedding[0], step.ids, self.config.embed_scale)  # [T, d_model], the residual stream
        tokens = None if w.tokens is None else self._tokens(x, w.tokens, step)
        self._through(x, step, tokens)
        return self._normed(x, w.norm, w.norm_bias)

    def _through(self, x: torch.Tensor, step: Step, tokens: torch.Tensor | None = None, first: Operand = None) -> None:
        """Have every sublayer add to x [T, d_model]. `tokens`: see `_tokens`; `first`: what the first one reads, where
        that is not x normed."""
        operand, ready = x, first
        tapped, each_layer = list[torch.Tensor](), len(self.weights.sublayers) // self.config.n_layers
        for i, (each, following) in enumerate(self.weights.with_next()):
            if self.taps and i % each_layer == 0 and i // each_layer in self.taps:
                tapped.append(self._copy(x))
            if ready is not None:
                operand = ready
            elif not each.beside:
                operand = self._operand(x, each)
            ready = self._add(x, self._inner(each.inner, operand, step, tokens), each, following)
            if each.leaves != 1:
                x *= each.leaves
        self.tapped = tapped

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        """On a CPU by a kernel, so that lists of calls have it."""
        if not isinstance(self.ops, HostBackend):
            return x.clone()
        if len(self._ones) < len(x):
            self._ones = torch.ones(len(x), 1)
        return self.ops.mix(x, self._ones[: len(x)])

    def _tokens(self, x: torch.Tensor, tokens: TokenEmbeddings, step: Step) -> torch.Tensor:
        """Each layer's own embedding of the step's tokens: float32 [T, layers, d_token]."""
        d, c = self.config.d_token, self.config
        projected = (self.ops.matmul(x, tokens.projection) * c.d_model**-0.5).unflatten(1, (-1, d))
        ids = step.ids * (step.ids < tokens.count)
        own = self.ops.rows(tokens.rows[0], ids, d**0.5).unflatten(1, (-1, d))
        return (self.ops.rms_norm(projected, tokens.norm, c.norm_eps) + own) * 0.5**0.5

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight is None:
            return x
        if self.config.block.norm == LAYER:
            return self.ops.layer_norm(x, weight, bias, self.config.norm_eps)
        return self.ops.rms_norm(x, weight, self.config.norm_eps)

    def _operand(self, x: torch.Tensor, each: Sublayer) -> Operand:
        """What a sublayer's first product reads."""
        if each.norm is None or self.config.block.norm == LAYER:
            return self._normed(x, each.norm, each.norm_bias)
        return self.ops.normed(x, each.norm, self.config.norm_eps)

    def _add(self, x: torch.Tensor, inner: Operand, sublayer: Sublayer, following: Sublayer | None = None) -> Operand:
        """x += what the sublayer makes of `inner`, its last product's input -> what the first product of the following
        sublayer reads, where a GPU's kernel makes that, too, else None."""
        scale, bias = self.config.residual_scale, sublayer.bias
        rms, post = self.config.block.norm != LAYER, sublayer.post_norm
        norm = following.norm if rms and following and not following.beside and sublayer.leaves == 1 else None
        settles = sublayer.out and bias is None and (norm is not None or (rms and post is not None))
        if settles and not isinstance(self.ops, HostBackend):
            return self.ops.settle(inner, sublayer.out, x, (post, norm), scale, self.config.norm_eps)
        if sublayer.out and bias is None and sublayer.post_norm is None and scale == 1:
            self.ops.matmul(inner, sublayer.out, add_to=x)
            return None
        y = self.ops.matmul(inner, sublayer.out) if sublayer.out else inner
        if bias is not None:
            self.ops.add_(y, bias)
        self.ops.add_(x, self._normed(y, sublayer.post_norm), scale)
        return None

    def _inner(self, inner: Inner, x: Operand, step: Step, tokens: torch.Tensor | None) -> Operand:
        """x [T, d_model], normed -> heads' outputs [T, heads * dim_v], with the rows stored, or activated [T, d_ff], or
        what experts give, [T, d_model], or the layer's part of `tokens` (see `_tokens`) gated, [T, d_token].

        Products are of all rows at once; each part then looks at its own pages.
        """
        if isinstance(inner, Attention):
            parts = [p.stretch(inner.layer, *rows) for rows, p in step.rows]
            joined = inner.joined if parts[0].record.joined else None
            if not (inner.gate or joined or isinstance(self.ops, HostBackend)):
                return self.ops.attended(x, inner.qkv, parts, inner.how)
            qkv, how = self.ops.matmul(x, inner.qkv), inner.how
            if joined is not None:
                qkv, how = joined.rows(self.ops, qkv), joined.how
            heads = self.ops.attend(qkv, parts, how)
            return heads * sigmoid(self.ops.matmul(x, inner.gate)) if inner.gate else heads
        if isinstance(inner, LatentAttention):
            return self._latents(inner, x, step)
        if isinstance(inner, Mixing):
            carried = [leg for (lo, _), p in step.rows for leg in p.carried(inner.index, lo)]
            projected = self.ops.matmul(x, inner.projections)
            mixed = inner.mix(self.ops, projected, carried)
            for (lo, hi), p in step.rows:
                p.keep(inner.index, partial(inner.again, self.ops), projected[lo:hi])
            return mixed
        if isinstance(inner, FeedForward):
            if inner.cutoff is not None:
                products = cut_gates(self.ops.matmul(x, inner.gate_up), inner.cutoff)
                return self.ops.glu(products, self.config.block.activation)
            first_products = self.ops.gated if self.config.block.gated else self.ops.activated
            return first_products(x, inner.gate_up, self.config.block.activation, inner.bias)
        if isinstance(inner, ExpertLayer):
            return self.ops.experts(x, inner)
        if isinstance(inner, DenseAndExperts):
            return self._both(inner, x)
        assert tokens is not None
        return self.ops.activated(x, inner.gate, self.config.block.activation) * tokens[:, inner.layer]

    def _latents(self, inner: LatentAttention, x: Operand, step: Step) -> torch.Tensor:
        """x [T, d_model], normed -> values of all heads, float32 [T, heads * dim_v], with the rows stored."""
        ops, c, how = self.ops, self.config, inner.how
        assert c.latents is not None
        layer, plain = c.layers[inner.layer], c.latents.plain
        first = ops.matmul(x, inner.first)
        queries, row = first.split([first.shape[1] - layer.dim_k - layer.dim_v, layer.dim_k + layer.dim_v], 1)
        if inner.q_norm is not None:
            normed: Operand = ops.normed(queries.contiguous(), inner.q_norm, c.norm_eps)
            queries = ops.matmul(normed, inner.second)
        turned, others = queries.split([how.heads * layer.dim_k, how.heads * plain], 1)
        asked = turned.unflatten(1, (-1, layer.dim_k)), others.unflatten(1, (-1, plain))
        parts = [p.stretch(inner.layer, *rows) for rows, p in step.rows]
        return ops.attend_latents(*asked, row, parts, how, inner.keys, inner.values)

    def _both(self, inner: DenseAndExperts, x: torch.Tensor) -> torch.Tensor:
        """x [T, d_model], the residual stream -> float32 [T, d_model]."""
        ops, act, eps = self.ops, self.config.block.activation, self.config.norm_eps
        before, behind, before_experts, behind_experts = inner.norms
        normed: tuple[Operand, Operand] = ops.normed(x, before, eps), ops.normed(x, before_experts, eps)
        activated: Operand = ops.gated(normed[0], inner.dense.gate_up, act, inner.dense.bias)
        dense = ops.rms_norm(ops.matmul(activated, inner.down), behind, eps)
        mixture = ops.experts(normed[1], inner.experts, x)
        return dense + ops.rms_norm(mixture, behind_experts, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, d_model] -> [n, vocab_size]."""
        c, found = self.config, self.ops.matmul(hidden, self.weights.head)
        if c.logit_scale != 1:
            found *= c.logit_scale
        return self.ops.softcap(found, c.logit_softcap) if c.logit_softcap else found
