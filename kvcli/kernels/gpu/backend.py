"""The facade on a GPU, for any number of rows: prefill, and decoding without a graph.

Matrices are expanded to float16, the largest ones a slice at a time, and multiplied by the vendor's library with
float32 sums; what stands between two products is one kernel (wide.py). The cache is read by the same kernels as in
decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch

from kvcli.errors import ModelError
from kvcli.kernels.attend import AttentionLayer, Rope, note_queries
from kvcli.kernels.experts import ExpertLayer, SharedExpert, asked
from kvcli.kernels.gpu import expand, experts, few, latentcombine, latentpast, latentrows, latents, past, picking, wide
from kvcli.kernels.gpu.attention import attend, block_rows, programs
from kvcli.kernels.gpu.basis import fix_basis
from kvcli.kernels.gpu.bound import attend_bound, frequencies
from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.choosing import summarize
from kvcli.kernels.gpu.combine import combine, most_parts
from kvcli.kernels.gpu.formats import GROUP, PLAIN, DeviceMatrix, dealt, repack
from kvcli.kernels.gpu.language import AFTER, BESIDE, INTERPRETED, SERIAL, TRAILING
from kvcli.kernels.gpu.mamba import mamba
from kvcli.kernels.gpu.mass import add_mass
from kvcli.kernels.gpu.pages import (
    Asked,
    BoundStretch,
    DevicePages,
    PageLists,
    device_pages,
    half_angles,
    lists_of_step,
    page_lists,
)
from kvcli.kernels.gpu.places import words
from kvcli.kernels.gpu.rows import normed_together, with_values
from kvcli.kernels.gpu.seal import seal
from kvcli.kernels.gpu.states import delta_net, short_conv
from kvcli.kernels.paged import Angles, PagedKV, Stretch
from kvcli.kernels.reference import ggml, pointwise
from kvcli.kernels.reference.experts import ExpertMatrices
from kvcli.kernels.reference.matmul import QuantTensor
from kvcli.kernels.reference.rotation import rotate

OTHERS = 8  # programs of one query alone, of each head, beside those that share out what it sees wholly
KEPT = 32  # angles of parts


class GpuBackend:
    """The operations of the facade over tensors of one GPU; what is done to keys, values and pages is cut otherwise.

    Results do not depend on chunking beyond rounding; with a `block` not at all, for steps of two rows or more that
    begin at multiples of it.
    """

    name: Literal["cuda"] = "cuda"

    def __init__(self, device: torch.device, block: int = 0) -> None:
        """`block`: rows of every product, the last ones of which may be none, so that a row's sums do not depend on how
        many rows a step has; nor are pages shared out by that. A multiple of the page size; 0 = what is fastest."""
        self.device, self.block = device, block
        self._angles = dict[int, tuple[Angles, torch.Tensor]]()  # of the parts of a step, by identity
        self._hadamard: dict[int, torch.Tensor] = {}
        self._most, self._packed = 0, False  # numbers that `expand.slices` needs; whether any weights are packed
        self.pdl = SERIAL

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Inside, kernels are launched ahead of each other, where the card can (see `language.SERIAL`): in a graph, in
        which nothing writes the lists of pages."""
        self.pdl = AFTER if Chip.of(self.device).ahead and not INTERPRETED else SERIAL
        try:
            yield
        finally:
            self.pdl = SERIAL

    @property
    def sums_by_page(self) -> bool:
        """Whether bits are fixed at all, and then by pages, too: without a `block` they also depend on how many rows a
        step has."""
        return self.block > 0

    @property
    def arithmetic(self) -> str:
        """What decides the last bits."""
        return f"cuda {torch.cuda.get_device_name(self.device)}{f' in blocks of {self.block}' if self.block else ''}"

    def place(self, weights: tuple[QuantTensor, ...], paired: bool = False) -> tuple[DeviceMatrix, ...]:
        """Repack on the device, stacked where the type is the same."""
        if paired and len({(w.type, w.rows) for w in weights}) > 1:
            kinds = " and ".join(w.type for w in weights)
            raise ModelError(f"gates and what they gate are stored as {kinds}", "use `device=cpu`")
        runs = [tuple(run) for _, run in groupby(weights, key=lambda w: w.type)]
        paired = paired and weights[0].rows % GROUP == 0
        matrices = tuple(repack(run, self.device, paired, dealt(run, paired)) for run in runs)
        self._most = max(self._most, *map(expand.room_for, matrices))
        self._packed |= any(m.format.kind != PLAIN for m in matrices)
        return matrices

    place_rows = place

    @property
    def placed(self) -> tuple[int, bool]:
        """What this backend has to know of all that it placed; to be set where another process has placed it."""
        return self._most, self._packed

    @placed.setter
    def placed(self, known: tuple[int, bool]) -> None:
        self._most, self._packed = known

    @cached_property
    def _room(self) -> torch.Tensor:
        """For expanded weights; one for all, also for graphs, whose buffers never move. Made when all are placed."""
        return torch.empty(self._most, dtype=torch.float16, device=self.device)

    @property
    def _before_product(self) -> int:
        """How kernels of a few programs are launched that a product comes behind; see `language.SERIAL`."""
        return TRAILING if self.pdl else SERIAL

    def matmul(
        self, x: torch.Tensor | wide.HalfRows, weights: Sequence[DeviceMatrix], add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = self._half_rows(x, weights)
        return wide.finish(self._products(rows, weights), rows.scales, add_to, self.pdl)

    def settle(
        self, x: torch.Tensor | wide.HalfRows, weights: Sequence[DeviceMatrix], add_to: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None], factor: float, eps: float,
    ) -> wide.HalfRows | None:  # fmt: skip
        """`add_to` += factor * norm(x . W^T) -> norm(add_to) as products read it: RMS norms of these weights, without
        what is None."""
        rows, (post, norm) = self._half_rows(x, weights), norms
        products, woven = self._products(rows, weights), self._weaves(len(add_to))
        return wide.settle(products, rows.scales, add_to, post, factor, norm, eps, woven, self._before_product)

    def gated(
        self, x: torch.Tensor | wide.HalfRows, weights: Sequence[DeviceMatrix], act: str,
        bias: torch.Tensor | None = None,
    ) -> wide.HalfRows:  # fmt: skip
        """See `kernels.gated`; as the next product reads it."""
        rows = self._half_rows(x, weights)
        products, paired = self._products(rows, weights), weights[0].paired
        woven, blocks = self._weaves(products.shape[1]), products.shape[1] <= few.FEWEST
        if bias is None:
            return wide.gate(products, act, paired, woven, rows.scales, self._before_product, blocks)
        gates = wide.finish(products, rows.scales, None, self.pdl)
        gates += bias.unflatten(0, (2, -1, GROUP)).transpose(0, 1).flatten() if paired else bias
        return wide.gate(gates, act, paired, woven)

    def _products(self, rows: wide.HalfRows, weights: Sequence[DeviceMatrix]) -> torch.Tensor:
        """Rows [T, cols], without their scales, times all weights, as they lie -> float32 [parts, T, sum of rows]; the
        parts are summed by whoever reads them."""
        t, cols, total = rows.values.shape[0], weights[0].cols, sum(w.rows for w in weights)
        block, by_few = self.block if t > 1 else 0, self._by_few(t, weights)
        values = wide.weave(rows, cols, by_few, self._before_product).values
        if block and t % block:
            values = torch.nn.functional.pad(values, (0, 0, 0, -t % block))
        out = torch.empty(few.parts(weights, t) if by_few else 1, len(values), total, device=self.device)
        done = 0
        for i, w in enumerate(weights):
            if by_few:
                beside = BESIDE if self.pdl and i == 1 and not weights[0].change else self.pdl
                few.product(values, w, out[:, :, done : done + w.rows], beside, scales=rows.blocks)
            else:
                for first, piece in expand.slices(w, self._room):
                    at = done + first
                    wide.product(values, piece, out[0, :, at : at + piece.shape[0]], block)
            if w.change:
                natural = wide.weave(rows, cols, False).values if by_few else values
                inner = torch.empty(len(values), w.change.a.rows, device=self.device)
                wide.product(natural, w.change.a.codes.half(), inner)
                out[0, :, done : done + w.rows] += inner @ w.change.b.T
            done += w.rows
        return out[:, :t]

    def _weaves(self, rows: int) -> bool:
        """Whether so many rows are woven as they are made, for what they are multiplied with."""
        return self._packed and rows <= few.MOST and not (self.block and rows > 1)

    def _by_few(self, rows: int, weights: Sequence[DeviceMatrix]) -> bool:
        """Whether weights are decoded on their way to the tensor cores."""
        return not (self.block and rows > 1) and all(few.can(w, rows) for w in weights)

    def _half_rows(self, x: torch.Tensor | wide.HalfRows, weights: Sequence[DeviceMatrix]) -> wide.HalfRows:
        """What `matmul` is given, as products with these weights read it."""
        if isinstance(x, wide.HalfRows):
            by_blocks = self._by_few(len(x.values), weights) and not any(w.change for w in weights)
            return x if x.blocks is None or by_blocks else wide.weave(x, weights[0].cols, False)
        if x.dtype == torch.float16:
            return wide.HalfRows(x)
        return wide.halve(x.contiguous(), self._weaves(len(x)), self._before_product)

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> wide.HalfRows:
        """`rms_norm`, as products read it."""
        return wide.norm(x, weight, eps, self._weaves(len(x)), self._before_product)

    def place_experts(self, weights: ExpertMatrices, paired: bool = False) -> experts.DeviceExperts:
        """As `place`, of matrices of experts."""
        return experts.place_experts(weights, self.device, paired)

    def place_heads(self, weights: ExpertMatrices) -> torch.Tensor:
        """A matrix of each head, for `by_head`: float16 [heads, rows, cols]."""
        whole = weights.parts[0]
        floats = ggml.decode(whole.type, whole.stacked).unflatten(0, (whole.experts, whole.rows))
        return floats.half().to(self.device)

    def by_head(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Heads' parts of rows, each times the matrix of its head: x [T, heads, cols] -> float32 [T, heads, rows]."""
        t, parts = len(x), x.transpose(0, 1).half()
        if not x.is_cuda:  # Triton's interpreter
            return (parts.float() @ weights.float().mT).transpose(0, 1)
        block = self.block if t > 1 and self.block else t
        parts = torch.nn.functional.pad(parts, (0, 0, 0, -t % block))
        found = [torch.bmm(each, weights.mT, out_dtype=torch.float32) for each in parts.split(block, 1)]
        return torch.cat(found, 1)[:, :t].transpose(0, 1)

    def experts(
        self, x: torch.Tensor | wide.HalfRows, layer: ExpertLayer, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `kernels.experts`."""
        rows = self._half_rows(x, layer.router)
        shape = rows.values.shape[0], layer.routing.used
        ids = torch.empty(shape, dtype=torch.int32, device=self.device)
        weights = torch.empty(shape, device=self.device)
        logits = self.matmul(asked(self, rows, layer, residual), layer.router)
        experts.route(logits, layer.routing, layer.router_bias, layer.choice_bias, ids, weights)
        grouping = experts.Grouping.of(ids, layer.routing.experts)
        if layer.scales is not None:
            weights *= layer.scales[ids]
        products = experts.grouped_product(rows, layer.gate_up, grouping)
        if layer.weighs_input:  # the products are linear
            products *= weights.view(-1, 1)
            weights.fill_(1.0)
        if layer.gated:
            activated = wide.gate(products, layer.activation, layer.gate_up.matrix.paired, layer.down.woven)
        else:
            activated = wide.halve(self.activate(products, layer.activation), layer.down.woven)
        out = experts.mix(experts.grouped_product(activated, layer.down, grouping), weights)
        if layer.shared is not None:
            self._add_shared(out, rows, layer.shared, layer)
        return out

    def _add_shared(self, out: torch.Tensor, rows: wide.HalfRows, shared: SharedExpert, layer: ExpertLayer) -> None:
        first: Callable[..., Any] = self.gated if layer.gated else self.activated
        activated = first(rows, shared.gate_up, layer.activation)
        if shared.gate is None:
            self.matmul(activated, shared.down, add_to=out)
        else:
            out.addcmul_(self.matmul(activated, shared.down), self.matmul(rows, shared.gate).sigmoid_())

    def rows(self, weight: DeviceMatrix, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return expand.changed_rows(
            weight, torch.empty(len(ids), weight.cols, device=self.device), ids.to(self.device), scale
        )

    rms_norm = staticmethod(wide.rms_norm)
    layer_norm = staticmethod(pointwise.layer_norm)
    rope_ = staticmethod(pointwise.rope_)
    activate = staticmethod(pointwise.activate)
    glu = staticmethod(pointwise.glu)
    activated = pointwise.activated
    softcap = staticmethod(pointwise.softcap)
    add_ = staticmethod(pointwise.add_)
    short_conv = staticmethod(short_conv)
    delta_net = staticmethod(delta_net)
    mamba = staticmethod(mamba)

    def rotate_(self, x: torch.Tensor) -> None:
        dim = x.shape[-1]
        if dim not in self._hadamard:
            self._hadamard[dim] = rotate(torch.eye(dim)).to(self.device)
        x.copy_(x @ self._hadamard[dim])

    def _pages(
        self, part: Stretch, layer: AttentionLayer, angles: Angles | None, past_pages: int = 0, own: int = 0
    ) -> DevicePages:
        """The layer's pages as the kernels want them; their lists are made once a step for all layers of a group.
        `past_pages`, `own`: of `Asked`, over latents."""
        kv, rows = part.kv, part.hi - part.lo
        chip = Chip.of(self.device)
        if kv.record.joined:
            block, _ = latents.block_rows(kv.record, layer.heads, rows)
            alone = latents.parts_of_one(kv.record, layer.heads, chip) + latents.OTHERS if rows == 1 else 0
            asked = Asked(part.start, rows, block, layer.window, alone, past_pages, self.block > 0, own=own)
            return device_pages(kv, page_lists(kv, part.shift, asked, self.device), self.device)
        block, _ = block_rows(kv.record, layer.heads, rows, chip)
        alone = programs(chip, kv.open is not None) // kv.record.kv_heads + OTHERS if rows == 1 else 0
        free = not self.block or (kv.choice is not None and rows > 1)
        apart = past.least_pages(kv.record, rows, layer, self.device, kv.choice) if free else 0
        parts, chosen = min(alone, most_parts(kv.record.dim_v)), kv.choice.pages if kv.choice and rows == 1 else 0
        asked = Asked(part.start, rows, block, layer.window, parts, apart, self.block > 0, chosen)
        lists = page_lists(kv, part.shift, asked, self.device)
        return device_pages(kv, lists, self.device, self._half_angles(angles))

    def _half_angles(self, angles: Angles | None) -> torch.Tensor | None:
        """The angles of the centres on the device; kept for the other layers."""
        if angles is None:
            return None
        if id(angles) not in self._angles:
            self._angles = {} if len(self._angles) == KEPT else self._angles
            self._angles[id(angles)] = angles, half_angles(angles, self.device)
        return self._angles[id(angles)][1]

    def fix_basis(self, kv: PagedKV, rope: Rope | None) -> None:
        """See `kernels.fix_basis`; of a step whose lists are on the device."""
        r, k, v = kv.record, kv.record.codec_k, kv.record.codec_v
        pages = replace(
            device_pages(kv, lists_of_step(kv), self.device),
            centre=torch.empty(r.kv_heads, r.dim_k, device=self.device) if k.centred else None,
            scale_k=torch.empty(r.kv_heads, device=self.device) if k.static_bytes else None,
            scale_v=torch.empty(r.kv_heads, device=self.device) if v.static_bytes else None,
        )
        fix_basis(pages, frequencies(rope, self.device))
        kv.basis.centre, kv.basis.scale_k, kv.basis.scale_v = pages.centre, pages.scale_k, pages.scale_v
        kv.basis.known = True

    def seal(self, kv: PagedKV, first: int, end: int, angles: Angles | None = None) -> None:
        seal(device_pages(kv, lists_of_step(kv), self.device, self._half_angles(angles)), first, end)

    def summarize(self, kv: PagedKV, which: np.ndarray, angles: Angles | None = None) -> None:
        """See `kernels.summarize`."""
        e, summaries = kv.entries, kv.entries.summaries
        assert summaries is not None
        slots = which if kv.open is not None and kv.record.codec_k.centred else None
        numbers = torch.from_numpy(np.stack((words(e.addresses[which], slots), summaries.addresses[which])))
        table, means = numbers.to(self.device)
        lists = PageLists(*(table,) * 7)
        pages = device_pages(kv, lists, self.device, self._half_angles(angles))
        each = past.STAGED_ROWS // kv.record.page_size
        for first in range(0, len(which), each):
            end = min(first + each, len(which))
            keys, _ = past.stage(pages, first, end)
            summarize(keys, means[first:end], kv.layer * summaries.layout.bytes, summaries.layout)

    def attend_latents(self, *given: Any) -> torch.Tensor:
        """See `kernels.attend.attend_latents`; of many rows un-absorbed."""
        return latentpast.attend(self, self._pages, *given)

    def attended(
        self, x: torch.Tensor | wide.HalfRows, weights: Sequence[DeviceMatrix],
        parts: Sequence[Stretch] | Sequence[BoundStretch], layer: AttentionLayer,
    ) -> torch.Tensor | wide.HalfRows:  # fmt: skip
        """`attend` with x . W^T, as the next product reads it; over lists on the device, nothing stands between."""
        rows, part = self._half_rows(x, weights), parts[0]
        if len(parts) > 1 or not isinstance(part, BoundStretch) or rows.scales is not None:
            return self.attend(self.matmul(rows, weights), parts, layer)
        return attend_bound(self._products(rows, weights), part, layer, self.pdl, self._weaves(len(rows.values)))

    def attend(
        self, qkv: torch.Tensor, parts: Sequence[Stretch] | Sequence[BoundStretch], layer: AttentionLayer
    ) -> torch.Tensor:
        """See `kernels.attend`; part by part, by kernels that do several of its steps at once."""
        found = []
        for part in parts:
            x, pdl = qkv[part.lo : part.hi], self.pdl
            one = attend_bound(x, part, layer, pdl) if isinstance(part, BoundStretch) else self._attend(x, part, layer)
            assert isinstance(one, torch.Tensor)
            found.append(one)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend(self, qkv: torch.Tensor, part: Stretch, layer: AttentionLayer) -> torch.Tensor:
        kv, known = part.kv, part.kv.basis.known
        if kv.record.joined:
            return self._attend_latents(qkv, part, layer)
        if part.watch is not None and part.watch.queries is not None:
            q = qkv[:, : layer.heads * kv.record.dim_k].contiguous()
            q = q if layer.bias is None else q + layer.bias[: q.shape[1]]
            note_queries(self, q.unflatten(1, (layer.heads, -1)), [part._replace(lo=0, hi=len(q))], layer)
        qkv = with_values(qkv, layer, kv.record.kv_heads, (kv.record.dim_k, kv.record.dim_v))
        layer = normed_together(qkv, layer, kv.record.dim_k)
        queries = picking.prepare(qkv, layer, self._pages(part, layer, None))
        angles = layer.seal(kv, part.start, part.start + len(qkv))
        pages = self._pages(part, layer, angles)
        if kv.basis.known != known:  # keys now have a mean, and queries carry its share of the scores: once more
            queries = picking.prepare(qkv, layer, pages)
        found = attend(queries, pages, layer.window, layer.softcap)
        if any(pages.lists.past):
            past.attend_past(queries, pages, found, kv.choice, part.start, layer.softcap)
        watch = part.watch
        if watch is not None and watch.mass is not None and part.start + len(qkv) > watch.since:
            add_mass(queries, kv, pages, found, watch, part.start, layer.window, layer.softcap, layer.sinks)
        out = combine(found, pages, sinks=layer.sinks)
        assert out is not None
        return out

    def _attend_latents(self, qkv: torch.Tensor, part: Stretch, layer: AttentionLayer) -> torch.Tensor:
        queries = latentrows.prepare(qkv, layer, self._pages(part, layer, None))
        layer.seal(part.kv, part.start, part.start + len(qkv))
        pages = self._pages(part, layer, None)  # with scales that sealing may have fixed
        return latentcombine.combine(latents.attend(queries, pages, layer.softcap), pages)
