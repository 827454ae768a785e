"""`Predictor`: one layer that guesses tokens from what a model made of those before, with rows of its own.

`NextN` is a layer of the model's own file, trained with it (DeepSeek-V3, arXiv 2412.19437, section 2.2); `Eagle` was
trained for the model later (EAGLE-3, arXiv 2503.01840). Both read the embedding of a token beside features of the row
before it. Behind what the model has computed, a predictor's own features stand in for the model's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvcli.errors import ModelError
from kvcli.kernels import Backend
from kvcli.runtime.cache.sequence import Step
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.decoder import Attention, Decoder, DecoderWeights, LatentAttention, Matrices, Sublayer
from kvcli.runtime.model.loading import Loader, rope_factors
from kvcli.runtime.model.rope import RopeTables
from kvcli.runtime.model.weights import Weights


class Predictor(Decoder):
    """A decoder of one layer. `reads`: layers of the model before which its residual stream is read; () = what its
    output matrix multiplies is."""

    reads: tuple[int, ...] = ()

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """Of rows of the model, float32 [T, n] -> features [T, d_model]."""
        return features

    def rows(self, step: Step, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the step's rows, each with the `features` [T, d_model] of the row before it, and store them -> what
        `logits` wants, and the features that each row has for the one behind it."""
        raise NotImplementedError


class NextN(Predictor):
    """Layer `n_layers` of a file: a block of the model behind a projection of embedding and features, each normed."""

    def __init__(
        self, config: ModelConfig, made: DecoderWeights, main: Decoder, norms: tuple[torch.Tensor, torch.Tensor],
        projection: Matrices,
    ) -> None:  # fmt: skip
        super().__init__(config, made, main.ops, main.ropes)
        self.norms, self.projection = norms, projection

    def rows(self, step: Step, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, ops, c = self.weights, self.ops, self.config
        embedded = ops.rows(w.embedding[0], step.ids, c.embed_scale)
        both = zip((embedded, features), self.norms, strict=True)
        x = ops.matmul(torch.cat([ops.rms_norm(rows, norm, c.norm_eps) for rows, norm in both], 1), self.projection)
        self._through(x, step)
        hidden = self._normed(x, w.norm)
        return hidden, hidden


def load_next(main: Decoder, weights: Weights) -> NextN:
    """The first layer of the file behind those of `main`. What it has no matrices of its own for are those of the
    model. Raises ModelError for missing or misshapen tensors."""
    config, n, ops = main.config, main.config.n_layers, main.ops
    d, name = config.d_model, f"blk.{n}.nextn.{{}}.weight".format
    loader = Loader(replace(config, layers=(*config.layers, *config.ahead)), weights, ops, main.ropes)
    embedding, head, norm = main.weights.embedding, main.weights.head, main.weights.norm
    if name("embed_tokens") in weights:
        embedding = ops.place_rows((weights.matrix(name("embed_tokens"), config.vocab_size, d, padded=True),))
    if name("shared_head_head") in weights:
        head = ops.place((weights.matrix(name("shared_head_head"), config.vocab_size, d, padded=True),))
    if name("shared_head_norm") in weights:
        norm = loader.vector(name("shared_head_norm"), d)
    made = DecoderWeights(embedding, tuple(map(_of_one, loader.layer(n))), norm, head)
    norms = loader.vector(name("enorm"), d), loader.vector(name("hnorm"), d)
    return NextN(config.predictor, made, main, norms, ops.place((weights.matrix(name("eh_proj"), d, 2 * d),)))


def _of_one(sublayer: Sublayer) -> Sublayer:
    """A sublayer of a model of one layer."""
    inner = sublayer.inner
    return (
        replace(sublayer, inner=replace(inner, layer=0)) if isinstance(inner, Attention | LatentAttention) else sublayer
    )


class Eagle(Predictor):
    """A layer whose attention reads embedding and features side by side, each normed; features of the model are those
    of three layers, fused by a matrix. It knows some tokens of the model's vocabulary: those of `ids`."""

    def __init__(
        self, config: ModelConfig, made: DecoderWeights, ops: Backend, ropes: RopeTables, fuse: Matrices,
        norms: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor | None, reads: tuple[int, ...], normed: bool,
    ) -> None:  # fmt: skip
        """`normed`: features are normed before the layer adds to them, too."""
        super().__init__(config, made, ops, ropes)
        self.fuse, self.norms, self.ids, self.reads, self.normed = fuse, norms, ids, reads, normed

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        return self.ops.matmul(features, self.fuse)

    def rows(self, step: Step, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, ops, eps = self.weights, self.ops, self.config.norm_eps
        embedded = ops.rows(w.embedding[0], step.ids, self.config.embed_scale)
        first, second = (
            ops.rms_norm(rows, norm, eps) for rows, norm in zip((embedded, features), self.norms, strict=True)
        )
        x = (second if self.normed else features).clone()
        self._through(x, step, first=torch.cat((first, second), 1))
        return self._normed(x, w.norm), x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden)
        if self.ids is None:
            return found
        all_ids = found.new_full((len(found), self.config.vocab_size), float("-inf"))
        return all_ids.index_copy_(1, self.ids, found)


def load_eagle(
    weights: Weights, config: ModelConfig, main: Decoder, offsets: np.ndarray | None, reads: tuple[int, ...],
    normed: bool,
) -> Eagle:  # fmt: skip
    """A head (see `headers/eagle.py`) for the model `main`, whose embedding it has where it has none of its own.
    `offsets`: from its own numbers of tokens to the model's, int64; None = these are the same. Raises ModelError for
    missing or misshapen tensors."""
    ops, d = main.ops, config.d_model
    ropes = RopeTables(config, rope_factors(config, weights))
    loader = Loader(config, weights, ops, ropes, attends=2 * d)
    attention, mlp = loader.layer(0)
    embedding = main.weights.embedding
    if "token_embd.weight" in weights:
        embedding = ops.place_rows((weights.embedding(config),))
    elif main.config.d_model != d:
        raise ModelError(f"the head has no embedding, and rows of {d} elements; the model's have {main.config.d_model}")
    ids, n_ids = None, config.vocab_size
    if offsets is not None:
        ids, n_ids = torch.arange(len(offsets)) + torch.from_numpy(offsets), len(offsets)
        if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size or len(ids.unique()) < n_ids:
            raise ModelError("the head's d2t names tokens that the model does not have", "it is of another model")
        ids = ids.to(ops.device)
    head = ops.place((weights.matrix("output.weight", n_ids, d),))
    fuse = ops.place((weights.matrix("fc.weight", d, len(reads) * main.config.d_model),))
    made = DecoderWeights(embedding, (replace(attention, norm=None), mlp), loader.vector("output_norm.weight", d), head)
    norms = loader.vector("blk.0.attn_norm.weight", d), loader.vector("hidden_norm.weight", d)
    return Eagle(config, made, ops, ropes, fuse, norms, ids, reads, normed)
