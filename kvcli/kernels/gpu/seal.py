"""Sealing on a GPU: rows of full open pages become codes, with the bits that kernels/reference/codecs give.

A program encodes the keys or the values of CENTRE_ROWS = 16 rows of one head. Rows are read as four quarters, whose
codes are packed without moving anything between lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.gpu.language import SERIAL, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.places import address, slot
from kvcli.kernels.gpu.rows import hadamard
from kvcli.kernels.gpu.tiles import LARGEST_HALF, bound, elements, launch_options
from kvcli.kernels.reference.rotation import block

ROWS = tl.constexpr(16)
SMALLEST_SCALE = tl.constexpr(6e-8)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it away rounds to an integer, ties to even


@triton.jit
def _load_quarter(at, rows, keep, i: tl.constexpr, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
                  CODEC: tl.constexpr):  # fmt: skip
    """Quarter i of rows of f16, bf16 or f32, float32 [ROWS, PAD / 4]; 0 where there is nothing."""
    d = elements(i, 4, DIM, PAD)
    mask = keep[:, None] & (d < DIM)[None, :]
    if CODEC.mantissa == 23:
        return tl.load(
            at.to(tl.pointer_type(tl.float32)) + rows[:, None] * (PITCH // 4) + d[None, :], mask=mask, other=0
        )
    elif CODEC.mantissa == 10:
        p = at.to(tl.pointer_type(tl.float16)) + rows[:, None] * (PITCH // 2) + d[None, :]
        return tl.load(p, mask=mask, other=0).to(tl.float32)
    else:
        p = at.to(tl.pointer_type(tl.uint16)) + rows[:, None] * (PITCH // 2) + d[None, :]
        return (tl.load(p, mask=mask, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _codes(x, scale, CENTRE: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """float32 whole numbers: the codes of x [ROWS, n] under scale [ROWS]."""
    u = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)) + CENTRE
    return tl.clamp((u + ROUNDER) - ROUNDER, LOWEST, HIGHEST)


@triton.jit
def _error(x, scale, there, CENTRE: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    e = (_codes(x, scale, CENTRE, LOWEST, HIGHEST) - CENTRE) * scale[:, None] - x
    return tl.sum(tl.where(there[None, :], e * e, 0.0), 1)


@triton.jit
def _best_scale(x0, x1, x2, x3, there, CENTRE: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
                TRIED: tl.constexpr):  # fmt: skip
    """The scale of least squared error of TRIED ones for each row, float32 [ROWS]; see `GridCodec.quantize`."""
    largest = tl.maximum(tl.max(tl.abs(x0), 1), tl.max(tl.abs(x1), 1))
    largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(x2), 1), tl.max(tl.abs(x3), 1)))
    step = tl.full((1,), 0.03, tl.float64)
    least = tl.full((ROWS,), float("inf"), tl.float32)
    best = tl.full((ROWS,), 1.0, tl.float32)
    for i in tl.range(0, bound(TRIED)):
        factor = ((1.0 - step * i) / (HIGHEST - CENTRE)).to(tl.float32)
        scale = tl.clamp(largest * factor, SMALLEST_SCALE, LARGEST_HALF).to(tl.float16).to(tl.float32)
        error = _error(x0, scale, there, CENTRE, LOWEST, HIGHEST) + _error(x1, scale, there, CENTRE, LOWEST, HIGHEST)
        error += _error(x2, scale, there, CENTRE, LOWEST, HIGHEST) + _error(x3, scale, there, CENTRE, LOWEST, HIGHEST)
        best = tl.where(error < least, scale, best)
        least = tl.minimum(error, least)
    return best


@triton.jit
def _float8(x, scale, CODEC: tl.constexpr):
    """x / scale, clamped, as bits of an 8-bit float in uint16, to nearest, ties to even; by integer arithmetic."""
    MANTISSA: tl.constexpr = CODEC.mantissa
    BIAS: tl.constexpr = (1 << (6 - MANTISSA)) - 1
    one = tl.broadcast_to(tl.full((1, 1), 1.0, tl.float32) * scale, x.shape)
    v = tl.clamp(tl.div_rn(x, one), -CODEC.largest, CODEC.largest)
    bits = v.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    CUT: tl.constexpr = 23 - MANTISSA
    normal = ((bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT) - ((127 - BIAS) << MANTISSA)
    small = ((tl.abs(v) * (2.0 ** (BIAS - 1 + MANTISSA)) + ROUNDER) - ROUNDER).to(tl.uint32)
    return (tl.where(bits < ((128 - BIAS) << 23), small, normal) | sign).to(tl.uint16)


@triton.jit
def _store_quarter(at, rows, keep, q, i: tl.constexpr, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    """Bytes of quarter i."""
    d = elements(i, 4, DIM, PAD)
    p = at.to(tl.pointer_type(tl.uint8)) + rows[:, None] * PITCH + d[None, :]
    tl.store(p, q.to(tl.uint8), mask=keep[:, None] & (d < DIM)[None, :])


@triton.jit
def _store_plain(at, rows, keep, x, i: tl.constexpr, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
                 CODEC: tl.constexpr):  # fmt: skip
    d = elements(i, 4, DIM, PAD)
    mask = keep[:, None] & (d < DIM)[None, :]
    if CODEC.mantissa == 23:
        tl.store(at.to(tl.pointer_type(tl.float32)) + rows[:, None] * (PITCH // 4) + d[None, :], x, mask=mask)
    elif CODEC.mantissa == 10:
        p = at.to(tl.pointer_type(tl.float16)) + rows[:, None] * (PITCH // 2) + d[None, :]
        tl.store(p, x.to(tl.float16), mask=mask)
    else:
        p = at.to(tl.pointer_type(tl.uint16)) + rows[:, None] * (PITCH // 2) + d[None, :]
        tl.store(p, (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16), mask=mask)


@triton.jit
def turned_centre(centre, angles, group, head, ROPE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
                   TURN: tl.constexpr):  # fmt: skip
    """What the keys of a group of rows will lack: float32 [PAD], turned by RoPE and rotated."""
    i = tl.arange(0, PAD)
    x = tl.load(centre + head * DIM + i, mask=i < DIM, other=0.0)
    if ROPE > 0:
        half: tl.constexpr = ROPE // 2
        j = tl.where(i < half, i, i - half)
        partner = tl.load(centre + head * DIM + tl.where(i < half, i + half, j), mask=i < ROPE, other=0.0)
        at = angles + group.to(tl.int64) * ROPE
        c = tl.load(at + j, mask=i < ROPE, other=1.0).to(tl.float32)
        s = tl.load(at + half + j, mask=i < ROPE, other=0.0).to(tl.float32)
        x = x * c + partner * tl.where(i < half, -s, s)
    return hadamard(x, PAD, TURN)


@triton.jit
def seal_rows(
    source, target, scales_at, rows, keep, group, head, centre, angles, head_scales,
    DIM: tl.constexpr, PAD: tl.constexpr, FROM: tl.constexpr, FROM_PITCH: tl.constexpr, TO: tl.constexpr,
    PITCH: tl.constexpr, CENTRED: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Slots `rows` [ROWS] where `keep`, of one head: from the records' addresses `source` to `target`."""
    HIGHEST: tl.constexpr = (1 << TO.bits) - 1
    CODE_CENTRE: tl.constexpr = (TO.lowest + HIGHEST) / 2
    x0 = _load_quarter(source, rows, keep, 0, FROM_PITCH, DIM, PAD, FROM)
    x1 = _load_quarter(source, rows, keep, 1, FROM_PITCH, DIM, PAD, FROM)
    x2 = _load_quarter(source, rows, keep, 2, FROM_PITCH, DIM, PAD, FROM)
    x3 = _load_quarter(source, rows, keep, 3, FROM_PITCH, DIM, PAD, FROM)
    if CENTRED:
        c = turned_centre(centre, angles, group, head, ROPE, DIM, PAD, TURN)
        last: tl.constexpr = PAD - 1
        x0 -= tl.gather(c, tl.minimum(elements(0, 4, DIM, PAD), last), 0)[None, :]
        x1 -= tl.gather(c, tl.minimum(elements(1, 4, DIM, PAD), last), 0)[None, :]
        x2 -= tl.gather(c, tl.minimum(elements(2, 4, DIM, PAD), last), 0)[None, :]
        x3 -= tl.gather(c, tl.minimum(elements(3, 4, DIM, PAD), last), 0)[None, :]
    if TO.mantissa == 0:
        j = tl.arange(0, PAD // 4)
        there = j < DIM // 4
        if DIM != PAD:  # beyond the elements there may be a part of the centre
            x0 = tl.where(there[None, :], x0, 0.0)
            x1 = tl.where(there[None, :], x1, 0.0)
            x2 = tl.where(there[None, :], x2, 0.0)
            x3 = tl.where(there[None, :], x3, 0.0)
        scale = _best_scale(x0, x1, x2, x3, there, CODE_CENTRE, TO.lowest, HIGHEST, TO.tries)
        tl.store(scales_at.to(tl.pointer_type(tl.float16)) + rows, scale.to(tl.float16), mask=keep)
        q0 = _codes(x0, scale, CODE_CENTRE, TO.lowest, HIGHEST).to(tl.uint16)
        q1 = _codes(x1, scale, CODE_CENTRE, TO.lowest, HIGHEST).to(tl.uint16)
        q2 = _codes(x2, scale, CODE_CENTRE, TO.lowest, HIGHEST).to(tl.uint16)
        q3 = _codes(x3, scale, CODE_CENTRE, TO.lowest, HIGHEST).to(tl.uint16)
        if TO.bits < 8:
            words = (q0 & 15) | ((q1 & 15) << 4) | ((q2 & 15) << 8) | ((q3 & 15) << 12)
            there = keep[:, None] & there[None, :]
            at = target.to(tl.pointer_type(tl.uint8)) + rows[:, None] * PITCH
            if PITCH % 2 == 0:
                tl.store(at.to(tl.pointer_type(tl.uint16)) + j[None, :], words, mask=there)
            else:  # rows do not begin where words may
                tl.store(at + 2 * j[None, :], words.to(tl.uint8), mask=there)
                tl.store(at + 2 * j[None, :] + 1, (words >> 8).to(tl.uint8), mask=there)
            if TO.bits == 6:
                fields = (q0 >> 4) | ((q1 >> 4) << 2) | ((q2 >> 4) << 4) | ((q3 >> 4) << 6)
                tl.store(at + DIM // 2 + j[None, :], fields.to(tl.uint8), mask=there)
            elif TO.bits == 5:
                HALF: tl.constexpr = DIM // 8
                fields = (q0 >> 4) | ((q1 >> 4) << 1) | ((q2 >> 4) << 2) | ((q3 >> 4) << 3)
                others = tl.broadcast_to(tl.minimum(j + HALF, PAD // 4 - 1)[None, :], fields.shape)
                fields = fields | (tl.gather(fields, others, 1) << 4)
                tl.store(at + DIM // 2 + j[None, :], fields.to(tl.uint8), mask=there & (j < HALF)[None, :])
            else:
                tl.static_assert(TO.bits == 4, "codes of that width are not packed")
    elif TO.bits == 8:
        one = tl.load(head_scales + head)
        q0 = _float8(x0, one, TO)
        q1 = _float8(x1, one, TO)
        q2 = _float8(x2, one, TO)
        q3 = _float8(x3, one, TO)
    if TO.bits == 8:
        _store_quarter(target, rows, keep, q0, 0, PITCH, DIM, PAD)
        _store_quarter(target, rows, keep, q1, 1, PITCH, DIM, PAD)
        _store_quarter(target, rows, keep, q2, 2, PITCH, DIM, PAD)
        _store_quarter(target, rows, keep, q3, 3, PITCH, DIM, PAD)
    elif TO.mantissa > 0:
        _store_plain(target, rows, keep, x0, 0, PITCH, DIM, PAD, TO)
        _store_plain(target, rows, keep, x1, 1, PITCH, DIM, PAD, TO)
        _store_plain(target, rows, keep, x2, 2, PITCH, DIM, PAD, TO)
        _store_plain(target, rows, keep, x3, 3, PITCH, DIM, PAD, TO)


@triton.jit(do_not_specialize=["first", "end", "origin", "offset", "open_offset", "stride", "open_stride", "layers",
                               "rows"])  # fmt: skip
def _seal(
    position, sealing, into, open_into, centre, angles, scale_k, scale_v, first, end, origin, offset, open_offset,
    stride, open_stride, layers, rows,
    IN_STEP: tl.constexpr, BY_ROW: tl.constexpr, APART: tl.constexpr, SIZE: tl.constexpr,
    DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr, CODEC_K: tl.constexpr,
    CODEC_V: tl.constexpr, RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, OPEN_K: tl.constexpr, OPEN_V: tl.constexpr,
    OPEN_RECORD: tl.constexpr, OPEN_K_ROW: tl.constexpr, OPEN_V_ROW: tl.constexpr, OPEN_V_OFFSET: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, TURN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one group of rows, one head, keys or values of one layer.

    IN_STEP: of the page that the row at `position` fills, if it does, or with BY_ROW of that row alone; else of rows
    [first, end), `group` counted from the one of `first`. Those of a page that is not in `into` are not sealed. APART:
    of each row in `sealing`, of so many `rows`.
    """
    group = tl.program_id(0)
    head = tl.program_id(1)
    layer = (tl.program_id(2) // 2 % layers).to(tl.int64)
    offset += layer * stride
    open_offset += layer * open_stride
    of = layer
    if APART:
        own = tl.load(sealing + tl.program_id(2) // 2 // layers)
        of = layer * rows + own
        position += own
        into += own
        open_into += own
    centre += of * tl.num_programs(1) * DIM_K
    scale_k += of * tl.num_programs(1)
    scale_v += of * tl.num_programs(1)
    wait_for_previous(PDL)
    if IN_STEP:
        at = tl.load(position).to(tl.int32)
        first = at
        end = at + 1
        if not BY_ROW:
            first = at + 1 - SIZE
            if (at + 1) % SIZE != 0:
                end = first
        origin = first
    row = (first // ROWS + group) * ROWS
    page = row // SIZE - origin // SIZE
    word = tl.load(into + page, mask=row < end, other=0)
    if word != 0:
        places = row + tl.arange(0, ROWS)
        keep = (places >= first) & (places < end)
        slots = places % SIZE
        source = tl.load(open_into + page) + (open_offset + head * OPEN_RECORD)
        target = address(word, CENTRED) + (offset + head * RECORD)
        centred = slot(word) * (SIZE // ROWS) + row % SIZE // ROWS  # the row of `angles`
        if tl.program_id(2) % 2 == 0:
            seal_rows(
                source, target, target + K_SCALES, slots, keep, centred, head, centre, angles, scale_k, DIM_K,
                PAD_K, OPEN_K, OPEN_K_ROW, CODEC_K, K_ROW, CENTRED, ROPE, TURN_K,
            )  # fmt: skip
        else:
            seal_rows(
                source + OPEN_V_OFFSET, target + V_OFFSET, target + V_SCALES, slots, keep, centred, head, centre,
                angles, scale_v, DIM_V, PAD_V, OPEN_V, OPEN_V_ROW, CODEC_V, V_ROW, False, 0, 0,
            )  # fmt: skip


def _launch(
    pages: DevicePages, groups: int, rows: tuple[int, int] | None, by_row: bool, pdl: int, layers: int,
    strides: tuple[int, int],
) -> None:  # fmt: skip
    """`rows`: what is sealed; None = what the row at the position on the device completes."""
    if pages.open is None:
        raise ValueError("this cache has no pages to seal")
    r, lists, opened = pages.record, pages.lists, pages.open
    o, some = opened.record, lists.into
    present = (some if x is None else x for x in (pages.centre, pages.angles, pages.scale_k, pages.scale_v))
    sealing = lists.sealing if lists.apart else lists.position
    assert sealing is not None
    launch(_seal, (groups, r.kv_heads, 2 * layers * len(sealing)))(
        lists.position, sealing, lists.into, lists.open_into, *present, *(rows or (0, 0)), lists.first, pages.offset,
        opened.offset, *strides, layers, len(lists.shift), rows is None, by_row, lists.apart, r.page_size, r.dim_k,
        padded(r.dim_k), r.dim_v,
        padded(r.dim_v), r.codec_k.numbers, r.codec_v.numbers, r.record_bytes, r.k_row_bytes, r.v_row_bytes, r.v_offset,
        r.k_scales, r.v_scales, o.codec_k.numbers, o.codec_v.numbers, o.record_bytes, o.k_row_bytes, o.v_row_bytes,
        o.v_offset, pages.centre is not None, 0 if pages.angles is None else pages.angles.shape[1],
        block(r.dim_k) if pages.rotated[0] else 0, pdl, **launch_options(pdl, 4 if max(r.dim_k, r.dim_v) > 256 else 2),
    )  # fmt: skip


def seal(pages: DevicePages, first: int, end: int) -> None:
    """Encode rows [first, end) of the open pages into the sealed pages; see `store.seal`."""
    _launch(pages, (end - 1) // 16 - first // 16 + 1, (first, end), False, SERIAL, 1, (0, 0))


def seal_step(
    pages: DevicePages,
    pdl: int = SERIAL,
    by_row: bool = False,
    layers: int = 1,
    strides: tuple[int, int] = (0, 0),
) -> None:
    """Encode what the row at `PageLists.position` completes: its page or, with `by_row`, it alone.

    With `layers` > 1 for as many layers, alike but for where they are: sealed and open records `strides` bytes on from
    layer to layer, means and scales one after the other in memory. Where rows are apart, of those in
    `PageLists.sealing`.
    """
    _launch(pages, 1 if by_row else pages.record.page_size // 16, None, by_row, pdl, layers, strides)
