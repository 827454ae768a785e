"""Experts in folders: each by itself or together, as rows or columns, become the same tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcli.errors import ModelError
from kvcli.runtime.formats.packedweights import Source
from kvcli.runtime.headers import hfexperts
from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.presented import Presented
from kvcli.runtime.headers.shapes import Given

EXPERTS, HIDDEN, WIDTH = 3, 8, 6
RNG = np.random.default_rng(2)
GATE, UP = (RNG.standard_normal((EXPERTS, WIDTH, HIDDEN)).astype(np.float32) for _ in range(2))
DOWN = RNG.standard_normal((EXPERTS, HIDDEN, WIDTH)).astype(np.float32)


def config(model_type: str) -> HFConfig:
    sizes = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "num_experts": EXPERTS}
    return HFConfig({"model_type": model_type, **sizes}, Given())


def parts(name: str, values: np.ndarray, model_type: str) -> dict[str, np.ndarray]:
    source = Source(name, values.shape, "F32", lambda: values)
    found = {part.name: part for part in hfexperts.together(name, source, config(model_type))}
    assert all(part.read().shape == part.shape for part in found.values())
    return {name.removeprefix("blk.0."): part.read() for name, part in found.items()}


def same(found: dict[str, np.ndarray], **expected: np.ndarray) -> bool:
    return found.keys() == {f"ffn_{x.replace('__', '.')}" for x in expected} and all(
        np.array_equal(found[f"ffn_{x.replace('__', '.')}"], value) for x, value in expected.items()
    )


def test_halves_as_rows() -> None:
    both = np.concatenate([GATE, UP], 1)
    for name in ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"):
        found = parts(f"model.layers.0.{name}", both, "granitemoe")
        assert same(found, gate_exps__weight=GATE, up_exps__weight=UP)
    found = parts("model.layers.0.block_sparse_moe.output_linear.weight", DOWN, "granitemoe")
    assert same(found, down_exps__weight=DOWN)
    found = parts("model.layers.0.shared_mlp.input_linear.weight", both[0], "granitemoe")
    assert same(found, gate_shexp__weight=GATE[0], up_shexp__weight=UP[0])


def test_halves_as_columns() -> None:
    both = np.concatenate([GATE, UP], 1).swapaxes(1, 2)
    found = parts("model.layers.0.feed_forward.experts.gate_up_proj", both, "llama4_text")
    assert same(found, gate_exps__weight=GATE, up_exps__weight=UP)
    found = parts("model.layers.0.feed_forward.experts.down_proj", DOWN.swapaxes(1, 2), "llama4_text")
    assert same(found, down_exps__weight=DOWN)


def test_in_turn_with_biases() -> None:
    both = np.stack([GATE, UP], 2).reshape(EXPERTS, 2 * WIDTH, HIDDEN)
    found = parts("model.layers.0.mlp.experts.gate_up_proj", both.swapaxes(1, 2), "gpt_oss")
    assert same(found, gate_exps__weight=GATE, up_exps__weight=UP)
    found = parts("model.layers.0.mlp.experts.gate_up_proj_bias", both[..., 0], "gpt_oss")
    assert same(found, gate_exps__bias=GATE[..., 0], up_exps__bias=UP[..., 0])
    assert same(
        parts("model.layers.0.mlp.experts.down_proj_bias", DOWN[..., 0], "gpt_oss"), down_exps__bias=DOWN[..., 0]
    )


def test_where_the_shape_tells_nothing_the_family_does() -> None:
    square = RNG.standard_normal((EXPERTS, HIDDEN, HIDDEN)).astype(np.float32)
    for family, expected in (("gpt_oss", square.swapaxes(1, 2)), ("granitemoe", square)):
        assert same(parts("model.layers.0.mlp.experts.down_proj", square, family), down_exps__weight=expected)


def test_each_by_itself() -> None:
    assert hfexperts.alone("model.layers.0.mlp.experts.12.up_proj.weight") == (
        "model.layers.0.mlp.experts.up_proj.weight",
        12,
    )
    assert hfexperts.alone("model.layers.0.mlp.up_proj.weight") is None

    def one(i: int) -> Presented:
        return Presented("x", UP[i].shape, "F32", lambda: UP[i], True)

    whole = hfexperts.stacked("x", {i: one(i) for i in (2, 0, 1)}, config("mixtral"))
    assert whole.shape == UP.shape and np.array_equal(whole.read(), UP)
    some: dict[int, Any] = {i: one(i) for i in (0, 2)}
    with pytest.raises(ModelError, match="there are 2 experts, 3 of one shape"):
        hfexperts.stacked("x", some, config("mixtral"))


def test_other_tensors_are_none_of_experts() -> None:
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        assert not parts(name, UP[0], "gpt_oss")
    with pytest.raises(ModelError, match="no two halves"):
        parts("model.layers.0.mlp.experts.gate_up_proj", UP[:, :5], "granitemoe")
