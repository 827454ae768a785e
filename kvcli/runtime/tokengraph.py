"""One token of a decoder on a GPU: kernels over buffers that never move, captured once as a CUDA graph and replayed.

Per layer: q/k/v product; norms of heads, RoPE, rotation, store; attention in splits; their combination, which is also
the next product's vector; output product; gate/up product; down product. Each product leaves the vector of the next
one, already normed and quantized (see kernels/gpu/matvec.py). What changes from token to token (token, position, page
tables) stands in device memory, so one graph serves a whole range of contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvcli.kernels.gpu import attention, expand, products, rows
from kvcli.kernels.gpu.formats import GROUP, PLAIN, DeviceMatrix
from kvcli.kernels.gpu.matvec import GATED, RESIDUAL, STORE
from kvcli.kernels.gpu.pages import DevicePages
from kvcli.kernels.gpu.products import Activations, Norm
from kvcli.kernels.paged import PagedKV
from kvcli.runtime.config import LayerConfig
from kvcli.runtime.layers import Block, Decoder
from kvcli.runtime.layout import KVLayout
from kvcli.runtime.sequence import Sequence, Step, paged_record

SMALLEST_BUCKET = 256  # tokens of context; buckets grow by factors of four
UPLOADS = 4  # page tables on the way to the device at once


def unsupported(model: Decoder) -> str:
    """Why a model's tokens cannot be computed by these kernels; "" = they can."""
    c = model.config
    sizes = {"d_model": c.d_model, "d_ff": c.d_ff} | {
        "heads x head dim": c.n_heads * x.dim_v for x in c.layers
    }
    for name, size in sizes.items():
        if size % GROUP:
            return f"{name} is {size}, which is no multiple of {GROUP}"
        if size > GROUP * products.MAX_GROUPS:
            return f"{name} is {size:,}, more than {GROUP * products.MAX_GROUPS:,}"
    return ""


@dataclass
class _Tables:
    """Page addresses of one group on the device, by page number: int64 [pages] of each class."""

    main: torch.Tensor
    open: torch.Tensor | None
    staging: torch.Tensor  # pinned int64 [UPLOADS, classes, pages]
    bound: object = None
    turn: int = 0


class TokenGraph:
    """The model's next-token computation for one sequence at a time: `bind` it, then `run` token after token."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int) -> None:
        self.model, self.layout, self.ctx_size = model, layout, ctx_size
        self.device: torch.device = model.ops.device
        c, w, floats = model.config, model.weights, self._floats
        keep = any(m.format.kind == PLAIN for m in _matrices(model))
        self.token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.logits, self.residual, self.row = floats(c.vocab_size), floats(c.d_model), floats(1, c.d_model)
        self.x = Activations.empty(c.d_model, keep, self.device)
        self.heads = Activations.empty(max(c.n_heads * x.dim_v for x in c.layers), keep, self.device)
        self.gated = Activations.empty(c.d_ff, keep, self.device)
        self.norm = Norm(floats(c.d_model // GROUP), c.norm_eps)
        self.qkv = floats(max(sum(m.rows for m in b.attn.qkv) for b in w.blocks))
        self.q = attention.Queries.empty(1, c.n_heads, max(x.dim_k for x in c.layers), self.device)
        self.y = floats(c.d_model)
        self.frequencies = {
            x.rope: torch.from_numpy(model.ropes.table(x.rope).frequencies).to(self.device) for x in c.layers if x.rope
        }
        self._tables = [self._make_tables(g) for g in range(len(layout.groups))]
        self._pages = [self._layer_pages(i) for i in range(c.n_layers)]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._partial: attention.Partial | None = None

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.float32, device=self.device)

    def _make_tables(self, group: int) -> _Tables:
        pages = -(-self.ctx_size // self.layout.page_size) + 1
        opened = self.layout.open_arena(group) is not None

        def table() -> torch.Tensor:
            return torch.zeros(pages, dtype=torch.int64, device=self.device)

        staging = torch.zeros(UPLOADS, 1 + opened, pages, dtype=torch.int64, pin_memory=True)
        return _Tables(table(), table() if opened else None, staging)
