"""Triton's interpreter without the work that it repeats: what kernels compute stays the same.

What it does for each call of a kernel's function, each tensor and each element of a reduction is done once here.
Call `hasten` before kernels run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """For this process. Replaces private functions of Triton, so whatever version lacks them fails here."""
    interpreter._patch_lang = _patch_where_needed(interpreter._patch_lang)
    interpreter._patch_attr = _patch_in_one_step(interpreter._patch_attr)
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
    known: dict[FunctionType, list[ModuleType]] = {}

    def patched(fn: FunctionType) -> Any:
        if fn not in known:
            known[fn] = [m for m in fn.__globals__.values() if isinstance(m, ModuleType) and m in (tl, tl.core)]
        if known[fn] and not any(tl.core.is_builtin(m.load) for m in known[fn]):
            return interpreter._LangPatchScope()
        return patch(fn)

    return patched


def _patch_in_one_step(patch: Any) -> Any:
    """A builtin is called with the interpreter's semantics at once; operators of tensors compute in numpy alone."""
    semantic = tl.semantic.TritonSemantic(interpreter.interpreter_builder)
    known: dict[Any, Any] = {}

    def bound(name: str, member: Any) -> Any:
        fn = member.__wrapped__

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return fn(*arguments, **named)

        if name == "where":
            return where(called)
        return operator(called, *OPERATORS[name]) if name in OPERATORS else called

    def patched(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if hasattr(member, "__wrapped__"):
            if member not in known:
                known[member] = bound(name, member)
            scope.set_attr(obj, name, known[member])
        else:
            patch(obj, name, member, builder, scope)

    return patched


_SIGNED = frozenset(f"int{bits}" for bits in (8, 16, 32, 64))
_INTEGERS = _SIGNED | {f"u{name}" for name in _SIGNED}
_LIMITS = {name: (int(np.iinfo(name).min), int(np.iinfo(name).max)) for name in _INTEGERS}
_FLOATS = {"fp32": np.float32, "fp64": np.float64}
_BITS = _INTEGERS | {"int1"}
_NUMBERS = _INTEGERS | _FLOATS.keys()


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of whole numbers, rounded towards zero."""
    return (a - np.fmod(a, b)) // b


# Numpy's function, the types that it is for, and whether it compares.
OPERATORS = {
    "__add__": (np.add, _NUMBERS, False), "__radd__": (np.add, _NUMBERS, False),
    "__sub__": (np.subtract, _NUMBERS, False),
    "__mul__": (np.multiply, _NUMBERS, False), "__rmul__": (np.multiply, _NUMBERS, False),
    "__truediv__": (np.divide, _FLOATS.keys(), False),
    "__floordiv__": (_quotient, _INTEGERS, False), "__mod__": (np.fmod, _INTEGERS, False),
    "__and__": (np.bitwise_and, _BITS, False), "__or__": (np.bitwise_or, _BITS, False),
    "__xor__": (np.bitwise_xor, _BITS, False),
    "__lshift__": (np.left_shift, _INTEGERS, False), "__rshift__": (np.right_shift, _INTEGERS, False),
    "__lt__": (np.less, _NUMBERS, True), "__le__": (np.less_equal, _NUMBERS, True),
    "__gt__": (np.greater, _NUMBERS, True), "__ge__": (np.greater_equal, _NUMBERS, True),
    "__eq__": (np.equal, _NUMBERS, True), "__ne__": (np.not_equal, _NUMBERS, True),
}  # fmt: skip


def operator(other_way: Any, op: Any, kinds: Any, compares: bool) -> Any:
    """An operator of two tensors of one type, or of a tensor and a number of its kind, which numpy broadcasts."""
    tensor, constexpr, block = tl.core.tensor, tl.core.constexpr, tl.core.block_type

    def computed(self: Any, other: Any) -> Any:
        dtype, a = self.dtype, self.handle.data
        kind = dtype.name
        if type(other) is constexpr:
            other = other.value
        if type(other) is tensor:
            b, theirs, whole = other.handle.data, other.dtype.name, type(other.type) is block
            alike = (kind == theirs and a.dtype == b.dtype) or (kind in _SIGNED and theirs in _SIGNED)
        else:
            b, theirs, whole = _constant(other, kind), "int32", False
            alike = b is not None
        whole = whole or type(self.type) is block
        if alike and kind in kinds:
            out = op(a, b)
            return _result(out, tl.int1 if compares else dtype if out.dtype == a.dtype else other.dtype, whole)
        if op is np.add and b is not None and theirs in _INTEGERS and dtype.is_ptr():
            size = max(1, dtype.element_ty.primitive_bitwidth // 8)
            return _result(a + size * b.astype(np.uint64), dtype, whole)
        return other_way(self, other)

    return computed


def _constant(value: Any, kind: str) -> np.ndarray | None:
    """A number in a type that takes it as it is, or for the address of what has this type."""
    if kind in _FLOATS:
        if type(value) not in (int, float) or (
            value == 0 and math.copysign(1, value) < 0
        ):  # some versions take -0.0 for 0
            return None
        return np.array([value], _FLOATS[kind])
    if type(value) is not int:
        return None
    name = "int32" if kind.startswith("pointer<") else kind
    if name not in _LIMITS or not _LIMITS[name][0] <= value <= _LIMITS[name][1]:
        return None
    return np.array([value], name)


def where(other_way: Any) -> Any:
    """The choice between two tensors of one type, or a tensor and a number of its kind."""
    tensor, block = tl.core.tensor, tl.core.block_type

    def chosen(condition: Any, x: Any, y: Any) -> Any:
        x, y = tl.core._unwrap_if_constexpr(x), tl.core._unwrap_if_constexpr(y)
        some = next((each for each in (x, y) if type(each) is tensor), None)
        if some is None or type(condition) is not tensor or condition.dtype.name != "int1":
            return other_way(condition, x, y)
        kind, each = some.dtype.name, [x, y]
        for i, value in enumerate(each):
            if type(value) is not tensor:
                each[i] = _constant(value, kind)
            else:
                each[i] = value.handle.data if value.dtype.name == kind else None
        if kind not in _NUMBERS or each[0] is None or each[1] is None or each[0].dtype != each[1].dtype:
            return other_way(condition, x, y)
        whole = any(type(of.type) is block for of in (condition, x, y) if type(of) is tensor)
        return _result(np.where(condition.handle.data, *each), some.dtype, whole)

    return chosen


_KNOWN: dict[Any, dict[str, Any]] = {}


def _result(data: np.ndarray, of: Any, whole: bool) -> Any:
    """A tensor of that data and type; `whole`: a block, else a scalar."""
    tensor, key = tl.core.tensor, (of.name, data.shape, whole)
    if key not in _KNOWN:
        type = tl.core.block_type(of, list(data.shape)) if whole else of
        _KNOWN[key] = dict(vars(tensor(interpreter.TensorHandle(data, of), type)))
    made, handle = tensor.__new__(tensor), interpreter.TensorHandle.__new__(interpreter.TensorHandle)
    vars(handle).update(data=data, dtype=of, attr={})
    vars(made).update(_KNOWN[key], handle=handle)
    return made


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
