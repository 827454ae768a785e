"""Where rows stand: what `PagedKV` says of a page list, on the device."""

# triton.jit functions are compiled, not called: their arguments carry no types
# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot(page, origin, front, wrap, RING: tl.constexpr):
    """Where in a table the address of a page stands; see `DevicePages`."""
    if RING:
        return tl.where(page < front, page, front + ((page - origin) & wrap))
    else:
        return page - origin


@triton.jit
def oldest_row(position, keep, retained, SIZE: tl.constexpr):
    """`PagedKV.oldest`: the first row, beside the first `keep`, that a query at `position` sees; 0 = it sees all."""
    first = tl.maximum(position - retained + 1, 0) // SIZE * SIZE
    return tl.where(first > keep, first, 0)
