"""Words of the tables on the device: the address of a page, with the slot of its angles in the upper bits."""

# triton.jit functions are compiled, not called: their arguments carry no types
# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from kvcli.errors import UsageError

ADDRESS_BITS = 48
MOST_SLOTS = 1 << (64 - ADDRESS_BITS)
_BITS = tl.constexpr(ADDRESS_BITS)
_ADDRESS = tl.constexpr((1 << ADDRESS_BITS) - 1)
_SLOT = tl.constexpr(MOST_SLOTS - 1)


def words(addresses: np.ndarray, slots: np.ndarray | None) -> np.ndarray:
    """int64 [n]: addresses, below 2 ** 48, and slots, below `MOST_SLOTS`, in one number each; 0 where there is no page.
    None = the pages need no angles."""
    if slots is None:
        return addresses
    check_slots(int(slots.max(initial=0)) + 1)
    return np.where(addresses == 0, 0, addresses | slots.astype(np.int64) << ADDRESS_BITS)


def check_slots(slots: int) -> None:
    """Raises UsageError where a word has no room for so many."""
    if slots > MOST_SLOTS:
        raise UsageError(f"on a GPU a context has at most {MOST_SLOTS:,} pages", "use a larger `page_size`")


@triton.jit
def address(word, SLOTS: tl.constexpr):
    """The address in a word, or in a word to which bytes were added. Without SLOTS there is nothing else in it."""
    if SLOTS:
        return word & _ADDRESS
    else:
        return word


@triton.jit
def slot(word):
    """int32: the slot in a word."""
    return ((word >> _BITS) & _SLOT).to(tl.int32)
