"""Triton's interpreter without the work that it repeats: what kernels compute stays the same.

What it does for each call of a kernel's function, each tensor and each element of a reduction is done once here.
Call `hasten` before kernels run.
"""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """For this process. Replaces private functions of Triton, so whatever version lacks them fails here."""
    interpreter._patch_lang = _patch_where_needed(interpreter._patch_lang)
    interpreter.ReduceOps.apply_impl = _with_xor(interpreter.ReduceOps.apply_impl)
    tl.core._type_for_tuple_values = _remembered(tl.core._type_for_tuple_values)


def _patch_where_needed(patch: Any) -> Any:
    """Functions called by a kernel find the language patched already, by the kernel's launch."""

    def patched(fn: FunctionType) -> Any:
        modules = [m for m in fn.__globals__.values() if isinstance(m, ModuleType) and m in (tl, tl.core)]
        if modules and not any(tl.core.is_builtin(m.load) for m in modules):
            return interpreter._LangPatchScope()
        return patch(fn)

    return patched


def _with_xor(apply: Any) -> Any:
    """A reduction by XOR, of which sorting consists, in numpy like sums and maxima."""

    def applied(self: Any, inputs: Any) -> Any:
        if self.combine_fn is tl.standard._xor_combine and self.axis is not None:
            reduced = np.bitwise_xor.reduce(inputs[0].handle.data, self.axis, keepdims=self.keep_dims)
            return self.to_tensor(reduced, inputs[0].dtype)
        return apply(self, inputs)

    return applied


def _remembered(type_of: Any) -> Any:
    """The type of a shape; tensors of few shapes come again and again."""
    known: dict[tuple[int, ...], Any] = {}

    def found(values: Any, fields: Any = None) -> Any:
        if fields is not None or not all(isinstance(v, tl.constexpr) and type(v.value) is int for v in values):
            return type_of(values, fields)
        key = tuple(v.value for v in values)
        if key not in known:
            known[key] = type_of(values)
        return known[key]

    return found
