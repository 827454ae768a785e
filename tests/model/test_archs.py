"""Every architecture against transformers in float32: the same random weights, written as a GGUF file and read back."""

from __future__ import annotations

import pytest
import tiny
import torch
from archcases import IDS, LENGTH, Loaded
from kernelcases import backend, one_thread, packed

from kvcli.errors import ModelError
from kvcli.kernels.reference import ggml
from kvcli.kernels.reference.pointwise import rope_
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, SLIDING
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.archs import ARCHITECTURES, RUNNABLE, from_gguf
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.weights import Weights, half_split, half_split_rows


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def test_every_architecture_has_a_tiny_model():
    names = [name for each in ARCHITECTURES for name in each.gguf]
    assert {v.arch for v in tiny.VARIANTS.values()} == set(names) == set(RUNNABLE) and len(names) == len(RUNNABLE) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ("", pytest.param("reference", marks=pytest.mark.thorough)))
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_logits_are_those_of_transformers(variant: str, name: str):
    made = tiny.make(variant)
    expected, loaded = made.logits(IDS), Loaded(made.path, name)
    assert expected.std() > 0.3 and expected.argmax(1).unique().numel() > 10  # there is something to get wrong
    seq = Sequence(loaded.pool)
    prefill = loaded.run(seq, IDS)
    assert (prefill - expected).abs().max() <= 1e-4
    seq = Sequence(loaded.pool)
    assert (loaded.run(seq, IDS[:71]) - expected[:71]).abs().max() <= 1e-4
    for i in range(71, LENGTH):
        assert (loaded.run(seq, IDS[i : i + 1])[0] - expected[i]).abs().max() <= 1e-4


def test_gemma3_slides_with_or_without_being_told_how():
    kinds = {"gemma3": [1, 0, 1], "gemma3-bare": [1, 1, 1, 1, 1, 0]}
    for name, slides in kinds.items():
        config = Loaded(tiny.make(name).path, "reference").config
        assert [layer.kind for layer in config.layers] == [SLIDING if s else FULL for s in slides]
        bases = {layer.kind: layer.rope.base for layer in config.layers if layer.rope}
        assert bases == {SLIDING: 10_000.0, FULL: 1_000_000.0}
        assert {layer.window for layer in config.layers} == {0, tiny.WINDOW} and tiny.WINDOW < LENGTH


def test_the_tiny_models_differ_where_they_should():
    """Scaled frequencies, the head and the window change the logits: no comparison above is idle."""
    by_name = {name: tiny.make(name).logits(IDS) for name in tiny.VARIANTS}
    for name in ("llama-untied", "llama-llama3-rope", "llama-linear-rope", "llama-sliding"):
        assert (by_name[name] - by_name["llama"]).abs().max() > 0.01
    wide = Loaded(tiny.make("gemma3").path, "reference", {"gemma3.attention.sliding_window": LENGTH})
    assert (wide.run(Sequence(wide.pool), IDS) - by_name["gemma3"]).abs().max() > 0.01


@pytest.mark.parametrize("type", ("F32", "Q4_K", "Q8_0"))
@pytest.mark.parametrize("rope_dim", (16, 8))
def test_llama_rows_are_reordered_so_that_halves_rotate_as_pairs_did(type: str, rope_dim: int):
    """Rotating neighbours in the file's order equals rotating halves in ours, whole heads or part of them."""
    heads, dim = 3, 16
    w = packed(type, heads * dim, 256)
    x = torch.randn(5, 256, generator=torch.manual_seed(0))
    angles = torch.randn(5, rope_dim // 2)
    pairs = (x @ ggml.decode(type, w.blocks).T).view(5, heads, dim)
    turned = pairs.clone()
    as_complex = torch.view_as_complex(pairs[..., :rope_dim].unflatten(-1, (-1, 2)).contiguous())
    turned[..., :rope_dim] = torch.view_as_real(
        as_complex * torch.polar(torch.ones(5, 1, rope_dim // 2), angles[:, None])
    ).flatten(-2)
    split = half_split_rows(w, heads, rope_dim)
    halves = (x @ ggml.decode(type, split.blocks).T).view(5, heads, dim)
    rope_(halves, angles.cos(), angles.sin())
    expected, found = (torch.einsum("qhd,khd->hqk", y, y) for y in (turned, halves))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert (split.rows, split.cols, split.nbytes) == (w.rows, w.cols, w.nbytes)
    order = half_split(torch.arange(heads * dim), heads, rope_dim)  # of a bias
    assert torch.equal(w.blocks[order], split.blocks)


def test_rope_angles_stay_right_at_large_positions():
    rope = from_gguf(
        {
            "general.architecture": "llama", "llama.embedding_length": 16, "llama.feed_forward_length": 16,
            "llama.attention.head_count": 2, "llama.block_count": 1, "llama.context_length": 64,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        },
        {"token_embd.weight": (10, 16)},
    ).layers[0].rope  # fmt: skip
    assert rope is not None
    cos, sin = RopeTable(rope).at(10_000_000, 2)
    exact = torch.tensor([[10_000_000.0], [10_000_001.0]], dtype=torch.float64) * 10_000.0 ** (
        -torch.arange(4).double() / 4
    )
    assert torch.allclose(cos.double(), exact.cos(), atol=1e-7) and torch.allclose(sin.double(), exact.sin(), atol=1e-7)


def test_a_tensor_that_would_be_left_out_is_named(monkeypatch: pytest.MonkeyPatch):
    """A llama file with norms of heads, for one: without them it would be another model."""
    file = GGUFFile.open(tiny.make("llama").path)
    config = from_gguf(file.metadata, {n: t.shape for n, t in file.tensors.items()})
    extra = {**file.tensors, "blk.0.attn_k_norm.weight": file.tensors["blk.0.attn_norm.weight"]}
    monkeypatch.setattr(GGUFFile, "tensors", property(lambda _: extra))
    with pytest.raises(ModelError, match=r"(?m)llama does not use: blk\.0\.attn_k_norm\.weight$"):
        load(config, Weights(file), backend("reference"))


def test_a_missing_or_misshapen_tensor_is_named():
    file = GGUFFile.open(tiny.make("llama").path)
    config = from_gguf(file.metadata, {n: t.shape for n, t in file.tensors.items()})
    weights, ops = Weights(file), backend("reference")
    lost = file.tensors.pop("blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.ffn_up\.weight"):
        load(config, weights, ops)
    file.tensors["blk.1.ffn_up.weight"] = file.tensors["blk.1.ffn_down.weight"]
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight has the shape \[48, 80\], \[80, 48\]"):
        load(config, weights, ops)
    file.tensors["blk.1.ffn_up.weight"] = lost
    load(config, weights, ops)
