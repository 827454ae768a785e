"""One token of a decoder on a GPU: kernels over buffers that never move, captured once as a CUDA graph and replayed.

Per layer: q/k/v product; norms of heads, RoPE, rotation, store; attention in splits; their combination, which is also
the next product's vector; output product; gate/up product; down product. Each product leaves the vector of the next
one, already normed and quantized (see kernels/gpu/matvec.py). Layers that keep a state have the kernels of prompts
between their two products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvcli.kernels import ExpertLayer
from kvcli.kernels.gpu import expand
from kvcli.kernels.gpu.attention import Partials, attend
from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.combine import combine, quantize
from kvcli.kernels.gpu.formats import GROUP, PLAIN, DeviceMatrix
from kvcli.kernels.gpu.language import ACTS, AFTER, BESIDE, INTERPRETED, LEADING, SERIAL
from kvcli.kernels.gpu.matvec import GATED, RESIDUAL, STORE
from kvcli.kernels.gpu.noting import note
from kvcli.kernels.gpu.picking import prepare
from kvcli.kernels.gpu.products import MAX_GROUPS, Activations, Norm, advance, matvec, parts_of
from kvcli.kernels.gpu.rows import Queries, normed_together
from kvcli.kernels.gpu.seal import seal_step
from kvcli.kernels.gpu.settle import LAYER_NORM, NO_NORM, RMS_NORM, UNCHANGED, NextNorm, activate, settle
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import LAYER, RMS, ModelConfig
from kvcli.runtime.engine.graph.nexttoken import NextToken
from kvcli.runtime.engine.graph.tokenexperts import TokenExperts, expert_matrices
from kvcli.runtime.model.decoder import Attention, Decoder, FeedForward, Inner, Sublayer
from kvcli.runtime.model.mixers import Mixing

MIXES_ROWS = Attention | Mixing  # what looks at other rows of a text


def unsupported(model: Decoder) -> str:
    """Why a model's tokens cannot be computed by these kernels; "" = they can."""
    c = model.config
    sizes = [("d_model", c.d_model), *(("d_ff", width) for width in _widths(model))]
    sizes += [("heads x head dim", x.out[0].cols) for x in model.weights.sublayers if isinstance(x.inner, MIXES_ROWS)]
    for name, size in sizes:
        if size % GROUP:
            return f"{name} is {size}, which is no multiple of {GROUP}"
        if size > GROUP * MAX_GROUPS:
            return f"{name} is {size:,}, more than {GROUP * MAX_GROUPS:,}"
    return _unlike(c)


def _unlike(c: ModelConfig) -> str:
    """What the model has that no graph has been written for."""
    if c.experts is not None and c.experts.weighs_input:
        return "weights of experts multiply what these read"
    if c.experts is not None and c.experts.beside:
        return "a dense part stands beside the experts"
    if c.latents:
        return "attention is over latents"
    if c.d_token:
        return "layers have embeddings of tokens of their own"
    if c.block.v_norm:
        return "values have a norm"
    return "some layers read the rows of earlier ones" if any(x.shares_kv_with is not None for x in c.layers) else ""


def _folds(model: Decoder) -> bool:
    """Whether all norms between products are folded into these: RMS norms before each, and nothing else."""
    c, block = model.config, model.config.block
    plain = block.norm == RMS and block.pre_norms and c.residual_scale == 1
    return plain and not any(each.beside or each.bias is not None for each in model.weights.sublayers)


def _widths(model: Decoder) -> Iterator[int]:
    """Of feed-forward parts."""
    c = model.config
    if c.experts is None or c.experts.has_dense:
        yield c.d_ff
    if c.experts is not None:
        yield c.experts.d_ff
        if c.experts.shared_ff:
            yield c.experts.shared_ff


def _first(inner: Inner) -> tuple[DeviceMatrix, ...]:
    """The first product of attention, or of what stands in its place."""
    if isinstance(inner, Attention):
        return inner.qkv
    return inner.projections if isinstance(inner, Mixing) else ()


class TokenGraph(NextToken):
    """The next token by kernels of its own; see `unsupported`."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int) -> None:
        super().__init__(model, layout, ctx_size)
        c, w, floats = model.config, model.weights, self._floats
        keep = any(m.format.kind == PLAIN or m.change for m in _matrices(model))
        self.residual, self.row = floats(c.d_model), floats(1, c.d_model)
        self.x = Activations.empty(c.d_model, keep, self.device)
        mixtures = [each.inner for each in w.sublayers if isinstance(each.inner, ExpertLayer)]
        self.experts = TokenExperts(mixtures[0], keep) if mixtures else None
        self.gated = Activations.empty(c.d_ff if len(mixtures) < c.n_layers else GROUP, keep, self.device)
        self.norm = Norm(floats(c.d_model // GROUP), c.norm_eps) if _folds(model) else None  # folded into products
        inner = [each.inner for each in w.sublayers]
        self.up = floats(max((m.rows for x in inner if isinstance(x, FeedForward) for m in x.gate_up), default=0))
        self.projected = {i: floats(1, sum(m.rows for m in _first(x))) for i, x in enumerate(inner) if _first(x)}
        self.heads = {i: Activations.empty(w.sublayers[i].out[0].cols, keep, self.device) for i in self.projected}
        self.gates = floats(1, max((m.rows for x in inner if isinstance(x, Attention) for m in x.gate), default=0))
        self.y = floats(c.d_model)
        shapes = {x.layer: c.layers[x.layer] for x in inner if isinstance(x, Attention)}
        self._queries = {  # and turned ones
            i: Queries.empty(2, c.n_heads, x.dim_k, x.rope.dim if x.rope else 0, self.device) for i, x in shapes.items()
        }
        self._partials: dict[tuple[int, int], Partials] = {}
        self.pdl = AFTER if Chip.of(self.device).ahead and not INTERPRETED else SERIAL
        self._post_squares: dict[int, torch.Tensor] = {}

    def launch(self, bucket: int) -> None:
        """Every kernel of a token, for up to `bucket` rows."""
        c, w, pdl = self.model.config, self.model.weights, self.pdl
        expand.changed_rows(w.embedding[0], self.row, self.token, c.embed_scale)
        first = w.sublayers[0]
        if self.norm is None:
            settle(self.row, self.residual, self._next_norm(first), self.x, c.norm_eps, first=True)
        elif first.norm is not None:
            advance(self.row, self.residual, first.norm, self.x, self.norm.squares)
        for i, (each, following) in enumerate(w.with_next()):
            if isinstance(each.inner, Attention):
                self._add(each, self._attention(each.inner, bucket, i), following)
            elif isinstance(each.inner, Mixing):
                self._add(each, self._mixing(each.inner, i), following)
            elif isinstance(each.inner, ExpertLayer):
                self._add_experts(each.inner, following)
            elif isinstance(each.inner, FeedForward):
                # 16 bits for what has the outliers, and for the logits; both cost a percent or two
                self._add(each, self._feed_forward(each.inner), following, planes=2)
        matvec(w.head[0], self.x, STORE, norm=self.norm, out=self.logits, pdl=pdl, planes=2)
        if c.logit_scale != 1:
            self.logits.mul_(c.logit_scale)
        if c.logit_softcap:
            self.logits.div_(c.logit_softcap).tanh_().mul_(c.logit_softcap)

    def _feed_forward(self, inner: FeedForward) -> Activations:
        """From the normed vector to what is activated, quantized."""
        block, matrix = self.model.config.block, inner.gate_up[0]
        if block.gated and inner.bias is None and block.activation in ACTS:
            matvec(matrix, self.x, GATED, norm=self.norm, into=self.gated, act=block.activation, pdl=self.pdl)
            return self.gated
        matvec(matrix, self.x, STORE, norm=self.norm, out=self.up[: matrix.rows], pdl=self.pdl)
        run = GROUP if block.gated else 0
        activate(self.up[: matrix.rows], inner.bias, block.activation, run, self.gated, self.pdl)
        return self.gated

    def _project(self, matrices: Sequence[DeviceMatrix], out: torch.Tensor) -> torch.Tensor:
        """The products of the normed vector, side by side in `out` [1, rows of all]."""
        done = 0
        for matrix in matrices:  # of different formats: they run beside each other
            beside = BESIDE if done and not matrix.change else LEADING
            to = out[0, done : done + matrix.rows]
            matvec(matrix, self.x, STORE, norm=self.norm, out=to, pdl=beside if self.pdl else SERIAL)
            done += matrix.rows
        return out

    def _mixing(self, inner: Mixing, i: int) -> Activations:
        """From the normed vector to what sublayer `i` makes of it and of its state, quantized; the state goes on."""
        assert self._legs is not None
        projected = self._project(inner.projections, self.projected[i])
        return self._quantized(inner.mix(self.model.ops, projected, [self._legs.of(inner.index)]), i)

    def _quantized(self, x: torch.Tensor, i: int) -> Activations:
        """x [1, n] as the last product of sublayer `i` reads it."""
        to = self.heads[i]
        quantize(x, to, self.pdl)
        if to.keep:
            to.values.copy_(x[0])
        return to

    def _attention(self, inner: Attention, bucket: int, i: int) -> Activations:
        """From the normed vector to the heads' outputs, quantized, of sublayer `i`; the token's key and value go into
        the cache."""
        layer, how, pdl = inner.layer, inner.how, self.pdl
        pages, qkv = self._pages.layers[layer], self._project(inner.qkv, self.projected[i])
        how = normed_together(qkv, how, pages.record.dim_k)
        tables, _ = self._pages.of(layer)
        queries = prepare(qkv, how, pages, self._queries[layer], pdl, tables.entries(bucket))
        if pages.open is not None and not tables.group.tail:  # the query reads its own row sealed
            seal_step(pages, pdl, by_row=True)
        partials = self._partials_of(layer, tables.parts(bucket))
        attend(queries, pages, how.window, how.softcap, partials, pdl)
        noted = pages.lists.noted is not None
        found = combine(
            partials, pages, None if inner.gate else self.heads[i], LEADING if noted and pdl else pdl, how.sinks
        )
        if noted:
            note(partials, pages, how.sinks, BESIDE if pdl else SERIAL)
        if found is None:
            return self.heads[i]
        return self._quantized(found * self._project(inner.gate, self.gates).sigmoid_(), i)

    def _partials_of(self, layer: int, parts: int) -> Partials:
        """Where the results of the parts of a layer's pages go; those of layers with as many of one size share it."""
        key = self.model.config.layers[layer].dim_v, parts
        if key not in self._partials:
            self._partials[key] = Partials.empty(1, self.model.config.n_heads, self._pages.layers[layer], parts)
        return self._partials[key]

    def _add(self, sublayer: Sublayer, x: Activations, following: Sublayer | None, planes: int = 0) -> None:
        """Add the product to the residual, normed first where there is a norm; `self.x` becomes the next vector."""
        matrix, post, pdl, eps = sublayer.out[0], sublayer.post_norm, self.pdl, self.model.config.norm_eps
        if self.norm is None:
            matvec(matrix, x, STORE, out=self.y, pdl=pdl, planes=planes)
            settle(
                self.y, self.residual, self._next_norm(following), self.x, eps, bias=sublayer.bias, post=post,
                scale=self.model.config.residual_scale, pdl=pdl,
            )  # fmt: skip
            return
        next_norm = self.model.weights.norm if following is None else following.norm
        assert next_norm is not None, "see `_folds`"
        if post is None:
            matvec(
                matrix, x, RESIDUAL, residual=self.residual, next_norm=next_norm, into=self.x,
                squares=self.norm.squares, pdl=pdl, planes=planes,
            )  # fmt: skip
            return
        squares = self._squares(parts_of(matrix, STORE))
        matvec(matrix, x, STORE, out=self.y, squares=squares, pdl=pdl, planes=planes)
        advance(self.y, self.residual, next_norm, self.x, self.norm.squares, (post, Norm(squares, eps)), pdl)

    def _add_experts(self, layer: ExpertLayer, following: Sublayer | None) -> None:
        """Add what the token's experts give, likewise."""
        c, experts = self.model.config, self.experts
        assert experts is not None
        experts.products(layer, self.x, self.norm, self.pdl)
        if self.norm is None:
            experts.mix(layer, self.y, self.pdl)
            following_norm = self._next_norm(following)
            settle(self.y, self.residual, following_norm, self.x, c.norm_eps, scale=c.residual_scale, pdl=self.pdl)
            return
        next_norm = self.model.weights.norm if following is None else following.norm
        assert next_norm is not None, "see `_folds`"
        experts.add(layer, self.residual, next_norm, self.x, self.norm.squares, self.pdl)

    def _next_norm(self, following: Sublayer | None) -> NextNorm:
        """What the residual stream passes on its way to the sublayer; None = to the logits."""
        kind, w = LAYER_NORM if self.model.config.block.norm == LAYER else RMS_NORM, self.model.weights
        if following is None:
            return NextNorm(kind, w.norm, w.norm_bias)
        if following.beside:
            return NextNorm(UNCHANGED)
        return NextNorm(kind if following.norm is not None else NO_NORM, following.norm, following.norm_bias)

    def _squares(self, parts: int) -> torch.Tensor:
        if parts not in self._post_squares:
            self._post_squares[parts] = self._floats(parts)
        return self._post_squares[parts]


def _matrices(model: Decoder) -> Iterator[DeviceMatrix]:
    w = model.weights
    yield from w.embedding
    yield from w.head
    for each in w.sublayers:
        yield from each.out
        if isinstance(each.inner, Attention):
            yield from each.inner.gate
        yield from _first(each.inner)
        if isinstance(each.inner, FeedForward):
            yield from each.inner.gate_up
        elif isinstance(each.inner, ExpertLayer):
            yield from expert_matrices(each.inner)
