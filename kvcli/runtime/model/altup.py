"""`AltUpDecoder`: layers that see one of several residual streams and correct all of them, as in Gemma 3n.

AltUp (arXiv 2301.13310): before a layer each stream is predicted from all of them, by coefficients that depend on the
active one; the layer runs on the active prediction alone, and what it changed there is added to each stream by another
coefficient. Beside attention stands LAuReL (arXiv 2411.07501), a product of low rank. The layer's own embedding of the
token is added to all streams but the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcli.kernels import Backend
from kvcli.kernels.reference.sums import sqrt, tanh, total
from kvcli.runtime.cache.sequence import Step
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.decoder import Decoder, DecoderWeights, Matrices, Sublayer
from kvcli.runtime.model.rope import RopeTables
from kvcli.runtime.model.weights import Weights

_LEAST_SQUARE = 1e-5  # of a stream, the mean over its elements


@dataclass(frozen=True)
class AltUpLayer:
    """What a layer has beside its sublayers. n streams of D elements.

    `router` [n, D] reads what `router_norm` [D] makes of the active stream; `predict` [n * n, n] and `correct` [n, n]
    make coefficients of what it gives. `scale` [D]: of the stream that lets the embedding of the layer pass. `left`
    [rank, D], `right` [D, rank] and a norm [D]: LAuReL.
    """

    router_norm: torch.Tensor
    router: Matrices
    predict: Matrices
    correct: Matrices
    scale: torch.Tensor
    left: Matrices
    right: Matrices
    laurel_norm: torch.Tensor


@dataclass(frozen=True)
class AltUpWeights:
    """`spread` and `merge`: a matrix [D, D] of each stream but the first, between it and the embedding or the end."""

    spread: tuple[Matrices, ...]
    merge: tuple[Matrices, ...]
    layers: tuple[AltUpLayer, ...]


def load_altup(config: ModelConfig, weights: Weights, ops: Backend) -> AltUpWeights:
    """From the tensors of a file. Raises ModelError for missing or misshapen ones."""
    assert config.altup is not None
    n, d = config.altup.streams, config.d_model

    def of_streams(name: str) -> tuple[Matrices, ...]:
        found = weights.experts(name, n - 1, d, d)
        return tuple(ops.place((found.of(i),)) for i in range(n - 1))

    def layer(i: int) -> AltUpLayer:
        def matrix(name: str, rows: int, cols: int) -> Matrices:
            return ops.place((weights.matrix(f"blk.{i}.{name}.weight", rows, cols),))

        def vector(name: str) -> torch.Tensor:
            return weights.vector(f"blk.{i}.{name}.weight", d).to(ops.device)

        rank = weights.file.tensors[left].shape[0] if (left := f"blk.{i}.laurel_l.weight") in weights else 0
        return AltUpLayer(
            vector("altup_router_norm"), matrix("altup_router", n, d), matrix("altup_predict_coef", n * n, n),
            matrix("altup_correct_coef", n, n), vector("altup_correct_scale"), matrix("laurel_l", rank, d),
            matrix("laurel_r", d, rank), vector("laurel_post_norm"),
        )  # fmt: skip

    layers = tuple(layer(i) for i in range(config.n_layers))
    return AltUpWeights(of_streams("altup_proj.weight"), of_streams("altup_unembd_proj.weight"), layers)


class AltUpDecoder(Decoder):
    """A decoder whose sublayers, three a layer, stand between a prediction and a correction of several streams."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ops: Backend, ropes: RopeTables, altup: AltUpWeights
    ) -> None:
        super().__init__(config, weights, ops, ropes)
        assert config.altup is not None
        self.altup, self.form = altup, config.altup

    def hidden(self, step: Step) -> torch.Tensor:
        """See `Decoder.hidden`."""
        w = self.weights
        x = self.ops.rows(w.embedding[0], step.ids, self.config.embed_scale)
        assert w.tokens is not None
        tokens = self._tokens(x, w.tokens, step)
        streams = [x, *(_as_long(self.ops.matmul(x, matrix), x) for matrix in self.altup.spread)]
        for layer, sublayers in zip(self.altup.layers, self._by_layer(), strict=True):
            streams = self._layer(streams, layer, sublayers, step, tokens)
        first, *others = streams
        for stream, matrix in zip(others, self.altup.merge, strict=True):
            first = first + _as_long(self.ops.matmul(stream, matrix), streams[0])
        return self._normed(first / len(streams), w.norm)

    def _by_layer(self) -> Iterator[tuple[Sublayer, ...]]:
        each = self.weights.sublayers
        return (each[i : i + 3] for i in range(0, len(each), 3))

    def _layer(
        self, streams: list[torch.Tensor], layer: AltUpLayer, sublayers: tuple[Sublayer, ...], step: Step,
        tokens: torch.Tensor,
    ) -> list[torch.Tensor]:  # fmt: skip
        """The streams, float32 [T, D] each, behind a layer."""
        attention, feed_forward, gate = sublayers
        predicted = self._predicted(streams, layer)
        before = predicted[self.form.active]
        x = before.clone()
        normed = self._normed(x, attention.norm)
        laurel = self.ops.matmul(self.ops.matmul(normed, layer.left), layer.right)
        laurel = self._normed(laurel, layer.laurel_norm) + normed
        self._add(x, self._inner(attention.inner, normed, step, None), attention)
        x = (x + laurel) * 0.5**0.5
        self._add(x, self._inner(feed_forward.inner, self._operand(x, feed_forward), step, None), feed_forward)
        factors = self.ops.matmul(self._routed(x, layer), layer.correct)
        change = x - before
        corrected = [y + change * (factors[:, i : i + 1] + 1.0) for i, y in enumerate(predicted)]
        passing = torch.zeros_like(x)
        self._add(passing, self._inner(gate.inner, corrected[self.form.active] * layer.scale, step, tokens), gate)
        return [corrected[0], *(y + passing for y in corrected[1:])]

    def _predicted(self, streams: list[torch.Tensor], layer: AltUpLayer) -> list[torch.Tensor]:
        n, found = len(streams), []
        factors = self.ops.matmul(self._routed(streams[self.form.active], layer), layer.predict)
        for i, own in enumerate(streams):
            x = own
            for j, other in enumerate(streams):
                x = x + other * factors[:, i * n + j : i * n + j + 1]
            found.append(x)
        return found

    def _routed(self, x: torch.Tensor, layer: AltUpLayer) -> torch.Tensor:
        """What coefficients are made of: float32 [T, n]."""
        normed = self._normed(x, layer.router_norm) / self.config.d_model
        return tanh(self.ops.matmul(normed, layer.router))


def _as_long(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Rows x [T, D], as long as those of `other`."""
    squares, wanted = (total(each * each) / each.shape[1] for each in (x, other))
    return x * (sqrt(wanted) / sqrt(squares.clamp(min=_LEAST_SQUARE)))[:, None]
