"""Latent attention from the tensors of a GGUF file: rows in the order in which they are computed, and a matrix of each
head for what is absorbed."""

from __future__ import annotations

from functools import partial

import torch

from kvcli.kernels import AttentionLayer, Backend, ExpertMatrices, ExpertTensor, QuantTensor
from kvcli.kernels.reference import ggml
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.decoder import LatentAttention, Matrices
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step
from kvcli.runtime.model.weights import Weights

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of an element of matrices that are transposed as they are


def load_latents(
    config: ModelConfig, layer: int, weights: Weights, ops: Backend, rope: RopeTable | None
) -> LatentAttention:
    """Attention of model layer `layer`, taken to where the backend computes.

    Raises ModelError for missing or misshapen tensors.
    """
    c, shape, name = config.latents, config.layers[layer], f"blk.{layer}.attn_{{}}".format
    assert c is not None
    heads, turned, each = config.n_heads, shape.dim_k, c.plain + shape.dim_k
    queries = weights.matrix(f"{name('q_b' if c.q_rank else 'q')}.weight", heads * each, c.q_rank or config.d_model)
    queries = queries.with_rows(lambda rows: rows[_turned_first(heads, c.plain, turned)])
    row = weights.matrix(f"{name('kv_a_mqa')}.weight", shape.dim_v + turned, config.d_model)
    row = row.with_rows(lambda rows: rows[_turned_first(1, shape.dim_v, turned)])
    first, norm = queries, None
    second: Matrices = ()
    if c.q_rank:
        first = weights.matrix(f"{name('q_a')}.weight", c.q_rank, config.d_model)
        norm, second = weights.vector(f"{name('q_a_norm')}.weight", c.q_rank).to(ops.device), ops.place((queries,))
    keys, values = _of_heads(weights, name("{}_b"), heads, (c.plain, shape.dim_v, c.dim_v))
    square = shape.rope.amplitude**2 if shape.rope else 1.0  # of RoPE's amplitude: see `loading`
    how = AttentionLayer(
        heads, config.attn_scale, rope, eps=config.norm_eps, amplitude=square, temperature=shape.temperature,
        v_norm=weights.vector(f"{name('kv_a_norm')}.weight", shape.dim_v).to(ops.device),
        seal=partial(seal_step, ops, rope),
    )  # fmt: skip
    return LatentAttention(
        layer, ops.place((first, row)), norm, second, ops.place_heads(ExpertMatrices((keys,))),
        ops.place_heads(ExpertMatrices((values,))), how,
    )  # fmt: skip


def _turned_first(heads: int, others: int, turned: int) -> torch.Tensor:
    """The order of rows in which those that RoPE turns come first, half a head apart, of all heads, from heads in which
    they come last, as neighbours: int64 [heads * (others + turned)]."""
    rows = torch.arange(heads * (others + turned)).view(heads, -1)
    last = rows[:, others:].unflatten(1, (-1, 2)).mT  # [heads, 2, turned / 2]
    return torch.cat((last.flatten(), rows[:, :others].flatten()))


def _of_heads(weights: Weights, name: str, heads: int, dims: tuple[int, int, int]) -> tuple[ExpertTensor, ExpertTensor]:
    """The matrices of heads that make queries of latents [rank, plain], and values [dim_v, rank].

    Files of before 2025 have one tensor of both, as folders do: [heads * (plain + dim_v), rank], from latents to keys
    and values.
    """
    plain, rank, dim_v = dims
    of = f"{name.format('k')}.weight", f"{name.format('v')}.weight", f"{name.format('kv')}.weight"
    if of[2] not in weights:
        return weights.experts(of[0], heads, rank, plain), weights.experts(of[1], heads, dim_v, rank)
    both = weights.matrix(of[2], heads * (plain + dim_v), rank)
    blocks = both.blocks.unflatten(0, (heads, -1))
    values = ExpertTensor(both.type, blocks[:, plain:].contiguous(), rank)
    return _transposed(QuantTensor(both.type, blocks[:, :plain].flatten(0, 1), rank), heads), values


def _transposed(w: QuantTensor, heads: int) -> ExpertTensor:
    """Matrices [rows, cols] one behind the other as [cols, rows] each: packed ones in float16, which has room for what
    their few bits say."""
    rows = w.rows // heads
    if w.type in _BYTES:
        elements = w.blocks.view(heads, rows, w.cols, _BYTES[w.type])
        return ExpertTensor(w.type, elements.transpose(1, 2).flatten(2).contiguous(), rows)
    floats = ggml.decode(w.type, w.blocks).view(heads, rows, w.cols).mT.half().contiguous()
    return ExpertTensor("F16", floats.view(torch.uint8), rows)
