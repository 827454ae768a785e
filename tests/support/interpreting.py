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
    tl.core.block_type.__init__ = _made_once_a_shape(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _made_once_a_type(tl.core.tensor.__init__)
    interpreter._get_np_dtype = _found_once_a_type(interpreter._get_np_dtype)
    semantic = tl.semantic.TritonSemantic
    semantic.broadcast_impl_value = _of_two_shapes(semantic.broadcast_impl_value)


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


def _made_once_a_shape(init: Any) -> Any:
    """What a block's type knows of its shape."""
    known: dict[Any, dict[str, Any]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(n, "value", n) for n in shape]
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])
        self.element_ty = element_ty

    return made


def _made_once_a_type(init: Any) -> Any:
    """What a tensor knows of its type."""
    known: dict[str, dict[str, Any]] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, None, type)
            known[type.name] = dict(self.__dict__)
        self.__dict__.update(known[type.name])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return made


def _found_once_a_type(dtype_of: Any) -> Any:
    known: dict[str, Any] = {}

    def found(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = dtype_of(type)
        return known[type.name]

    return found


def _of_two_shapes(broadcast: Any) -> Any:
    """Tensors of one shape need no other."""

    def done(self: Any, a: Any, b: Any) -> Any:
        if a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values:
            return a, b
        return broadcast(self, a, b)

    return done


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
