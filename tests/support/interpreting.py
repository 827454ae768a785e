"""Triton's interpreter without the work that it repeats: what kernels compute stays the same.

What it does for each call of a kernel's function, each tensor and each element of a reduction is done once here.
Call `hasten` before kernels run.
"""

from __future__ import annotations

from dataclasses import replace
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
    interpreter._get_np_dtype = _asked_once_a_name(interpreter._get_np_dtype)
    dtype = tl.core.dtype
    dtype.__eq__ = _same_first(dtype.__eq__)
    for name in ("is_int", "is_int_signed", "is_int_unsigned", "is_floating", "kind"):
        setattr(dtype, name, _asked_once_a_name(getattr(dtype, name)))
    semantic = tl.semantic.TritonSemantic
    semantic.broadcast_impl_value = _of_two_shapes(semantic.broadcast_impl_value)
    semantic.computation_type_impl = _computed_once_a_pair(semantic.computation_type_impl)
    semantic.cast = _to_another_type(semantic.cast)
    semantic.binary_op_type_checking_impl = _of_two_kinds(semantic.binary_op_type_checking_impl)
    tl.core._unwrap_if_constexpr = _unwrapped_where_wrapped(tl.core._unwrap_if_constexpr)
    # Sums and products would be computed again in 64 bits, for an assertion that is made with `debug` alone.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


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


def _of_two_shapes(broadcast: Any) -> Any:
    """Tensors of one shape need no other."""

    def done(self: Any, a: Any, b: Any) -> Any:
        if a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values:
            return a, b
        return broadcast(self, a, b)

    return done


def _same_first(equal: Any) -> Any:
    """Types of scalars are few objects, compared with themselves more often than not."""
    return lambda self, other: self is other or equal(self, other)


def _asked_once_a_name(question: Any) -> Any:
    """What the name of a type says."""
    known: dict[str, Any] = {}

    def answer(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = question(type)
        return known[type.name]

    return answer


def _computed_once_a_pair(type_of: Any) -> Any:
    """The type in which two types meet."""
    known: dict[Any, Any] = {}

    def found(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = type_of(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return found


def _to_another_type(cast: Any) -> Any:
    """A tensor of the type that is wanted stays as it is."""

    def done(self: Any, value: Any, wanted: Any, fp_downcast_rounding: str | None = None) -> Any:
        same = value.type.scalar is wanted.scalar
        return value if same else cast(self, value, wanted, fp_downcast_rounding)

    return done


def _of_two_kinds(check: Any) -> Any:
    """Numbers of one type and shape are added, compared and so on as they are."""
    tensor = tl.core.tensor

    def checked(self: Any, a: Any, b: Any, *how: Any, **named: Any) -> Any:
        if type(a) is type(b) is tensor and a.dtype is b.dtype and (a.dtype.is_int() or a.dtype.name == "fp32"):
            shapes = [x.type.shape.values if x.type.is_block() else None for x in (a, b)]
            if shapes[0] == shapes[1]:
                return a, b
        return check(self, a, b, *how, **named)

    return checked


def _unwrapped_where_wrapped(unwrap: Any) -> Any:
    """What is neither a constant of the compiler's nor a list stays as it is."""
    kinds = tl.core.constexpr, list, tuple, tl.core.tuple
    return lambda value: unwrap(value) if isinstance(value, kinds) else value


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
