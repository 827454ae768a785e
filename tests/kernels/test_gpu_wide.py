"""Rows between the products of a prefill step: the GPU backend against the reference."""

from __future__ import annotations

import pytest
import torch
from gpucases import DEVICE, watched  # noqa: F401
from kernelcases import packed

from kvcli.kernels.gpu import wide
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.formats import GROUP
from kvcli.kernels.gpu.wide import HalfRows, finish, gate, halve, norm, weave
from kvcli.kernels.reference import pointwise
from kvcli.kernels.reference.backend import ReferenceBackend
from kvcli.kernels.reference.matmul import QuantTensor

OPS = ReferenceBackend()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def floats(rows: HalfRows, n: int) -> torch.Tensor:
    assert rows.values.dtype == torch.float16
    rows = weave(rows, n, False)
    return rows.values.float().cpu() * (1.0 if rows.scales is None else rows.scales.cpu()[:, None])


def plain(*shape: int, seed: int) -> QuantTensor:
    """A matrix of float32 weights."""
    w = random(*shape, seed=seed) * shape[1] ** -0.5
    return QuantTensor("F32", w.view(torch.uint8), shape[1])


@pytest.mark.parametrize("n", [32, 100, 128, 300, 1536])
def test_woven_rows_are_in_the_order_of_the_words_of_four_groups(n):
    x = random(3, n).half()
    whole = torch.nn.functional.pad(x, (0, -n % 128)).view(3, -1, 4, 2, 4, 2, 2)  # block, group, half, word, byte
    woven = weave(HalfRows(x.to(DEVICE)), n)
    assert torch.equal(woven.values.cpu(), whole.permute(0, 1, 3, 4, 6, 2, 5).reshape(3, -1))
    assert torch.equal(weave(woven, n, False).values.cpu(), x)


@pytest.mark.parametrize("woven", [False, True])
@pytest.mark.parametrize("width", [32, 100, 1536])
def test_norm(width, woven):
    x, weight = 300 * random(5, width), random(width, seed=1)
    found = norm(x.to(DEVICE), weight.to(DEVICE), 1e-6, woven)
    torch.testing.assert_close(floats(found, width), pointwise.rms_norm(x, weight, 1e-6), rtol=6e-4, atol=1e-6)
    assert not woven or torch.equal(found.values, weave(norm(x.to(DEVICE), weight.to(DEVICE), 1e-6), width).values)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(("post", "following"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("width", "parts"), [(70, 1), (256, 3)])
def test_settle(width, parts, post, following):
    """A sum, with a norm before it and one behind it."""
    products, scales, x = random(parts, 3, width), random(3, seed=1).abs(), 30 * random(3, width, seed=2)
    weights = [random(width, seed=3 + i) if there else None for i, there in enumerate((post, following))]
    added = 0.5 * (products.sum(0) * scales[:, None])
    if post:
        added = 0.5 * pointwise.rms_norm(2 * added, weights[0], 1e-6)
    on_device = [None if w is None else w.to(DEVICE) for w in weights]
    to = x.to(DEVICE, copy=True)
    found = wide.settle(products.to(DEVICE), scales.to(DEVICE), to, on_device[0], 0.5, on_device[1], 1e-6, width == 256)
    torch.testing.assert_close(to.cpu(), x + added, rtol=1e-5, atol=1e-5)
    assert (found is not None) == following
    if found is not None:
        expected = pointwise.rms_norm(x + added, weights[1], 1e-6)
        torch.testing.assert_close(floats(found, width), expected, rtol=6e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 320), (1, 4096), (2, 5, 64)])
def test_norm_in_float32(shape):
    x, weight = random(*shape[:-1], shape[-1] + 8)[..., 8:], random(shape[-1], seed=1)
    found = wide.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6)
    torch.testing.assert_close(found.cpu(), pointwise.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-6)


def test_norm_of_large_weights_stays_finite():
    x = torch.zeros(2, 64)
    x[:, 3] = 1.0
    found = norm(x.to(DEVICE), torch.full((64,), 1e6, device=DEVICE), 1e-6).values.cpu()
    assert found[0, 3] == 65504 and found.isfinite().all()


@pytest.mark.parametrize("woven", [False, True])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e7])
def test_halves_of_any_size(size, woven):
    x = size * random(3, 70)
    x[1] = 0
    torch.testing.assert_close(floats(halve(x.to(DEVICE), woven), 70), x, rtol=6e-4, atol=6e-8 * float(x.abs().max()))


@pytest.mark.parametrize("act", ["silu", "gelu", "clamped"])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("woven", [False, True])
def test_gate(act, paired, woven):
    width = 3 * GROUP
    x = 4 * random(5, 2 * width)
    expected = pointwise.glu(x, act)
    if paired:
        x = x.unflatten(1, (2, -1, GROUP)).transpose(1, 2).flatten(1).contiguous()
    found = floats(gate(x.to(DEVICE), act, paired, woven), width)
    torch.testing.assert_close(found, expected, rtol=6e-4, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("paired", [False, True])
def test_gate_of_a_product_in_parts(paired):
    x, scales = random(3, 5, 4 * GROUP), random(5, seed=1).abs()
    whole = wide.finish(x.clone().to(DEVICE), scales.to(DEVICE), None)
    found, expected = (wide.gate(*each) for each in (
        (x.to(DEVICE), "silu", paired, True, scales.to(DEVICE)), (whole, "silu", paired, True),
    ))  # fmt: skip
    assert torch.equal(found.values, expected.values) and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("width", [96, 256, 2336])
def test_a_gate_by_blocks(width):
    """Each with a scale of its own, also the last one, of fewer columns; and by one number again."""
    x, scales = random(2, 3, 2 * width), random(3, seed=1).abs()
    x[..., : width // 2] *= 1e-3
    x[:, 1] = 0
    expected = pointwise.glu(x.sum(0) * scales[:, None], "silu")
    found = gate(x.to(DEVICE), "silu", False, True, scales.to(DEVICE), blocks=True)
    assert found.scales is None and found.blocks.shape == (3, -(-width // 256))
    largest = torch.nn.functional.pad(expected.abs(), (0, -width % 256)).unflatten(1, (-1, 256)).amax(2)
    torch.testing.assert_close(found.blocks.cpu(), largest.clamp(min=1e-30), rtol=1e-5, atol=1e-35)
    assert found.values.abs().max() == 1 and found.values.isfinite().all()
    blocks = found._replace(blocks=None, scales=None)
    values = weave(blocks, width, False).values.float().cpu() * largest.repeat_interleave(256, 1)[:, :width]
    torch.testing.assert_close(values, expected, rtol=6e-4, atol=1e-7 * float(expected.abs().max()))
    torch.testing.assert_close(floats(found, width), expected, rtol=1.2e-3, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(("types", "t"), [(("Q4_K", "Q6_K"), 5), (("Q4_0", "Q8_0"), 16), (("Q4_K", "F32"), 3)])
def test_gated_rows_go_through_the_next_product(types, t):
    """Scaled by blocks where it can take that."""
    ops, widths = GpuBackend(torch.device(DEVICE)), (256, 768)
    gates = packed(types[0], widths[1], widths[0]), packed(types[0], widths[1], widths[0], 1)
    down = packed(types[1], 64, widths[1], 2)
    x, to = random(t, widths[0]), random(t, 64, seed=3)
    gated = ops.gated(x.to(DEVICE), ops.place(gates, paired=True), "silu")
    assert gated.blocks is not None
    found = ops.matmul(gated, ops.place((down,)), add_to=to.to(DEVICE, copy=True)).cpu()
    expected = OPS.matmul(OPS.gated(x, gates, "silu"), (down,)) + to
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_finish(scaled, added, parts):
    product, scales, to = random(parts, 3, 1100), random(3, seed=1).abs(), random(3, 1100, seed=2)
    expected = product.sum(0) * (scales[:, None] if scaled else 1) + (to if added else 0)
    into = to.to(DEVICE) if added else None
    found = finish(product.to(DEVICE), scales.to(DEVICE) if scaled else None, into)
    torch.testing.assert_close(found.cpu(), expected)
    assert not added or found is into


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("act", ["silu", "gelu", "clamped"])
def test_a_feed_forward_part_is_that_of_the_reference(act):
    ops = GpuBackend(torch.device(DEVICE))
    gates, gated, down = plain(96, 64, seed=1), plain(96, 64, seed=2), plain(64, 96, seed=3)
    x, weight = 50 * random(7, 64), random(64, seed=4)
    place = ops.place((gates, gated), paired=True), ops.place((down,))
    y = x.clone().to(DEVICE)
    inner = ops.gated(ops.normed(y, weight.to(DEVICE), 1e-6), place[0], act)
    assert ops.matmul(inner, place[1], add_to=y) is y
    expected = OPS.matmul(OPS.gated(OPS.normed(x, weight, 1e-6), (gates, gated), act), (down,), add_to=x.clone())
    torch.testing.assert_close(y.cpu(), expected, rtol=2e-3, atol=2e-3)
