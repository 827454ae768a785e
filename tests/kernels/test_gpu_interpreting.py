"""Operators of Triton's interpreter as the tests hasten them give what it gives itself, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gpucases  # first: its kernels are interpreted
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl
from triton.runtime import interpreter

if gpucases.DEVICE != "cpu":
    pytest.skip("nothing is interpreted here", allow_module_level=True)

from interpreting import OPERATORS, operator, where

TYPES = {
    "int1": np.bool_, "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "int32": np.int32, "uint32": np.uint32,
    "int64": np.int64, "uint64": np.uint64, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
NAMED = {name: tl.core.dtype(name) for name in TYPES}
NUMBERS = (0, 1, 3, -1, 200, 1 << 33, 0.5, -0.0, float("inf"), float("nan"), True)
MEMBERS = {name: vars(tl.core.tensor)[name].__wrapped__ for name in OPERATORS}  # before anything is patched
WHERE = tl.core.where.__wrapped__


@triton.jit
def launched() -> None:
    """Nothing; it can see the language."""
    tl.static_assert(True)


@pytest.fixture
def patched() -> Iterator[None]:
    """The language as a launch has it."""
    scope = interpreter._patch_lang(launched.fn)
    yield
    scope.restore()


def made(name: str, *shape: int) -> Any:
    """Numbers of that type, among them its limits; () = a scalar."""
    dtype, n = np.dtype(TYPES[name]), int(np.prod(shape))
    if dtype.kind == "f":
        some = np.array([0.0, -0.0, 1.5, -2.25, np.inf, np.nan, 100.0, 3e-5], dtype)
    elif dtype.kind == "b":
        some = np.array([True, False, False])
    else:
        limits = np.iinfo(dtype)
        some = np.array([3, 0, 1, limits.max, limits.min, 7, 2], dtype)
    type, data = NAMED[name], np.resize(some, n)
    whole = tl.block_type(type, list(shape)) if shape else type
    return tl.core.tensor(interpreter.TensorHandle(data.reshape(shape or (1,)), type), whole)


def pointers(*shape: int) -> Any:
    """Addresses of two-byte numbers."""
    type, data = tl.pointer_type(tl.float16), np.arange(int(np.prod(shape)), dtype=np.uint64) + (1 << 40)
    whole = tl.block_type(type, list(shape)) if shape else type
    return tl.core.tensor(interpreter.TensorHandle(data.reshape(shape or (1,)), type), whole)


def outcome(function: Any, *operands: Any) -> Any:
    """All of a result, or that there is none."""
    with np.errstate(all="ignore"):
        try:
            found = function(*operands)
        except (ValueError, TypeError, IncompatibleTypeErrorImpl):
            return None
    data = np.ascontiguousarray(found.handle.data)
    return str(found.type), str(found.dtype), data.dtype, data.shape, data.tobytes()


SHAPES = (((8,), (8,)), ((4, 1), (1, 8)), ((4, 8), (8,)), ((), (8,)), ((8,), ()), ((), ()), ((4,), (8,)))


@pytest.mark.filterwarnings("ignore:Value .* exceeds the maximum bitwidth")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, patched: None) -> None:
    semantic = tl.semantic.TritonSemantic(interpreter.interpreter_builder)
    asked = list[Any]()

    def itself(*operands: Any) -> Any:
        asked.append(operands)
        return MEMBERS[name](*operands, _semantic=semantic)

    hastened = operator(itself, *OPERATORS[name])
    compared = 0
    for kind in TYPES:
        pairs = [(made(kind, *a), made(other, *b)) for other in TYPES for a, b in SHAPES]
        pairs += [(made(kind, *a), value) for value in NUMBERS for a in ((), (4, 8))]
        pairs += [(made(kind, 4, 8), tl.constexpr(value)) for value in NUMBERS]
        pairs += [(pointers(*a), made(kind, *b)) for a, b in SHAPES]
        for pair in pairs:
            asked.clear()
            found, slow = outcome(hastened, *pair), bool(asked)
            assert found == outcome(itself, *pair), (name, pair)
            compared += not slow
    assert compared > 10


@pytest.mark.filterwarnings("ignore:tl.where with a non-boolean")
@pytest.mark.filterwarnings("ignore:Value .* exceeds the maximum bitwidth")
def test_where(patched: None) -> None:
    semantic = tl.semantic.TritonSemantic(interpreter.interpreter_builder)
    asked = list[Any]()

    def itself(*operands: Any) -> Any:
        asked.append(operands)
        return WHERE(*operands, _semantic=semantic)

    hastened = where(itself)
    compared = 0
    for kind in TYPES:
        pairs = [(made(kind, *a), made(other, *b)) for other in TYPES for a, b in SHAPES]
        pairs += [pair for n in NUMBERS for pair in ((made(kind, 4, 8), n), (n, made(kind, 8)))]
        for x, y in pairs:
            for condition in (made("int1", 8), made("int1"), made("int32", 8)):
                asked.clear()
                found, slow = outcome(hastened, condition, x, y), bool(asked)
                assert found == outcome(itself, condition, x, y), (condition, x, y)
                compared += not slow
    assert compared > 100
