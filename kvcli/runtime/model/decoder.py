"""`Decoder`: a stack of sublayers over the paged cache, written over the kernels' facade."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvcli.kernels import AttentionLayer, Backend, Stretch
from kvcli.runtime.cache.sequence import Step
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.rope import RopeTables

Matrices = tuple[Any, ...]  # stacked; what the backend's `place` made of QuantTensors
Operand = Any  # rows as the backend's `matmul` reads them


@dataclass(frozen=True)
class Attention:
    """Attention of model layer `layer`: the product that gives q, k and v side by side, and what `ops.attend` wants."""

    layer: int
    qkv: Matrices
    how: AttentionLayer


@dataclass(frozen=True)
class FeedForward:
    """A gated feed-forward part: the product that gives gates and, behind them, what they gate."""

    gate_up: Matrices


@dataclass(frozen=True)
class Sublayer:
    """x += out . inner(norm(x)), with `post_norm` over what is added where there is one."""

    norm: torch.Tensor
    inner: Attention | FeedForward
    out: Matrices
    post_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder, where the backend computes. `sublayers` are in the order in which they are computed."""

    embedding: Matrices
    sublayers: tuple[Sublayer, ...]
    norm: torch.Tensor
    head: Matrices

    def with_next_norms(self) -> Iterator[tuple[Sublayer, torch.Tensor]]:
        """Each sublayer, and the norm that the residual stream passes behind it."""
        norms = (*(each.norm for each in self.sublayers[1:]), self.norm)
        return zip(self.sublayers, norms, strict=True)


class Decoder:
    """The model of `config`: hidden states of a step's rows, and logits of those."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Backend, ropes: RopeTables) -> None:
        self.config, self.weights, self.ops, self.ropes = config, weights, ops, ropes

    def hidden(self, step: Step) -> torch.Tensor:
        """Run the step's rows and store them in the cache -> float32 [T, d_model], after the last norm."""
        ops, eps, w = self.ops, self.config.norm_eps, self.weights
        x = ops.rows(w.embedding[0], step.ids, self.config.embed_scale)  # [T, d_model], the residual stream
        for each in w.sublayers:
            inner = self._inner(each.inner, ops.normed(x, each.norm, eps), step)
            if each.post_norm is None:
                ops.matmul(inner, each.out, add_to=x)
            else:
                x += ops.rms_norm(ops.matmul(inner, each.out), each.post_norm, eps)
        return ops.rms_norm(x, w.norm, eps)

    def _inner(self, inner: Attention | FeedForward, x: torch.Tensor, step: Step) -> Operand:
        """x [T, d_model], normed -> heads' outputs [T, heads * dim_v], with the rows stored, or gated [T, d_ff].

        Products are of all rows at once; each part then looks at its own pages.
        """
        if isinstance(inner, FeedForward):
            return self.ops.gated(x, inner.gate_up, self.config.block.activation)
        qkv = self.ops.matmul(x, inner.qkv)
        return self.ops.attend(qkv, [Stretch(*rows, p.kv(inner.layer), p.start) for rows, p in step.rows], inner.how)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, d_model] -> [n, vocab_size]."""
        return self.ops.matmul(hidden, self.weights.head)
