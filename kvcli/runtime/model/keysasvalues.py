"""Keys that are values, too, stored once.

Where there is no matrix of values (some layers of Gemma 4), a head's value is v = x / rms(x) of what the matrix of
keys gives, and its key RoPE(w * v), w the weights of the norm of keys. RoPE turns only some dims of it. So a score is
that of these dims, which are stored beside the value, and of the value's other dims with a query that was multiplied
by w:

    q . RoPE(w * v) = q[turned] . RoPE(w * v)[turned] + sum over other dims of (q * w) v

which is what records of latents are for (`RecordLayout.joined`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from kvcli.kernels import AttentionLayer, Backend
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step


@dataclass(frozen=True)
class JoinedRows:
    """What makes queries and rows of a layer's projections, all of whose heads have `dim` elements.

    `columns` int64 [turned + dim]: the dims that RoPE turns, then all. `of_queries`, `of_rows` float32 [turned + dim]:
    what these are multiplied by. `how`: attention to them, without norms of heads.
    """

    columns: torch.Tensor
    of_queries: torch.Tensor
    of_rows: torch.Tensor
    q_norm: torch.Tensor
    ones: torch.Tensor
    eps: float
    bias: torch.Tensor | None
    how: AttentionLayer

    @classmethod
    def of(cls, how: AttentionLayer, rope: RopeTable, turned: int, k_norm: torch.Tensor, ops: Backend) -> JoinedRows:
        """Of a layer as it is where rows are stored apart. `k_norm`: the weights of the layer whose rows are read."""
        assert how.q_norm is not None
        dim, half = k_norm.numel(), torch.arange(turned // 2)
        first, whole = torch.cat((half, half + dim // 2)), torch.arange(dim)
        columns, still = torch.cat((first, whole)), ~torch.isin(whole, first)
        weights = k_norm.cpu()
        of_queries = torch.cat((torch.ones(turned), weights * still))
        of_rows = torch.cat((weights[first], torch.ones(dim)))
        part = rope.first(turned)
        plain = replace(
            how, rope=part, bias=None, q_norm=None, k_norm=None, v_norm=None, keys_as_values=False,
            seal=partial(seal_step, ops, part, stores=how.stores),
        )  # fmt: skip
        on = ops.device
        ones, norm = torch.ones(dim, device=on), how.q_norm
        return cls(columns.to(on), of_queries.to(on), of_rows.to(on), norm, ones, how.eps, how.bias, plain)

    def rows(self, ops: Backend, qkv: torch.Tensor) -> torch.Tensor:
        """Projections [T, (heads + kv_heads) * dim], which are changed -> [T, (heads + kv_heads) * (turned + dim)]: of
        each head what RoPE turns, which it has not done yet, and then the rest. Without KV heads where the layer reads
        rows of another one."""
        if self.bias is not None:
            ops.add_(qkv, self.bias)
        t, n, dim = len(qkv), self.how.heads, self.ones.numel()
        heads = qkv.view(t, -1, dim)
        found = [ops.rms_norm(heads[:, :n], self.q_norm, self.eps)[..., self.columns] * self.of_queries]
        if self.how.stores:
            found.append(ops.rms_norm(heads[:, n:], self.ones, self.eps)[..., self.columns] * self.of_rows)
        return torch.cat(found, 1).flatten(1)
