"""Attention over latents on a GPU against that of the reference: rows that are stored and sealed, and what is seen."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpucases import COMPILED, DEVICE, MORE, OPS, error
from kernelcases import one_thread

from kvcli.codecs import CODECS
from kvcli.kernels import AttentionLayer, Backend, ExpertMatrices, ExpertTensor
from kvcli.kernels.gpu import latentpast, past
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, LATENT, LayerConfig, ModelConfig, RopeConfig
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

EPS = 1e-6


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


class Latents:
    """The second of two layers over latents, or over keys that are values, too, of some KV heads."""

    def __init__(
        self,
        ops: Backend,
        codec: str,
        dims: tuple[int, int],
        heads: int,
        kept: Retention | None = None,
        size: int = 16,
        kv_heads: int = 0,
        **how: object,
    ) -> None:
        layer = LayerConfig(LATENT, 1, *dims, rope=RopeConfig(10000.0, dims[0]))
        if kv_heads:
            layer = LayerConfig(FULL, kv_heads, dims[1], dims[1], rope=layer.rope, turned=dims[0])
        config = ModelConfig("x", "", 10, 2, 2, heads, 4096, EPS, (layer, layer), 1.0)
        layout = KVLayout.build(config, codec, codec, size).evicting(kept)
        self.ops, on = ops, ops.device
        self.seq = Sequence(PagePool(layout.by_layer(on.type == "cuda"), device=on))
        rope = RopeTable(RopeConfig(10000.0, dims[0]))
        norm = torch.linspace(0.5, 1.5, dims[1]).to(on)
        self.how = AttentionLayer(
            heads, dims[0] ** -0.5 / 4, rope, eps=EPS, v_norm=norm, seal=partial(seal_step, ops, rope), **how
        )

    def run(self, qkv: torch.Tensor) -> torch.Tensor:
        ids = [0] * len(qkv)
        part = self.seq.reserve(ids)
        found = self.ops.attend(qkv.clone().to(self.ops.device), [part.stretch(1, 0, len(ids))], self.how)
        self.seq.commit(ids)
        return found.cpu()


CASES = [
    ("f16", (16, 64), 16, {"size": 64}),
    *((codec, (64, 512), 16, {"size": 64}) for codec in ("f16", "int8") if DEVICE == "cuda"),
    ("int8", (16, 64), 5, {}),
    *(pytest.param(codec, (16, 64), 5, {}, marks=COMPILED) for codec in ("f32", "int4")),
    *(pytest.param(c, (16, dim), 3, {}, marks=COMPILED) for c, dim in (("int8", 256), ("fp8", 128), ("int4", 256))),
    pytest.param("f16", (16, 64), 6, {"kv_heads": 2}, marks=MORE),
    *(pytest.param(codec, (16, 64), 6, {"kv_heads": 2}, marks=COMPILED) for codec in ("fp8", "int8")),
    *((codec, (128, 512), 32, {"size": 64, "kv_heads": 4}) for codec in ("f16", "int8") if DEVICE == "cuda"),
    ("bf16", (8, 32), 20, {"amplitude": 1.3, "temperature": (0.3, 16, 0), "softcap": 2.0}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "dims", "heads", "how"), CASES)
def test_steps_are_those_of_the_reference(codec: str, dims: tuple[int, int], heads: int, how: dict[str, object]):
    """Of one row and of several, across the ends of pages, over one page that fixes scales."""
    both = [Latents(ops, codec, dims, heads, **how) for ops in (OPS, GpuBackend(torch.device(DEVICE)))]
    generator = torch.manual_seed(heads)
    for t in (15, 3, 1) if DEVICE == "cpu" else (80, 1, 300, 1, 1):
        qkv = torch.randn(t, (heads + how.get("kv_heads", 1)) * sum(dims), generator=generator)
        expected, found = (each.run(qkv) for each in both)
        assert error(found, expected) < (6e-3 if CODECS[codec].bits < 16 else 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ("f16", "int8"))
def test_many_rows_are_not_absorbed(codec: str, monkeypatch: pytest.MonkeyPatch):
    """From the middle of a page on; of a cache in 16 bits what the step stores is seen so, too."""
    for name, least in (("LEAST_QUERIES", 8), ("LEAST_ROWS", 16), ("MANY", 8), ("WORTH", 64), ("OWN_ROWS", 16)):
        monkeypatch.setattr(latentpast, name, least)
    heads, dims, plain, dim_v = 3, (16, 64), 24, 32
    generator = torch.manual_seed(3)
    matrices = [torch.randn(heads, *shape, generator=generator) / 8 for shape in ((dims[1], plain), (dim_v, dims[1]))]
    both, counted = [], []
    library = past.library
    monkeypatch.setattr(latentpast, "library", lambda *x, **how: counted.append(how) or library(*x, **how))
    for ops in (OPS, GpuBackend(torch.device(DEVICE))):
        layer = Latents(ops, codec, dims, heads, temperature=(0.3, 16, 0))
        placed = [ops.place_heads(packed(x)) for x in matrices]
        both.append((layer, placed))
    for t, takes in ((37, True), (30, True), (9, True), (9, False)):
        monkeypatch.setattr(latentpast, "library_takes", lambda *x, takes=takes: takes)
        before = len(counted)
        turned, others, row = (
            torch.randn(t, *shape, generator=generator) for shape in ((heads, dims[0]), (heads, plain), (sum(dims),))
        )
        found = []
        for layer, placed in both:
            part = layer.seq.reserve([0] * t)
            given = (x.clone().to(layer.ops.device) for x in (turned, others, row))
            found.append(layer.ops.attend_latents(*given, [part.stretch(1, 0, t)], layer.how, *placed).cpu())
            layer.seq.commit([0] * t)
        assert error(found[1], found[0]) < (6e-3 if codec == "int8" else 2e-3)
        assert takes == (len(counted) > before)
    assert {how.get("causal", False) for how in counted} == ({False, True} if codec == "f16" else {False})


def packed(matrices: torch.Tensor) -> ExpertMatrices:
    """A matrix of each head as files have them."""
    blocks = matrices.contiguous().view(torch.uint8).view(*matrices.shape[:2], -1)
    return ExpertMatrices((ExpertTensor("F32", blocks, matrices.shape[2]),))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ("int8",))
@pytest.mark.parametrize("kv_heads", (0, pytest.param(2, marks=COMPILED)))
def test_evicted_rows_are_not_seen_and_kept_ones_are_turned(codec: str, kv_heads: int):
    retention, heads = Rolling(5, 32, 16), 6
    both = [
        Latents(ops, codec, (16, 64), heads, retention, kv_heads=kv_heads)
        for ops in (OPS, GpuBackend(torch.device(DEVICE)))
    ]
    generator = torch.manual_seed(1)
    for t in (40, 1, 9, 1):
        qkv = torch.randn(t, (heads + (kv_heads or 1)) * 80, generator=generator)
        expected, found = (each.run(qkv) for each in both)
        assert error(found, expected) < 6e-3
    assert both[0].seq.evicted > 0
