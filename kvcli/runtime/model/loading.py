"""`load`: a decoder from the tensors of a GGUF file, in the order of sublayers that the model's `Block` describes.

This is the one place that says what a layer is made of; the decoder and a GPU's token graph run what it made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvcli.errors import ModelError
from kvcli.kernels import AttentionLayer, Backend, QuantTensor
from kvcli.kernels.reference.backend import ReferenceBackend
from kvcli.runtime.config import ALL, LATENT, LAYER, PLAIN, RECURRENT, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.model.altup import AltUpDecoder, load_altup
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.decoder import (
    Attention,
    Decoder,
    DecoderWeights,
    DenseAndExperts,
    FeedForward,
    Inner,
    Sublayer,
    TokenEmbeddings,
    TokenGate,
)
from kvcli.runtime.model.experts import load_experts
from kvcli.runtime.model.keysasvalues import JoinedRows
from kvcli.runtime.model.latents import load_latents
from kvcli.runtime.model.mixers import load_mixer
from kvcli.runtime.model.rope import RopeTables
from kvcli.runtime.model.ropekeys import FACTORS
from kvcli.runtime.model.sealing import seal_step
from kvcli.runtime.model.weights import UnreadWeights, Weights, half_split, half_split_rows

TURNS_LEAST = 1e-12  # radians a token: what is divided by 1e30 stands still


def load(config: ModelConfig, weights: Weights, ops: Backend) -> Decoder:
    """The model of `config` over mapped weights.

    Raises ModelError for missing or misshapen tensors, and for tensors that it would leave out: without them it would
    be another model.
    """
    weights.used.clear()  # what others looked at before does not count
    ropes = RopeTables(config, rope_factors(config, weights))
    loader = Loader(config, weights, ops, ropes)
    sublayers = tuple(each for i in range(config.n_layers) for each in loader.layer(i))
    embedding = (ops.place_rows if weights.has_head else ops.place)((weights.embedding(config),))
    # A head that is the embedding is what it is without an adapter: that is added to rows of the embedding.
    head = ops.place((weights.head(config),)) if weights.has_head else tuple(x.unchanged for x in embedding)
    norm, norm_bias = loader.norm(config.block.last_norm)
    tokens = loader.tokens() if config.d_token else None
    altup = load_altup(config, weights, ops) if config.altup else None
    ahead = tuple(f"blk.{config.n_layers + i}." for i in range(len(config.ahead)))
    left = sorted(x for x in set(weights.file.tensors) - weights.used if not x.startswith(ahead))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ModelError(
            f"the file has tensors that kv's {config.arch} does not use: {left[0]}{more}",
            "kv would compute another model than this one",
        )
    if missed := sorted({name for each in weights.adapters for name in each.pairs} - weights.changed):
        raise ModelError(f"the adapter changes {missed[0]}, which kv does not compute as a matrix")
    made = DecoderWeights(embedding, sublayers, norm, head, norm_bias, tokens)
    return Decoder(config, made, ops, ropes) if altup is None else AltUpDecoder(config, made, ops, ropes, altup)


def check(file: ModelFile) -> None:
    """Raises ModelError where `load` would for the model in that file; reads none of its weights."""
    config = from_gguf(file.metadata, {name: tensor.shape for name, tensor in file.tensors.items()})
    load(config, UnreadWeights(file), ReferenceBackend(1))


def rope_factors(config: ModelConfig, weights: Weights) -> dict[str, torch.Tensor]:
    """What frequencies of RoPE are divided by, where the file says so; see `RopeTables`."""
    wanted = {rope.scaling: rope.dim for x in config.layers if (rope := x.rope) and rope.scaling in FACTORS}
    if not wanted.keys().isdisjoint(("long", "short")):  # of which a context takes one
        weights.used.update(FACTORS[each] for each in ("long", "short"))
    return {scaling: weights.vector(FACTORS[scaling], dim // 2) for scaling, dim in wanted.items()}


def _amplitudes(layer: LayerConfig, norms_last: bool) -> tuple[float, float]:
    """What all scores are multiplied by, and what the dims of queries that RoPE turns.

    RoPE's amplitude multiplies queries and keys, which is to multiply queries twice: keys stay as long as they are.
    Norms behind RoPE undo it.
    """
    square = layer.rope.amplitude**2 if layer.rope and not norms_last else 1.0
    return (square, 1.0) if layer.rope is None or layer.rope.dim == layer.dim_k else (1.0, square)


@dataclass(frozen=True)
class _Projection:
    """One of q, k and v: a matrix [heads * dim, d_model], and what is added to its product."""

    matrix: QuantTensor
    bias: torch.Tensor | None

    def cut(self, sizes: list[int]) -> list[_Projection]:
        """Runs of so many rows."""
        ends = list(itertools.accumulate(sizes))
        return [
            _Projection(self.matrix.part(end - n, end), None if self.bias is None else self.bias[end - n : end])
            for n, end in zip(sizes, ends, strict=True)
        ]

    def halved(self, heads: int, rope_dim: int) -> _Projection:
        """With what RoPE turns together half a head apart, from neighbours."""
        bias = self.bias if self.bias is None else half_split(self.bias, heads, rope_dim)
        return _Projection(half_split_rows(self.matrix, heads, rope_dim), bias)


class Loader:
    """The tensors of one layer after the other, taken to where the backend computes."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Backend, ropes: RopeTables, attends: int = 0
    ) -> None:
        """`attends`: elements that attention reads of a row, 0 = those of the residual stream."""
        self.config, self.weights, self.ops, self.ropes = config, weights, ops, ropes
        self.attends = attends or config.d_model

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.weights.vector(name, size).to(self.ops.device)

    def norm(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights and bias of a norm of the residual stream."""
        d = self.config.d_model
        bias = self.bias(name, d) if self.config.block.norm == LAYER else None
        bare = name in self.weights  # as files of Falcon-H1 have one
        return self.vector(name if bare else f"{name}.weight", d), bias

    def bias(self, name: str, size: int) -> torch.Tensor | None:
        """The bias of that product or norm, where the file has one."""
        return self.vector(f"{name}.bias", size) if f"{name}.bias" in self.weights else None

    def layer(self, i: int) -> Iterator[Sublayer]:
        """The sublayers of model layer `i`, in their order."""
        c, name = self.config, f"blk.{i}.{{}}".format
        block, leaves = c.block, self._leaves(name("layer_output_scale.weight"))
        norm = name("attn_norm") if block.pre_norms else ""
        for n, (first, out, cols) in enumerate(self._over_rows(i)):
            yield self._sublayer("" if n else norm, first, out, cols, name("post_attention_norm"), beside=n > 0)
        if not c.feeds_forward(i):
            return
        norm = name(block.ffn_norm) if block.pre_norms and not block.parallel else ""
        inner, out = self._second_part(i)
        yield self._sublayer(
            "" if isinstance(inner, DenseAndExperts) else norm, inner, out, self._width(i), name("post_ffw_norm"),
            beside=block.parallel, leaves=1.0 if c.d_token else leaves,
        )  # fmt: skip
        if c.d_token:
            gate = TokenGate(i, self.ops.place((self.weights.matrix(name("inp_gate.weight"), c.d_token, c.d_model),)))
            yield self._sublayer("", gate, name("proj"), c.d_token, name("post_norm"), leaves=leaves)

    def _over_rows(self, i: int) -> Iterator[tuple[Inner, str, int]]:
        """What looks at other rows of a text: what keeps a state, attention, or both; each with the name of its last
        matrix, and the columns of this."""
        c, shape, out = self.config, self.config.layers[i], f"blk.{i}.attn_output"
        if shape.mixer is not None:
            yield load_mixer(c, i, self.weights, self.ops)
        if shape.kind == LATENT and c.latents is not None:
            latents = load_latents(c, i, self.weights, self.ops, self.ropes.table(shape.rope))
            yield latents, out, c.n_heads * c.latents.dim_v
        elif shape.kind != RECURRENT:
            yield self._attention(i), out, c.n_heads * shape.dim_v

    def _second_part(self, i: int) -> tuple[Inner, str]:
        """The feed-forward part, and the name of its last matrix, "" = it has that itself."""
        c, name = self.config, f"blk.{i}.{{}}".format
        if not c.has_experts(i):
            return self._feed_forward(i), name("ffn_down")
        experts = load_experts(c, i, self.weights, self.ops)
        if c.experts is None or not c.experts.beside:
            return experts, ""
        norms = (c.block.ffn_norm, "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
        before, behind, second, last = (self.vector(f"{name(x)}.weight", c.d_model) for x in norms)
        down = self.ops.place((self.weights.matrix(f"{name('ffn_down')}.weight", c.d_model, self._width(i)),))
        return DenseAndExperts(self._feed_forward(i), down, experts, (before, behind, second, last)), ""

    def _leaves(self, name: str) -> float:
        """What the layer multiplies the residual stream by."""
        has = self.config.block.layer_scale and name in self.weights
        return float(self.weights.vector(name, 1)) if has else 1.0

    def _width(self, i: int) -> int:
        return self.config.layers[i].d_ff or self.config.d_ff

    def tokens(self) -> TokenEmbeddings:
        """Each layer's own embedding of tokens."""
        c, w = self.config, self.weights
        d = c.n_layers * c.d_token
        name = "per_layer_token_embd.weight"  # tokens that stand for images or sound may have no row
        there = w.file.tensors[name].shape[0] if name in w else c.vocab_size
        rows = w.matrix(name, min(there, c.vocab_size), d, padded=True)
        projection = w.matrix("per_layer_model_proj.weight", d, c.d_model)
        norm = self.vector("per_layer_proj_norm.weight", c.d_token)
        return TokenEmbeddings(self.ops.place_rows((rows,)), self.ops.place((projection,)), norm, rows.rows)

    def _sublayer(
        self, norm: str, inner: Inner, out: str, cols: int, post: str, beside: bool = False, leaves: float = 1.0
    ) -> Sublayer:
        """From names of tensors; `norm`, `out` "" = none. `cols` of the matrix that gives what is added."""
        d = self.config.d_model
        weight, bias = self.norm(norm) if norm else (None, None)
        matrices = self.ops.place((self.weights.matrix(f"{out}.weight", d, cols),)) if out else ()
        post_norm = self.vector(f"{post}.weight", d) if self.config.block.post_norms else None
        return Sublayer(weight, inner, matrices, post_norm, bias, self.bias(out, d), beside, leaves)

    def _feed_forward(self, i: int) -> FeedForward:
        c, name = self.config, f"blk.{i}.ffn_{{}}".format
        f, d, place = self._width(i), c.d_model, self.ops.place
        if not c.block.gated:
            return FeedForward(place((self.weights.matrix(f"{name('up')}.weight", f, d),)), self.bias(name("up"), f))
        if f"{name('gate')}.weight" not in self.weights:  # one matrix of both
            both = self.weights.matrix(f"{name('up')}.weight", 2 * f, d)
            halves = both.part(0, f), both.part(f, 2 * f)
            return FeedForward(place(halves, paired=True), self.bias(name("up"), 2 * f))
        pair = tuple(self.weights.matrix(f"{name(x)}.weight", f, d) for x in ("gate", "up"))
        biases = [x for x in (self.bias(name("gate"), f), self.bias(name("up"), f)) if x is not None]
        cutoff = c.layers[i].cutoff
        return FeedForward(place(pair, paired=cutoff is None), torch.cat(biases) if biases else None, cutoff)

    def _attention(self, i: int) -> Attention:
        c, shape = self.config, self.config.layers[i]
        rope, heads = self.ropes.table(shape.rope), (c.n_heads, shape.kv_heads)
        parts, stores = self._projections(i), shape.shares_kv_with is None
        gate: _Projection | None = None
        if c.block.output_gate:
            parts[0], gate = self._gated(parts[0], shape.dim_k)
        if c.block.rope_pairs and shape.rope:
            parts = [*(x.halved(n, shape.rope.dim) for x, n in zip(parts, heads, strict=False)), *parts[2:]]
        biases = [x.bias for x in parts if x.bias is not None]
        q_norm = self._head_norm(f"blk.{i}.attn_q_norm", c.n_heads, shape)
        k_norm = self._head_norm(f"blk.{i}.attn_k_norm", shape.kv_heads, shape) if stores else None
        v_norm = torch.ones(shape.dim_v, device=self.ops.device) if c.block.v_norm and stores else None
        sinks = self.vector(f"blk.{i}.attn_sinks.weight", c.n_heads) if c.block.sinks else None
        scale, amplitude = _amplitudes(shape, c.block.qk_norm_last)
        how = AttentionLayer(
            c.n_heads, c.attn_scale * scale, rope, shape.window if shape.kind == SLIDING else 0, c.attn_softcap,
            torch.cat(biases) if biases else None, q_norm, k_norm, c.norm_eps, c.block.qk_norm_last, amplitude,
            shape.temperature, v_norm, stores and len(parts) == 2, stores, sinks,
            partial(seal_step, self.ops, rope, stores=stores),
        )  # fmt: skip
        gates = self.ops.place((gate.matrix,)) if gate else ()
        return Attention(i, self.ops.place(tuple(x.matrix for x in parts)), how, gates, self._joined(i, how))

    def _joined(self, i: int, how: AttentionLayer) -> JoinedRows | None:
        """What to do where values that are keys are stored once; None where they are not keys. Raises ModelError where
        RoPE turns other dims than was said when rows were laid out."""
        shape = self.config.layers[i]
        rope = self.ropes.table(shape.rope)
        if not shape.turned or rope is None:
            return None
        turns = rope.frequencies > TURNS_LEAST
        if turns[shape.turned // 2 :].any():
            raise ModelError(
                f"RoPE turns {2 * int(turns.sum())} dims of keys in layer {i}, at most {shape.turned} are those of kv's"
                f" {self.config.arch}",
                "kv would compute another model than this one",
            )
        owner = i if shape.shares_kv_with is None else shape.shares_kv_with
        k_norm = self._head_norm(f"blk.{owner}.attn_k_norm", shape.kv_heads, shape)
        assert k_norm is not None
        return JoinedRows.of(how, rope, shape.turned, k_norm, self.ops)

    def _projections(self, i: int) -> list[_Projection]:
        """q, k and v, which files have one by one or as one matrix; what the layer has none of is left out."""
        c, shape, name = self.config, self.config.layers[i], f"blk.{i}.attn_{{}}".format
        each = 2 if c.block.output_gate else 1  # queries, and gates of as many elements
        rows = {
            "q": each * c.n_heads * shape.dim_k,
            "k": shape.kv_heads * shape.dim_k,
            "v": shape.kv_heads * shape.dim_v,
        }
        if f"{name('qkv')}.weight" in self.weights:
            return self._projection(name("qkv"), sum(rows.values())).cut(list(rows.values()))
        if shape.shares_kv_with is not None:  # files may have what nothing reads
            self.weights.used.update(f"{name(x)}.weight" for x in ("k", "v", "k_norm"))
            return [self._projection(name("q"), rows["q"])]
        if c.block.keys_as_values and f"{name('v')}.weight" not in self.weights:
            del rows["v"]
        parts = [self._projection(name(x), n) for x, n in rows.items()]
        if len({x.bias is None for x in parts}) > 1:
            raise ModelError(f"layer {i} has a bias for some of q, k and v only", "the file is incomplete")
        return parts

    def _gated(self, both: _Projection, dim: int) -> tuple[_Projection, _Projection]:
        """Queries and gates, which stand in files head by head, first the query and then its gate."""
        if both.bias is not None:
            raise ModelError("queries that have gates have a bias", "kv would compute another model than this one")

        def rows(which: int) -> QuantTensor:
            return both.matrix.with_rows(lambda x: x.unflatten(0, (-1, 2, dim))[:, which].flatten(0, 1))

        return _Projection(rows(0), None), _Projection(rows(1), None)

    def _projection(self, name: str, rows: int) -> _Projection:
        return _Projection(self.weights.matrix(f"{name}.weight", rows, self.attends), self.bias(name, rows))

    def _head_norm(self, name: str, heads: int, shape: LayerConfig) -> torch.Tensor | None:
        """The weights of the norm of q or k, in the order of their rows; None where there is none."""
        block = self.config.block
        if not block.qk_norm:
            return None
        if block.qk_norm == PLAIN:
            return torch.ones(shape.dim_k, device=self.ops.device) if shape.rope else None
        n = heads if block.qk_norm == ALL else 1
        weight = self.vector(f"{name}.weight", n * shape.dim_k)
        return half_split(weight, n, shape.rope.dim) if block.rope_pairs and shape.rope else weight
