"""Formats whose codes are numbers of entries of a grid: from GGML blocks to the arrays of formats.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.reference import fields, lookup

Arrays = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def flat(fields: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n, ...] -> [n, all of them as dtype]."""
    return fields.flatten(1).contiguous().view(dtype)


def half(field: Tensor) -> Tensor:
    return flat(field, torch.float16)


def _together(*words: Tensor) -> Tensor:
    """Bytes uint8 [n, ...], a multiple of four a group -> int32 [n, groups, words], one's behind the other's."""
    groups = words[-1].flatten(1).shape[1] // 4
    return torch.cat([flat(w, torch.int32).unflatten(1, (groups, -1)) for w in words], 2)


def _twice(scales: Tensor) -> Tensor:
    """A nibble for 32 elements, [..., groups] -> one for each 16, uint8 [n, all groups]."""
    return (scales | scales << 4).byte().flatten(1)


def _iq2_xxs(b: Tensor) -> Arrays:
    runs = b[..., 2:66].unflatten(-1, (8, 8))
    signs, scales = lookup.words_of_signs(runs[..., 4:8].flatten(-2))
    return _together(runs[..., 0:4], signs.byte()), None, _twice(scales), half(b[..., 0:2])


def _iq2_xs(b: Tensor) -> Arrays:
    index = fields.u16(b[..., 2:66])
    above = (index >> 8 & 1).unflatten(-1, (8, 4)) << torch.tensor([0, 2, 4, 6], device=b.device)
    words = _together((index & 255).byte(), lookup.eight_signs(index >> 9).byte())
    return words, above.sum(-1).byte().flatten(1), b[..., 66:74].flatten(1), half(b[..., 0:2])


def _iq2_s(b: Tensor) -> Arrays:
    words = _together(b[..., 2:34], b[..., 34:66])
    return words, b[..., 66:74].flatten(1), b[..., 74:82].flatten(1), half(b[..., 0:2])


def _iq3_xxs(b: Tensor) -> Arrays:
    signs, scales = lookup.words_of_signs(b[..., 66:98])
    return _together(b[..., 2:66], signs.byte()), None, _twice(scales), half(b[..., 0:2])


def _iq3_s(b: Tensor) -> Arrays:
    words, scales = _together(b[..., 2:66], b[..., 74:106]), fields.alternating(b[..., 106:110])
    return words, b[..., 66:74].flatten(1), _twice(scales), half(b[..., 0:2])


def _iq1_s(b: Tensor) -> Arrays:
    qh, i = fields.u16(b[..., 34:50]), torch.arange(4, device=b.device)
    each = (qh.unsqueeze(-1) >> 3 * i & 7 | (qh >> 15 << 3).unsqueeze(-1)) << 4 * i
    return _together(b[..., 2:34]), each.sum(-1).short().flatten(1), _twice(qh >> 12 & 7), half(b[..., 0:2])


def _iq1_m(b: Tensor) -> Arrays:
    d, scales = lookup.iq1_m_scales(b)
    return (
        _together(b[..., 0:32]), flat(b[..., 32:48], torch.int16),
        (scales[..., 0::2] | scales[..., 1::2] << 4).byte().flatten(1), half(d),
    )  # fmt: skip


# Words int32 [n, groups, words], high, scales, supers of formats whose codes are numbers of entries of a grid.
ENTRIES = {
    "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}  # fmt: skip
