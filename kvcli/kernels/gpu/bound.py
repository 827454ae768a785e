"""`attend_bound`: attention of rows whose pages are listed on the device, as graphs have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvcli.kernels.attend import AttentionLayer, Rope
from kvcli.kernels.gpu import latentcombine, latentrows, latents, picking
from kvcli.kernels.gpu.attention import Partials, attend
from kvcli.kernels.gpu.basis import fix_basis
from kvcli.kernels.gpu.combine import combine, fits_half
from kvcli.kernels.gpu.noting import note
from kvcli.kernels.gpu.pages import BoundStretch, Sealing
from kvcli.kernels.gpu.rows import Queries, is_changed, normed_together, with_values
from kvcli.kernels.gpu.seal import seal, seal_step
from kvcli.kernels.gpu.wide import HalfRows, finish


def attend_bound(
    qkv: torch.Tensor, bound: BoundStretch, layer: AttentionLayer, pdl: int, woven: bool = False
) -> torch.Tensor | HalfRows:
    """`GpuBackend.attend` over lists that are on the device, without a look at what they hold: graphs replay it.

    qkv may be [parts, T, ...], to be summed. `woven`: whether the result is woven, where it fits into float16."""
    pages, record = bound.pages, bound.pages.record
    if qkv.dim() == 3 and (record.joined or pages.chooses or is_changed(layer, record.dim_k)):
        qkv = finish(qkv, None, None, pdl)
    make: Callable[[], Queries] = partial(latentrows.prepare, qkv, layer, pages, pdl=pdl)
    if not record.joined:
        qkv = with_values(qkv, layer, record.kv_heads, (record.dim_k, record.dim_v))
        layer = normed_together(qkv, layer, record.dim_k)
        make = partial(picking.prepare, qkv, layer, pages, pdl=pdl)
    queries = make()
    if layer.stores and bound.fixes and pages.open is not None:
        fix_basis(pages, frequencies(layer.rope, qkv.device))
        queries = make()  # which carry the mean's share of the scores
    if layer.stores and bound.sealing == Sealing.PAGES:
        seal(pages, 0, len(pages.lists.into) * record.page_size)
    elif layer.stores and bound.sealing == Sealing.ROW:
        seal_step(pages, pdl, by_row=True)
    partials = Partials.of(pages, qkv.shape[-2], layer.heads, bound.parts)
    if record.joined:
        return latentcombine.combine(
            latents.attend(queries, pages, layer.softcap, partials, pdl), pages, bound.parts, pdl=pdl
        )
    woven = woven and fits_half(pages, layer.heads)
    found = attend(queries, pages, layer.window, layer.softcap, partials, pdl)
    out = combine(found, pages, None, pdl, layer.sinks, bound.parts, woven)
    if pages.lists.noted is not None:
        note(partials, pages, layer.sinks)
    assert out is not None
    return HalfRows(out, None, True) if woven else out


def frequencies(rope: Rope | None, device: torch.device) -> torch.Tensor | None:
    return None if rope is None else rope.frequencies_on(device)
